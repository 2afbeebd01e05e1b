"""Means, standard deviations and paired differences over seeds, with Student's t intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def mean(values: Sequence[float]) -> float:
    """The mean of the finite values; NaN if there are none."""
    known = [v for v in values if math.isfinite(v)]
    return average(known) if known else math.nan


def average(values: Sequence[float]) -> float:
    """The mean of all values, also where their sum is larger than any float."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(v / len(values) for v in values)


def average_by_seed(seeds: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    """Each seed's value; the mean, if a seed occurs several times."""
    by_seed: dict[int, list[float]] = {}
    for seed, value in zip(seeds, values, strict=True):
        by_seed.setdefault(seed, []).append(value)
    return {seed: average(own) for seed, own in sorted(by_seed.items())}


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation (n − 1) of the finite values; NaN for fewer than two."""
    known = [v for v in values if math.isfinite(v)]
    if len(known) < 2:
        return math.nan
    middle = mean(known)
    try:
        return math.sqrt(math.fsum((v - middle) ** 2 for v in known) / (len(known) - 1))
    except OverflowError:  # of a square; hypot scales what it squares
        return math.hypot(*(v - middle for v in known)) / math.sqrt(len(known) - 1)


@dataclass(frozen=True)
class Difference:
    """A mean difference over pairs, with its confidence interval."""

    mean: float
    low: float
    """NaN with fewer than two pairs."""
    high: float
    pairs: int


def paired(values: Mapping[int, float], baseline: Mapping[int, float], level: float = 0.95) -> Difference:
    """The mean of `values − baseline` over the seeds that both have, with Student's t interval for it.

    Args:
        values: A finite or non-finite figure per seed.
        baseline: The same, of what it is compared with. Seeds with a figure that is not finite are left out.
        level: The confidence level.

    Returns:
        The difference. With no common seed its mean is NaN, with fewer than two its interval.
    """
    common = [seed for seed in values if seed in baseline]
    differences = [values[seed] - baseline[seed] for seed in common]
    differences = [x for x in differences if math.isfinite(x)]
    pairs, middle = len(differences), mean(differences)
    if pairs < 2:
        return Difference(middle, math.nan, math.nan, pairs)
    half = t_quantile((1 + level) / 2, pairs - 1) * deviation(differences) / math.sqrt(pairs)
    return Difference(middle, middle - half, middle + half, pairs)


def t_quantile(p: float, degrees: int) -> float:
    """The quantile of Student's t distribution with a whole number of degrees of freedom, for 0.5 ≤ p < 1.

    With t = √ν · tan θ, the probability of |T| ≤ t is a finite sum in θ (`central_probability`) that grows with θ,
    which is found by bisection.
    """
    if not 0.5 <= p < 1 or degrees < 1:
        raise ValueError(f"p = {p} must be in [0.5, 1), and the degrees of freedom ({degrees}) at least 1")
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if central_probability(middle, degrees) < 2 * p - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def central_probability(theta: float, degrees: int) -> float:
    """P(|T| ≤ √ν tan θ), by Abramowitz and Stegun's *Handbook of Mathematical Functions* (1964), 26.7.3 and 26.7.4."""
    sine, square = math.sin(theta), math.cos(theta) ** 2
    odd = degrees % 2
    term = total = 0.0 if degrees == 1 else (math.cos(theta) if odd else 1.0)
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * square
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
