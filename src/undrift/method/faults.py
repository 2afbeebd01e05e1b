"""Simulated faults of clients: which client fails in which round, and how.

Every draw is a function of (seed, round, client). So it depends neither on the other clients nor on the engine, and a
resumed run has the same faults.
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

    Example:
        >>> import undrift as ud
        >>> ud.Faults(dropout=0.3, nan=0.1).stragglers
        0.0

    Args:
        dropout: The probability that a client receives the model and never replies.
        stragglers: The probability that a client takes only some of its planned local steps.
        straggler_work: The fraction of its steps that a straggler takes, rounded up. None draws the number of steps
            uniformly, from one to one less than planned. Every client takes at least one step.
        nan: The probability that a client returns NaN.
        explode: The probability that a client's update explodes: the weights that it returns are `explode_factor` times
            as far from the global model as local training took them. Whatever else the client keeps and sends is
            computed from these weights.
        explode_factor: That factor, at least 1.

    Raises:
        UndriftError: If a probability or `straggler_work` is outside [0, 1], or `explode_factor` is less than 1.
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
        """Raise if a number is out of range in any of the rounds."""
        for name in (field.name for field in fields(self)):
            if name != "straggler_work" or self.straggler_work is not None:
                check_number(getattr(self, name), rounds, f"Faults({name})", self.ranges.get(name, "[0, 1]"))

    def draw(self, seed: int, t: int, clients: Array, steps: Array) -> Fates:
        """Draw what happens in round `t` to these clients, which were to take `steps` local steps."""
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
        # Nothing depends on how long a client that drops out trains, so it takes a single step.
        return Fates(np.where(dropped, 1, taken), dropped, taken < steps, factor)

    def _bound(self, name: str, t: int) -> int:
        """Return the bound below which a 32-bit word is a hit: 0 for probability 0, 2**32 for 1."""
        return round(value(getattr(self, name), t) * 2**32)


@dataclass(frozen=True)
class Fates:
    """What happens to each client of a cohort in one round, in the cohort's order."""

    steps: Array
    """The number of local steps that the simulation takes for it."""
    dropped: Array
    """Whether it never replies."""
    stragglers: Array
    """Whether it replies after fewer steps than planned."""
    factor: Array
    """The factor of the distance from the global model to the weights that it returns: 1, NaN, or `explode_factor`.
    NaN also stands for no reply."""

    def of(self, places: Array) -> Fates:
        """Return what happens to the clients at these places."""
        return Fates(self.steps[places], self.dropped[places], self.stragglers[places], self.factor[places])


def unharmed(steps: Array) -> Fates:
    """Return the fates of clients to which nothing happens."""
    nobody = np.zeros(len(steps), bool)
    return Fates(steps, nobody, nobody, np.ones(len(steps)))
