"""A federated data set: one store of tensors, and for each client a range of one index into it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data import digest
from undrift.data.labels import FEW, sparse
from undrift.errors import UndriftError
from undrift.random import Key

log = logging.getLogger("undrift")

MOST_OUTPUTS = 1_000_000
"""More classes than any data set has: labels beyond are codes of some kind."""
MOST_COUNTS = 1_000_000_000
"""Entries of a table of clients by classes: more would take the memory of a large machine."""

Store = dict[str, Tensor]
Take = Callable[[Store, Tensor], tuple[Tensor, Tensor]]


def take(store: Store, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The samples at `indices`, on the store's device. Bytes become floats from 0 to 1."""
    x, y = store["x"][indices], store["y"][indices]
    return (x.float() / 255 if x.dtype == torch.uint8 else x), y


@dataclass(frozen=True)
class Rows:
    """Some rows of a store: a client's, the test set, the server's."""

    store: Store
    index: Tensor
    take: Take = take

    def __len__(self) -> int:
        return len(self.index)

    def all(self) -> tuple[Tensor, Tensor]:
        return self.take(self.store, self.index)

    def to(self, device: torch.device) -> Rows:
        return Rows({name: t.to(device) for name, t in self.store.items()}, self.index.to(device), self.take)


@dataclass(frozen=True)
class Task:
    """What a data set brings along: its loss and metrics, where `ud.train` is given none, and what its models need."""

    loss: str | Callable[[Tensor, Tensor], Tensor] | None = None
    metrics: dict[str, Any] | None = None
    classes: int | None = None
    """How many outputs a model needs, where the labels do not tell."""
    vocabulary: int | None = None
    """How many different words or characters samples are made of."""


@dataclass(eq=False)
class FederatedDataset:
    """Clients' data. `len(data)` clients; `data[i]` is client i's `(x, y)`; client ids are positions.

    A million clients cost a million small ranges: client i holds rows `index[offsets[i]:offsets[i+1]]` of the store.
    """

    store: Store
    index: Tensor
    offsets: np.ndarray
    take: Take = take
    test_rows: Rows | None = None
    validation_rows: Rows | None = None
    server_rows: Rows | None = None
    task: Task = field(default_factory=Task)
    client_test: FederatedDataset | None = None
    """Each client's own held-out data, where `client_test_fraction` asked for it."""
    augment: Callable[[Tensor, Key], Tensor] | None = None
    """What changes a batch before each local step."""
    names: list[str] | None = None
    """The classes' names."""
    client_names: list[str] | None = None
    """Who the clients are, where they are the data's own."""
    origin: dict[str, Any] | None = None
    """What `ud.load` was asked for, where a file can say it."""

    def __post_init__(self) -> None:
        self._refuse_not_finite()
        self.sizes: np.ndarray = np.diff(self.offsets)
        self.nonempty: np.ndarray = np.flatnonzero(self.sizes)
        self._label_counts: Tensor | None = None

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[tuple[Any, Any]],
        test: tuple[Any, Any] | None = None,
        server: tuple[Any, Any] | None = None,
        validation: tuple[Any, Any] | None = None,
        task: Task | None = None,
    ) -> FederatedDataset:
        """Data that are split already: one `(x, y)` of arrays or tensors per client. Rows keep their order."""
        if isinstance(clients, Tensor | np.ndarray) or not hasattr(clients, "__iter__"):
            raise UndriftError(f"from_clients needs a list with one (x, y) a client, not {type(clients).__name__}.")
        pairs = [as_pair(pair, f"client {i}", copy=False) for i, pair in enumerate(clients)]
        full = [(i, pair) for i, pair in enumerate(pairs) if len(pair[0])]
        if not full:
            raise UndriftError("No client has any data; give from_clients at least one (x, y) with rows.")
        first, (x0, y0) = full[0]
        for i, (x, y) in full[1:]:
            if x.shape[1:] != x0.shape[1:] or y.shape[1:] != y0.shape[1:] or x.dtype != x0.dtype or y.dtype != y0.dtype:
                raise UndriftError(
                    f"Client {i}'s samples are {tuple(x.shape[1:])} {x.dtype} with targets {tuple(y.shape[1:])} "
                    f"{y.dtype}, but client {first}'s are {tuple(x0.shape[1:])} {x0.dtype} with "
                    f"{tuple(y0.shape[1:])} {y0.dtype}; make them alike."
                )
        # Joining copies them, so that what a caller does to its arrays afterwards changes nothing here.
        store = {"x": torch.cat([x for _, (x, _) in full]), "y": torch.cat([y for _, (_, y) in full])}
        return cls(
            store,
            torch.arange(len(store["x"])),
            np.cumsum([0] + [len(x) for x, _ in pairs]),
            test_rows=_rows(test, "test"),
            server_rows=_rows(server, "server"),
            validation_rows=_rows(validation, "validation"),
            task=task or Task(),
        )

    @classmethod
    def from_owners(
        cls, store: Store, rows: np.ndarray, owner: np.ndarray, clients: int, **rest: Any
    ) -> FederatedDataset:
        """Data from who owns what: `owner[j]` holds row `rows[j]` of the store."""
        order = np.argsort(owner, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))])
        return cls(store, torch.from_numpy(rows[order]), offsets, **rest)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        shape = tuple(self.take(self.store, self.index[:1])[0].shape[1:]) if len(self.index) else None
        kind = f", {self.classes} classes" if self.labels is not None else ""
        sizes = f"{self.sizes.min():,} to {self.sizes.max():,} per client" if len(self) else "none"
        lines = [
            f"FederatedDataset: {len(self):,} clients, {len(self.index):,} samples of shape {shape}{kind} ({sizes})"
        ]
        splits = {"test": self.test_rows, "validation": self.validation_rows, "server": self.server_rows}
        held = [f"{name} {len(rows):,}" for name, rows in splits.items() if rows is not None]
        held += [f"clients' own tests {len(self.client_test.index):,}"] if self.client_test is not None else []
        return "\n".join([*lines, f"  held out: {', '.join(held)}"] if held else lines)

    def __getitem__(self, client: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= client < len(self):
            raise IndexError(f"There are {len(self)} clients, so no client {client}.")
        client %= len(self)
        return self.take(self.store, self.index[self.offsets[client] : self.offsets[client + 1]])

    @property
    def test(self) -> tuple[Tensor, Tensor] | None:
        return self.test_rows.all() if self.test_rows else None

    @property
    def validation(self) -> tuple[Tensor, Tensor] | None:
        return self.validation_rows.all() if self.validation_rows else None

    @property
    def server(self) -> tuple[Tensor, Tensor] | None:
        return self.server_rows.all() if self.server_rows else None

    @property
    def labels(self) -> Tensor | None:
        """The store's targets, where they are classes (one whole number per sample)."""
        y = self.store["y"]
        return y if y.dim() == 1 and not y.is_floating_point() and y.dtype != torch.bool else None

    @property
    def digests(self) -> dict[str, str]:
        """A SHA-256 for each split there is: of every sample, its names, types and shapes, and of who holds it.

        The splits are "training data", "test data", "validation data", "server data" and "clients' test data". Data
        from the decoded cache were hashed when they were decoded, others are the first time they are asked for, and
        again if a tensor has been written to since.
        """
        found = {"training data": digest.of_parts(self.store, index=self.index, offsets=self.offsets)}
        for split in ("test", "validation", "server"):
            rows: Rows | None = getattr(self, f"{split}_rows")
            if rows is not None:
                found[f"{split} data"] = digest.of_parts(rows.store, index=rows.index)
        if self.client_test is not None:
            found["clients' test data"] = self.client_test.digests["training data"]
        return found

    @cached_property
    def outputs(self) -> int:
        """How many outputs a model of these data needs."""
        if self.classes and self.task.classes is None:
            self._check_classes()
        y = self.store["y"]
        return self.classes or self.task.classes or (y.shape[1] if y.dim() > 1 else 1)

    @cached_property
    def classes(self) -> int:
        """How many classes the labels name, the test set's included; 0 where targets are not classes."""
        if self.labels is None:
            return 0
        if self.task.classes is not None:
            return self.task.classes
        return max(int(y.max()) + 1 for y in self._all_labels() if len(y))

    def _all_labels(self) -> list[Tensor]:
        rows = [rows for rows in (self.test_rows, self.validation_rows, self.server_rows) if rows]
        return [self.store["y"], *(rows.store["y"] for rows in rows)]

    def _check_classes(self) -> None:
        """Say it if labels are hardly classes counted from 0; refuse them if no model could have that many outputs."""
        if self.classes > MOST_OUTPUTS:
            raise UndriftError(
                f"The labels run up to {self.classes - 1:,}, which would make a model of {self.classes:,} outputs; "
                "number the classes from 0, or pass floats if they are numbers to predict."
            )
        if self.classes <= FEW:
            return
        used = len(torch.cat([torch.unique(y) for y in self._all_labels()]).unique())
        if sparse(used, self.classes):
            log.warning(
                "The labels have %s different values up to %s, so a model gets %s outputs; number the classes from 0 "
                "if that is not meant.", f"{used:,}", f"{self.classes - 1:,}", f"{self.classes:,}",
            )  # fmt: skip

    def label_counts(self, clients: np.ndarray | None = None) -> Tensor:
        """How many samples of each class each client holds: clients × classes. All clients, unless some are named."""
        if self.labels is None:
            raise UndriftError("label_counts needs targets that are classes: one whole number per sample.")
        asked = len(self) if clients is None else len(clients)
        if asked * self.classes > MOST_COUNTS:
            raise UndriftError(
                f"The samples of {asked:,} clients by {self.classes:,} classes are too many to count; ask for fewer "
                "clients, or number the classes from 0."
            )
        if self._label_counts is None and (clients is None or len(self) * self.classes <= 1_000_000):
            self._label_counts = self._count(np.arange(len(self)))
        if self._label_counts is None:
            return self._count(np.asarray(clients))
        return self._label_counts if clients is None else self._label_counts[clients]

    def _count(self, clients: np.ndarray) -> Tensor:
        sizes = self.sizes[clients]
        position = np.arange(sizes.sum()) + np.repeat(self.offsets[clients] - np.cumsum(sizes) + sizes, sizes)
        assert self.labels is not None
        labels = self.labels[self.index[torch.from_numpy(position)]].long()
        row = torch.from_numpy(np.repeat(np.arange(len(clients)), sizes))
        return torch.bincount(row * self.classes + labels, minlength=len(clients) * self.classes).view(len(clients), -1)

    def _refuse_not_finite(self) -> None:
        for what, tensor in self.store.items():
            for row in _not_finite(tensor):
                if len(spot := torch.nonzero(self.index == row).flatten()):  # somebody holds it
                    client = int(np.searchsorted(self.offsets, int(spot[0]), side="right")) - 1
                    place = f"Client {client}, row {int(spot[0]) - int(self.offsets[client])}"
                    raise UndriftError(f"{place} has {_what(tensor[row])} in its {what}; clean or drop that row.")
        for split in ("test", "validation", "server"):
            rows: Rows | None = getattr(self, f"{split}_rows")
            if rows is None:
                continue
            for what, tensor in rows.store.items():
                for row in _not_finite(tensor):
                    if len(spot := torch.nonzero(rows.index == row).flatten()):
                        place = f"The {split} data's row {int(spot[0])}"
                        raise UndriftError(f"{place} has {_what(tensor[row])} in its {what}; clean or drop that row.")


def _not_finite(tensor: Tensor) -> list[int]:
    """The rows that hold NaN or infinity. A finite sum spares looking at each."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
        return []
    return torch.nonzero(~torch.isfinite(tensor.reshape(len(tensor), -1)).all(1)).flatten().tolist()


def _what(row: Tensor) -> str:
    return "NaN" if bool(torch.isnan(row).any()) else "infinity"


def as_pair(pair: Any, whose: str, copy: bool = True) -> tuple[Tensor, Tensor]:
    """Samples and targets as tensors, copied unless the caller is going to."""
    try:
        x, y = (_as_tensor(part, copy) for part in pair)
    except (TypeError, ValueError) as error:
        raise UndriftError(f"The data of {whose} must be a pair (x, y) of arrays or tensors ({error}).") from error
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        raise UndriftError(
            f"The data of {whose} must have as many x as y, not shapes {tuple(x.shape)} and {tuple(y.shape)}."
        )
    # Labels are indices; one integer type for all spares every later step a conversion.
    return x, y if y.is_floating_point() else y.long()


def _as_tensor(part: Any, copy: bool) -> Tensor:
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_meta or part.is_quantized:
            raise ValueError(f"a tensor must be dense and in memory, not {part.layout} on {part.device}")
        found = part.detach().to("cpu", copy=copy)
    else:
        if hasattr(part, "toarray"):
            raise ValueError("a sparse matrix must be made dense with .toarray()")
        refuse_masked(part)
        array = np.array(part) if copy else np.asarray(part)
        found = torch.as_tensor(array if array.flags.writeable else array.copy())  # torch has no read-only tensors
    if found.is_complex():
        raise ValueError("complex numbers must be given as two real ones, such as z.real and z.imag")
    return found


def refuse_masked(part: Any) -> None:
    """A masked array's mask would be dropped, and what it hides be trained on."""
    several = part if isinstance(part, list | tuple) else (part,)
    if any(isinstance(one, np.ma.MaskedArray) and np.ma.is_masked(one) for one in several):
        raise ValueError("some values are masked; drop those samples, or fill them in with .filled(…)")


def _rows(pair: tuple[Any, Any] | None, name: str) -> Rows | None:
    if pair is None:
        return None
    x, y = as_pair(pair, f"the {name} set")
    return Rows({"x": x, "y": y}, torch.arange(len(x))) if len(x) else None
