"""A federated data set: one store of tensors, and an index into it of which each client has a range."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from undrift.data import clients as given
from undrift.data import digest, samples
from undrift.data.labels import FEW, sparse
from undrift.data.pieces import size_counts
from undrift.data.samples import Samples, Store, Take, as_pair, stored, take
from undrift.data.shares import in_order
from undrift.errors import UndriftError
from undrift.losses import IGNORED
from undrift.random import Key

if TYPE_CHECKING:
    from undrift.data.source import Scales

log = logging.getLogger("undrift")

MOST_OUTPUTS = 1_000_000
"""More classes than any data set has. Larger labels must be codes of some kind."""
MOST_COUNTS = 1_000_000_000
"""The largest table of clients × classes. A larger one would not fit into memory."""


@dataclass(frozen=True)
class Rows:
    """A subset of a store, given by indices: the test set, for example, or the server's data."""

    store: Store
    index: Tensor
    take: Take = take

    def __len__(self) -> int:
        return len(self.index)

    def all(self) -> tuple[Samples, Tensor]:
        return self.take(self.store, self.index)

    def batches(self, size: int) -> Iterator[tuple[Samples, Tensor]]:
        """Yield the samples in order, `size` at a time."""
        for begin in range(0, len(self), size):
            yield self.take(self.store, self.index[begin : begin + size])

    def to(self, device: torch.device) -> Rows:
        return Rows({name: t.to(device) for name, t in self.store.items()}, self.index.to(device), self.take)


@dataclass(frozen=True)
class Task:
    """A data set's default loss and metrics, and the sizes that a model for it needs.

    Example:
        >>> import undrift as ud
        >>> x, y = torch.randn(8, 3), torch.randn(8)
        >>> data = ud.FederatedDataset.from_clients([(x, y)], task=ud.Task(loss="mse"))
        >>> data.task.loss
        'mse'

    Args:
        loss: The default of `ud.train(loss=…)`: a name, or a function of `(output, target)` that returns one value per
            sample.
        metrics: The default of `ud.train(metrics=…)`: a dict of metrics by name.
        classes: The number of outputs of a model, where the labels do not determine it.
        vocabulary: The number of different tokens in the samples, for models that embed them.
    """

    loss: str | Callable[[Tensor, Tensor], Tensor] | None = None
    metrics: dict[str, Any] | None = None
    classes: int | None = None
    vocabulary: int | None = None


@dataclass(eq=False)
class FederatedDataset:
    """The data of all clients, together with the test, validation and server data.

    `len(data)` is the number of clients, and `data[i]` the pair `(x, y)` of client i. x is a tensor, or a tuple or dict
    of tensors for a model with several inputs. `data.test`, `data.validation` and `data.server` are such pairs too, or
    None. Create one with `ud.load` or `FederatedDataset.from_clients`.

    Client i holds the samples at `index[offsets[i]:offsets[i+1]]` of the store.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.Dirichlet(0.3), clients=20)
        >>> x, y = data[0]
        >>> len(data), x.shape[1:], data.classes
        (20, torch.Size([1, 8, 8]), 10)
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
    """Each client's own test data, from `client_test_fraction` or from `from_clients(test=…)`."""
    augment: Callable[[Samples, Key], Samples] | None = None
    """A function of `(x, key)`, applied to each training batch."""
    names: list[str] | None = None
    """The names of the classes."""
    client_names: Sequence[str] | None = None
    """The names of the clients, if they have any."""
    origin: dict[str, Any] | None = None
    """The arguments of `ud.load`, if an experiment file can hold them."""
    scales: Scales | None = None
    """The columns and scales of the features, of a table and of what is normalized by columns."""

    def __post_init__(self) -> None:
        self._refuse_not_finite()
        self._label_counts: Tensor | None = None

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[tuple[Any, Any]] | Mapping[Any, tuple[Any, Any]],
        test: Any = None,
        server: tuple[Any, Any] | None = None,
        validation: tuple[Any, Any] | None = None,
        task: Task | None = None,
    ) -> FederatedDataset:
        """Create a federated data set from data that are already split into clients.

        Example:
            >>> import undrift as ud
            >>> hospitals = {f"H{n}": (torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in (10, 20)}
            >>> data = ud.FederatedDataset.from_clients(hospitals, test={"H20": hospitals["H20"]})
            >>> len(data), data.client_names, data.client_test.sizes.tolist()
            (2, ['H10', 'H20'], [0, 20])

        Args:
            clients: One pair `(x, y)` of arrays or tensors per client: a list, or a dict by client name. For a model
                with several inputs, x is a tuple or a dict of them. The data are copied; samples keep their order.
            test: The test set, as one pair. Or one pair per client, in a list (None for a client without test data) or
                in a dict by name: then each client is tested on its own data, and the test set is the union.
            server: The server's own data, as one pair, for methods that train there.
            validation: The validation set, as one pair, to choose settings by.
            task: The default loss and metrics, and the sizes that models need.

        Returns:
            The federated data set.

        Raises:
            UndriftError: If something is not a pair of arrays of equal length, if clients' shapes or dtypes differ, if
                a value is not finite, or if no client has any data.
        """
        pairs, names = given.named(clients)
        who: Sequence[Any] = names or range(len(pairs))
        own = given.joined(pairs, who)
        test_rows, client_test = None, None
        if given.by_client(test):
            tests = given.joined(given.tests_of(test, len(pairs), names), who, own, "test samples")
            client_test = cls.from_joined(*tests, client_names=names)
            test_rows = Rows(client_test.store, client_test.index)
        return cls.from_joined(
            *own,
            client_names=names,
            client_test=client_test,
            test_rows=test_rows or _rows(test, "test"),
            server_rows=_rows(server, "server"),
            validation_rows=_rows(validation, "validation"),
            task=task or Task(),
        )

    @classmethod
    def from_joined(cls, store: Store, offsets: np.ndarray, **rest: Any) -> FederatedDataset:
        """Create a federated data set from a store that has one client's samples after another's."""
        return cls(store, torch.arange(len(store["y"])), offsets, **rest)

    @classmethod
    def from_owners(
        cls, store: Store, rows: np.ndarray, owner: np.ndarray, clients: int, **rest: Any
    ) -> FederatedDataset:
        """Create a federated data set in which client `owner[j]` holds the sample at `rows[j]` of the store."""
        order = in_order(owner)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))])
        return cls(store, torch.from_numpy(rows[order]), offsets, **rest)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    # Arrays over all clients are created on first use. Training does not use them: with millions of clients they would
    # take longer than the rest of a round. It calls `sizes_of` and `holders` for the clients of a round instead.

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of samples of each client."""
        return np.diff(self.offsets)

    @cached_property
    def nonempty(self) -> np.ndarray:
        """The ids of the clients that hold samples, ascending."""
        return np.flatnonzero(self.offsets[1:] > self.offsets[:-1])

    @cached_property
    def size_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The different sizes of clients that hold samples, ascending, and the number of clients of each size."""
        sizes, counts = size_counts(self.offsets)
        return sizes[sizes > 0], counts[sizes > 0]

    @cached_property
    def population(self) -> int:
        """The number of clients that hold samples."""
        return int(self.size_counts[1].sum())

    @cached_property
    def largest(self) -> int:
        """The number of samples of the largest client."""
        return int(self.size_counts[0].max(initial=0))

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        """Return the number of samples of each of these clients."""
        return self.offsets[clients + 1] - self.offsets[clients]

    def holders(self, places: np.ndarray) -> np.ndarray:
        """Return the ids of the clients at these positions among those that hold samples."""
        return places if self.population == len(self) else self.nonempty[places]

    def __repr__(self) -> str:
        shape = samples.shape(self.take(self.store, self.index[:1])[0]) if len(self.index) else None
        kind = f", {self.classes} classes" if self.labels is not None else ""
        smallest = int(self.size_counts[0].min(initial=self.largest)) if self.population == len(self) else 0
        sizes = f"{smallest:,} to {self.largest:,} per client" if len(self) else "none"
        lines = [
            f"FederatedDataset: {len(self):,} clients, {len(self.index):,} samples of shape {shape}{kind} ({sizes})"
        ]
        splits = {"test": self.test_rows, "validation": self.validation_rows, "server": self.server_rows}
        held = [f"{name} {len(split):,}" for name, split in splits.items() if split is not None]
        held += [f"clients' own tests {len(self.client_test.index):,}"] if self.client_test is not None else []
        return "\n".join([*lines, f"  held out: {', '.join(held)}"] if held else lines)

    def __getitem__(self, client: int) -> tuple[Samples, Tensor]:
        if not -len(self) <= client < len(self):
            raise IndexError(f"There are {len(self)} clients, so no client {client}.")
        client %= len(self)
        return self.take(self.store, self.index[self.offsets[client] : self.offsets[client + 1]])

    @property
    def test(self) -> tuple[Samples, Tensor] | None:
        return self.test_rows.all() if self.test_rows else None

    @property
    def validation(self) -> tuple[Samples, Tensor] | None:
        return self.validation_rows.all() if self.validation_rows else None

    @property
    def server(self) -> tuple[Samples, Tensor] | None:
        return self.server_rows.all() if self.server_rows else None

    @property
    def labels(self) -> Tensor | None:
        """The targets in the store if they are classes (one integer per sample), else None."""
        y = self.store["y"]
        return y if y.dim() == 1 and not y.is_floating_point() and y.dtype != torch.bool else None

    @property
    def digests(self) -> dict[str, str]:
        """A SHA-256 per split: of all values, names, dtypes and shapes, and of which client holds which sample.

        The splits are "training data", "test data", "validation data", "server data" and "clients' test data". Cached
        data were hashed when they were decoded. Other data are hashed on first use, and again after a tensor has been
        written to.
        """
        found = {"training data": digest.of_parts(self.store, index=self.index, offsets=self.offsets)}
        for split in ("test", "validation", "server"):
            held: Rows | None = getattr(self, f"{split}_rows")
            if held is not None:
                found[f"{split} data"] = digest.of_parts(held.store, index=held.index)
        if self.client_test is not None:
            found["clients' test data"] = self.client_test.digests["training data"]
        return found

    @cached_property
    def outputs(self) -> int:
        """The number of outputs that a model for these data needs."""
        if self.classes and self.task.classes is None:
            self._check_classes()
        y = self.store["y"]
        return self.classes or self.task.classes or (y.shape[1] if y.dim() > 1 else 1)

    @cached_property
    def classes(self) -> int:
        """The number of classes, including those that only held-out data have; 0 if targets are not classes."""
        if self.labels is None:
            return 0
        if self.task.classes is not None:
            return self.task.classes
        return max([0, *(int(y.max()) + 1 for y in self._targets() if len(y))])  # negative labels stand for none

    @cached_property
    def unlabelled(self) -> bool:
        """Whether some samples have the label -100, which stands for no label."""
        return self.labels is not None and any(bool((y == IGNORED).any()) for y in self._targets())

    def _targets(self) -> list[Tensor]:
        held = [split for split in (self.test_rows, self.validation_rows, self.server_rows) if split]
        return [self.store["y"], *(split.store["y"] for split in held)]

    def _all_labels(self) -> list[Tensor]:
        """Return the labels of all splits, without negative ones, which stand for no label."""
        return [y[y >= 0] for y in self._targets()]

    def _check_classes(self) -> None:
        """Warn if labels are unlikely to be classes from 0; raise if no model could have that many outputs."""
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
        """Count the samples per client and class. Samples with negative labels, which stand for no label, are left out.

        Args:
            clients: The ids of the clients to count for; all clients by default.

        Returns:
            A tensor of integers, clients × classes.

        Raises:
            UndriftError: If targets are not classes, or the table would be too large.
        """
        if self.labels is None:
            raise UndriftError("label_counts needs targets that are classes, one whole number per sample.")
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
        sizes = self.sizes_of(clients)
        owner = np.repeat(np.arange(len(clients)), sizes)
        position = np.arange(len(owner)) + (self.offsets[clients] - np.cumsum(sizes) + sizes)[owner]
        assert self.labels is not None
        labels = self.labels.numpy()[self.index.numpy()[position]].astype(np.int64)
        place = (owner * self.classes + labels)[labels >= 0]
        counts = np.bincount(place, minlength=len(clients) * self.classes)
        return torch.from_numpy(counts.reshape(len(clients), self.classes))

    def _refuse_not_finite(self) -> None:
        for what, tensor in self.store.items():
            for i in _not_finite(tensor):
                if len(spot := torch.nonzero(self.index == i).flatten()):  # a client holds it
                    client = int(np.searchsorted(self.offsets, int(spot[0]), side="right")) - 1
                    who = self.client_names[client] if self.client_names else client
                    place = f"Client {who}, sample {int(spot[0]) - int(self.offsets[client])}"
                    raise UndriftError(f"{place} has {_what(tensor[i])} in its {what}; clean or drop that sample.")
        for split in ("test", "validation", "server"):
            held: Rows | None = getattr(self, f"{split}_rows")
            if held is None:
                continue
            for what, tensor in held.store.items():
                for i in _not_finite(tensor):
                    if len(spot := torch.nonzero(held.index == i).flatten()):
                        place = f"Sample {int(spot[0])} of the {split} data"
                        raise UndriftError(f"{place} has {_what(tensor[i])} in its {what}; clean or drop that sample.")


def _not_finite(tensor: Tensor) -> list[int]:
    """Return the indices of samples with NaN or infinity. If the sum is finite, there are none. Skips lazy data."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
        return []
    return torch.nonzero(~torch.isfinite(tensor.reshape(len(tensor), -1)).all(1)).flatten().tolist()


def _what(sample: Tensor) -> str:
    return "NaN" if bool(torch.isnan(sample).any()) else "infinity"


def _rows(pair: tuple[Any, Any] | None, name: str) -> Rows | None:
    if pair is None:
        return None
    x, y = as_pair(pair, f"the {name} set")
    return Rows({**stored(x), "y": y}, torch.arange(len(y))) if len(y) else None
