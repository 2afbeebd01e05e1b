"""Partitions: which client holds which sample.

A partition is a function of `(labels, clients, rng, keys)` that returns the owner of each sample, an integer below
`clients`. By construction, every sample goes to exactly one client. Clients may be left without samples.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Protocol

import numpy as np

from undrift.data.dealing import fewest_first, holders, in_blocks, own_and_others
from undrift.data.shares import Array, assign, bounded, by_class, even, in_order, numbered, shares
from undrift.errors import UndriftError, quoted, whole

MOST = 100_000_000
"""The largest number of clients or shards. A larger one is taken for a mistake."""
ONE_BY_ONE = 100_000
"""Up to this many clients, `DirichletPrior` draws one client at a time; beyond, in blocks of clients."""
TRIES = 1000
"""How often to draw again when some client has too few samples."""


class Partition(Protocol):
    """A function that returns the owner of each sample. Users may pass their own."""

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array: ...


@dataclass(frozen=True)
class IID:
    """IID partition: every client gets the same number of samples of every class, to within one.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.IID(), clients=10)
        >>> bool((data.label_counts() > 0).all())
        True
    """

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        # Round robin over all classes, so that the classes' remainders are spread over the clients too.
        owner = np.empty(len(labels), np.int64)
        indices = np.concatenate(by_class(labels, rng))
        owner[indices] = rng.permutation(clients)[np.arange(len(indices)) % clients]
        return owner


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: each class is split over the clients in proportions drawn from Dir(α, …, α).

    With a small α, few clients hold a class, and client sizes differ. `Dirichlet(alpha, capped=True, min_samples=10)`
    is the partition of NIID-Bench, which many papers use: Li, Diao, Chen and He, *Federated Learning on Non-IID Data
    Silos: An Experimental Study* (2022).

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.Dirichlet(0.1, min_samples=5), clients=10)
        >>> bool(data.sizes.min() >= 5)
        True

    Args:
        alpha: The concentration α, greater than 0. The smaller, the more the clients differ.
        capped: Whether a client that has reached an even share of all samples gets none of the remaining classes.
        least: The former name of `min_samples`, which still works.
        min_samples: Draw again until every client has at least this many samples.

    Raises:
        UndriftError: If an argument is out of range or, when the data are partitioned, if `min_samples` cannot be met.
    """

    alpha: float
    capped: bool = False
    least: int = 0
    min_samples: InitVar[int | None] = None

    def __post_init__(self, min_samples: int | None) -> None:
        if min_samples is not None:
            if self.least not in (0, min_samples):
                raise UndriftError("Dirichlet(min_samples) and Dirichlet(least) are two names of one number; give one.")
            object.__setattr__(self, "least", min_samples)
        _positive("Dirichlet(alpha)", self.alpha)
        if not isinstance(self.capped, bool):
            raise UndriftError(f"Dirichlet(capped) must be True or False, not {self.capped!r}.")
        if not whole(self.least) or self.least < 0:
            raise UndriftError(f"Dirichlet(min_samples) must be a whole number from 0, not {self.least!r}.")

    def __repr__(self) -> str:
        # With `least`, as earlier versions wrote it, so that their runs are recognized as having the same partition.
        more = f", capped={self.capped}, least={self.least}" if self.capped or self.least else ""
        return f"Dirichlet(alpha={self.alpha!r}{more})"

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        classes = by_class(labels, rng)
        if self.least * clients > len(labels):
            raise UndriftError(f"{clients} clients cannot have {self.least} samples each: there are {len(labels)}.")
        for _ in range(TRIES):
            owner = self._draw(classes, clients, len(labels), rng)
            if np.bincount(owner, minlength=clients).min() >= self.least:
                return owner
        raise UndriftError(
            f"In {TRIES:,} draws of {self} some client always had fewer than {self.least} samples; "
            "choose a larger alpha, a smaller min_samples, or fewer clients."
        )

    def _draw(self, classes: list[Array], clients: int, n: int, rng: np.random.Generator) -> Array:
        owner, held = np.empty(n, np.int64), np.zeros(clients, np.int64)
        for indices in classes:
            proportions = rng.dirichlet(np.full(clients, bounded(self.alpha)))
            if self.capped:
                open_to = proportions * (held < n / clients)
                # If only clients that are full were drawn, the others share the class evenly.
                open_to = open_to if open_to.sum() > 0 else (held < n / clients).astype(float)
                proportions = open_to / open_to.sum()
            sizes = shares(len(indices), proportions)
            owner[indices] = np.repeat(np.arange(clients), sizes)
            held += sizes
        return owner


@dataclass(frozen=True)
class DirichletPrior:
    """Label skew, equal sizes: each client's label distribution is drawn from Dir(γ·p), with p that of all data.

    Hsu, Qi and Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification*
    (2019). As in the paper, a class that has run out is left out for the remaining clients. More than 100,000 clients
    are drawn in blocks; if a block runs short of a class, it draws from the others instead.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.DirichletPrior(1.0), clients=10)
        >>> int(data.sizes.max() - data.sizes.min())
        1

    Args:
        gamma: The concentration γ, greater than 0. The larger, the more alike the clients.

    Raises:
        UndriftError: If `gamma` is not greater than 0.
    """

    gamma: float

    def __post_init__(self) -> None:
        _positive("DirichletPrior(gamma)", self.gamma)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pools = by_class(labels, rng)
        left = np.array([len(pool) for pool in pools])
        prior = left / left.sum()
        owner = np.empty(len(labels), np.int64)
        sizes = even(len(labels), clients)
        order = rng.permutation(clients)  # since the last clients get what is left
        if clients > ONE_BY_ONE:
            return in_blocks(owner, pools, order, sizes, bounded(self.gamma) * prior, rng)
        for client in order:
            mix = rng.dirichlet(bounded(self.gamma) * prior)
            wanted = int(sizes[client])
            while wanted:
                share = np.where(left > 0, mix, 0.0)
                share = share if share.sum() > 1e-12 else np.where(left > 0, prior, 0.0)
                drawn = np.minimum(rng.multinomial(wanted, share / share.sum()), left)
                for c in np.flatnonzero(drawn):
                    owner[pools[c][left[c] - drawn[c] : left[c]]] = client
                left -= drawn
                wanted -= int(drawn.sum())
        return owner


@dataclass(frozen=True)
class Shards:
    """Label skew: every client holds `classes_per_client` classes, each cut at random points among its holders.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.Shards(2), clients=10)
        >>> int((data.label_counts() > 0).sum(1).max())
        2

    Args:
        classes_per_client: How many classes each client holds.

    Raises:
        UndriftError: If it is not an integer from 1 or, when the data are partitioned, if it is more than the number of
            classes or leaves a class without a client.
    """

    classes_per_client: int

    def __post_init__(self) -> None:
        _count("Shards(classes_per_client)", self.classes_per_client)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pools = by_class(labels, rng)
        each, classes = self.classes_per_client, len(pools)
        if each > classes:
            raise UndriftError(
                f"Shards({each}) asks for {each} classes per client, but the data have {classes}; "
                f"ask for at most {classes}."
            )
        if each * clients < classes:
            raise UndriftError(
                f"Shards({each}) over {clients} clients leaves some of the {classes} classes without a holder; "
                f"use at least {-(-classes // each)} clients or {-(-classes // clients)} classes per client."
            )
        owner = np.empty(len(labels), np.int64)
        for indices, held in zip(pools, holders(fewest_first(clients, classes, each, rng), classes), strict=True):
            spots = len(indices) - 1
            if spots >= len(held) - 1:  # enough samples for one each
                cuts = np.sort(rng.choice(spots, len(held) - 1, replace=False)) + 1
            else:
                cuts = np.sort(rng.integers(0, len(indices) + 1, len(held) - 1))
            sizes = np.diff(cuts, prepend=0, append=len(indices))
            owner[indices] = np.repeat(rng.permutation(held), sizes)
        return owner


@dataclass(frozen=True)
class ClassesPerClient:
    """Label skew: client i holds class i modulo the number of classes, and random others; each class is split evenly.

    The partition `#C = count` of NIID-Bench: Li, Diao, Chen and He, *Federated Learning on Non-IID Data Silos: An
    Experimental Study* (2022). The number of clients that hold a class differs between classes, so client sizes differ.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.ClassesPerClient(3), clients=10)
        >>> set((data.label_counts() > 0).sum(1).tolist())
        {3}

    Args:
        count: How many classes each client holds.

    Raises:
        UndriftError: If it is not an integer from 1 or, when the data are partitioned, if it is more than the number of
            classes, or if there are fewer clients than classes.
    """

    count: int

    def __post_init__(self) -> None:
        _count("ClassesPerClient(count)", self.count)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pools = by_class(labels, rng)
        classes = len(pools)
        if self.count > classes:
            raise UndriftError(
                f"ClassesPerClient({quoted(self.count)}) asks for more classes than the data have; "
                f"ask for at most {classes}."
            )
        if clients < classes:
            raise UndriftError(
                f"ClassesPerClient({self.count}) over {clients} clients may leave some of the {classes} classes "
                f"without a holder; use at least {classes} clients, or Shards({self.count})."
            )
        owner = np.empty(len(labels), np.int64)
        for indices, held in zip(
            pools, holders(own_and_others(clients, classes, self.count, rng), classes), strict=True
        ):
            owner[indices] = np.repeat(held, even(len(indices), len(held)))
        return owner


@dataclass(frozen=True)
class SortedShards:
    """Label skew: samples are sorted by label and cut into equal shards; each client gets `per_client` at random.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, *Communication-Efficient Learning of Deep Networks from
    Decentralized Data* (2017), who use two shards per client.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.SortedShards(2), clients=10)
        >>> int((data.label_counts() > 0).sum(1).max()) <= 4
        True

    Args:
        per_client: How many shards each client gets.

    Raises:
        UndriftError: If it is not an integer from 1 or, when the data are partitioned, if there would be far more
            shards than samples.
    """

    per_client: int = 1

    def __post_init__(self) -> None:
        _count("SortedShards(per_client)", self.per_client)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pieces = clients * self.per_client
        if pieces > max(len(labels), MOST):
            raise UndriftError(
                f"SortedShards({quoted(self.per_client)}) over {clients} clients cuts {len(labels)} samples into "
                f"{quoted(pieces)} shards; ask for fewer."
            )
        holder = rng.permutation(np.arange(pieces) % clients)
        owner = np.empty(len(labels), np.int64)
        owner[in_order(labels)] = np.repeat(holder, even(len(labels), pieces))
        return owner


@dataclass(frozen=True)
class LabelSplit:
    """Label skew without overlap: each client holds a contiguous range of classes, such as 0 to 4 and 5 to 9.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.LabelSplit(), clients=2)
        >>> data[0][1].unique().tolist()
        [0, 1, 2, 3, 4]

    Raises:
        UndriftError: When the data are partitioned, if there are more clients than classes.
    """

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        classes, position = np.unique(labels, return_inverse=True)
        if clients > len(classes):
            raise UndriftError(
                f"LabelSplit() does not split classes, so {len(classes)} classes are enough for at most "
                f"{len(classes)} clients, not {clients}."
            )
        group = np.repeat(np.arange(clients), even(len(classes), clients)[::-1])  # the first groups take the remainder
        return group[position]


@dataclass(frozen=True)
class QuantitySkew:
    """Quantity skew: clients have the same label distribution, but sizes drawn from Dir(α, …, α).

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.QuantitySkew(0.5), clients=10)
        >>> int(data.sizes.sum())
        1438

    Args:
        alpha: The concentration α, greater than 0. The smaller, the more client sizes differ.

    Raises:
        UndriftError: If `alpha` is not greater than 0.
    """

    alpha: float

    def __post_init__(self) -> None:
        _positive("QuantitySkew(alpha)", self.alpha)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        sizes = shares(len(labels), rng.dirichlet(np.full(clients, bounded(self.alpha))))
        return assign(rng.permutation(len(labels)), sizes, len(labels))


@dataclass(frozen=True)
class ByKey:
    """Natural partition: the data's own clients, such as writers, speakers or users.

    Leave `clients` out of `ud.load`: the data determine the number of clients.

    Example:
        >>> import undrift as ud
        >>> ud.ByKey()(np.array([0, 1, 0]), 0, np.random.default_rng(0), np.array([7, 9, 7]))
        array([0, 1, 0])

    Args:
        largest: Train only this many clients, those with the most training samples; of equals, the first. `ud.load`
            leaves the training samples of the others out, but not the test samples. By default, all clients train.

    Raises:
        UndriftError: If `largest` is not a whole number from 1. When the data are partitioned, if they have no clients
            of their own.
    """

    largest: int | None = None

    def __post_init__(self) -> None:
        if self.largest is not None:
            _count("ByKey(largest)", self.largest)

    def __repr__(self) -> str:
        return "ByKey()" if self.largest is None else f"ByKey(largest={self.largest})"

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        if keys is None:
            raise UndriftError(
                "ByKey() needs data with a client column; choose another partition, such as Dirichlet(0.1)."
            )
        if not self.chosen(keys).all():
            raise UndriftError(
                f"{self!r} leaves samples out, but a partition must assign all of them; pass it to ud.load, or leave "
                "`largest` out."
            )
        return numbered(keys)[1]

    def chosen(self, keys: Array) -> Array:
        """Return which samples belong to the clients that train."""
        if self.largest is None:
            return np.ones(len(keys), bool)
        client = numbered(keys)[1]
        by_size = np.argsort(-np.bincount(client), kind="stable")
        return np.isin(client, by_size[: self.largest])


def _positive(where: str, x: float) -> None:
    if not (isinstance(x, int | float) and 0 < x < float("inf")):
        raise UndriftError(f"{where} must be a number above 0, not {quoted(x)}.")


def _count(where: str, x: int) -> None:
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise UndriftError(f"{where} must be a whole number from 1, not {quoted(x)}.")
