"""Batches in which the classes of a client are equally likely: draws with replacement, in place of permutations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from undrift.data.dataset import FederatedDataset
from undrift.random import philox

Array = np.ndarray
Order = Callable[[tuple[Array, Array], Array, Array, Array, Array], Array]
"""Returns positions within a client's data, one segment after another. The arguments are a key per client; per segment,
the client's index, the pass over its data and the segment's length; and where each segment begins."""


def balanced(data: FederatedDataset, clients: Array) -> Order:
    """Return draws of one of the client's classes, all equally likely, and then of one of its samples.

    Both are `⌊u·count / 2³²⌋` of a Philox word u under the client's key. Samples without a label are one class.
    """
    assert data.labels is not None
    sizes = data.sizes_of(clients)
    owner = np.repeat(np.arange(len(clients)), sizes)
    position = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    labels = data.labels.numpy()[data.index.numpy()[data.offsets[clients][owner] + position]]
    labels = np.where(labels < 0, -1, labels)
    order = np.lexsort((labels, owner))  # stable: client by client, class by class
    position, owner, labels = position[order], owner[order], labels[order]
    new = np.ones(len(owner), bool)
    new[1:] = (owner[1:] != owner[:-1]) | (labels[1:] != labels[:-1])
    begin = np.flatnonzero(new)  # of each class of each client
    samples = np.diff(np.append(begin, len(owner)))
    classes = np.bincount(owner[begin], minlength=len(clients))
    first = np.cumsum(classes) - classes

    def drawn(key: tuple[Array, Array], client_of: Array, epoch_of: Array, lengths: Array, begins: Array) -> Array:
        segment = np.repeat(np.arange(len(lengths)), lengths)
        number = np.arange(len(segment)) - np.repeat(begins, lengths)
        client = client_of[segment]
        # The third word is 0 for permutations, so no draw of theirs is one of these.
        words = philox((number, epoch_of[segment], 1, 0), (key[0][client], key[1][client]))
        group = first[client] + (words[0] * classes[client] >> 32)
        return position[begin[group] + (words[1] * samples[group] >> 32)]

    return drawn
