"""Local training: how many steps a client takes, on which batches, at which learning rate."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.data.array_ops import stable_argsort
from undrift.data.dataset import FederatedDataset
from undrift.errors import UndriftError, first_line, quoted, require, whole
from undrift.method.groups import Group, check_groups
from undrift.method.optimizers import Optimizer, check_optimizer
from undrift.method.sampling import Order, balanced
from undrift.random import derive, philox
from undrift.schedule import Number, StepSchedule, check_number, decay, inside, inverse, value, whole_steps

Array = np.ndarray

PIECE = 1 << 22
"""How many samples to assign to batches at a time."""
MOST_STEPS = 10_000_000
"""The largest number of steps of a client in a round, whose batches are all in memory before the first step."""
ADDED = {"added": True}
"""Marks fields that earlier versions did not have. At their defaults, they are left out of a run's identity."""
STATES = ("reset", "keep", "average")
"""What can happen to a local optimizer's state at the end of a round."""


class Spread(NamedTuple):
    """The numbers of local steps of many clients."""

    mean: float
    largest: int


@dataclass(frozen=True, kw_only=True)
class Local:
    """Local training: what a client does in a round, with SGD or another optimizer.

    Any number may be a schedule, a function of the round counted from 0: `ud.Local(steps=ud.decay(50, 0.98), lr=0.1)`.

    In a local step, the gradient of the loss goes through `weight_decay`, the parts' `gradient` hooks, `clip_norm` and
    the `optimizer` (or `momentum`), in this order. The result is multiplied by the learning rate and subtracted from
    the weights.

    Example:
        >>> import undrift as ud
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.1, momentum=0.9)
        >>> schedule, groups = ud.warmup(5) * ud.cosine(), {"*.bias": ud.Group(weight_decay=0.0)}
        >>> local = ud.Local(steps=20, lr=0.001, optimizer=ud.AdamW(), step_schedule=schedule, groups=groups)

    Args:
        steps: The number of local steps, or a list with one entry per client. Give either `steps` or `epochs`.
        epochs: The number of passes over the client's n samples. With batch size B, E epochs are `E·⌈n/B⌉` steps.
        batch_size: The number of samples per batch. None uses all of a client's samples in each step.
        drop_last: Whether to leave out the last batch of each pass if it is short, so that E epochs are `E·⌊n/B⌋`
            steps. Which samples are left out differs from pass to pass. A client with fewer samples than one batch
            keeps its short batch. A step on a few samples can move a client as far as all its other steps; a warning
            says so if the last batch has less than an eighth of `batch_size`.
        lr: The learning rate.
        momentum: The momentum of SGD, as in `ud.SGD(momentum)`. It starts at zero in every round. A short form, for use
            without `optimizer`.
        weight_decay: λ; adds `λ·w` to the gradient, before the `gradient` hooks and before clipping. A short form, for
            use without `optimizer`. The weight decay of `ud.SGD` comes after both.
        optimizer: The local optimizer: `ud.SGD`, `ud.Adam`, `ud.AdamW`, or your own subclass of `ud.Optimizer`. None is
            SGD with the `momentum` and `weight_decay` given here.
        optimizer_state: What happens to the optimizer's state at the end of a round. `"reset"`: every round starts with
            a new one. `"keep"`: every client continues with its own, from the last round in which it took part.
            `"average"`: the states are averaged over the cohort like the weights, and the next round starts with the
            mean.
        clip_norm: The maximum norm of the gradient, over all parameters together. Longer gradients are scaled down to
            it. None does not clip.
        sampling: `"shuffle"`: batches are cut from fresh permutations of the client's samples. `"balanced"`: the
            samples of a batch are drawn with replacement such that all classes that the client holds are equally
            likely. An epoch is then as many draws as the client has samples.
        step_schedule: A factor of the learning rate by local step: `ud.warmup`, `ud.cosine`, their product, or a
            function `f(k, steps)` of the local step k, counted from 0, and the client's number of steps. Both are
            tensors, so use tensor operations, without an `if` on k.
        groups: Parameter groups: a dict from patterns of parameter names, such as `"head.*"` or `"*.bias"`, to
            `ud.Group(rate, weight_decay)`, factors of the learning rate and of the weight decay. The first pattern that
            matches a name applies.

    Raises:
        UndriftError: If an argument is invalid, or two contradict each other. `ud.train` checks schedules as well.
    """

    steps: Number | Sequence[int] | None = None
    epochs: Number | None = None
    batch_size: int | None = None
    drop_last: bool = field(default=False, metadata=ADDED)
    lr: Number
    momentum: Number = 0.0
    weight_decay: Number = 0.0
    optimizer: Optimizer | None = field(default=None, metadata=ADDED)
    optimizer_state: str = field(default="reset", metadata=ADDED)
    clip_norm: Number | None = field(default=None, metadata=ADDED)
    step_schedule: StepSchedule | Callable[[Any, Any], Any] | None = field(default=None, metadata=ADDED)
    groups: Mapping[str, Group] | None = field(default=None, metadata=ADDED)
    sampling: str = field(default="shuffle", metadata=ADDED)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UndriftError("Local needs either steps or epochs, and not both.")
        size = self.batch_size
        if size is not None and not (whole(size) and 1 <= size < 2**31):
            raise UndriftError(
                f"Local(batch_size) must be a whole number from 1, or None for all samples, not {quoted(size)}."
            )
        require(
            self.drop_last in (True, False), f"Local(drop_last) must be True or False, not {quoted(self.drop_last)}."
        )
        require(
            size is not None or not self.drop_last,
            "Local(drop_last=True) needs a batch_size: without one a batch is all of a client's samples, never short.",
        )
        if self.optimizer is not None:
            _check_beside(self, self.optimizer)
        _check_state(self.optimizer_state, self.optimizer)
        known = self.sampling in ("shuffle", "balanced")
        require(known, f'Local(sampling) must be "shuffle" or "balanced", not {quoted(self.sampling)}.')
        all_at_once = self.sampling == "balanced" and size is None
        require(not all_at_once, 'Local(sampling="balanced") draws batches; give it a batch_size.')
        if self.groups is not None:
            object.__setattr__(self, "groups", check_groups(self.groups))

    def check(self, data: FederatedDataset, rounds: int) -> None:
        if self.sampling == "balanced" and data.labels is None:
            raise UndriftError('Local(sampling="balanced") needs labels that are classes, one whole number per sample.')
        check_number(self.lr, rounds, "Local(lr)")
        check_number(self.momentum, rounds, "Local(momentum)", "[0, 1)")
        check_number(self.weight_decay, rounds, "Local(weight_decay)")
        if self.optimizer is not None:
            check_optimizer(self.optimizer, rounds)
        if self.clip_norm is not None:
            check_number(self.clip_norm, rounds, "Local(clip_norm)", "(0, inf]")
        if self.step_schedule is not None:
            _check_step_schedule(self.step_schedule)
        if self.per_client:
            given = self.steps if isinstance(self.steps, np.ndarray) else np.array(self.steps, dtype=object)
            if given.dtype == object and all(isinstance(k, int | np.integer) and k < 2**63 for k in given.flat):
                given = given.astype(np.int64)
            if given.shape != (len(data),) or given.dtype.kind not in "iu" or given.min() < 1:
                raise UndriftError(
                    f"Local(steps) as a list needs one whole number from 1 for each of the {len(data)} clients."
                )
            if given.max() > MOST_STEPS:
                raise UndriftError(f"Local(steps) has {given.max():,}; a client takes at most {MOST_STEPS:,} a round.")
        elif self.steps is not None:
            check_number(self.steps, rounds, "Local(steps)", f"(0, {MOST_STEPS}]")
        else:
            longest = int(self.per_epoch(data.size_counts[0]).max(initial=1))
            check_number(self.epochs, rounds, "Local(epochs)", f"(0, {max(1, MOST_STEPS // longest)}]")

    @cached_property
    def per_client(self) -> bool:
        return self.steps is not None and not callable(self.steps) and np.ndim(self.steps) > 0

    def step_counts(self, t: int, clients: Array, sizes: Array, per_step: int = 1) -> Array:
        """Return how many steps, of `per_step` batches each, these clients take in round `t`."""
        if self.per_client:
            return self._listed[clients]
        if self.steps is not None:
            return np.full(len(clients), whole_steps(value(self.steps, t)))
        epochs = value(self.epochs, t)
        return np.array([whole_steps(epochs * per / per_step) for per in self.per_epoch(sizes).tolist()], np.int64)

    @cached_property
    def _listed(self) -> Array:
        """The steps per client as an array, converted once since a long list is slow to convert."""
        return np.asarray(self.steps)

    def spread(self, t: int, data: FederatedDataset, per_step: int = 1) -> Spread:
        """Return the same over all clients with data, by their sizes: clients of one size take as many steps."""
        sizes, clients = data.size_counts
        if self.per_client:
            steps = self._listed[data.nonempty]
            return Spread(float(steps.mean()), int(steps.max()))
        steps = self.step_counts(t, sizes, sizes, per_step)
        return Spread(float((steps * clients).sum() / clients.sum()), int(steps.max()))

    def per_epoch(self, sizes: Array) -> Array:
        """Return the number of batches in one pass over the samples of clients of these sizes."""
        return steps_per_epoch(sizes, self.batch_size, self.drop_last)

    def order(self, data: FederatedDataset, clients: Array) -> Order | None:
        """Return how these clients' samples are drawn, or None for permutations."""
        return balanced(data, clients) if self.sampling == "balanced" else None

    def widest(self, sizes: Array) -> int:
        """Return the size of the largest batch that a client of these sizes can have."""
        return int(sizes.max()) if self.batch_size is None else min(self.batch_size, int(sizes.max()))

    def last_batches(self, sizes: Array) -> Array:
        """Return the size of the last batch of a pass, for clients of these sizes. No other batch is smaller."""
        size = sizes if self.batch_size is None else np.minimum(sizes, self.batch_size)
        return np.minimum(size, sizes - (self.per_epoch(sizes) - 1) * size)

    def may_be_short(self, sizes: Array) -> bool:
        """Return whether some batch may have fewer samples than the largest, so that lanes pad it."""
        some = sizes[sizes > 0]
        return bool(len(some)) and bool((self.last_batches(some) < self.widest(some)).any())


def _check_beside(local: Local, optimizer: Any) -> None:
    """Raise unless this is an optimizer, and no argument of `Local` contradicts it."""
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        raise UndriftError(f"Local(optimizer) is a class; write {optimizer.__name__}(), with its arguments.")
    if not isinstance(optimizer, Optimizer):
        raise UndriftError(f"Local(optimizer) must be an optimizer such as ud.Adam(), not {quoted(optimizer)}.")
    name = type(optimizer).__name__
    for key in ("momentum", "weight_decay"):
        given = getattr(local, key)
        if callable(given) or given:
            write = f"write optimizer={name}({key}={quoted(given)})" if hasattr(optimizer, key) else "leave it out"
            raise UndriftError(
                f"Local({key}) is the short form of SGD({key}) and cannot stand beside optimizer={name}(…); {write}."
            )


def _check_state(state: Any, optimizer: Optimizer | None) -> None:
    ways = ", ".join(f'"{way}"' for way in STATES)
    require(state in STATES, f"Local(optimizer_state) must be one of {ways}, not {quoted(state)}.")
    if state == "reset":
        return
    if optimizer is None:
        raise UndriftError(
            f'Local(optimizer_state="{state}") needs an optimizer; for momentum, write optimizer=ud.SGD(momentum=…).'
        )
    if not optimizer.stateful:
        name = type(optimizer).__name__
        raise UndriftError(f'Local(optimizer_state="{state}"): this {name} has no state; leave optimizer_state out.')


def _check_step_schedule(schedule: Any) -> None:
    """Try a step schedule on all steps of a round at once, as the lanes engine does."""
    where = "Local(step_schedule)"
    if isinstance(schedule, decay | inverse):
        raise UndriftError(f"{where} is {schedule!r}, a function of the round; write lr={schedule!r}.")
    given = quoted(schedule)
    require(callable(schedule), f"{where} must be a function of (k, steps), such as ud.cosine(), not {given}.")
    count = 10
    k, steps = torch.arange(count, dtype=torch.float64), torch.full((count,), float(count), dtype=torch.float64)
    try:
        found = torch.func.vmap(lambda k, steps: torch.as_tensor(schedule(k, steps)))(k, steps)
    except Exception as error:  # a user's function may raise anything
        raise UndriftError(
            f"{where} fails as a function of the tensors k and steps ({first_line(error)}); use tensor operations, "
            "such as torch.where, and no if on k."
        ) from error
    require(found.shape == k.shape, f"{where} must return one number, not a tensor of shape {tuple(found.shape[1:])}.")
    for step, factor in enumerate(found.tolist()):
        fine = inside("[0, inf)", factor)
        require(fine, f"{where} is {factor:g} in step {step} of {count}; it must be in [0, inf).")


def steps_per_epoch(sizes: Array, batch_size: int | None, drop_last: bool = False) -> Array:
    """Return the number of batches in one pass: all of them, or with `drop_last` the full ones, but at least one."""
    if batch_size is None:
        return np.ones_like(sizes)
    all_of_them = -(-sizes // batch_size)
    return np.where(sizes >= batch_size, sizes // batch_size, all_of_them) if drop_last else all_of_them


@dataclass(frozen=True)
class Batches:
    """The batches of a cohort in one round, one row per batch, client by client."""

    positions: Array
    """Positions within the client's data, batches × largest size. A short batch is padded with its last sample."""
    counts: Array
    """Per batch, the number of samples that are not padding."""
    first: Array
    """The index of each client's first batch."""
    per_step: int = 1
    """The number of batches per step."""


def cohort_batches(
    seed: int,
    t: int,
    clients: Array,
    sizes: Array,
    steps: Array,
    batch_size: int | None,
    width: int,
    per_step: int = 1,
    drop_last: bool = False,
    draw: Order | None = None,
) -> Batches:
    """Return the batches of each client's steps: step k takes those from `k·per_step` on.

    Batches are cut from successive permutations of a client's samples (or from what `draw` returns). The last batch of
    a permutation is short, or left out. Each permutation is the stable order of Philox words under the key (seed,
    "batches", round, client). So it depends on nothing else: not on the cohort, the lanes or the engine. The
    permutations of many clients are sorted in one call.
    """
    per, count = steps_per_epoch(sizes, batch_size, drop_last), steps * per_step
    epochs = -(-count // per)
    piece = np.cumsum(epochs * sizes) // PIECE
    if draw is None and len(piece) and piece[0] != piece[-1]:  # sorting needs several times as much memory
        positions, counts = np.empty((count.sum(), width), np.int64), np.empty(count.sum(), np.int64)
        first = np.cumsum(count) - count
        for part in np.split(np.arange(len(clients)), np.flatnonzero(np.diff(piece)) + 1):
            own = cohort_batches(
                seed, t, clients[part], sizes[part], steps[part], batch_size, width, per_step, drop_last, _permutations
            )
            here = slice(first[part[0]], first[part[0]] + len(own.counts))
            positions[here], counts[here] = own.positions, own.counts
        return Batches(positions, counts, first, per_step)
    # One segment per client and epoch: its length, and where it begins in the concatenation of all segments.
    client_of = np.repeat(np.arange(len(clients)), epochs)
    lengths = sizes[client_of]
    begins = np.cumsum(lengths) - lengths
    first_segment = np.cumsum(epochs) - epochs
    if batch_size is None:  # all samples in each step, in order
        order = np.arange(lengths.sum()) - np.repeat(begins, lengths)
    else:
        epoch_of = np.arange(len(client_of)) - first_segment[client_of]
        order = (draw or _permutations)(derive(seed, "batches", t, clients), client_of, epoch_of, lengths, begins)

    owner, j, inside, counts = slices(sizes, count, per, batch_size)
    first = np.cumsum(count) - count
    starts = begins[first_segment[owner] + j // per[owner]] + inside
    column = np.minimum(np.arange(width)[None], counts[:, None] - 1)
    return Batches(order[starts[:, None] + column], counts, first, per_step)


def slices(sizes: Array, count: Array, per: Array, batch_size: int | None) -> tuple[Array, Array, Array, Array]:
    """Return every batch's client, number, start and size, for a cohort whose clients take `count` batches each.

    Batch j of client c is the (j mod per)-th slice of its (j div per)-th segment.
    """
    owner = np.repeat(np.arange(len(sizes)), count)
    j = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    size = sizes[owner] if batch_size is None else np.full(len(owner), batch_size)
    inside = j % per[owner] * size
    return owner, j, inside, np.minimum(size, sizes[owner] - inside)


def _permutations(key: tuple[Array, Array], client_of: Array, epoch_of: Array, lengths: Array, begins: Array) -> Array:
    """Return one permutation per segment, one after another."""
    blocks = -(-lengths // 4)
    segment = np.repeat(np.arange(len(lengths)), blocks)
    block = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    words = philox((block, epoch_of[segment], 0, 0), (key[0][client_of[segment]], key[1][client_of[segment]]))
    real = (block[:, None] * 4 + np.arange(4)) < lengths[segment][:, None]
    tagged = (segment[:, None] << 32 | np.stack(words, 1))[real]  # the segment above the word: one sort serves all
    return stable_argsort(tagged) - np.repeat(begins, lengths)


def batches(
    data: FederatedDataset, local: Local, *, client: int, round: int, seed: int, method: Any = None
) -> list[Tensor]:
    """Return the indices of the samples in each batch that a client trains on in a round.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.IID(), clients=10)
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.1)
        >>> [len(batch) for batch in ud.batches(data, local, client=0, round=0, seed=0)]
        [32, 32, 32, 32, 16]

    Args:
        data: The federated data set.
        local: The local training.
        client: The client's id.
        round: The round, from 0.
        seed: The seed of the run.
        method: The method, if one of its parts takes several batches per local step (`batches = 2`). Step k then takes
            the batches from `2k` on.

    Returns:
        One tensor of indices into `data[client]` per batch. The list is empty if the client has no samples.

    Raises:
        UndriftError: If there is no such client or round, or if `local` does not fit the data.
    """
    client, round = operator.index(client), operator.index(round)
    if not 0 <= client < len(data) or round < 0:
        raise UndriftError(
            f"There are clients 0 to {len(data) - 1} and rounds from 0: no client {client}, round {round}."
        )
    local.check(data, round + 1)
    from undrift.method.parse import as_method  # which imports the parts, and they this module

    per_step = 1 if method is None else as_method(method).batches
    ids, sizes = np.array([client]), data.sizes[client : client + 1]
    if not sizes[0]:
        return []
    steps = local.step_counts(round, ids, sizes, per_step)
    width, draw = local.widest(sizes), local.order(data, ids)
    made = cohort_batches(seed, round, ids, sizes, steps, local.batch_size, width, per_step, local.drop_last, draw=draw)
    return [torch.from_numpy(row[:count]) for row, count in zip(made.positions, made.counts, strict=True)]
