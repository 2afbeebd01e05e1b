"""What floats of lower precision lose of large numbers: times in seconds since 1970, identifiers, amounts in cents."""

from __future__ import annotations

import numpy as np

LOST = 0.01
"""The share of a column's standard deviation above which rounding loses some of its differences."""
NOISE = 1e-11
"""The standard deviation, as a share of the largest number, below which differences are rounding themselves."""


def loses(exact: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """Return, per column of rows × columns of float64, whether rounding to `dtype` loses some of its differences."""
    if not len(exact):
        return np.zeros(exact.shape[1], bool)
    error = np.sqrt(np.square(exact - exact.astype(dtype)).mean(0))
    spread = exact.std(0)
    found: np.ndarray = (error > LOST * spread) & (spread > NOISE * np.abs(exact).max(0))
    return found


def example(exact: np.ndarray, dtype: type = np.float32) -> str:
    """Return one of the numbers that are rounded, and what becomes of it."""
    value = exact[exact != exact.astype(dtype)][0]
    return f"{value:.17g} becomes {float(value.astype(dtype)):.17g}"
