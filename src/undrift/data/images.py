"""Image data sets: from encoded bytes to one array of samples × channels × height × width."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.cache import Notes, Writer
from undrift.data.dataset import Rows
from undrift.data.labels import Labels, encoded
from undrift.data.paths import read_bytes
from undrift.data.samples import Store, finish, gather, in_halves
from undrift.data.source import Scales, Source
from undrift.data.tables import BATCH, Place
from undrift.errors import UndriftError, quoted

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""The formats to read. Pillow supports others, such as PostScript, for which it would run an external program."""
MOST_PIXELS = 4096 * 4096
"""The limit per image, checked before decoding: a file of a few kilobytes may decode to gigabytes."""
MOST_BYTES = 1 << 28
"""How many bytes of decoded images to collect before writing them."""

Cells = tuple[list[Any], np.ndarray, list[Any] | None]
"""A batch before it is decoded: images as bytes or paths, their classes, and their clients."""


def picture(data: bytes, mode: str | None = None) -> np.ndarray:
    """Decode an image to uint8, channels first: one channel for grey images, three for all others."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError(
                f"it has {opened.width}×{opened.height} pixels, and the limit is {MOST_PIXELS:,}; make it smaller"
            )
        if opened.mode.startswith("I"):  # 16 bits, which `convert` would clip at 255
            return (np.asarray(opened).astype(np.int64) // 257).clip(0, 255).astype(np.uint8)[None]
        if opened.mode == "F":
            raise ValueError("its pixels are floats; write them as 8 or 16 bits")
        mode = mode or ("L" if opened.mode in ("1", "L") else "RGB")
        pixels = np.asarray(opened.convert(mode))
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def resized(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return an image of another height and width, by bilinear interpolation that averages where it shrinks."""
    from PIL import Image

    if pixels.shape[1:] == size:
        return pixels
    return np.stack([np.asarray(Image.fromarray(own).resize(size[::-1], Image.Resampling.BILINEAR)) for own in pixels])


def one_size(shape: tuple[int, ...], other: tuple[int, ...]) -> str:
    """Return advice for images of these two shapes."""
    if shape[0] != other[0]:
        return "bring all images to one number of channels"
    return "bring all images to one size, such as resize=32, or resize=[height, width]"


def grey(data: bytes) -> np.ndarray:
    """Decode an image that is known to be grey; some formats (WebP) store it in colour."""
    return picture(data, "L")


@dataclass(frozen=True)
class Images:
    """Images with one class each, from two columns of a table."""

    hub: str
    image: str = "image"
    label: str = "label"
    client: str | None = None
    """The column of the client ids."""
    test: str | None = "test"
    beside: tuple[str, str] | None = None
    """Another data set with the same rows, and its column of client ids."""
    config: str | None = None
    decoder: Callable[[bytes], np.ndarray] = picture
    resize: tuple[int, int] | None = field(default=None, metadata={"added": True})
    """The height and width to which all images are resized."""

    def decode(self, places: list[Place], write: Writer) -> None:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            self._decode(places, write)

    def _decode(self, places: list[Place], write: Writer) -> None:
        place = places[0]
        names, read = self.reader(place)
        codes: dict[Any, int] = {}
        found: Any = 0
        for split in ("train", *([self.test] if self.test else [])):
            to, count = "train" if split == "train" else "test", 0
            for cells, y, who in read(split):
                for x in self._stacked(cells, write, place, split, count):
                    count += len(x)
                    write.append(f"{to}_x", x)
                    if to == "train":
                        found = found + moments(x)
                write.append(f"{to}_y", y)
                if to == "train" and who is not None:
                    write.append("train_key", encoded(who, codes, f"The column {quoted(self.client)} of {place.name}"))
            if not count:
                raise UndriftError(f"The {split} split of {place.name} has no rows.")
        if self.beside and places[1:]:
            other, column = places[1], self.beside[1]
            for table in other.batches("train", [column]):
                write.append("train_key", encoded(table[column].to_pylist(), codes))
            count, wanted = (write.shapes[name][1][0] for name in ("train_key", "train_x"))
            if count != wanted:
                raise UndriftError(f"{other.name} has {count} rows, but {place.name} has {wanted}; get both again.")
        for name, values in statistics(channel_scales(found)).items():
            write.append(name, values)
        write.notes |= {"classes": names, "clients": list(map(str, codes))}

    def reader(self, place: Place) -> tuple[list[str] | None, Callable[[str], Iterator[Cells]]]:
        """Return the classes' names, and a function that reads a split in batches."""
        labels = Labels(place, self.label)
        columns = [self.image, self.label, *([self.client] if self.client else [])]

        def read(split: str) -> Iterator[Cells]:
            begin = 0
            for table in place.batches(split, columns):
                who = table[self.client].to_pylist() if self.client else None
                rows = range(begin, begin + len(table))
                yield table[self.image].to_pylist(), labels.read(table[self.label], split, rows), who
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
        """Yield these images, all of the first one's size, as one array, or several if they are large."""
        shape = tuple(write.shapes["train_x"][1][1:]) if "train_x" in write.shapes else None
        found: list[np.ndarray] = []
        for i, cell in enumerate(cells):
            where = str(cell) if isinstance(cell, Path) else f"Row {begin + i} of the {split} split of {place.name}"
            pixels = self.decoded(_bytes(cell, place, where), where)
            shape = shape or pixels.shape
            if pixels.shape != shape:
                sizes = " but others ".join("×".join(map(str, s)) for s in (pixels.shape, shape))
                raise UndriftError(f"{where} is {sizes}; {one_size(pixels.shape, shape)}.")
            found.append(pixels)
            if len(found) * pixels.nbytes >= MOST_BYTES:
                yield np.stack(found)
                found = []
        if found:
            yield np.stack(found)

    def decoded(self, data: bytes, where: str) -> np.ndarray:
        try:
            pixels = self.decoder(data)
            return resized(pixels, self.resize) if self.resize else pixels
        except Exception as error:  # decoders raise all kinds of errors for damaged bytes
            reason = re.sub(r" <_io.*?>", "", str(error))  # PIL quotes the stream object, with its address
            raise UndriftError(f"{where} cannot be decoded ({reason}); get or write that file again.") from error


@dataclass(frozen=True)
class ImageFolder(Images):
    """Images in one subfolder per class, optionally below `train` and `test`."""

    def reader(self, place: Place) -> tuple[list[str] | None, Callable[[str], Iterator[Cells]]]:
        names, classes = self.labels(place)

        def read(split: str) -> Iterator[Cells]:
            files, y = dict(place.files)[split], classes(split)
            for begin in range(0, len(files), BATCH):
                yield list(files[begin : begin + BATCH]), y[begin : begin + BATCH], None

        return names, read

    def from_file(self, file: Path) -> np.ndarray:
        """Return one image."""
        return self.decoded(_bytes(file, None, str(file)), str(file))

    def labels(self, place: Place) -> tuple[list[str], Callable[[str], np.ndarray]]:
        """The classes' names, and a function that gives each image's class in a split: no image is read for that."""

        def named(split: str) -> list[str]:
            files = dict(place.files)[split]
            parts = [file.relative_to(place.name).parts for file in files]
            below = all(part[0].lower() == split for part in parts)  # the classes are subfolders of `train` and `test`
            return [part[1] if below else part[0] for part in parts]

        names = sorted(set(named("train")))
        numbers = {name: i for i, name in enumerate(names)}

        def classes(split: str) -> np.ndarray:
            found = named(split)
            if strange := set(found) - set(names):
                raise UndriftError(f"{place.name} has images of {min(strange)!r} in {split}, but none to train on.")
            return np.array([numbers[name] for name in found], np.int64)

        return names, classes


def standardised(store: Store, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return images minus the training set's mean, divided by its standard deviation, per channel."""
    return _standardised(gather(store, indices), store)


def _standardised(rows: Store, store: Store) -> tuple[Tensor, Tensor]:
    x, y = finish(rows, store)
    return (x - store["mean"]) / store["std"], y


in_halves(standardised, gather, _standardised)


def moments(x: np.ndarray) -> Any:
    """Return, per channel, the sum of the pixels, scaled to [0, 1], the sum of their squares, and their number."""
    scaled = x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1) / 255.0
    return np.stack([scaled.sum(1), np.square(scaled).sum(1), np.full(len(scaled), float(scaled.shape[1]))])


def channel_scales(found: np.ndarray) -> Scales:
    """Return the scales of the channels, from the sum of all moments."""
    total, squares, pixels = found
    mean = total / pixels
    return Scales(mean, np.sqrt(np.maximum(squares / pixels - mean**2, 0)), int(pixels[0]))


def statistics(scales: Scales) -> dict[str, np.ndarray]:
    """Return the mean and the standard deviation per channel, as a store has them."""
    found = {"mean": scales.mean, "std": np.maximum(scales.std, 1e-4)}
    return {name: values.astype(np.float32)[:, None, None] for name, values in found.items()}


def _bytes(cell: Any, place: Place | None, where: str) -> bytes:
    """Return the encoded image: from the cell itself, or from a file in the table's folder."""
    try:
        if isinstance(cell, Path):
            return read_bytes(cell)
        if not isinstance(cell, dict):
            raise ValueError(f"it holds {type(cell).__name__}, not an image's bytes")
        data = cell.get("bytes")
        assert place
        return data if data is not None else read_bytes(place.beside(cell.get("path")))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UndriftError(f"{where} cannot be read ({reason}); correct it, or leave it out of the data.") from error
