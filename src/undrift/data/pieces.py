"""Facts about the clients or samples of a very large data set, computed piece by piece.

With 15 million clients, an array of one number per client takes 120 MB, so none is created here.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

PIECE = 1 << 20
"""How many clients or samples to look at together."""


def size_counts(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different sizes of clients, ascending, and how many clients have each."""
    begins = range(0, max(1, len(offsets) - 1), PIECE)
    found = [np.unique(np.diff(offsets[begin : begin + PIECE + 1]), return_counts=True) for begin in begins]
    sizes, place = np.unique(np.concatenate([values for values, _ in found]), return_inverse=True)
    counts = np.zeros(len(sizes), np.int64)
    np.add.at(counts, place, np.concatenate([each for _, each in found]))
    return sizes, counts


def firsts(labels: Tensor, index: Tensor) -> np.ndarray:
    """Return where each of the labels at `index` occurs first there, in the order of the labels."""
    values, places = [], []
    for begin in range(0, max(1, len(index)), PIECE):
        found, first = np.unique(labels[index[begin : begin + PIECE]].numpy(), return_index=True)
        values.append(found)
        places.append(begin + first)
    place: np.ndarray = np.concatenate(places)[np.unique(np.concatenate(values), return_index=True)[1]]
    return place


def extremes(labels: Tensor, index: Tensor, but: int | None) -> tuple[int, int] | None:
    """Return the smallest and largest of the labels at `index`, except `but`; None if there are no others."""
    found: list[int] = []
    for part in index.split(PIECE):
        some = labels[part] if but is None else labels[part][labels[part] != but]
        found += [int(some.min()), int(some.max())] if some.numel() else []
    return (min(found), max(found)) if found else None


def median(sizes: np.ndarray, counts: np.ndarray) -> float:
    """Return the median size of the clients, from the number of clients of each size."""
    last = np.cumsum(counts)
    middle = np.array([(last[-1] - 1) // 2, last[-1] // 2])
    return float(sizes[np.searchsorted(last, middle, side="right")].mean())
