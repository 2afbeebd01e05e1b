"""Faults that a simulation gives its clients: which client is hit in which round, and how.

Every draw is a function of (seed, round, client), so that it depends neither on who else is sampled nor on the engine,
and a resumed run meets the same faults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from undrift.random import derive, philox
from undrift.schedule import Number, check_number, value

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often clients fail in a simulation, for the argument `faults` of `ud.train`.

    Each kind of fault is drawn independently, for every round and every sampled client. All fields may be schedules.

    Args:
        dropout: The probability that a client receives the model and never answers.
        stragglers: The probability that a client takes only part of its planned local steps.
        straggler_work: The fraction of its steps that a straggler takes, rounded up. None draws the number of steps
            uniformly, from one to one less than planned. Every client takes at least one step.
        nan: The probability that a client returns NaN.
        explode: The probability that a client's weights explode: they return `explode_factor` times as far from the
            global model as training took them. What the client keeps and sends beside them is computed from these.
        explode_factor: That factor, at least 1.

    Raises:
        UndriftError: A probability or `straggler_work` is outside [0, 1], or `explode_factor` is below 1.

    >>> Faults(dropout=0.3, nan=0.1).stragglers
    0.0
    """

    dropout: Number = 0.0
    stragglers: Number = 0.0
    straggler_work: Number | None = None
    nan: Number = 0.0
    explode: Number = 0.0
    explode_factor: Number = 100.0

    ranges: ClassVar[dict[str, str]] = {"explode_factor": "[1, inf)"}

    def __post_init__(self) -> None:
        self.check(rounds=1)

    def check(self, rounds: int) -> None:
        """Refuse numbers that are out of range in any of the rounds."""
        for name in (field.name for field in fields(self)):
            if name != "straggler_work" or self.straggler_work is not None:
                check_number(getattr(self, name), rounds, f"Faults({name})", self.ranges.get(name, "[0, 1]"))

    def draw(self, seed: int, t: int, clients: Array, steps: Array) -> Fates:
        """What happens in round `t` to these clients, which were to take `steps` local steps."""
        key = derive(seed, "faults", t, clients)
        drops, straggles, spoils, explodes = philox((0, 0, 0, 0), key)
        dropped = drops < self._bound("dropout", t)
        if self.straggler_work is None:
            part = 1 + (philox((1, 0, 0, 0), key)[0] * (steps - 1) >> 32)
        else:
            part = np.ceil(value(self.straggler_work, t) * steps - 1e-9).astype(np.int64)
        late = (straggles < self._bound("stragglers", t)) & ~dropped
        taken = np.where(late, np.maximum(part, 1), steps)
        factor = np.where(explodes < self._bound("explode", t), value(self.explode_factor, t), 1.0)
        factor[dropped | (spoils < self._bound("nan", t))] = np.nan
        # Nobody waits for a client that drops out, so a single step of its lane will do.
        return Fates(np.where(dropped, 1, taken), dropped, taken < steps, factor)

    def _bound(self, name: str, t: int) -> int:
        """The number of 32-bit words below which a draw is a hit: none for probability 0, all of them for 1."""
        return round(value(getattr(self, name), t) * 2**32)


@dataclass(frozen=True)
class Fates:
    """What happens to each client of a cohort in one round, in the cohort's order."""

    steps: Array
    """How many local steps the simulation takes for it."""
    dropped: Array
    """Whether it never answers."""
    stragglers: Array
    """Whether it answers after fewer steps than planned."""
    factor: Array
    """What multiplies the distance from the global model to the weights that it returns: 1, or NaN, or an explosion's
    factor. NaN also stands for no answer."""


def unharmed(steps: Array) -> Fates:
    """Nothing happens to anybody."""
    nobody = np.zeros(len(steps), bool)
    return Fates(steps, nobody, nobody, np.ones(len(steps)))
