"""Metrics of predicted numbers, and perplexity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.losses import IGNORED, class_axis
from undrift.metrics.base import Metric, added

NOISE = 1e-12
"""Targets whose variance is below this share of their mean square are constant, as far as float64 sums can say."""


@dataclass(frozen=True)
class MAE(Metric):
    """The mean absolute error, over all targets of all samples."""

    higher_is_better = False

    def sums(self, output: Tensor, target: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
        errors = (output.reshape(target.shape).double() - target).abs()
        errors = errors.flatten(1).mean(1) if errors.dim() > 1 else errors
        return added([errors, torch.ones_like(errors)], owner, owners)

    def value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1]


@dataclass(frozen=True)
class R2(Metric):
    """R², 1 − (squared errors) / (squared deviations from the mean), per target; then the mean over targets.

    Constant targets have 1 if they are predicted exactly and 0 otherwise; of fewer than two samples it is undefined.
    """

    def sums(self, output: Tensor, target: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
        y, z = (t.reshape(len(target), -1).double() for t in (target, output.reshape(target.shape)))
        return added(torch.cat([torch.ones_like(y), y, y.square(), (y - z).square()], 1).T, owner, owners)

    def value(self, sums: Tensor) -> Tensor:
        n, total, squares, errors = sums.unflatten(0, (4, -1))
        deviations = squares - total.square() / n
        constant = deviations <= NOISE * squares
        by_target = torch.where(constant, (errors == 0).double(), 1 - errors / deviations)
        by_target = torch.where(errors.isnan(), errors, by_target)  # of a model that diverged
        return torch.where(n < 2, torch.nan, by_target).mean(0)


@dataclass(frozen=True)
class Perplexity(Metric):
    """exp of the mean cross-entropy over all labels, as of the tokens of a text; labels of -100 are left out."""

    higher_is_better = False

    def sums(self, output: Tensor, target: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
        axis = class_axis(output, target)
        if output.shape[axis] == 1:
            raise ValueError("it needs one output per class")
        labelled = target != IGNORED
        index = torch.where(labelled, target, 0).unsqueeze(axis)
        losses = -torch.log_softmax(output, axis).gather(axis, index).squeeze(axis)
        parts = (torch.where(labelled, losses.double(), 0.0), labelled.double())
        return added([t.flatten(1).sum(1) if t.dim() > 1 else t for t in parts], owner, owners)

    def value(self, sums: Tensor) -> Tensor:
        return (sums[0] / sums[1]).exp()
