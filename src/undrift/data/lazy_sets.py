"""A torch `Dataset`, or arrays such as `numpy.memmap`, of which samples are read when they are needed."""

from __future__ import annotations

import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data import digest
from undrift.data.dataset import Rows
from undrift.data.lazy import Reader, digest_of
from undrift.data.samples import Store, paths, stored
from undrift.data.source import Source
from undrift.data.stacking import partition_labels, stacked
from undrift.errors import UndriftError

log = logging.getLogger("undrift")

PROBES = 16
"""How many samples, from all over a data set, are looked at to identify it."""
CHUNK = 64
"""How many samples are read at a time where labels are wanted, and how many a process gets at least."""


def source(data: Any, test: Any, label: str, workers: int | None) -> Source:
    """Return a data set that is read as it is needed, with its own test set where one is given."""
    store = _store(data, "the training set", label, workers)
    held = _store(test, "the test set", label, workers) if test is not None else None
    if held and not len(held["y"]):
        raise UndriftError("The test set is empty; leave test out, or give it some samples.")
    rows = Rows(held, torch.arange(len(held["y"]))) if held else None
    return Source(store, partition_labels(store["y"]), test=rows)


def _store(data: Any, whose: str, label: str, workers: int | None) -> Store:
    reader = Arrays(data, whose) if isinstance(data, tuple | list) else Samples(data, whose, label, workers or 0)
    return {**{name: reader.column(name) for name in reader.shapes}, "y": reader.y}


class Samples(Reader):
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
        found = self._stacked(probes)
        values = {name: digest.sha256(digest.as_bytes(t)) for name, t in found.items()}
        if values != {name: digest.sha256(digest.as_bytes(t)) for name, t in self._stacked(probes).items()}:
            raise UndriftError(
                f"{whose[0].upper() + whose[1:]} gives other values each time that a sample is read, so runs would not "
                "repeat; leave random transforms out of it, and give load an augment=… of your own."
            )
        self.y = self._labels(probes, found["y"])
        values["all y"] = digest.sha256(digest.as_bytes(self.y))
        self.identity = digest_of("samples", len(data), values, getattr(data, "_fingerprint", None))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=Lock())

    def called(self, row: int) -> str:
        return f"Sample {row} of {self.whose}"

    def load(self, rows: np.ndarray) -> Store:
        found = self._stacked(rows)
        changed = (found.pop("y") != self.y[torch.from_numpy(rows)]).reshape(len(rows), -1).any(1)
        if bool(changed.any()):
            where = self.called(int(rows[int(changed.nonzero()[0])]))
            raise UndriftError(f"{where} has another label than when the data were loaded; load them again.")
        return found

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
        parts = np.array_split(np.arange(len(self.data)), -(-len(self.data) // (CHUNK * max(1, self.workers))))
        return torch.cat([self._stacked(part)["y"] for part in parts])

    def _stacked(self, rows: np.ndarray) -> Store:
        """Return the samples with their labels."""
        if not self.workers:
            with self.lock:
                return _read(self.data, rows, self.whose, self.label)
        pool = self.executor(self._processes)
        parts = np.array_split(rows, min(self.workers, -(-len(rows) // 4)))
        try:
            found = list(pool.map(_read_there, parts))
        except BrokenProcessPool as error:
            raise UndriftError(
                f"A process that reads {self.whose} has ended, perhaps for lack of memory; give fewer workers."
            ) from error
        return {name: torch.from_numpy(np.concatenate([part[name] for part in found])) for name in found[0]}

    def _processes(self) -> ProcessPoolExecutor:
        """As torch's `DataLoader` starts its workers: copies of this process, where there is a way to make some."""
        context = multiprocessing.get_context("fork" if hasattr(os, "fork") else None)
        return ProcessPoolExecutor(self.workers, context, _begin, (self.data, self.whose, self.label))


def _read(data: Any, rows: np.ndarray, whose: str, label: str) -> Store:
    if hasattr(data, "column_names") and hasattr(data, "select"):  # Hugging Face's, which read rows at once
        x, y = stacked(data.select(rows.tolist()), whose, label)
    else:
        x, y = stacked(_Some(data, rows.tolist()), whose, label)
    return {**stored(x), "y": y}


class _Some:
    """Some samples of a data set."""

    def __init__(self, data: Any, rows: list[int]) -> None:
        self.data, self.rows = data, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.data[self.rows[i]]


_here: list[Any] = []
"""In a process that reads: its data set, whose it is, and the name of the labels."""


def _begin(*given: Any) -> None:
    torch.set_num_threads(1)  # the threads of the process that this is a copy of are not here
    _here[:] = given


def _read_there(rows: np.ndarray) -> dict[str, np.ndarray]:
    data, whose, label = _here
    return {name: t.numpy() for name, t in _read(data, rows, whose, label).items()}


class Arrays(Reader):
    """Reads rows of arrays, which may be files that are mapped into memory, such as `numpy.memmap`.

    A mapped file is identified by its size, its time and a few of its rows, other arrays by their values.
    """

    def __init__(self, data: Any, whose: str) -> None:
        few, self.y = stacked(_first(data), whose)[0], stacked((np.zeros((len(data[1]), 1)), data[1]), whose)[1]
        x = data[0]
        inputs = [values for _, values in paths(x)] if isinstance(few, dict | tuple) else [x]
        columns = dict(zip(stored(few), inputs, strict=True))
        self.whose, self.arrays = whose, {name: np.asarray(values) for name, values in columns.items()}
        if wrong := [name for name, values in self.arrays.items() if len(values) != len(self.y)]:
            raise UndriftError(f"{whose} has {len(self.arrays[wrong[0]])} x but {len(self.y)} y; give as many of each.")
        mapped = [found.filename for found in map(_mapped, self.arrays.values()) if found is not None]
        self.files = [(file, _status(file)) for file in mapped]
        described = {name: _identity(values) for name, values in self.arrays.items()}
        first = {name: t[0] for name, t in stored(few).items()}
        super().__init__(len(self.y), first, digest_of("arrays", described))

    def called(self, row: int) -> str:
        return f"Sample {row} of {self.whose}"

    def load(self, rows: np.ndarray) -> Store:
        for file, status in self.files:
            if _status(file) != status:
                raise UndriftError(f"{file} has changed since the data were loaded; load them again.")
        return {name: torch.from_numpy(np.take(values, rows, 0)) for name, values in self.arrays.items()}


def _first(data: Any) -> tuple[Any, Any]:
    """Return the first sample of a pair of arrays, as a pair of arrays."""
    if len(data) != 2 or not len(data[1]):
        raise UndriftError("lazy=True needs a pair (x, y) of arrays with at least one sample.")
    x, y = data
    return _first_of(x), y[:1]


def _first_of(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _first_of(values) for name, values in x.items()}
    several = isinstance(x, tuple) and all(hasattr(values, "shape") or isinstance(values, dict | tuple) for values in x)
    return tuple(map(_first_of, x)) if several else x[:1]


def _identity(values: np.ndarray) -> list[Any]:
    kind = [str(values.dtype), list(values.shape)]
    mapped = _mapped(values)
    if mapped is None:
        return [*kind, _sha256(values)]
    start = mapped.offset + values.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    some = values[np.linspace(0, len(values) - 1, PROBES).astype(np.int64)]
    return [*kind, *_status(mapped.filename), int(start), list(values.strides), _sha256(some)]


def _mapped(values: np.ndarray) -> Any:
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
