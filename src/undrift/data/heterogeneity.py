"""How heterogeneous the clients' data are, measured on the data themselves, whatever the partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from undrift.data.dataset import FederatedDataset
from undrift.data.partition import ONE_BY_ONE
from undrift.data.pieces import median
from undrift.errors import UndriftError
from undrift.random import host_generator

BATCH = 500
"""How many samples to read at a time if only `take` has the labels, since a bag of words is wide."""


def class_counts(data: FederatedDataset) -> np.ndarray:
    """Return samples per client and class, as clients × classes. A sample with several labels counts once for each."""
    if data.labels is not None:
        return data.label_counts().numpy()
    if not data.task.classes:
        raise UndriftError("These data have no classes to count; their targets are numbers.")
    counts = np.zeros((len(data), data.task.classes), np.int64)
    owner = np.repeat(np.arange(len(data)), data.sizes)
    for begin in range(0, len(owner), BATCH):
        part = slice(begin, begin + BATCH)
        targets = data.take(data.store, data.index[part])[1].to(torch.int64).numpy()
        np.add.at(counts, owner[part], targets)
    return counts


def label_distance(counts: np.ndarray) -> float:
    """Return the mean over clients, weighted by size, of the total variation distance `½ Σ_c |p_c − q_c|`.

    p is a client's label distribution, q that of all data. 0 means that all clients have the same distribution;
    values near 1 that no two clients share a class.
    """
    held = counts[counts.sum(1) > 0]
    sizes = held.sum(1)
    mix, overall = held / sizes[:, None], held.sum(0) / held.sum()
    return float(np.average(np.abs(mix - overall).sum(1) / 2, weights=sizes))


def by_chance(counts: np.ndarray) -> np.ndarray:
    """Return the same samples assigned at random to clients of the same sizes."""
    rng, left, sizes = host_generator(0, "heterogeneity"), counts.sum(0), counts.sum(1)
    if len(counts) > ONE_BY_ONE:
        labels = rng.permutation(np.repeat(np.arange(len(left)), left))
        place = np.repeat(np.arange(len(sizes)), sizes) * len(left) + labels
        return np.bincount(place, minlength=counts.size).reshape(counts.shape)
    drawn = []
    for size in sizes:
        drawn.append(rng.multivariate_hypergeometric(left, size))
        left = left - drawn[-1]
    return np.stack(drawn)


def heterogeneity(data: FederatedDataset) -> dict[str, Any]:
    """Return sizes, classes per client, and `label_distance`, also for a random partition of the same sizes."""
    sizes, clients = data.size_counts
    found: dict[str, Any] = {
        "clients": data.population,
        "empty": len(data) - data.population,
        "samples": int((sizes * clients).sum()),
        "smallest": int(sizes.min()),
        "median": median(sizes, clients),
        "largest": int(sizes.max()),
    }
    if not data.classes and not data.task.classes:
        return found
    counts = class_counts(data)[data.nonempty]
    return found | {
        "classes": int((counts.sum(0) > 0).sum()),
        "classes_per_client": float((counts > 0).sum(1).mean()),
        "label_distance": label_distance(counts),
        "label_distance_by_chance": label_distance(by_chance(counts)),
    }
