"""Samples that are read when they are needed, and never all at once.

In a store, a `Lazy` column stands where a tensor of all samples would be: it has a length, a shape and a type, and can
be indexed, which reads. Labels are always there, as a tensor. The columns of one source share a `Reader`, so that a
sample with several inputs is read once (`samples.gather`). There are readers of a torch `Dataset`, of arrays such as
`numpy.memmap`, and of folders of images (`images.py`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from threading import Lock
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from undrift.data import digest
from undrift.data.collate import to_tensors
from undrift.data.digest import digest_of
from undrift.data.samples import Store, as_pair, input_paths, nonfinite_error, nonfinite_samples, to_store
from undrift.errors import UndriftError

log = logging.getLogger("undrift")

Shapes = dict[str, tuple[torch.Size, torch.dtype]]
CHUNK_BYTES = 2**21
"""How much to read at a time in one pass over all data."""
PROBES = 16
"""How many samples, from all over a data set, are looked at to identify it."""
LABEL_CHUNK = 64
"""How many samples are read at a time where labels are wanted, and how many a process gets at least."""


class Lazy:
    """A column of a store whose values are read when they are needed."""

    def __init__(self, reader: Reader, name: str) -> None:
        self.reader, self.name = reader, name
        shape, self.dtype = reader.shapes[name]
        self.shape = torch.Size([len(reader), *shape])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        wanted = torch.arange(len(self))[rows] if isinstance(rows, slice) else rows
        return self.reader.read(wanted)[self.name]

    def dim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def identity(self) -> str:
        """A digest of what the values come from."""
        return self.reader.identity


class Reader(ABC):
    """Reads samples by their numbers.

    Args:
        count: How many samples there are.
        first: The first of them, which all others must be like: its columns but for `y`, without an axis of samples.
        identity: A digest of where the samples come from.
    """

    _executor: Executor | None = None

    def __init__(self, count: int, first: Store, identity: str) -> None:
        self.count, self.identity = count, identity
        self.shapes: Shapes = {name: (t.shape, t.dtype) for name, t in first.items()}

    def __len__(self) -> int:
        return self.count

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_executor": None}

    @abstractmethod
    def load(self, rows: np.ndarray) -> Store:
        """Return the columns of these samples, which are all different, along a first axis."""

    @abstractmethod
    def sample_name(self, row: int) -> str:
        """Return the name of a sample, for messages."""

    def column(self, name: str) -> Tensor:
        """Return what to put into a store; it stands in for a tensor."""
        return cast(Tensor, Lazy(self, name))

    def read(self, rows: Tensor) -> Store:
        """Return the columns of the samples at `rows`, of any shape. Repeated samples (padding) are read once."""
        flat = rows.reshape(-1).numpy()
        different, places = np.unique(flat, return_inverse=True)
        columns = self.load(different)
        for name, values in columns.items():
            shape, dtype = self.shapes[name]
            if values.dtype != dtype or values.shape[1:] != shape:
                raise UndriftError(
                    f"{self.sample_name(int(different[0]))} and those after it are {tuple(values.shape[1:])} "
                    f"{values.dtype}, but the first are {tuple(shape)} {dtype}; make all samples alike."
                )
            for i in nonfinite_samples(values):  # data in memory are checked once
                raise nonfinite_error(self.sample_name(int(different[i])), name, values[i])
        index = torch.from_numpy(places.reshape(-1))
        same = len(different) == len(flat) and bool((index == torch.arange(len(flat))).all())
        return {
            name: (t if same else t.index_select(0, index)).reshape(*rows.shape, *t.shape[1:])
            for name, t in columns.items()
        }

    def executor(self, make: Callable[[], Executor]) -> Executor:
        """Return the threads or processes that read, made at first use."""
        if self._executor is None:
            self._executor = make()
        return self._executor

    def chunks(self, limit: int = CHUNK_BYTES) -> list[np.ndarray]:
        """Return all samples in order, a few at a time."""
        each = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.shapes.values())
        size = max(1, limit // max(1, each))
        return [np.arange(begin, min(begin + size, self.count)) for begin in range(0, self.count, size)]


def lazy_store(data: Any, whose: str, label: str, workers: int | None) -> Store:
    """Return a store of a `Dataset` or of a pair of arrays that are read as they are needed."""
    if isinstance(data, tuple | list):
        reader: ArrayReader | DatasetReader = ArrayReader(data, whose)
    else:
        reader = DatasetReader(data, whose, label, workers or 0)
    return {**{name: reader.column(name) for name in reader.shapes}, "y": reader.y}


class DatasetReader(Reader):
    """Reads a `Dataset`, in this process, one thread at a time, or in processes of its own.

    Its identity is its length, all labels, and the values of some samples from all over it: to know the rest, all of it
    would have to be read. A Hugging Face data set has a fingerprint, which counts too.
    """

    def __init__(self, data: Any, whose: str, label: str, workers: int) -> None:
        self.data, self.whose, self.label, self.workers, self.lock = data, whose, label, workers, Lock()
        if not len(data):
            raise UndriftError(
                f"The samples of {whose} must be pairs (x, y) that stack into two arrays (there are none)."
            )
        probes = np.unique(np.linspace(0, len(data) - 1, PROBES).astype(np.int64))
        super().__init__(len(data), {name: t[0] for name, t in self._stacked(probes[:1]).items() if name != "y"}, "")
        samples = self._stacked(probes)
        values = {name: digest.of_tensor(t) for name, t in samples.items()}
        if values != {name: digest.of_tensor(t) for name, t in self._stacked(probes).items()}:
            raise UndriftError(
                f"{whose[0].upper() + whose[1:]} gives other values each time that a sample is read, so runs would not "
                "repeat; leave random transforms out of it, and give load an augment=… of your own."
            )
        self.y = self._labels(probes, samples["y"])
        values["all y"] = digest.of_tensor(self.y)
        self.identity = digest_of("samples", len(data), values, getattr(data, "_fingerprint", None))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=Lock())

    def sample_name(self, row: int) -> str:
        return f"Sample {row} of {self.whose}"

    def load(self, rows: np.ndarray) -> Store:
        columns = self._stacked(rows)
        changed = (columns.pop("y") != self.y[torch.from_numpy(rows)]).reshape(len(rows), -1).any(1)
        if bool(changed.any()):
            where = self.sample_name(int(rows[int(changed.nonzero()[0])]))
            raise UndriftError(f"{where} has another label than when the data were loaded; load them again.")
        return columns

    def _labels(self, probes: np.ndarray, known: Tensor) -> Tensor:
        """Return all labels: the data set's `targets`, if it has them and they are its samples'; else they are read."""
        try:
            targets = torch.as_tensor(self.data.targets)
            targets = targets if targets.is_floating_point() else targets.long()
        except (AttributeError, TypeError, ValueError, RuntimeError):
            targets = torch.empty(0)
        if len(targets) == len(self.data) and torch.equal(targets[torch.from_numpy(probes)], known):
            return targets.clone()
        log.info("%s has no targets of its own, so all of it is read once for its labels", self.whose)
        parts = np.array_split(np.arange(len(self.data)), -(-len(self.data) // (LABEL_CHUNK * max(1, self.workers))))
        return torch.cat([self._stacked(part)["y"] for part in parts])

    def _stacked(self, rows: np.ndarray) -> Store:
        """Return the samples with their labels."""
        if not self.workers:
            with self.lock:
                return _read(self.data, rows, self.whose, self.label)
        pool = self.executor(self._processes)
        parts = np.array_split(rows, min(self.workers, -(-len(rows) // 4)))
        try:
            read = list(pool.map(_read_in_worker, parts))
        except BrokenProcessPool as error:
            raise UndriftError(
                f"A process that reads {self.whose} has ended, perhaps for lack of memory; give fewer workers."
            ) from error
        return {name: torch.from_numpy(np.concatenate([part[name] for part in read])) for name in read[0]}

    def _processes(self) -> ProcessPoolExecutor:
        """As torch's `DataLoader` starts its workers: copies of this process, where there is a way to make some."""
        context = multiprocessing.get_context("fork" if hasattr(os, "fork") else None)
        return ProcessPoolExecutor(self.workers, context, _start_worker, (self.data, self.whose, self.label))


def _read(data: Any, rows: np.ndarray, whose: str, label: str) -> Store:
    if hasattr(data, "column_names") and hasattr(data, "select"):  # Hugging Face's, which read rows at once
        return to_store(*to_tensors(data.select(rows.tolist()), whose, label))
    return to_store(*to_tensors(Subset(data, rows.tolist()), whose, label))


_of_worker: list[Any] = []
"""In a process that reads: its data set, whose it is, and the name of the labels."""


def _start_worker(*given: Any) -> None:
    torch.set_num_threads(1)  # the threads of the process that this is a copy of are not here
    _of_worker[:] = given


def _read_in_worker(rows: np.ndarray) -> dict[str, np.ndarray]:
    data, whose, label = _of_worker
    return {name: t.numpy() for name, t in _read(data, rows, whose, label).items()}


class ArrayReader(Reader):
    """Reads rows of arrays, which may be files that are mapped into memory, such as `numpy.memmap`.

    A mapped file is identified by its size, its time and a few of its rows, other arrays by their values.
    """

    def __init__(self, data: Any, whose: str) -> None:
        if len(data) != 2 or not len(data[1]):
            raise UndriftError("lazy=True needs a pair (x, y) of arrays with at least one sample.")
        x, y = data
        first, self.y = as_pair((_first_sample(x), y[:1]), whose)[0], as_pair((np.zeros((len(y), 1)), y), whose)[1]
        inputs = [values for _, values in input_paths(x)] if isinstance(first, dict | tuple) else [x]
        columns = dict(zip(to_store(first), inputs, strict=True))
        self.whose, self.arrays = whose, {name: np.asarray(values) for name, values in columns.items()}
        if wrong := [name for name, values in self.arrays.items() if len(values) != len(self.y)]:
            raise UndriftError(f"{whose} has {len(self.arrays[wrong[0]])} x but {len(self.y)} y; give as many of each.")
        mapped = [array for array in map(_mapped_file, self.arrays.values()) if array is not None]
        self.files = [(array.filename, _status(array.filename)) for array in mapped]
        identity = digest_of("arrays", {name: _identity(values) for name, values in self.arrays.items()})
        super().__init__(len(self.y), {name: t[0] for name, t in to_store(first).items()}, identity)

    def sample_name(self, row: int) -> str:
        return f"Sample {row} of {self.whose}"

    def load(self, rows: np.ndarray) -> Store:
        for file, status in self.files:
            if _status(file) != status:
                raise UndriftError(f"{file} has changed since the data were loaded; load them again.")
        return {name: torch.from_numpy(np.take(values, rows, 0)) for name, values in self.arrays.items()}


def _first_sample(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _first_sample(values) for name, values in x.items()}
    several = isinstance(x, tuple) and all(hasattr(values, "shape") or isinstance(values, dict | tuple) for values in x)
    return tuple(map(_first_sample, x)) if several else x[:1]


def _identity(values: np.ndarray) -> list[Any]:
    kind = [str(values.dtype), list(values.shape)]
    mapped = _mapped_file(values)
    if mapped is None:
        return [*kind, _sha256(values)]
    start = mapped.offset + values.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    some = values[np.linspace(0, len(values) - 1, PROBES).astype(np.int64)]
    return [*kind, *_status(mapped.filename), int(start), list(values.strides), _sha256(some)]


def _mapped_file(values: np.ndarray) -> Any:
    """Return the mapped file that has these values, as an array; None if they are in memory."""
    owner: Any = values
    mapped = None
    while isinstance(owner, np.ndarray):
        mapped = owner if isinstance(owner, np.memmap) and owner.filename is not None else mapped
        owner = owner.base
    return mapped


def _status(file: Any) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _sha256(values: np.ndarray) -> str:
    return digest.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
