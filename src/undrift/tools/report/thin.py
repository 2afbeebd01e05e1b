"""Fewer numbers that look the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def plain(values: Iterable[Any], digits: int = 5) -> list[float | int | None]:
    """Numbers with so many digits, the whole ones without a point; None for what is no finite number."""
    found: list[float | int | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            found.append(None)
        else:
            short = float(f"{value:.{digits}g}")
            found.append(int(short) if short.is_integer() and abs(short) < 1e15 else short)
    return found


def even(count: int, most: int) -> np.ndarray:
    """At most so many positions, evenly spaced, the first and the last among them."""
    return (
        np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)) if count else np.empty(0, int)
    )


def telling(series: Sequence[np.ndarray], count: int, most: int) -> np.ndarray:
    """At most so many positions of curves that share them: of every stretch its end and each curve's extremes."""
    if count <= most:
        return np.arange(count)
    chosen = {0, count - 1}
    for stretch in np.array_split(np.arange(count), most // (2 * max(1, len(series)) + 1)):
        chosen.add(int(stretch[-1]))
        for values in series:
            here = values[stretch]
            if np.isfinite(here).any():
                chosen |= {int(stretch[np.nanargmin(here)]), int(stretch[np.nanargmax(here)])}
    return np.array(sorted(chosen))
