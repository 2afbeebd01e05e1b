"""Which samples a fraction takes: class-balanced ones, or, for overlapping windows of text, a contiguous piece."""

from __future__ import annotations

import numpy as np

from undrift.data.shares import lexsort, numbered


def stratified(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Return a class-balanced fraction, as a mask: every (1/fraction)-th sample in order of class.

    The number taken of each class is within one of its exact share.
    """
    order = lexsort(rng.random(len(labels)), labels)
    position = np.arange(len(order))
    mask = np.empty(len(labels), bool)
    mask[order] = np.floor((position + 1) * fraction + 1e-9) > np.floor(position * fraction + 1e-9)
    return mask


def stratified_by_group(
    labels: np.ndarray, groups: np.ndarray, fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """Return a class-balanced fraction of each group, as a mask, which never takes all of a group's samples.

    Classes come in a random order per group, counted from a random offset, so that small groups are sampled without
    bias.
    """
    count = int(groups.max()) + 1 if len(groups) else 0
    order = lexsort(rng.random(len(labels)), shuffled(labels, groups, rng), groups)
    sizes = np.bincount(groups, minlength=count)
    position = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    along = position * fraction + np.repeat(rng.random(count), sizes)
    taken = np.floor(along + fraction + 1e-9) > np.floor(along + 1e-9)
    mask = np.empty(len(labels), bool)
    mask[order] = taken
    whole = np.bincount(groups[mask], minlength=count) == sizes
    first = order[np.searchsorted(groups[order], np.flatnonzero(whole & (sizes > 0)))]
    mask[first] = False
    return mask


def shuffled(inner: np.ndarray, outer: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a number for each pair of values; within one outer value, the inner ones come in a random order."""
    values, codes = numbered(inner)  # so that no product of large labels overflows
    width = max(1, len(values))
    pairs, place = numbered(outer.astype(np.int64) * width + codes)
    rank = np.empty(len(pairs), np.int64)
    rank[lexsort(rng.random(len(pairs)), pairs // width)] = np.arange(len(pairs))
    return rank[place]


def tails(spans: np.ndarray, fraction: float, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tail of each span of consecutive windows, and the windows that remain: two masks.

    Windows of text that begin less than `gap` characters apart overlap. So the fraction is one contiguous piece, and
    the `gap` windows before it belong to neither part. Nothing is taken from a span that is too short for that.
    """
    _, where, sizes = np.unique(spans, return_inverse=True, return_counts=True)
    position = np.arange(len(spans)) - (np.cumsum(sizes) - sizes)[where]
    wanted = np.floor(sizes * fraction + 1e-9).astype(np.int64)
    wanted[sizes - wanted - gap < 1] = 0
    cut = (sizes - wanted)[where]
    left = position < np.where(wanted > 0, sizes - wanted - gap, sizes)[where]
    return position >= cut, left
