"""Arithmetic of partitions: how many samples each client gets, and which."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def by_class(labels: Array, rng: np.random.Generator) -> list[Array]:
    """The indices of each class's samples, shuffled."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def assign(indices: Array, sizes: Array, n: int) -> Array:
    """Owners of `n` samples: the first sizes[0] of `indices` go to client 0, and so on."""
    owner = np.empty(n, np.int64)
    owner[indices] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def even(n: int, parts: int) -> Array:
    """Sizes that sum to n and differ by at most one."""
    return np.diff(np.arange(parts + 1) * n // parts)


def shares(n: int, proportions: Array) -> Array:
    """Integer sizes that sum to n: the differences of the rounded cumulative sums of the proportions."""
    cuts = np.round(np.cumsum(proportions) * n).astype(np.int64)
    cuts[-1] = n
    return np.diff(cuts, prepend=0)


def bounded(concentration: float) -> float:
    """The concentration, clipped to where numpy's draws neither overflow nor underflow.

    Beyond these bounds, all shares are equal, or one is 1, up to rounding.
    """
    return float(min(max(concentration, 1e-290), 1e290))
