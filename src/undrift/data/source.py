"""A data set before it is partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from undrift.data.dataset import Rows, Scales, Task
from undrift.data.samples import Store, Take, take


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
        parts = {"labels": self.labels, "keys": self.keys, "spans": self.spans}
        left = {name: array[chosen] for name, array in parts.items() if array is not None}
        return replace(self, indices=self.in_store(np.flatnonzero(chosen)), **left)

    def in_store(self, positions: np.ndarray) -> np.ndarray:
        """Return the store's indices of the training samples at these positions."""
        return positions if self.indices is None else self.indices[positions]

    def with_entries(self, entries: Store) -> Source:
        """Return the source with more entries in the stores of its training and its test data."""
        test = replace(self.test, store=self.test.store | entries) if self.test else None
        return replace(self, store=self.store | entries, test=test)


def source_from_arrays(
    arrays: dict[str, Tensor], notes: dict[str, Any], shared: Sequence[str] = (), **rest: Any
) -> Source:
    """Return the source of arrays by split: `train_x`, `train_y`, perhaps `train_key`, `test_x` and `test_y`.

    Args:
        arrays: The arrays.
        notes: What else is known: the names of the `classes` and of the `clients`.
        shared: The names of arrays that belong to every split.
        rest: More arguments of `Source`.
    """

    def store(split: str) -> Store:
        return {"x": arrays[f"{split}_x"], "y": arrays[f"{split}_y"], **{name: arrays[name] for name in shared}}

    train = store("train")
    return Source(
        train,
        rest.pop("labels", train["y"].numpy()),
        test=Rows.whole(store("test"), rest.get("take", take)) if "test_y" in arrays else None,
        keys=arrays["train_key"].numpy() if "train_key" in arrays else None,
        names=notes["classes"],
        clients=notes.get("clients") or None,
        **rest,
    )


class ClientNumbers(Sequence[str]):
    """The names of clients that have numbers. Each is created on demand, as there may be millions."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> Any:
        chosen = self.numbers[place]
        return ClientNumbers(chosen) if isinstance(place, slice) else str(chosen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def client_names(known: np.ndarray, names: Sequence[str] | None) -> Sequence[str]:
    """Return the names of the clients with these keys, of all clients' names by key; their keys if they have none."""
    if not names:
        return ClientNumbers(known)
    return names if len(known) == len(names) else np.array(names, object)[known].tolist()


def partition_labels(y: Tensor) -> np.ndarray:
    """Return what partitions and class-balanced fractions go by.

    A sample's class; where it has several labels, as 0s and 1s or as shares, the first or largest; and a single class
    for numbers to predict and for targets with a class at every position.
    """
    if y.dim() == 1 and not y.is_floating_point():
        return y.numpy()
    several = y.dim() == 2 and y.shape[1] > 1
    if several and (y.is_floating_point() or bool(((y == 0) | (y == 1)).all())):
        return y.argmax(1).numpy()
    return np.zeros(len(y), np.int64)
