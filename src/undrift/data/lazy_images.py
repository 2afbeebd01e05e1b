"""A folder of images, read image by image: nothing is decoded ahead of time, and nothing kept."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from undrift.cpus import usable_cpus
from undrift.data.cache import Writer, cached
from undrift.data.dataset import Rows
from undrift.data.images import ImageFolder, channel_scales, moments, one_size, statistics
from undrift.data.lazy import Lazy, Reader, digest_of
from undrift.data.samples import Store
from undrift.data.source import Source
from undrift.data.tables import Place
from undrift.errors import UndriftError

MOST_THREADS = 8


class Images(Reader):
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
        super().__init__(len(files), {"x": torch.from_numpy(self._decoded(0))}, identity)

    def called(self, row: int) -> str:
        return str(Path(self.root, self.names[row]))

    def load(self, rows: np.ndarray) -> Store:
        shape, _ = self.shapes["x"]
        found = np.empty((len(rows), *shape), np.uint8)

        def put(i: int) -> None:
            pixels = self._decoded(int(rows[i]))
            if pixels.shape != tuple(shape):
                sizes = " but others ".join("×".join(map(str, s)) for s in (pixels.shape, shape))
                raise UndriftError(f"{self.called(int(rows[i]))} is {sizes}; {one_size(pixels.shape, tuple(shape))}.")
            found[i] = pixels

        list(self.executor(lambda: ThreadPoolExecutor(self.threads)).map(put, range(len(rows))))
        return {"x": torch.from_numpy(found)}

    def _decoded(self, row: int) -> np.ndarray:
        where = self.called(row)
        if self._stamp(self.names[row]) != tuple(self.stamps[row]):
            raise UndriftError(f"{where} has changed since the data were loaded; load them again.")
        return np.ascontiguousarray(self.recipe.from_file(Path(where)))

    def _stamp(self, name: str) -> tuple[int, int]:
        try:
            status = os.stat(os.path.join(self.root, name))
        except OSError as error:
            raise UndriftError(f"{os.path.join(self.root, name)} cannot be read ({error.strerror}).") from error
        return status.st_size, status.st_mtime_ns


def folder(place: Place, recipe: ImageFolder, threads: int | None) -> Source:
    """Return the images of a folder with one subfolder per class, which tell the labels without reading any."""
    names, classes = recipe.labels(place)

    def store(split: str) -> Store:
        reader = Images(recipe, place.name, list(dict(place.files)[split]), threads)
        return {"x": reader.column("x"), "y": torch.from_numpy(classes(split))}

    train = store("train")
    test = store(recipe.test) if recipe.test else None
    if test and test["x"].shape[1:] != train["x"].shape[1:]:
        sizes = " but those to train on ".join("×".join(map(str, s["x"].shape[1:])) for s in (test, train))
        raise UndriftError(f"The test images of {place.name} are {sizes}; bring all images to one size.")
    return Source(
        train,
        train["y"].numpy(),
        test=Rows(test, torch.arange(len(test["y"]))) if test else None,
        names=names,
    )


def with_statistics(source: Source) -> Source:
    """Return the source with the mean and standard deviation of its images, computed once and then cached."""
    column = source.store.get("x")
    if not isinstance(column, Lazy) or not isinstance(column.reader, Images):
        return source
    reader = column.reader

    def decode(write: Writer) -> None:
        found = sum(moments(reader.load(rows)["x"].numpy()) for rows in reader.chunks())
        for name, values in statistics(channel_scales(np.asarray(found))).items():
            write.append(name, values)

    arrays, _ = cached("statistics", ["statistics", reader.identity], decode)
    test = replace(source.test, store=source.test.store | arrays) if source.test else None
    return replace(source, store=source.store | arrays, test=test)
