"""Differences between two methods over the end of training, where a few rounds say little and seeds are few.

Per seed, the difference is that of the means over the last fifth of the rounds, which is 100 of 500. Rounds that are
close in time are not independent, so its standard error comes from the means of five blocks of them: `s/√5`, where s is
their standard deviation. If both runs were evaluated in the same rounds, the blocks are those of the difference;
otherwise each run has its own, and `√(e² + e′²)` is the error of the difference. Over n seeds the standard error is
`s/√n` with the standard deviation s of the seeds' differences; that of a single seed is its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from papers.catalogue import Figure
from papers.results import Result, series

FIFTH = 0.8
"""The share of the rounds after which the last fifth begins."""
BLOCKS = 5
TAKES = ("last", "best", "peak", "at")
"""What is taken of a curve whose end says the same: not of one that is read for when it gets somewhere."""


class Estimate(NamedTuple):
    """A difference with its standard error, which is None if one value cannot tell."""

    value: float
    error: float | None = None


def by_seed(which: Figure, better: Result, than: Result) -> Estimate | None:
    """Return the difference of two runs over the last fifth, in the direction in which the figure is better."""
    if which.take not in TAKES:
        return None
    one, other = last_fifth(which, better), last_fifth(which, than)
    if not one or not other:
        return None
    sign = -1.0 if which.lower else 1.0
    value = sign * (statistics.fmean(one.values()) - statistics.fmean(other.values()))
    if one.keys() == other.keys():
        return Estimate(value, block_error([one[t] - other[t] for t in one]))
    errors = [block_error(list(run.values())) for run in (one, other)]
    return Estimate(value, None if None in errors else math.hypot(*errors))  # type: ignore[arg-type]


def over_seeds(each: Sequence[Estimate]) -> Estimate | None:
    """Return the mean of differences by seed, with its standard error."""
    if len(each) < 2:
        return each[0] if each else None
    values = [one.value for one in each]
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def over_columns(each: Sequence[Estimate]) -> Estimate | None:
    """Return the mean over a table's columns, whose errors are independent."""
    if not each:
        return None
    errors = [one.error for one in each if one.error is not None]
    error = math.hypot(*errors) / len(each) if len(errors) == len(each) else None
    return Estimate(statistics.fmean(one.value for one in each), error)


def last_fifth(which: Figure, result: Result) -> dict[int, float]:
    """Return a run's values in the last fifth of its rounds, by round."""
    points = series(result, which.column)
    begin = FIFTH * points[-1][0] if points else 0
    return {t: which.scale * x for t, x in points if t > begin}


def block_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of neighbouring values; None for fewer than two per block."""
    if len(values) < 2 * BLOCKS:
        return None
    cuts = [i * len(values) // BLOCKS for i in range(BLOCKS + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(cuts)]
    return statistics.stdev(means) / math.sqrt(BLOCKS)
