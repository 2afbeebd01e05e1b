"""Reduce the size of what a chart shows, without a visible difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def rounded(values: Iterable[Any], digits: int = 5) -> list[float | int | None]:
    """Numbers rounded to `digits` significant digits, whole ones as integers; None for what is not finite."""
    found: list[float | int | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            found.append(None)
        else:
            short = float(f"{value:.{digits}g}")
            found.append(int(short) if short.is_integer() and abs(short) < 1e15 else short)
    return found


def even(count: int, most: int) -> np.ndarray:
    """At most `most` evenly spaced positions, including the first and the last."""
    return (
        np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)) if count else np.empty(0, int)
    )


def downsample(series: Sequence[np.ndarray], count: int, most: int) -> np.ndarray:
    """At most `most` positions for curves with a common x axis: the end and each curve's extremes of every segment."""
    if count <= most:
        return np.arange(count)
    chosen = {0, count - 1}
    for segment in np.array_split(np.arange(count), most // (2 * max(1, len(series)) + 1)):
        chosen.add(int(segment[-1]))
        for values in series:
            here = values[segment]
            if np.isfinite(here).any():
                chosen |= {int(segment[np.nanargmin(here)]), int(segment[np.nanargmax(here)])}
    return np.array(sorted(chosen))
