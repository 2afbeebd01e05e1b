"""A data set before it is partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from undrift.data.dataset import Rows, Task
from undrift.data.samples import Store, Take, take


@dataclass(frozen=True)
class Scales:
    """The mean and the standard deviation of each feature over the training split, in float64."""

    mean: np.ndarray
    std: np.ndarray
    count: int
    """How many values of each feature these are of."""
    columns: list[str] | None = None
    """The names of the features, if they have any."""
    codes: dict[str, list[str]] = field(default_factory=dict)
    """The names of the classes of those features that are numbers of classes."""
    table: str = ""
    """What to call the data in messages."""

    def lists(self) -> dict[str, Any]:
        """Return the numbers in a form that JSON can hold."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist(), "count": self.count}


@dataclass(frozen=True)
class Source:
    """A data set that is not partitioned yet: arrays, labels and, if the data have natural clients, their ids."""

    store: Store
    labels: np.ndarray
    """The label of each training sample, for partitions and class-balanced fractions."""
    indices: np.ndarray | None = None
    """The training samples' positions in the store; all of it if None."""
    test: Rows | None = None
    keys: np.ndarray | None = None
    """The natural client of each training sample."""
    test_keys: np.ndarray | None = None
    """The natural client of each test sample, if clients have their own test data; -1 if it does not train."""
    take: Take = take
    task: Task = field(default_factory=Task)
    names: list[str] | None = None
    """The names of the classes."""
    clients: Sequence[str] | None = None
    """The names of the natural clients, by key."""
    spans: np.ndarray | None = None
    """For overlapping windows: which run of consecutive windows each training sample belongs to."""
    gap: int = 0
    """The distance at which windows do not overlap."""

    scales: Scales | None = None
    """The scales of the features, if they are known. They are computed where they are needed and not known."""

    def only(self, chosen: np.ndarray) -> Source:
        """Return the data with only these training samples."""
        if chosen.all():
            return self
        parts = {"labels": self.labels, "keys": self.keys, "spans": self.spans}
        left = {name: array[chosen] for name, array in parts.items() if array is not None}
        return replace(self, indices=self.in_store(np.flatnonzero(chosen)), **left)

    def in_store(self, positions: np.ndarray) -> np.ndarray:
        """Return the store's indices of the training samples at these positions."""
        return positions if self.indices is None else self.indices[positions]
