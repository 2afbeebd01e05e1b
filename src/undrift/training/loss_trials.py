"""Trials of a user's loss and metrics on a few different samples: what a value per sample depends on."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.array_ops import first_occurrences
from undrift.data.dataset import Rows
from undrift.data.samples import Samples
from undrift.errors import UndriftError
from undrift.functional.loss_draws import repeating
from undrift.functional.model import Model
from undrift.loss_modules import PerSample
from undrift.metrics.base import streams
from undrift.tree import tree_map

FEW = 8
"""The number of samples, of as many classes as possible."""
PAIRED = 4
"""The number of samples of which all pairs of an output and a target are tried."""
SEARCHED = 1000
"""The number of samples among which different targets are looked for."""


def different_samples(rows: Rows, device: torch.device) -> tuple[Samples, Tensor]:
    """Return a few samples, of different classes as far as that goes."""
    y, last = rows.store["y"], len(rows) - 1
    some = first_occurrences(y, rows.index)[:FEW] if y.dim() == 1 else np.arange(min(FEW, len(rows)))
    chosen = rows.index[torch.from_numpy(np.union1d(some, [0, last]))]
    x, target = tree_map(lambda t: t.to(device), rows.take(rows.store, chosen))
    return x, target


def check_mean(model: Model, loss: PerSample, rows: Rows, device: torch.device) -> None:
    """Let a loss module compare its values with its own mean, on samples of different classes."""
    x, target = different_samples(rows, device)
    with torch.no_grad(), contextlib.suppress(Exception):  # other checks report what does not match
        loss.check(model(model.perturbed(), x), target)


def refuse_broadcasts(model: Model, functions: dict[str, Any], rows: Rows, device: torch.device) -> None:
    """Reject a loss or a metric that compares each sample's output with the targets of all others.

    That is what torch makes of outputs N×1 and targets N, and the result may look like one value per sample. A loss
    that is meant to couple samples, such as a contrastive one, is no mean over pairs of an output and a target.
    """
    theirs = {name: function for name, function in functions.items() if not _is_ours(function)}
    if not theirs or rows.store["y"].shape[1:].numel() != 1:
        return
    some = rows.index[np.linspace(0, len(rows) - 1, SEARCHED).astype(np.int64)]
    first = np.unique(rows.store["y"][some].flatten().cpu().numpy(), return_index=True)[1]
    chosen = some[first[np.linspace(0, len(first) - 1, PAIRED).astype(np.int64)]]  # of different targets
    found: list[tuple[str, Tensor, Tensor]] = []
    with torch.no_grad(), warnings.catch_warnings(), contextlib.suppress(Exception):  # that is for other checks
        warnings.simplefilter("ignore")  # torch warns of some of these shapes
        x, y = tree_map(lambda t: t.to(device), rows.take(rows.store, chosen))
        z = model(model.perturbed(), x)
        if isinstance(z, Tensor) and z[:1].numel() == 1:
            found += [(name, z, y) for name, f in theirs.items() if broadcasts(repeating(model, f), z, y)]
    for name, z, y in found:
        raise UndriftError(
            f"The {name} broadcasts outputs of shape {_shape(z)} against targets of shape {_shape(y)}, so that each "
            "sample is compared with the targets of all others; give both one shape, for example by y[:, None] or "
            "output.squeeze(1)."
        )


def _is_ours(function: Any) -> bool:
    where = getattr(function, "__module__", type(function).__module__)
    return streams(function) or (str(where).startswith("undrift.") and not isinstance(function, PerSample))


def _shape(t: Tensor) -> str:
    return f"({', '.join(['N', *map(str, t.shape[1:])])}{',' if t.dim() == 1 else ''})"


def broadcasts(function: Any, z: Tensor, y: Tensor) -> bool:
    """Return whether values are means or sums over all pairs of an output and a target, instead of a sample's own."""
    rows = [slice(i, i + 1) for i in range(len(z))]
    pairs = torch.stack([function(z[i], y[j]).reshape(()) for i in rows for j in rows]).double().view(len(z), -1)
    found = function(z, y).double()

    def is_any(*wanted: Tensor) -> bool:
        return any(found.shape == own.shape and bool((found - own).norm() <= 0.001 * own.norm()) for own in wanted)

    own = pairs.diagonal()
    if is_any(own, own.mean(), own.sum()):
        return False
    return is_any(*(reduce(axis) for reduce in (pairs.mean, pairs.sum) for axis in (0, 1)), pairs.mean(), pairs.sum())
