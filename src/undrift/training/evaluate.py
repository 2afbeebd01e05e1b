"""Evaluation of the global model on held-out data: loss, metrics, and accuracy per class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from undrift.data.dataset import Rows
from undrift.loss_modules import PerSample
from undrift.losses import Metric, accuracy
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import tree_bytes

BATCH = 1000
BATCH_BYTES = 2**25
"""The most that the samples of a batch may take; of large ones there are fewer in it."""


def evaluate(run: Run, state: State) -> dict[str, Any]:
    """Loss and metrics on the test set, and as `validation_…` on the validation set, if there are such sets."""
    row = measured(run, state, run.test) if run.test else {}
    held = measured(run, state, run.validation) if run.validation else {}
    return row | {f"validation_{name}": value for name, value in held.items() if name != "class_accuracy"}


def measured(run: Run, state: State, data: Rows) -> dict[str, Any]:
    """The mean loss and each metric; with accuracy also `class_accuracy`, a list with None for classes without data."""
    return ratios(run.ranks.sum(run.ranks.together(lambda: totals(run, state, data))))


@torch.no_grad()
def totals(run: Run, state: State, data: Rows) -> dict[str, Any]:
    """Numerators and denominators of what `measured` returns: `sums` per metric, and `by_class` with accuracy.

    Of several processes, each takes some of the batches.
    """
    model = run.model.at(state.tracked)
    by_class = run.metrics.get("accuracy") is accuracy and run.data.classes > 0
    sums = {name: torch.zeros(2, dtype=torch.float64, device=run.device) for name in run.measures}
    classes = torch.zeros(2, run.data.classes if by_class else 0, device=run.device)
    size = batch_size(run)
    for x, y in replace(data, index=own_batches(run, data.index, size)).batches(size):
        output = model(state.params, x)
        for name, metric in run.measures.items():
            top, bottom = parts_of(metric, output, y)
            sums[name] += torch.stack([top.sum(), bottom.sum()])
        if by_class:
            for total, own in zip(classes, accuracy(output, y), strict=True):
                total.index_add_(0, y.clamp(min=0), (own * (y >= 0)).to(total.dtype))
    return {"sums": sums} | ({"by_class": classes} if by_class else {})


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """The columns that sums stand for."""
    row: dict[str, Any] = {name: float(top / bottom) for name, (top, bottom) in found["sums"].items()}
    if "by_class" in found:
        pairs = zip(*found["by_class"].tolist(), strict=True)
        row["class_accuracy"] = [right / seen if seen else None for right, seen in pairs]
    return row


def own_batches(run: Run, values: Tensor, size: int) -> Tensor:
    """Of the batches of so many values that these make up, those that this process takes."""
    if not run.ranks.several:
        return values
    return torch.cat([values[:0], *values.split(size)[run.ranks.rank :: run.ranks.size]])


def batch_size(run: Run) -> int:
    """How many samples to evaluate at a time: a function of their size, not of where they lie, which decides no bit."""
    return min(BATCH, max(1, BATCH_BYTES // max(1, tree_bytes(run.device_data.sample))))


def parts_of(metric: Metric, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """A metric's numerators and denominators per sample; the denominators are 1 if it returns single values."""
    value = metric.parts(output, target) if isinstance(metric, PerSample) else metric(output, target)
    top, bottom = value if isinstance(value, tuple) else (value, torch.ones_like(value, dtype=torch.float64))
    return top.double(), bottom.double()
