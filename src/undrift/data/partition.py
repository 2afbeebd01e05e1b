"""Partitions: who holds which sample.

A partition is a function of (labels, clients, generator, keys) that gives each row's owner, a number below the
count of clients. So every sample goes to exactly one client by construction. Clients may come out empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import undrift
from undrift.errors import UndriftError, quoted, whole
from undrift.expressions import parse

Array = np.ndarray[Any, Any]

MOST = 10_000_000
"""So many clients, or pieces of data, are the most that are asked for in earnest."""
TRIES = 1000
"""How often a partition is drawn again that left some client with too few samples."""


class Partition(Protocol):
    """Anything that deals rows out; users may pass their own."""

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array: ...


def by_class(labels: Array, rng: np.random.Generator) -> list[Array]:
    """The rows of each class, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def _deal(rows: Array, sizes: Array, n: int) -> Array:
    """Owners of `n` rows: the first sizes[0] of `rows` go to client 0, and so on."""
    owner = np.empty(n, np.int64)
    owner[rows] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def _even(n: int, parts: int) -> Array:
    """Sizes that sum to n and differ by at most one."""
    return np.diff(np.arange(parts + 1) * n // parts)


def _shares(n: int, proportions: Array) -> Array:
    """Whole sizes that sum to n, as near to the proportions as cutting at their cumulative sums gives."""
    cuts = np.round(np.cumsum(proportions) * n).astype(np.int64)
    cuts[-1] = n
    return np.diff(cuts, prepend=0)


@dataclass(frozen=True)
class IID:
    """Stratified: every client gets the same number of every class, to within one."""

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        # Dealt round like cards, class after class, so that the remainders of all classes spread over clients too.
        owner = np.empty(len(labels), np.int64)
        rows = np.concatenate(by_class(labels, rng))
        owner[rows] = rng.permutation(clients)[np.arange(len(rows)) % clients]
        return owner


@dataclass(frozen=True)
class Dirichlet:
    """Each class is shared out over the clients by a draw from Dir(α, …, α): small α, few holders, uneven sizes.

    `capped=True` leaves clients that already have an even share of all samples out of the classes that follow, and
    `least` draws again until every client has at least so many samples. `Dirichlet(α, capped=True, least=10)` is the
    partition of NIID-Bench (Li et al., 2022), which many papers use.
    """

    alpha: float
    capped: bool = False
    least: int = 0

    def __post_init__(self) -> None:
        _positive("Dirichlet(alpha)", self.alpha)
        if not isinstance(self.capped, bool):
            raise UndriftError(f"Dirichlet(capped) must be True or False, not {self.capped!r}.")
        if not whole(self.least) or self.least < 0:
            raise UndriftError(f"Dirichlet(least) must be a whole number from 0, not {self.least!r}.")

    def __repr__(self) -> str:
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
            "choose a larger alpha, a smaller least, or fewer clients."
        )

    def _draw(self, classes: list[Array], clients: int, n: int, rng: np.random.Generator) -> Array:
        owner, held = np.empty(n, np.int64), np.zeros(clients, np.int64)
        for rows in classes:
            proportions = rng.dirichlet(np.full(clients, _bounded(self.alpha)))
            if self.capped:
                open_to = proportions * (held < n / clients)
                # A draw may give everything to clients that are full; then all that are not share it.
                open_to = open_to if open_to.sum() > 0 else (held < n / clients).astype(float)
                proportions = open_to / open_to.sum()
            sizes = _shares(len(rows), proportions)
            owner[rows] = np.repeat(np.arange(clients), sizes)
            held += sizes
        return owner


@dataclass(frozen=True)
class DirichletPrior:
    """Each client's mix of classes is a draw from Dir(γ·p), p the classes' shares; sizes are even (Hsu et al., 2019).

    A class that has run out is left out of the mixes that come after, as there.
    """

    gamma: float

    def __post_init__(self) -> None:
        _positive("DirichletPrior(gamma)", self.gamma)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pools = by_class(labels, rng)
        left = np.array([len(pool) for pool in pools])
        prior = left / left.sum()
        owner = np.empty(len(labels), np.int64)
        sizes = _even(len(labels), clients)
        for client in rng.permutation(clients):  # the last ones get what is left, so let chance say who is last
            mix = rng.dirichlet(_bounded(self.gamma) * prior)
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
    """Every client holds `classes_per_client` classes; each class is cut at random points among its holders."""

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
                f"take at least {-(-classes // each)} clients or {-(-classes // clients)} classes per client."
            )
        holders: list[list[int]] = [[] for _ in range(classes)]
        for client in range(clients):
            # The classes with the fewest holders so far, ties by chance: every class gets its share of holders.
            load = np.array([len(h) for h in holders]) + rng.random(classes)
            for c in np.argsort(load)[:each]:
                holders[c].append(client)
        owner = np.empty(len(labels), np.int64)
        for rows, held in zip(pools, holders, strict=True):
            spots = len(rows) - 1
            if spots >= len(held) - 1:  # enough samples for one each
                cuts = np.sort(rng.choice(spots, len(held) - 1, replace=False)) + 1
            else:
                cuts = np.sort(rng.integers(0, len(rows) + 1, len(held) - 1))
            sizes = np.diff(cuts, prepend=0, append=len(rows))
            owner[rows] = np.repeat(rng.permutation(np.array(held)), sizes)
        return owner


@dataclass(frozen=True)
class ClassesPerClient:
    """Client i holds class i modulo the number of classes, and others by chance; each class is split evenly.

    The partition that NIID-Bench writes #C = `count` (Li et al., 2022). Classes differ in how many clients hold them,
    so clients differ in size.
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
                f"without a holder; take at least {classes} clients, or Shards({self.count})."
            )
        holders: list[list[int]] = [[] for _ in range(classes)]
        for client in range(clients):
            own = client % classes
            others = rng.permutation(np.delete(np.arange(classes), own))[: self.count - 1]
            for c in (own, *others):
                holders[c].append(client)
        owner = np.empty(len(labels), np.int64)
        for rows, held in zip(pools, holders, strict=True):
            owner[rows] = np.repeat(np.array(held), _even(len(rows), len(held)))
        return owner


@dataclass(frozen=True)
class SortedShards:
    """Sorted by label, cut into equal pieces, and `per_client` of them dealt to each client at random."""

    per_client: int = 1

    def __post_init__(self) -> None:
        _count("SortedShards(per_client)", self.per_client)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pieces = clients * self.per_client
        if pieces > max(len(labels), MOST):
            raise UndriftError(
                f"SortedShards({quoted(self.per_client)}) over {clients} clients cuts {len(labels)} samples into "
                f"{quoted(pieces)} pieces; ask for fewer."
            )
        holder = rng.permutation(np.arange(pieces) % clients)
        owner = np.empty(len(labels), np.int64)
        owner[np.argsort(labels, kind="stable")] = np.repeat(holder, _even(len(labels), pieces))
        return owner


@dataclass(frozen=True)
class LabelSplit:
    """Contiguous groups of classes: of ten classes over two clients, 0 to 4 and 5 to 9."""

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        classes, position = np.unique(labels, return_inverse=True)
        if clients > len(classes):
            raise UndriftError(
                f"LabelSplit() deals {len(classes)} classes out whole, so it serves at most {len(classes)} clients, "
                f"not {clients}."
            )
        group = np.repeat(np.arange(clients), _even(len(classes), clients)[::-1])  # the first groups take the remainder
        return group[position]


@dataclass(frozen=True)
class QuantitySkew:
    """The same mix of classes for all, but sizes from Dir(α, …, α)."""

    alpha: float

    def __post_init__(self) -> None:
        _positive("QuantitySkew(alpha)", self.alpha)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        sizes = _shares(len(labels), rng.dirichlet(np.full(clients, _bounded(self.alpha))))
        return _deal(rng.permutation(len(labels)), sizes, len(labels))


@dataclass(frozen=True)
class ByKey:
    """The data's own clients: writers, speakers, users. Their number is what the data have."""

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        if keys is None:
            raise UndriftError(
                "ByKey() needs data with a client column; choose another partition, such as Dirichlet(0.1)."
            )
        return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def _bounded(concentration: float) -> float:
    """The concentration, kept where numpy's draws neither overflow nor underflow.

    Beyond these bounds all shares are equal, or one is everything, to the last bit of a float.
    """
    return float(min(max(concentration, 1e-290), 1e290))


def _positive(where: str, x: float) -> None:
    if not (isinstance(x, int | float) and 0 < x < float("inf")):
        raise UndriftError(f"{where} must be a number above 0, not {quoted(x)}.")


def _count(where: str, x: int) -> None:
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise UndriftError(f"{where} must be a whole number from 1, not {quoted(x)}.")


def parse_partition(text: str) -> Partition:
    """`"Dirichlet(0.1)"` as a partition."""
    known = {name: globals()[name] for name in undrift.PARTITIONS}
    found: Partition = parse(text, "partition", known, "Dirichlet(0.1)")
    return found
