"""Evaluation of the global model on held-out data: loss, metrics, and accuracy per class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrift.data.dataset import Rows
from undrift.loss_modules import PerSample
from undrift.losses import Metric, accuracy
from undrift.training.run import Run
from undrift.training.state import State

BATCH = 1000


def evaluate(run: Run, state: State) -> dict[str, Any]:
    """Loss and metrics on the test set, and as `validation_…` on the validation set, if there are such sets."""
    row = measured(run, state, run.test) if run.test else {}
    held = measured(run, state, run.validation) if run.validation else {}
    return row | {f"validation_{name}": value for name, value in held.items() if name != "class_accuracy"}


@torch.no_grad()
def measured(run: Run, state: State, data: Rows) -> dict[str, Any]:
    """The mean loss and each metric; with accuracy also `class_accuracy`, a list with None for classes without data."""
    sums, (right, seen) = run.ranks.sum(run.ranks.together(lambda: added_up(run, state, data)))
    found: dict[str, Any] = {name: float(top / bottom) for name, (top, bottom) in sums.items()}
    if len(right):
        found["class_accuracy"] = [r / s if s else None for r, s in zip(right.tolist(), seen.tolist(), strict=True)]
    return found


def added_up(run: Run, state: State, data: Rows) -> tuple[dict[str, Tensor], Tensor]:
    """Each measure's numerator and denominator, and how many samples of each class are right and how many there are.

    Of several processes, each takes some of the batches.
    """
    model = run.model.at(state.tracked)
    by_class = run.metrics.get("accuracy") is accuracy and run.data.classes > 0
    sums = {name: torch.zeros(2, dtype=torch.float64, device=data.index.device) for name in run.measures}
    classes = torch.zeros(2, run.data.classes if by_class else 0, device=data.index.device)
    for begin in range(run.ranks.rank * BATCH, len(data), run.ranks.size * BATCH):
        x, y = data.take(data.store, data.index[begin : begin + BATCH])
        output = model(state.params, x)
        for name, metric in run.measures.items():
            top, bottom = parts_of(metric, output, y)
            sums[name] += torch.stack([top.sum(), bottom.sum()])
        if by_class:
            for total, own in zip(classes, accuracy(output, y), strict=True):
                total.index_add_(0, y.clamp(min=0), (own * (y >= 0)).to(total.dtype))
    return sums, classes


def parts_of(metric: Metric, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """A metric's numerators and denominators per sample; the denominators are 1 if it returns single values."""
    value = metric.parts(output, target) if isinstance(metric, PerSample) else metric(output, target)
    top, bottom = value if isinstance(value, tuple) else (value, torch.ones_like(value, dtype=torch.float64))
    return top.double(), bottom.double()
