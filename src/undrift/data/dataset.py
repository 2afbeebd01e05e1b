"""A federated data set: one store of tensors, and an index into it of which each client has a range."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.data import digest
from undrift.data.array_ops import size_counts, stable_argsort
from undrift.data.labels import MANY_CLASSES, labels_are_sparse
from undrift.data.samples import (
    Samples,
    Store,
    Take,
    as_pair,
    nonfinite_error,
    nonfinite_samples,
    same_kind,
    sample_kind,
    sample_shape,
    take,
    to_store,
)
from undrift.errors import UndriftError, listed
from undrift.losses import IGNORED
from undrift.random import Key

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

    @classmethod
    def whole(cls, store: Store, take: Take = take) -> Rows:
        """Return all rows of a store."""
        return cls(store, torch.arange(len(store["y"])), take)

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


@dataclass(frozen=True)
class Scales:
    """The mean and the standard deviation of each feature over the training split, in float64."""

    mean: np.ndarray
    std: np.ndarray
    count: int
    """The number of values per feature that these were computed from."""
    columns: list[str] | None = None
    """The names of the features, if they have any."""
    codes: dict[str, list[str]] = field(default_factory=dict)
    """The names of the classes of those features that are numbers of classes."""
    table: str = ""
    """What to call the data in messages."""

    def lists(self) -> dict[str, Any]:
        """Return the numbers in a form that JSON can hold."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist(), "count": self.count}


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
        self._refuse_nonfinite()
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
        pairs, names = _pairs_and_names(clients)
        who: Sequence[Any] = names or range(len(pairs))
        train = concatenate_clients(pairs, who)
        test_rows, client_test = None, None
        if _is_per_client(test):
            tests = concatenate_clients(_test_pairs(test, len(pairs), names), who, train, "test samples")
            client_test = cls.from_joined(*tests, client_names=names)
            test_rows = Rows(client_test.store, client_test.index)
        return cls.from_joined(
            *train,
            client_names=names,
            client_test=client_test,
            test_rows=test_rows or _rows_of_pair(test, "test"),
            server_rows=_rows_of_pair(server, "server"),
            validation_rows=_rows_of_pair(validation, "validation"),
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
        order = stable_argsort(owner)
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
        shape = sample_shape(self.take(self.store, self.index[:1])[0]) if len(self.index) else None
        kind = f", {self.classes} classes" if self.labels is not None else ""
        smallest = int(self.size_counts[0].min(initial=self.largest)) if self.population == len(self) else 0
        sizes = f"{smallest:,} to {self.largest:,} per client" if len(self) else "none"
        lines = [
            f"FederatedDataset: {len(self):,} clients, {len(self.index):,} samples of shape {shape}{kind} ({sizes})"
        ]
        held = [f"{name} {len(rows):,}" for name, rows in self.held_out.items()]
        held += [f"clients' own tests {len(self.client_test.index):,}"] if self.client_test is not None else []
        return "\n".join([*lines, f"  held out: {', '.join(held)}"] if held else lines)

    def __getitem__(self, client: int) -> tuple[Samples, Tensor]:
        if not -len(self) <= client < len(self):
            raise IndexError(f"There are {len(self)} clients, so no client {client}.")
        client %= len(self)
        return self.take(self.store, self.index[self.offsets[client] : self.offsets[client + 1]])

    @property
    def held_out(self) -> dict[str, Rows]:
        """The test, validation and server data, as far as there are any."""
        splits = {"test": self.test_rows, "validation": self.validation_rows, "server": self.server_rows}
        return {name: rows for name, rows in splits.items() if rows is not None}

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
        digests = {"training data": digest.of_parts(self.store, index=self.index, offsets=self.offsets)}
        for name, rows in self.held_out.items():
            digests[f"{name} data"] = digest.of_parts(rows.store, index=rows.index)
        if self.client_test is not None:
            digests["clients' test data"] = self.client_test.digests["training data"]
        return digests

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
        return [self.store["y"], *(rows.store["y"] for rows in self.held_out.values() if rows)]

    def _check_classes(self) -> None:
        """Warn if labels are unlikely to be classes from 0; raise if no model could have that many outputs."""
        if self.classes > MOST_OUTPUTS:
            raise UndriftError(
                f"The labels run up to {self.classes - 1:,}, which would make a model of {self.classes:,} outputs; "
                "number the classes from 0, or pass floats if they are numbers to predict."
            )
        if self.classes <= MANY_CLASSES:
            return
        used = len(torch.cat([torch.unique(y[y >= 0]) for y in self._targets()]).unique())
        if labels_are_sparse(used, self.classes):
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
        count = len(self) if clients is None else len(clients)
        if count * self.classes > MOST_COUNTS:
            raise UndriftError(
                f"The samples of {count:,} clients by {self.classes:,} classes are too many to count; ask for fewer "
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

    def _refuse_nonfinite(self) -> None:
        for split, rows in {"training": Rows(self.store, self.index), **self.held_out}.items():
            for name, tensor in rows.store.items():
                for i in nonfinite_samples(tensor) if isinstance(tensor, Tensor) else ():  # lazy data are not read here
                    if not len(places := torch.nonzero(rows.index == i).flatten()):
                        continue  # another split of the same store has it
                    raise nonfinite_error(self._describe_sample(split, int(places[0])), name, tensor[i])

    def _describe_sample(self, split: str, place: int) -> str:
        if split != "training":
            return f"Sample {place} of the {split} data"
        client = int(np.searchsorted(self.offsets, place, side="right")) - 1
        who = self.client_names[client] if self.client_names else client
        return f"Client {who}, sample {place - int(self.offsets[client])}"


def _rows_of_pair(pair: tuple[Any, Any] | None, name: str) -> Rows | None:
    if pair is None:
        return None
    x, y = as_pair(pair, f"the {name} set")
    return Rows.whole(to_store(x, y)) if len(y) else None


NOTHING: tuple[Samples, Tensor] = (None, torch.empty(0))
"""The pair of a client without data."""


class ConcatenatedClients(NamedTuple):
    """The data of several clients in one store: client i's samples are from `offsets[i]` to `offsets[i + 1]`."""

    store: Store
    offsets: np.ndarray


def _pairs_and_names(clients: Any) -> tuple[list[Any], list[str] | None]:
    """Return one entry per client, and the clients' names if these are the keys of a dict."""
    if isinstance(clients, Mapping):
        names = [str(name) for name in clients]
        if len(set(names)) < len(names):
            raise UndriftError(f"Two clients have the same name among {listed(sorted(names))}; names must differ.")
        return list(clients.values()), names
    if isinstance(clients, Tensor | np.ndarray) or not hasattr(clients, "__iter__"):
        raise UndriftError(
            f"from_clients needs a list with one (x, y) per client, or a dict of them, not {type(clients).__name__}."
        )
    return list(clients), None


def concatenate_clients(
    pairs: Sequence[Any], who: Sequence[Any], like: ConcatenatedClients | None = None, what: str = "samples"
) -> ConcatenatedClients:
    """Return the clients' pairs in one store, copied, so that later changes to the caller's arrays have no effect.

    Args:
        pairs: A pair `(x, y)` per client; None for a client without.
        who: What to call each client in messages.
        like: Data that they must be like, if not just like one another.
        what: What to call the data.
    """
    named = zip(pairs, who, strict=True)
    tensors = [NOTHING if pair is None else as_pair(pair, f"client {name}", copy=False) for pair, name in named]
    full = [(name, pair) for name, pair in zip(who, tensors, strict=True) if len(pair[1])]
    if not full:
        raise UndriftError("No client has any data; give from_clients at least one (x, y) with samples.")
    first, (x0, y0) = full[0]
    for name, (x, y) in full[1:]:
        if not (same_kind(x, x0) and same_kind(y, y0)):
            raise UndriftError(
                f"Client {name}'s {what} are {sample_kind(x)} with targets {sample_kind(y)}, but client {first}'s "
                f"are {sample_kind(x0)} with {sample_kind(y0)}; make them alike."
            )
    flat = [to_store(x, y) for _, (x, y) in full]
    if like is not None and not same_kind(flat[0], like.store):
        raise UndriftError(
            f"Client {first}'s {what} are {sample_kind(x0)} with targets {sample_kind(y0)}, unlike those to train "
            "on; make them alike."
        )
    store = {name: torch.cat([each[name] for each in flat]) for name in flat[0]}
    return ConcatenatedClients(store, np.cumsum([0] + [len(y) for _, y in tensors]))


def _is_per_client(test: Any) -> bool:
    """Return whether this is a test pair for each client rather than one pair `(x, y)` for all."""
    if isinstance(test, Mapping):
        return True
    return isinstance(test, list | tuple) and len(test) > 0 and all(each is None or _is_pair(each) for each in test)


def _is_pair(each: Any) -> bool:
    """Return whether this has arrays x and y; an array of two samples is none, and neither is a list of two numbers."""
    return isinstance(each, list | tuple) and len(each) == 2 and getattr(each[1], "ndim", 0) > 0


def _test_pairs(test: Any, clients: int, names: list[str] | None) -> list[Any]:
    """Return the clients' test pairs, in the clients' order; None for a client without."""
    if not isinstance(test, Mapping):
        if len(test) != clients:
            raise UndriftError(f"test has {len(test)} pairs for {clients} clients; give one per client, or None.")
        return list(test)
    if names is None:
        raise UndriftError("test names clients, but the clients are a list; give both as dicts, or both as lists.")
    given = {str(name): pair for name, pair in test.items()}
    if strange := [name for name in given if name not in names]:
        raise UndriftError(f"test has data of {listed(strange)}, which no client is called; clients: {listed(names)}.")
    return [given.get(name) for name in names]
