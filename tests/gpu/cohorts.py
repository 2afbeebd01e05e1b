"""Cohorts that are hard on captured graphs, each with the property that its name claims.

A segment is a run of steps in which no lane changes its client (`engine/packing.py`). Clients start in the order of
their step counts, so a segment can outgrow the first only once no client is waiting any more, or in a later round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

import undrift as ud
from undrift.engine.packing import pack, segments

Lengths = list[list[int]]
"""The lengths of each round's segments."""


@dataclass(frozen=True)
class Cohort:
    """Clients of these sizes, all of them in each round."""

    sizes: tuple[int, ...]
    local: ud.Local
    lanes: int
    rounds: int = 3
    holds: Callable[[Lengths], bool] = lambda lengths: True
    """What the name claims, of the lengths of the segments."""

    def lengths(self) -> Lengths:
        clients, sizes = np.arange(len(self.sizes)), np.array(self.sizes)
        found = []
        for t in range(self.rounds):
            steps = self.local.step_counts(t, clients, sizes)
            found.append([len(s.steps) for s in segments(steps, pack(steps, min(self.lanes, len(steps))))])
        return found


def of(*sizes: int, lanes: int, holds: Callable[[Lengths], bool], rounds: int = 3, **local: object) -> Cohort:
    return Cohort(sizes, ud.Local(**{"batch_size": 4, "lr": 0.05, **local}), lanes, rounds, holds)  # type: ignore[arg-type]


def later_longer(lengths: Lengths) -> bool:
    return max(lengths[0][1:]) > lengths[0][0]


def one_longer(lengths: Lengths) -> bool:
    """A segment in the middle of a round is one step longer than the longest before it."""
    return any(b == a + 1 for a, b in zip(accumulate(lengths[0], max), lengths[0][1:], strict=False))


def longer_twice(lengths: Lengths) -> bool:
    return sum(b > a for a, b in zip(accumulate(lengths[0], max), lengths[0][1:], strict=False)) >= 2


def by_round(test: Callable[[int, int], bool]) -> Callable[[Lengths], bool]:
    """Whether the longest segment of every round compares so with that of the round before."""
    return lambda lengths: all(test(max(a), max(b)) for a, b in pairwise(lengths))


def scheduled(*counts: int) -> Callable[[int], int]:
    """So many steps in round 0, 1, …"""
    return lambda t: counts[t]


GIANT = of(
    61, 9, 7, 5, 3, lanes=3, epochs=1, holds=lambda ls: later_longer(ls) and sum(ls[0]) == 16
)  # fmt: skip
MIXED = (23, 5, 41, 10, 17, 1)
COHORTS = {
    "a later segment is longer": of(49, 11, 7, 3, lanes=2, epochs=1, holds=later_longer),
    "a later segment is one longer": of(30, 11, 4, lanes=2, epochs=1, holds=one_longer),
    "segments grow twice in a round": of(80, 31, 11, lanes=3, epochs=1, rounds=2, holds=longer_twice),
    "one client larger than all others together": GIANT,
    "one lane": of(*MIXED, lanes=1, epochs=1, holds=lambda ls: len(ls[0]) == 6),
    "two lanes": of(*MIXED, lanes=2, epochs=1, holds=lambda ls: ls[0] == [6, 5, 2, 1]),
    "three lanes": of(*MIXED, lanes=3, epochs=1, holds=lambda ls: 3 < len(ls[0]) <= 6),
    "all lanes": of(*MIXED, lanes=6, epochs=1, holds=lambda ls: len(ls[0]) == 6 and later_longer(ls)),
    "one step": of(*MIXED, lanes=2, steps=1, holds=lambda ls: ls == [[1, 1, 1]] * 3),
    "one step, then two, then three": of(
        *MIXED, lanes=4, steps=scheduled(1, 2, 3), holds=by_round(lambda a, b: b == a + 1)
    ),
    "steps grow by one": of(*MIXED, lanes=2, steps=scheduled(4, 5, 6), holds=by_round(lambda a, b: b == a + 1)),
    "steps grow": of(*MIXED, lanes=2, steps=scheduled(2, 5, 11), holds=by_round(lambda a, b: b > a + 1)),
    "steps shrink": of(*MIXED, lanes=3, steps=scheduled(9, 4, 1), holds=by_round(lambda a, b: b < a)),
    "steps per client": of(
        *MIXED, lanes=3, steps=(1, 12, 2, 7, 3, 1), holds=lambda ls: later_longer(ls) and len(set(ls[0])) > 2
    ),
    "whole clients as batches": of(*MIXED, lanes=4, steps=3, batch_size=None, holds=lambda ls: ls[0] == [3, 3]),
    "more than 64 steps at a time": of(
        5, 9, 3, lanes=2, steps=(64, 195, 2), rounds=1, lr=0.01, holds=lambda ls: ls == [[64, 2, 129]]
    ),
}  # fmt: skip


def with_momentum(cohort: Cohort) -> Cohort:
    return replace(cohort, local=replace(cohort.local, momentum=0.9, weight_decay=0.01, lr=0.01))
