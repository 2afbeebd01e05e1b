"""Losses, one value a sample, and metrics.

A metric is a function of (output, target) that gives one value a sample, averaged over the test set, or a pair
(numerators, denominators), each summed before they are divided: recall in the top 5, say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.errors import UndriftError, unknown

Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[Tensor, Tensor], Any]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """`−log softmax(z)_y`. The classes are the last axis."""
    return -torch.log_softmax(output, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """`‖z − y‖²`, averaged over what a sample has."""
    return (
        (output.reshape(target.shape) - target).square().flatten(1).mean(1)
        if target.dim() > 1
        else (output.reshape(target.shape) - target).square()
    )


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """`−y log σ(z) − (1−y) log(1−σ(z))`, averaged over a sample's labels."""
    losses = F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 where the highest output is the label."""
    return output.argmax(-1) == target


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse, "binary_cross_entropy": binary_cross_entropy}
METRICS: dict[str, Metric] = {"accuracy": accuracy}


def get_loss(loss: str | Loss | None) -> Loss:
    if loss is None:
        return cross_entropy
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        return LOSSES[loss]
    if not callable(loss):
        raise UndriftError(f"loss must be a name or a function of (output, target), not {loss!r}.")
    return loss


def get_metrics(metrics: Any, loss: Loss) -> dict[str, Metric]:
    """The metrics by name. Accuracy by default where the loss is cross-entropy, and none elsewhere."""
    if metrics is None:
        return {"accuracy": accuracy} if loss is cross_entropy else {}
    if isinstance(metrics, str):
        metrics = [metrics]
    if isinstance(metrics, list | tuple):
        metrics = {str(name): name for name in metrics}
    if not isinstance(metrics, dict):
        raise UndriftError(f"metrics must be names, or a dict of names and functions, not {metrics!r}.")
    for function in metrics.values():
        if not callable(function) and function not in METRICS:
            raise unknown("metric", str(function), METRICS)
    return {name: f if callable(f) else METRICS[f] for name, f in metrics.items()}
