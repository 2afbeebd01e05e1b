"""Checks of a run's batches: short ones, ones of a single sample, and ones whose samples interact.

Batch norm cannot train on one sample: torch rejects it, but in lanes such a batch is padded, and its variance would be
meaningless. And a step on a few samples has the same learning rate as one on a whole batch, and much more noise.

Batches whose samples interact, and data from elsewhere than the store, train on the plain engine.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.data.array_ops import first_occurrences
from undrift.data.dataset import FederatedDataset
from undrift.engine.device_data import DeviceData
from undrift.errors import UndriftError
from undrift.functional.batch_norm import SINGLE
from undrift.functional.draws import fixed_key
from undrift.functional.loss_draws import repeating
from undrift.functional.model import Model, Params
from undrift.loss_modules import PerSample, WholeBatch
from undrift.losses import Loss
from undrift.method.local import Local
from undrift.schedule import value, whole_steps
from undrift.tree import tree_leaves, tree_map

# ---- the last batch of an epoch ------------------------------------------------------------------------------------

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
    short = sizes[(sizes > size) & (SHORT * local.last_batches(sizes) < size)]
    if not len(short):
        return
    clients = np.flatnonzero(np.isin(data.sizes, short))
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
    reached: np.ndarray = _most_batches(local, clients, sizes, rounds, per_step) >= local.per_epoch(sizes)
    return reached


def _most_batches(local: Local, clients: np.ndarray, sizes: np.ndarray, rounds: int, per_step: int) -> np.ndarray:
    """Return the most batches that these clients take in any round."""
    if local.per_client or not callable(local.steps if local.steps is not None else local.epochs):
        return local.step_counts(0, clients, sizes, per_step) * per_step
    if local.steps is not None:
        most = max(whole_steps(value(local.steps, t)) for t in range(rounds))
        return np.full(len(clients), most * per_step)
    epochs = max(value(local.epochs, t) for t in range(rounds))
    return np.array([whole_steps(epochs * per / per_step) for per in local.per_epoch(sizes).tolist()]) * per_step


# ---- samples that lanes cannot pad or gather -----------------------------------------------------------------------

PROBED = 8
"""The number of samples on which to try a model."""


@torch.no_grad()
def samples_interact(model: Model, loss: Loss, data: DeviceData) -> bool:
    """Return whether a sample's training loss depends on the other samples of its batch, as contrastive losses do.

    Half of a batch, or one sample, must have the same losses as with the rest as padding, with the same draws: at the
    starting weights, and near them. They are computed in the model's own precision, and not in tf32 either
    (`full_precision`): a deep network may turn another order of summation into another loss.
    """
    rows, model = probe_rows(data), model.in_own_precision()
    if len(rows) < 2:
        return False
    count = len(rows)
    batch = data.batch(data.rows(rows), torch.ones(count, device=data.device))
    key, repeated = fixed_key(data.device), repeating(model, loss)

    def losses(weights: Params, rows: int, real: int) -> Tensor:
        x, y = tree_map(lambda t: t[:rows].clone(), (batch.x, batch.y))
        mask = (torch.arange(rows, device=data.device) < real).to(data.dtype)  # which norms in lanes know
        values: Tensor = repeated(model.train(tree_map(torch.clone, weights), x, key, mask=mask), y)[:real]
        return values.double()

    for weights in (model.start, model.perturbed()):
        for real in {1, max(count // 2, min(2, count - 1))}:
            try:
                alone, padded = losses(weights, real, real), losses(weights, count, real)
            except Exception:  # errors of the model or the loss are reported when training runs into them
                continue
            if not losses_agree(alone, padded, model.compute_dtype):
                return True
    return False


def probe_rows(data: DeviceData) -> np.ndarray:
    """Return samples to try: of every class one, as far as that goes, and others from all over the data."""
    everywhere = data.index[np.linspace(0, len(data.index) - 1, PROBED).astype(np.int64)]
    labels, of_classes = data.data.labels, data.index[:0]
    if labels is not None:
        of_classes = data.index[first_occurrences(labels, data.data.index)]
    return np.array(list(dict.fromkeys([*of_classes[:PROBED], *everywhere]))[:PROBED], np.int64)


def losses_agree(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two losses differ by no more than rounding explains; what is not finite says nothing."""
    size = other.abs().amax()
    allowed = min(1000 * torch.finfo(dtype).eps, 0.05)
    return not bool((one - other).abs().amax() > allowed * size)


def take_is_foreign(data: DeviceData) -> bool:
    """Return whether the data's own `take` reads more than the store: files, or anything else that cannot be traced.

    What was traced for some samples must give for others what `take` itself gives for them.
    """
    if data.host:  # then it runs on the host and is not traced
        return False
    take: Any = data.data.take
    while hasattr(take, "take"):  # one of ours that wraps another
        take = take.take
    if getattr(take, "__module__", type(take).__module__).startswith("undrift.") or len(data.index) < 2:
        return False
    ends = data.index[[0, -1]]
    first, other = (torch.from_numpy(rows.copy()).to(data.device) for rows in (ends, ends[::-1]))
    try:
        traced = make_fx(lambda indices: tree_leaves(take(data.store, indices)))(first)(other)
    except Exception:  # a user's function may raise anything while it is traced
        return True
    wanted = tree_leaves(take(data.store, other))
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(traced, wanted, strict=True))


def why_plain(model: Model, loss: Loss, data: DeviceData, padded: bool) -> str | None:
    """Return why a run must train on the plain engine, or None. `padded`: whether batches may be padded in lanes."""
    if take_is_foreign(data):
        return "the data's own `take` reads more than the tensors that it is given"
    if not padded:
        return None
    coupled = isinstance(loss, PerSample | WholeBatch) and loss.couples(data.data.store["y"])
    if not (coupled or samples_interact(model, loss, data)):
        return None
    whole = isinstance(loss, WholeBatch)
    what = "the loss returns one number for a batch" if whole else "the samples of a batch interact"
    return f"{what}, which the padding of short batches would change; drop_last=True leaves none in training"
