"""Samples that are read when they are needed, and never all at once.

In a store, a `Lazy` column stands where a tensor of all samples would be: it has a length, a shape and a type, and can
be indexed, which reads. Labels are always there, as a tensor. The columns of one source share a `Reader`, so that a
sample with several inputs is read once (`samples.gather`).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from undrift.data.samples import Store
from undrift.errors import UndriftError

Shapes = dict[str, tuple[torch.Size, torch.dtype]]
CHUNK_BYTES = 2**21
"""How much to read at a time in one pass over all data."""


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
    def called(self, row: int) -> str:
        """Return the name of a sample, for messages."""

    def column(self, name: str) -> Tensor:
        """Return what to put into a store; it stands in for a tensor."""
        return cast(Tensor, Lazy(self, name))

    def read(self, rows: Tensor) -> Store:
        """Return the columns of the samples at `rows`, of any shape. Repeated samples (padding) are read once."""
        flat = rows.reshape(-1).numpy()
        different, places = np.unique(flat, return_inverse=True)
        found = self.load(different)
        for name, values in found.items():
            shape, dtype = self.shapes[name]
            if values.dtype != dtype or values.shape[1:] != shape:
                raise UndriftError(
                    f"{self.called(int(different[0]))} and those after it are {tuple(values.shape[1:])} "
                    f"{values.dtype}, but the first are {tuple(shape)} {dtype}; make all samples alike."
                )
            if values.is_floating_point() and not bool(torch.isfinite(values.sum())):
                self._refuse_not_finite(name, values, different)
        index = torch.from_numpy(places.reshape(-1))
        same = len(different) == len(flat) and bool((index == torch.arange(len(flat))).all())
        return {
            name: (t if same else t.index_select(0, index)).reshape(*rows.shape, *t.shape[1:])
            for name, t in found.items()
        }

    def _refuse_not_finite(self, name: str, values: Tensor, rows: np.ndarray) -> None:
        """Reject NaN and infinity: data that are not all in memory are checked as they are read."""
        for i in torch.nonzero(~torch.isfinite(values.reshape(len(values), -1)).all(1)).flatten().tolist():
            kind = "NaN" if bool(torch.isnan(values[i]).any()) else "infinity"
            raise UndriftError(f"{self.called(int(rows[i]))} has {kind} in its {name}; clean or drop that sample.")

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


def digest_of(*parts: Any) -> str:
    """Return a digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
