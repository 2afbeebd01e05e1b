"""Data sets of pictures: bytes in, one array of channels × height × width out."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.cache import Notes, Writer
from undrift.data.dataset import Rows, Store, take
from undrift.data.labels import Labels, encoded
from undrift.data.paths import read_bytes
from undrift.data.source import Source
from undrift.data.tables import BATCH, Place
from undrift.errors import UndriftError, quoted

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""Pillow reads others too, PostScript among them, for which it runs a program."""
MOST_PIXELS = 4096 * 4096
"""Of one picture. A file of a few kilobytes may decode to gigabytes, so its size is looked at first."""
MOST_BYTES = 1 << 28
"""Of pictures that are decoded at a time."""

Cells = tuple[list[Any], np.ndarray, list[Any] | None]
"""A batch before it is decoded: pictures as bytes or paths, their classes, and whose they are."""


def picture(data: bytes, mode: str | None = None) -> np.ndarray:
    """An encoded picture as bytes by channel: grey ones have one channel, all others three."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError(
                f"{opened.width}×{opened.height} pixels, where at most {MOST_PIXELS:,} are read; make it smaller"
            )
        if opened.mode.startswith("I"):  # 16 bits, which a conversion would cut off at 255
            return (np.asarray(opened).astype(np.int64) // 257).clip(0, 255).astype(np.uint8)[None]
        if opened.mode == "F":
            raise ValueError("pixels that are floats; write them as 8 or 16 bits")
        mode = mode or ("L" if opened.mode in ("1", "L") else "RGB")
        pixels = np.asarray(opened.convert(mode))
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def grey(data: bytes) -> np.ndarray:
    """A picture that is known to be grey: some formats (WebP) have colours only."""
    return picture(data, "L")


@dataclass(frozen=True)
class Pictures:
    """Pictures with a class each, in two columns of a table."""

    hub: str
    image: str = "image"
    label: str = "label"
    client: str | None = None
    """The column that says whose a picture is."""
    test: str | None = "test"
    beside: tuple[str, str] | None = None
    """Another data set with the same rows, and its column that says whose each is."""
    config: str | None = None
    decoder: Callable[[bytes], np.ndarray] = picture

    def decode(self, places: list[Place], write: Writer) -> None:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # a refusal will do
            self._decode(places, write)

    def _decode(self, places: list[Place], write: Writer) -> None:
        place = places[0]
        names, read = self.reader(place)
        codes: dict[Any, int] = {}
        moments: Any = 0
        for split in ("train", *([self.test] if self.test else [])):
            to, count = "train" if split == "train" else "test", 0
            for cells, y, who in read(split):
                for x in self._stacked(cells, write, place, split, count):
                    count += len(x)
                    write.append(f"{to}_x", x)
                    if to == "train":
                        moments = moments + _moments(x)
                write.append(f"{to}_y", y)
                if to == "train" and who is not None:
                    write.append("train_key", encoded(who, codes, f"The column {quoted(self.client)} of {place.name}"))
            if not count:
                raise UndriftError(f"The {split} split of {place.name} has no rows.")
        if self.beside and places[1:]:
            other, column = places[1], self.beside[1]
            for table in other.rows("train", [column]):
                write.append("train_key", encoded(table[column].to_pylist(), codes))
            rows, wanted = (write.shapes[name][1][0] for name in ("train_key", "train_x"))
            if rows != wanted:
                raise UndriftError(f"{other.name} has {rows} rows for the {wanted} of {place.name}; get both again.")
        total, squares, pixels = moments
        mean = total / pixels
        write.append("mean", mean.astype(np.float32)[:, None, None])
        write.append("std", np.sqrt(np.maximum(squares / pixels - mean**2, 1e-8)).astype(np.float32)[:, None, None])
        write.notes |= {"classes": names, "clients": list(map(str, codes))}

    def reader(self, place: Place) -> tuple[list[str] | None, Callable[[str], Iterator[Cells]]]:
        """The classes' names, and what reads a split batch by batch."""
        labels = Labels(place, self.label)
        columns = [self.image, self.label, *([self.client] if self.client else [])]

        def read(split: str) -> Iterator[Cells]:
            begin = 0
            for table in place.rows(split, columns):
                who = table[self.client].to_pylist() if self.client else None
                yield table[self.image].to_pylist(), labels.read(table[self.label], split, begin), who
                begin += len(table)
            labels.check()

        return labels.names, read

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source:
        def store(split: str) -> Store:
            return {"x": arrays[f"{split}_x"], "y": arrays[f"{split}_y"], "mean": arrays["mean"], "std": arrays["std"]}

        train = store("train")
        return Source(
            train,
            train["y"].numpy(),
            test=Rows(store("test"), torch.arange(len(arrays["test_y"]))) if "test_y" in arrays else None,
            keys=arrays["train_key"].numpy() if "train_key" in arrays else None,
            names=notes["classes"],
            clients=notes["clients"] or None,
        )

    def _stacked(self, cells: list[Any], write: Writer, place: Place, split: str, begin: int) -> Iterator[np.ndarray]:
        """These pictures as one array, all of the first one's size; as several if they are large."""
        shape = tuple(write.shapes["train_x"][1][1:]) if "train_x" in write.shapes else None
        found: list[np.ndarray] = []
        for i, cell in enumerate(cells):
            where = str(cell) if isinstance(cell, Path) else f"Row {begin + i} of the {split} split of {place.name}"
            pixels = self._decoded(_bytes(cell, place, where), where)
            shape = shape or pixels.shape
            if pixels.shape != shape:
                sizes = " but others ".join("×".join(map(str, s)) for s in (pixels.shape, shape))
                raise UndriftError(f"{where} is {sizes}; bring all pictures to one size and number of colours.")
            found.append(pixels)
            if len(found) * pixels.nbytes >= MOST_BYTES:
                yield np.stack(found)
                found = []
        if found:
            yield np.stack(found)

    def _decoded(self, data: bytes, where: str) -> np.ndarray:
        try:
            return self.decoder(data)
        except Exception as error:  # whatever a decoder makes of bytes that are not what they should be
            reason = re.sub(r" <_io.*?>", "", str(error))  # PIL names the bytes' address
            raise UndriftError(f"{where} cannot be decoded ({reason}); get or write that file again.") from error


@dataclass(frozen=True)
class PictureFolder(Pictures):
    """Pictures in a subfolder per class, with or without `train` and `test` above them."""

    def reader(self, place: Place) -> tuple[list[str] | None, Callable[[str], Iterator[Cells]]]:
        def named(split: str) -> list[str]:
            files = dict(place.files)[split]
            parts = [file.relative_to(place.name).parts for file in files]
            below = all(part[0].lower() == split for part in parts)  # `train` and `test` stand above the classes
            return [part[1] if below else part[0] for part in parts]

        names = sorted(set(named("train")))

        def read(split: str) -> Iterator[Cells]:
            files, classes = list(dict(place.files)[split]), named(split)
            if strange := set(classes) - set(names):
                raise UndriftError(f"{place.name} has pictures of {min(strange)!r} in {split}, but none to train on.")
            for begin in range(0, len(files), BATCH):
                part = slice(begin, begin + BATCH)
                yield files[part], np.array([names.index(c) for c in classes[part]], np.int64), None

        return names, read


def standardised(store: Store, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures less the training set's mean by channel, over its spread."""
    x, y = take(store, indices)
    return (x - store["mean"]) / store["std"], y


def _moments(x: np.ndarray) -> Any:
    """By channel: the sum of pixels from 0 to 1, the sum of their squares, and their number."""
    scaled = x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1) / 255.0
    return np.stack([scaled.sum(1), np.square(scaled).sum(1), np.full(len(scaled), float(scaled.shape[1]))])


def _bytes(cell: Any, place: Place, where: str) -> bytes:
    """The encoded picture: in the cell itself, or in a file that must lie beside the table."""
    try:
        if isinstance(cell, Path):
            return read_bytes(cell)
        if not isinstance(cell, dict):
            raise ValueError(f"it holds {type(cell).__name__}, not a picture's bytes")
        data = cell.get("bytes")
        return data if data is not None else read_bytes(place.beside(cell.get("path")))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UndriftError(f"{where} cannot be read ({reason}); mend it, or leave it out of the data.") from error
