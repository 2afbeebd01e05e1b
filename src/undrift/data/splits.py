"""Hold out samples: the test set, and what the server, validation and the clients' own tests get."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real

import numpy as np
import torch

from undrift.data.array_ops import lexsort, unique_inverse
from undrift.data.dataset import Rows
from undrift.data.source import Source
from undrift.errors import UndriftError, quoted
from undrift.random import host_generator

TEST_FRACTION = 0.2
"""The fraction of a named data set to test on if it has no test set."""


def with_test(source: Source, name: str | None, fraction: float | None, size: int | None) -> Source:
    """Return the source with a test set: its own, or a fraction of every class and client that no seed changes."""
    if fraction is not None and source.test is not None:
        raise UndriftError(f"{name or 'The data'} has a test set of its own; leave test_fraction out.")
    if fraction is None and name:
        fraction = TEST_FRACTION
    if source.test is None and fraction:
        rng = host_generator(0, f"{name} test set")
        # Ordered by class and, within a class, by client: the fraction is exact per class, approximate per client.
        strata = source.labels if source.keys is None else shuffled_rank(source.keys, source.labels, rng)
        held = stratified_mask(strata, fraction, rng)
        if not held.any():
            raise UndriftError(f"test_fraction={fraction} of {len(held)} samples is none; make it larger.")
        indices = source.in_store(np.arange(len(held)))
        source = replace(
            source,
            labels=source.labels[~held],
            indices=indices[~held],
            test=Rows(source.store, torch.from_numpy(indices[held]), source.take),
            keys=None if source.keys is None else source.keys[~held],
        )
    if size is not None and source.test is not None and size < len(source.test):
        chosen = host_generator(0, f"{name} test sample").choice(len(source.test), size, replace=False)
        index = source.test.index[torch.from_numpy(np.sort(chosen))]
        whose = None if source.test_keys is None else source.test_keys[np.sort(chosen)]
        source = replace(source, test=replace(source.test, index=index), test_keys=whose)
    return source


def hold_out(
    source: Source, samples: np.ndarray, fraction: float, seed: int, purpose: str
) -> tuple[Rows | None, np.ndarray]:
    """Return a class-balanced fraction of these training samples, None if it is 0, and the samples that remain."""
    if not fraction:
        return None, samples
    held, left = split_masks(source, samples, fraction, host_generator(seed, f"{purpose} data"))
    if not held.any():
        raise UndriftError(f"{purpose}_fraction of {len(samples)} samples is none; make it larger.")
    return Rows(source.store, torch.from_numpy(source.in_store(samples[held])), source.take), samples[left]


def split_masks(
    source: Source, samples: np.ndarray, fraction: float, rng: np.random.Generator, owner: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return which of these samples a fraction takes (per owner, if given), and which remain: two masks."""
    if source.spans is not None:
        return tail_masks(source.spans[samples], fraction, source.gap)
    labels = source.labels[samples]
    held = (
        stratified_mask(labels, fraction, rng)
        if owner is None
        else stratified_mask_by_group(labels, owner, fraction, rng)
    )
    return held, ~held


def check_fractions(server: float, validation: float, client_test: float, test: float | None) -> None:
    fractions = {
        "server_fraction": server,
        "validation_fraction": validation,
        "client_test_fraction": client_test,
        "test_fraction": 0.0 if test is None else test,
    }
    for argument, fraction in fractions.items():
        if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 <= float(fraction) < 1:
            raise UndriftError(f"{argument} must be in [0, 1), not {quoted(fraction)}.")
    if server + validation >= 1:
        raise UndriftError(
            "server_fraction and validation_fraction leave nothing to train on; they must sum to less than 1."
        )


def stratified_mask(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Return a class-balanced fraction, as a mask: every (1/fraction)-th sample in order of class.

    The number taken of each class is within one of its exact share.
    """
    order = lexsort(rng.random(len(labels)), labels)
    position = np.arange(len(order))
    mask = np.empty(len(labels), bool)
    mask[order] = np.floor((position + 1) * fraction + 1e-9) > np.floor(position * fraction + 1e-9)
    return mask


def stratified_mask_by_group(
    labels: np.ndarray, groups: np.ndarray, fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """Return a class-balanced fraction of each group, as a mask, which never takes all of a group's samples.

    Classes come in a random order per group, counted from a random offset, so that small groups are sampled without
    bias.
    """
    count = int(groups.max()) + 1 if len(groups) else 0
    order = lexsort(rng.random(len(labels)), shuffled_rank(labels, groups, rng), groups)
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


def shuffled_rank(inner: np.ndarray, outer: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a number for each pair of values; within one outer value, the inner ones come in a random order."""
    values, codes = unique_inverse(inner)  # so that no product of large labels overflows
    width = max(1, len(values))
    pairs, place = unique_inverse(outer.astype(np.int64) * width + codes)
    rank = np.empty(len(pairs), np.int64)
    rank[lexsort(rng.random(len(pairs)), pairs // width)] = np.arange(len(pairs))
    return rank[place]


def tail_masks(spans: np.ndarray, fraction: float, gap: int) -> tuple[np.ndarray, np.ndarray]:
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
