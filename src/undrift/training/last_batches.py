"""The last batch of an epoch, which may be short. Batches follow from the clients' sizes and step counts.

Batch norm cannot train on one sample: torch rejects it, but in lanes such a batch is padded, and its variance would be
meaningless. And a step on a few samples has the same learning rate as one on a whole batch, and much more noise.
"""

from __future__ import annotations

import logging

import numpy as np

from undrift.data.dataset import FederatedDataset
from undrift.errors import UndriftError
from undrift.functional.batch_norm import SINGLE
from undrift.functional.model import Model
from undrift.method.local import Local
from undrift.schedule import value, whole_steps

log = logging.getLogger("undrift")

SHORT = 8
"""A batch is short if it has less than this part of `batch_size`."""


def check_single_samples(
    model: Model, local: Local, data: FederatedDataset, rounds: int, per_step: int, tuned: bool
) -> None:
    """Reject a run in which some client has a batch of one sample, if the model cannot train on it.

    Args:
        model: The model.
        local: The local work.
        data: The clients' data; clients without samples do not train.
        rounds: The number of rounds.
        per_step: How many batches a step takes.
        tuned: Whether clients also train for one epoch to be evaluated.
    """
    suspicious = data.size_counts[0][local.last_batches(data.size_counts[0]) == 1]
    if not len(suspicious) or not model.refuses_single:
        return
    sizes = data.sizes
    first = sizes if local.batch_size is None else np.minimum(sizes, local.batch_size)
    suspects = np.flatnonzero(np.isin(sizes, suspicious))
    if len(suspects):
        reached = _reached(local, suspects, sizes[suspects], rounds, per_step)
        suspects = suspects[reached | tuned | (first[suspects] == 1)]
    if not len(suspects):
        return
    client = suspects[0]
    if first[client] > 1:
        raise UndriftError(SINGLE.replace("A client's batch", f"The last batch of client {client}"))
    if local.batch_size == 1:
        raise UndriftError("Batch norm cannot train on a batch of one sample; choose a larger batch_size.")
    raise UndriftError(
        f"Client {client} has one sample, on which batch norm cannot train; leave such clients out of the data, or "
        "choose a norm that does not look across samples (GroupNorm)."
    )


def warn_of_short_batches(local: Local, data: FederatedDataset, rounds: int, per_step: int) -> None:
    """Warn if epochs of several batches end with a short one, which may move a client as far as all the others."""
    size, sizes = local.batch_size, data.size_counts[0]
    if size is None:
        return
    found = sizes[(sizes > size) & (SHORT * local.last_batches(sizes) < size)]
    if not len(found):
        return
    clients = np.flatnonzero(np.isin(data.sizes, found))
    clients = clients[_reached(local, clients, data.sizes[clients], rounds, per_step)]
    if len(clients):
        last = local.last_batches(data.sizes[clients])
        log.warning(
            "%s of %s clients end their epochs with a batch of less than an eighth of batch_size (client %d: %d of %d "
            "samples), which can move them as far as all their other steps; Local(drop_last=True) leaves it out",
            f"{len(clients):,}", f"{data.population:,}", clients[last.argmin()], last.min(), size,
        )  # fmt: skip


def check_batch_sizes(model: Model, counts: np.ndarray) -> None:
    """Check the same for one round, whose step counts parts may have changed, by the sizes of its batches."""
    if (counts == 1).any() and model.refuses_single:
        raise UndriftError(SINGLE)


def _reached(local: Local, clients: np.ndarray, sizes: np.ndarray, rounds: int, per_step: int) -> np.ndarray:
    """Return which of these clients take the last batch of an epoch in some round."""
    found: np.ndarray = _most_batches(local, clients, sizes, rounds, per_step) >= local.per_epoch(sizes)
    return found


def _most_batches(local: Local, clients: np.ndarray, sizes: np.ndarray, rounds: int, per_step: int) -> np.ndarray:
    """Return the most batches that these clients take in any round."""
    if local.per_client or not callable(local.steps if local.steps is not None else local.epochs):
        return local.step_counts(0, clients, sizes, per_step) * per_step
    if local.steps is not None:
        most = max(whole_steps(value(local.steps, t)) for t in range(rounds))
        return np.full(len(clients), most * per_step)
    epochs = max(value(local.epochs, t) for t in range(rounds))
    return np.array([whole_steps(epochs * per / per_step) for per in local.per_epoch(sizes).tolist()]) * per_step
