"""A data set before it is dealt out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from undrift.data.dataset import Rows, Store, Take, Task, take


@dataclass(frozen=True)
class Source:
    """A data set that is not partitioned yet: arrays, labels, and the client of each sample where the data name one."""

    store: Store
    labels: np.ndarray
    """What partitions and class-balanced fractions go by, one for each training row."""
    rows: np.ndarray | None = None
    """Which rows of the store are for training; all of them if None."""
    test: Rows | None = None
    keys: np.ndarray | None = None
    """Whose each training row is."""
    take: Take = take
    task: Task = field(default_factory=Task)
    names: list[str] | None = None
    """The classes' names."""
    clients: list[str] | None = None
    """The natural clients' names, by key."""
    spans: np.ndarray | None = None
    """Of rows that overlap their neighbours: which stretch of consecutive rows each training row is of."""
    gap: int = 0
    """How far apart rows must be not to overlap."""

    def inside(self, rows: np.ndarray) -> np.ndarray:
        """Where these training rows lie in the store."""
        return rows if self.rows is None else self.rows[rows]
