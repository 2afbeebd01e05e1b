"""Class-balanced fractions of some rows."""

from __future__ import annotations

import numpy as np


def stratified(
    labels: np.ndarray, fraction: float, rng: np.random.Generator, groups: np.ndarray | None = None
) -> np.ndarray:
    """Which rows a class-balanced fraction takes, of each group where groups are given: a mask.

    Along an order by group and class, every 1/fraction-th row: each class is met to within one.
    """
    groups = np.zeros(len(labels), np.int64) if groups is None else groups
    order = np.lexsort((rng.random(len(labels)), labels, groups))
    sizes = np.bincount(groups)
    position = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.empty(len(labels), bool)
    mask[order] = np.floor((position + 1) * fraction + 1e-9) > np.floor(position * fraction + 1e-9)
    return mask
