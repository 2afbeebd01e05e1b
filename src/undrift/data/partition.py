"""Partitions: which client holds which sample.

A partition is a function of `(labels, clients, rng, keys)` that returns the owner of each sample, an integer below
`clients`. By construction, every sample goes to exactly one client. Clients may be left without samples.

Classes are assigned to all clients at once, with the draws of a loop over clients, in the same order of the generator's
stream; `draw_in_blocks` has draws of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Protocol

import numpy as np

from undrift.data.array_ops import Array, stable_argsort, unique_inverse
from undrift.errors import UndriftError, quoted, whole
from undrift.expressions import parse
from undrift.registry import Registry

MAX_CLIENTS = 100_000_000
"""The largest number of clients or shards. A larger one is taken for a mistake."""
ONE_BY_ONE = 100_000
"""Up to this many clients, `DirichletPrior` draws one client at a time; beyond, in blocks of clients."""
TRIES = 1000
"""How often to draw again when some client has too few samples."""
FEW_CLASSES = 16
"""Up to this many classes, one pass over all labels per class is faster than sorting them."""
BLOCK = 1 << 22
"""How many numbers to draw at a time, one per client and class."""


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
        indices = np.concatenate(shuffled_by_class(labels, rng))
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
        _check_positive("Dirichlet(alpha)", self.alpha)
        if not isinstance(self.capped, bool):
            raise UndriftError(f"Dirichlet(capped) must be True or False, not {self.capped!r}.")
        if not whole(self.least) or self.least < 0:
            raise UndriftError(f"Dirichlet(min_samples) must be a whole number from 0, not {self.least!r}.")

    def __repr__(self) -> str:
        # With `least`, as earlier versions wrote it, so that their runs are recognized as having the same partition.
        more = f", capped={self.capped}, least={self.least}" if self.capped or self.least else ""
        return f"Dirichlet(alpha={self.alpha!r}{more})"

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        classes = shuffled_by_class(labels, rng)
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
            proportions = rng.dirichlet(np.full(clients, clip_concentration(self.alpha)))
            if self.capped:
                open_to = proportions * (held < n / clients)
                # If only clients that are full were drawn, the others share the class evenly.
                open_to = open_to if open_to.sum() > 0 else (held < n / clients).astype(float)
                proportions = open_to / open_to.sum()
            sizes = rounded_sizes(len(indices), proportions)
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
        _check_positive("DirichletPrior(gamma)", self.gamma)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pools = shuffled_by_class(labels, rng)
        left = np.array([len(pool) for pool in pools])
        prior = left / left.sum()
        owner = np.empty(len(labels), np.int64)
        sizes = even_sizes(len(labels), clients)
        order = rng.permutation(clients)  # since the last clients get what is left
        if clients > ONE_BY_ONE:
            return draw_in_blocks(owner, pools, order, sizes, clip_concentration(self.gamma) * prior, rng)
        for client in order:
            mix = rng.dirichlet(clip_concentration(self.gamma) * prior)
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
        _check_count("Shards(classes_per_client)", self.classes_per_client)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pools = shuffled_by_class(labels, rng)
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
        for indices, held in zip(
            pools, clients_by_class(least_held_classes(clients, classes, each, rng), classes), strict=True
        ):
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
        _check_count("ClassesPerClient(count)", self.count)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pools = shuffled_by_class(labels, rng)
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
            pools, clients_by_class(own_class_and_others(clients, classes, self.count, rng), classes), strict=True
        ):
            owner[indices] = np.repeat(held, even_sizes(len(indices), len(held)))
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
        _check_count("SortedShards(per_client)", self.per_client)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        pieces = clients * self.per_client
        if pieces > max(len(labels), MAX_CLIENTS):
            raise UndriftError(
                f"SortedShards({quoted(self.per_client)}) over {clients} clients cuts {len(labels)} samples into "
                f"{quoted(pieces)} shards; ask for fewer."
            )
        holder = rng.permutation(np.arange(pieces) % clients)
        owner = np.empty(len(labels), np.int64)
        owner[stable_argsort(labels)] = np.repeat(holder, even_sizes(len(labels), pieces))
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
        group = np.repeat(
            np.arange(clients), even_sizes(len(classes), clients)[::-1]
        )  # the first groups take the remainder
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
        _check_positive("QuantitySkew(alpha)", self.alpha)

    def __call__(self, labels: Array, clients: int, rng: np.random.Generator, keys: Array | None) -> Array:
        sizes = rounded_sizes(len(labels), rng.dirichlet(np.full(clients, clip_concentration(self.alpha))))
        owner = np.empty(len(labels), np.int64)
        owner[rng.permutation(len(labels))] = np.repeat(np.arange(clients), sizes)
        return owner


@dataclass(frozen=True)
class ByKey:
    """Natural partition: the data's own clients, such as writers, speakers or users.

    Leave `clients` out of `ud.load`: the data determine the number of clients.

    Example:
        >>> import undrift as ud
        >>> ud.ByKey()(np.array([0, 1, 0]), 0, np.random.default_rng(0), np.array([7, 9, 7]))
        array([0, 1, 0])

    Args:
        largest: Train at most this many clients, those with the most training samples; of equals, the first. `ud.load`
            leaves the training samples of the others out, but nothing of a test set that the data have. Images are
            normalized, and missing values filled in, by all clients' samples. By default, all clients train.

    Raises:
        UndriftError: If `largest` is not a whole number from 1. When the data are partitioned, if they have no clients
            of their own.
    """

    largest: int | None = None

    def __post_init__(self) -> None:
        if self.largest is not None:
            _check_count("ByKey(largest)", self.largest)

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
        return unique_inverse(keys)[1]

    def chosen(self, keys: Array) -> Array:
        """Return which samples belong to the clients that train."""
        if self.largest is None:
            return np.ones(len(keys), bool)
        client = unique_inverse(keys)[1]
        by_size = np.argsort(-np.bincount(client), kind="stable")
        return np.isin(client, by_size[: self.largest])


def _check_positive(where: str, x: float) -> None:
    if not (isinstance(x, int | float) and 0 < x < float("inf")):
        raise UndriftError(f"{where} must be a number above 0, not {quoted(x)}.")


def _check_count(where: str, x: int) -> None:
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise UndriftError(f"{where} must be a whole number from 1, not {quoted(x)}.")


def shuffled_by_class(labels: Array, rng: np.random.Generator) -> list[Array]:
    """Return the indices of each class's samples, shuffled."""
    classes, counts = np.unique(labels, return_counts=True)
    if len(classes) <= FEW_CLASSES:
        pools = [np.flatnonzero(labels == c) for c in classes]
    else:
        pools = np.split(stable_argsort(labels), np.cumsum(counts)[:-1])
    return [rng.permutation(pool) for pool in pools]


def even_sizes(n: int, parts: int) -> Array:
    """Return sizes that sum to n and differ by at most one."""
    return np.diff(np.arange(parts + 1) * n // parts)


def rounded_sizes(n: int, proportions: Array) -> Array:
    """Return integer sizes that sum to n: the differences of the rounded cumulative sums of the proportions."""
    cuts = np.round(np.cumsum(proportions) * n).astype(np.int64)
    cuts[-1] = n
    return np.diff(cuts, prepend=0)


def clip_concentration(concentration: float) -> float:
    """Return the concentration, clipped to where numpy's draws neither overflow nor underflow.

    Beyond these bounds, all shares are equal, or one is 1, up to rounding.
    """
    return float(min(max(concentration, 1e-290), 1e290))


def least_held_classes(clients: int, classes: int, each: int, rng: np.random.Generator) -> Array:
    """Return, per client, `each` of the classes: those that the fewest clients before it hold, ties at random.

    After some clients, all classes are held equally often, and a new cycle begins. So clients at the same position of a
    cycle are independent, and are drawn together.
    """
    turn = classes // math.gcd(each, classes)
    per_turn = each * turn // classes
    turns = -(-clients // turn)
    taken = np.empty((turns, turn, each), np.int64)
    step = max(1, BLOCK // (turn * classes))
    for begin in range(0, turns, step):
        number = np.arange(begin, min(turns, begin + step))
        # In the last cycle, only the clients that exist may draw.
        real = min(clients - begin * turn, len(number) * turn)
        draws = np.zeros((len(number), turn, classes))
        draws.reshape(-1)[: real * classes] = rng.random(real * classes)
        load = np.repeat(number[:, None] * per_turn, classes, 1)
        for place in range(turn):
            chosen = np.argsort(load + draws[:, place], 1)[:, :each]
            np.put_along_axis(load, chosen, np.take_along_axis(load, chosen, 1) + 1, 1)
            taken[begin : begin + len(number), place] = chosen
    return taken.reshape(turns * turn, each)[:clients]


def own_class_and_others(clients: int, classes: int, count: int, rng: np.random.Generator) -> Array:
    """Return, per client i, class i modulo the number of classes and `count − 1` others at random."""
    taken = np.empty((clients, count), np.int64)
    for begin in range(0, clients, step := max(1, BLOCK // classes)):
        own = np.arange(begin, min(clients, begin + step)) % classes
        rest = np.arange(classes - 1)[None] + (np.arange(classes - 1)[None] >= own[:, None])
        taken[begin : begin + len(own), 0] = own
        taken[begin : begin + len(own), 1:] = rng.permuted(rest, axis=1)[:, : count - 1]
    return taken


def clients_by_class(taken: Array, classes: int) -> list[Array]:
    """Return, per class, the clients that hold it, ascending, given the classes of each client."""
    each = taken.shape[1]
    counts = np.bincount(taken.reshape(-1), minlength=classes)
    return np.split(stable_argsort(taken.reshape(-1)) // each, np.cumsum(counts)[:-1])


def draw_in_blocks(
    owner: Array, pools: list[Array], clients: Array, sizes: Array, concentration: Array, rng: np.random.Generator
) -> Array:
    """Return the owners of all samples: each client, in turn, draws its samples from a mix of classes of its own.

    A block of clients draws together. Where it asks for more of a class than is left, its first clients get what there
    is, and the others draw what they lack from the classes that remain.

    Args:
        owner: The array to fill.
        pools: Per class, its samples.
        clients: The clients, in the order of their draws.
        sizes: By client, how many samples it gets.
        concentration: Per class, that of the Dirichlet distribution from which mixes are drawn.
        rng: The generator.
    """
    left = np.array([len(pool) for pool in pools])
    for begin in range(0, len(clients), step := max(1, BLOCK // len(pools))):
        block = clients[begin : begin + step]
        mix, wanted = rng.dirichlet(concentration, len(block)), sizes[block].copy()
        while len(lacking := np.flatnonzero(wanted)):
            share = mix[lacking]
            if (left == 0).any():
                share = np.where(left > 0, share, 0.0)
                share = np.where(share.sum(1, keepdims=True) > 1e-12, share, np.where(left > 0, concentration, 0.0))
                share /= share.sum(1, keepdims=True)
            drawn = rng.multinomial(wanted[lacking], share)
            upto = np.minimum(np.cumsum(drawn, 0), left)
            drawn = np.diff(upto, axis=0, prepend=0)
            for c in np.flatnonzero(upto[-1]):
                owner[pools[c][left[c] - upto[-1, c] : left[c]]] = np.repeat(block[lacking], drawn[:, c])
            left = left - upto[-1]
            wanted[lacking] -= drawn.sum(1)
    return owner


PARTITIONS: Registry[Callable[..., Partition]] = Registry(
    "partition",
    {p.__name__: p for p in (IID, Dirichlet, DirichletPrior, Shards, ClassesPerClient, SortedShards)}
    | {p.__name__: p for p in (LabelSplit, QuantitySkew, ByKey)},
    called=True,
)


def register_partition(name: str, function: Callable[..., Partition]) -> None:
    """Register a partition under a name that experiment files and the command line know.

    Example:
        >>> import undrift as ud
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class ByParity:
        ...     even: int = 0
        ...
        ...     def __call__(self, labels, clients, rng, keys):
        ...         return (labels + self.even) % 2
        >>> ud.register_partition("ByParity", ByParity)
        >>> len(ud.load("digits", "ByParity(even=1)", clients=2))
        2

    Args:
        name: The name.
        function: A frozen dataclass, or another function of the arguments in parentheses, which returns a partition: a
            function of `(labels, clients, rng, keys)` that returns the owner of each sample.

    Raises:
        UndriftError: If undrift has a partition of this name, or if the name cannot be called.
    """
    PARTITIONS.register(name, function)


def parse_partition(text: str) -> Partition:
    """Return the partition that a string such as `"Dirichlet(0.1)"` describes."""
    partition: Partition = parse(text, "partition", PARTITIONS, "Dirichlet(0.1)")
    return partition


def partition_text(partition: Partition, given: Partition | str) -> str | None:
    """Return a string that describes the partition, `given` as it is or as a string; None if there is none."""
    if type(partition).__module__ == __name__:
        return repr(partition)
    if isinstance(given, str):
        return given
    try:
        return repr(partition) if parse_partition(repr(partition)) == partition else None
    except UndriftError:
        return None
