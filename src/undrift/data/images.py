"""Image data sets: from encoded bytes to one array of samples × channels × height × width.

Images are in a table (`Images`) or in one folder per class (`ImageFolder`). They are decoded once, into the cache; with
`lazy=True`, those of a folder are decoded when they are needed (`ImageFolderReader`).
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.cpus import usable_cpus
from undrift.data.cache import Notes, Writer, cached_arrays
from undrift.data.dataset import Rows, Scales
from undrift.data.digest import digest_of
from undrift.data.labels import Labels, encode_names
from undrift.data.lazy import Lazy, Reader
from undrift.data.paths import read_bytes
from undrift.data.samples import Store, declare_halves, finish, gather
from undrift.data.source import Source, source_from_arrays
from undrift.data.tables import BATCH, Place
from undrift.errors import UndriftError, quoted

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""The formats to read. Pillow supports others, such as PostScript, for which it would run an external program."""
MOST_PIXELS = 4096 * 4096
"""The limit per image, checked before decoding: a file of a few kilobytes may decode to gigabytes."""
MOST_BYTES = 1 << 28
"""How many bytes of decoded images to collect before writing them."""
MOST_THREADS = 8
"""How many threads decode lazily read images, unless the user says otherwise."""

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


def grey(data: bytes) -> np.ndarray:
    """Decode an image that is known to be grey; some formats (WebP) store it in colour."""
    return picture(data, "L")


def resize_image(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return an image of another height and width, by bilinear interpolation that averages where it shrinks."""
    from PIL import Image

    if pixels.shape[1:] == size:
        return pixels
    return np.stack([np.asarray(Image.fromarray(own).resize(size[::-1], Image.Resampling.BILINEAR)) for own in pixels])


def _check_size(where: str, shape: tuple[int, ...], others: tuple[int, ...]) -> None:
    if shape == others:
        return
    same = "size, such as resize=32, or resize=[height, width]" if shape[0] == others[0] else "number of channels"
    raise UndriftError(f"{where} is {_times(shape)} but others {_times(others)}; bring all images to one {same}.")


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


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
        names, read_split = self.reader(place)
        codes: dict[Any, int] = {}
        moments: Any = 0
        for split in ("train", *([self.test] if self.test else [])):
            to, count = "train" if split == "train" else "test", 0
            for cells, y, who in read_split(split):
                for x in self._decode_batch(cells, write, place, split, count):
                    count += len(x)
                    write.append(f"{to}_x", x)
                    if to == "train":
                        moments = moments + channel_moments(x)
                write.append(f"{to}_y", y)
                if to == "train" and who is not None:
                    whose = f"The column {quoted(self.client)} of {place.name}"
                    write.append("train_key", encode_names(who, codes, whose))
            if not count:
                raise UndriftError(f"The {split} split of {place.name} has no rows.")
        if self.beside and places[1:]:
            other, column = places[1], self.beside[1]
            for table in other.batches("train", [column]):
                write.append("train_key", encode_names(table[column].to_pylist(), codes))
            count, wanted = (write.shapes[name][1][0] for name in ("train_key", "train_x"))
            if count != wanted:
                raise UndriftError(f"{other.name} has {count} rows, but {place.name} has {wanted}; get both again.")
        for name, values in channel_entries(channel_scales(moments)).items():
            write.append(name, values)
        write.notes |= {"classes": names, "clients": list(map(str, codes))}

    def reader(self, place: Place) -> tuple[list[str] | None, Callable[[str], Iterator[Cells]]]:
        """Return the classes' names, and a function that reads a split in batches."""
        labels = Labels(place, self.label)
        columns = [self.image, self.label, *([self.client] if self.client else [])]

        def read_split(split: str) -> Iterator[Cells]:
            begin = 0
            for table in place.batches(split, columns):
                who = table[self.client].to_pylist() if self.client else None
                rows = range(begin, begin + len(table))
                yield table[self.image].to_pylist(), labels.encode(table[self.label], split, rows), who
                begin += len(table)
            labels.check()

        return labels.names, read_split

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source:
        return source_from_arrays(arrays, notes, shared=("mean", "std"))

    def _decode_batch(
        self, cells: list[Any], write: Writer, place: Place, split: str, begin: int
    ) -> Iterator[np.ndarray]:
        """Yield these images, all of the first one's size, as one array, or several if they are large."""
        shape = tuple(write.shapes["train_x"][1][1:]) if "train_x" in write.shapes else None
        images: list[np.ndarray] = []
        for i, cell in enumerate(cells):
            where = str(cell) if isinstance(cell, Path) else f"Row {begin + i} of the {split} split of {place.name}"
            pixels = self.decode_image(_image_bytes(cell, place, where), where)
            shape = shape or pixels.shape
            _check_size(where, pixels.shape, shape)
            images.append(pixels)
            if len(images) * pixels.nbytes >= MOST_BYTES:
                yield np.stack(images)
                images = []
        if images:
            yield np.stack(images)

    def decode_image(self, data: bytes, where: str) -> np.ndarray:
        try:
            pixels = self.decoder(data)
            return resize_image(pixels, self.resize) if self.resize else pixels
        except Exception as error:  # decoders raise all kinds of errors for damaged bytes
            reason = re.sub(r" <_io.*?>", "", str(error))  # PIL quotes the stream object, with its address
            raise UndriftError(f"{where} cannot be decoded ({reason}); get or write that file again.") from error


@dataclass(frozen=True)
class ImageFolder(Images):
    """Images in one subfolder per class, optionally below `train` and `test`."""

    def reader(self, place: Place) -> tuple[list[str] | None, Callable[[str], Iterator[Cells]]]:
        names, classes_of = self.labels(place)

        def read_split(split: str) -> Iterator[Cells]:
            files, y = dict(place.files)[split], classes_of(split)
            for begin in range(0, len(files), BATCH):
                yield list(files[begin : begin + BATCH]), y[begin : begin + BATCH], None

        return names, read_split

    def labels(self, place: Place) -> tuple[list[str], Callable[[str], np.ndarray]]:
        """Return the classes' names, and a function that gives each image's class in a split, without reading any."""

        def folders(split: str) -> list[str]:
            parts = [file.relative_to(place.name).parts for file in dict(place.files)[split]]
            below = all(part[0].lower() == split for part in parts)  # the classes are subfolders of `train` and `test`
            return [part[1] if below else part[0] for part in parts]

        names = sorted(set(folders("train")))
        numbers = {name: i for i, name in enumerate(names)}

        def classes_of(split: str) -> np.ndarray:
            own = folders(split)
            if strange := set(own) - set(names):
                raise UndriftError(f"{place.name} has images of {min(strange)!r} in {split}, but none to train on.")
            return np.array([numbers[name] for name in own], np.int64)

        return names, classes_of

    def from_file(self, file: Path) -> np.ndarray:
        """Return one image."""
        return self.decode_image(_image_bytes(file, None, str(file)), str(file))

    def lazy_source(self, place: Place, threads: int | None) -> Source:
        """Return the images, each decoded when it is needed."""
        names, classes_of = self.labels(place)

        def store(split: str) -> Store:
            reader = ImageFolderReader(self, place.name, list(dict(place.files)[split]), threads)
            return {"x": reader.column("x"), "y": torch.from_numpy(classes_of(split))}

        train = store("train")
        test = store(self.test) if self.test else None
        if test and test["x"].shape[1:] != train["x"].shape[1:]:
            sizes = " but those to train on ".join(_times(s["x"].shape[1:]) for s in (test, train))
            raise UndriftError(f"The test images of {place.name} are {sizes}; bring all images to one size.")
        return Source(train, train["y"].numpy(), test=Rows.whole(test) if test else None, names=names)


class ImageFolderReader(Reader):
    """Reads image files, decoding them in threads: Pillow lets others run meanwhile.

    They are identified by their names below the folder, sizes and times. A file that is not what it was when the data
    were loaded is refused.
    """

    def __init__(self, recipe: ImageFolder, root: str, files: list[Path], threads: int | None) -> None:
        self.recipe, self.root, self.threads = recipe, root, threads or min(MOST_THREADS, usable_cpus())
        self.names = [str(file.relative_to(root)) for file in files]
        self.stamps = np.array([self._stamp(name) for name in self.names], np.int64)
        size = [recipe.resize] if recipe.resize else []
        identity = digest_of("images", self.names, self.stamps.tolist(), *size)
        super().__init__(len(files), {"x": torch.from_numpy(self._read_image(0))}, identity)

    def sample_name(self, row: int) -> str:
        return str(Path(self.root, self.names[row]))

    def load(self, rows: np.ndarray) -> Store:
        shape, _ = self.shapes["x"]
        images = np.empty((len(rows), *shape), np.uint8)

        def read_into(i: int) -> None:
            pixels = self._read_image(int(rows[i]))
            _check_size(self.sample_name(int(rows[i])), pixels.shape, tuple(shape))
            images[i] = pixels

        list(self.executor(lambda: ThreadPoolExecutor(self.threads)).map(read_into, range(len(rows))))
        return {"x": torch.from_numpy(images)}

    def _read_image(self, row: int) -> np.ndarray:
        where = self.sample_name(row)
        if self._stamp(self.names[row]) != tuple(self.stamps[row]):
            raise UndriftError(f"{where} has changed since the data were loaded; load them again.")
        return np.ascontiguousarray(self.recipe.from_file(Path(where)))

    def _stamp(self, name: str) -> tuple[int, int]:
        try:
            status = os.stat(os.path.join(self.root, name))
        except OSError as error:
            raise UndriftError(f"{os.path.join(self.root, name)} cannot be read ({error.strerror}).") from error
        return status.st_size, status.st_mtime_ns


def _image_bytes(cell: Any, place: Place | None, where: str) -> bytes:
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


def standardised(store: Store, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return images minus the training set's mean, divided by its standard deviation, per channel."""
    return _standardised(gather(store, indices), store)


def _standardised(rows: Store, store: Store) -> tuple[Tensor, Tensor]:
    x, y = finish(rows, store)
    return (x - store["mean"]) / store["std"], y


declare_halves(standardised, gather, _standardised)


def channel_moments(x: np.ndarray) -> Any:
    """Return, per channel, the sum of the pixels, scaled to [0, 1], the sum of their squares, and their number."""
    scaled = x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1) / 255.0
    return np.stack([scaled.sum(1), np.square(scaled).sum(1), np.full(len(scaled), float(scaled.shape[1]))])


def channel_scales(moments: np.ndarray) -> Scales:
    """Return the scales of the channels, from the sum of all moments."""
    total, squares, pixels = moments
    mean = total / pixels
    return Scales(mean, np.sqrt(np.maximum(squares / pixels - mean**2, 0)), int(pixels[0]))


def channel_entries(scales: Scales) -> dict[str, np.ndarray]:
    """Return the mean and the standard deviation per channel, as a store has them."""
    entries = {"mean": scales.mean, "std": np.maximum(scales.std, 1e-4)}
    return {name: values.astype(np.float32)[:, None, None] for name, values in entries.items()}


def with_image_statistics(source: Source) -> Source:
    """Return a source of lazily read images with their mean and standard deviation, computed once and then cached."""
    column = source.store.get("x")
    if not isinstance(column, Lazy) or not isinstance(column.reader, ImageFolderReader):
        return source
    reader = column.reader

    def decode(write: Writer) -> None:
        moments = sum(channel_moments(reader.load(rows)["x"].numpy()) for rows in reader.chunks())
        for name, values in channel_entries(channel_scales(np.asarray(moments))).items():
            write.append(name, values)

    arrays, _ = cached_arrays("statistics", ["statistics", reader.identity], decode)
    return source.with_entries(arrays)
