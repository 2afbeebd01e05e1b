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


def measured(run: Run, state: State, data: Rows) -> dict[str, Any]:
    """The mean loss and each metric; with accuracy also `class_accuracy`, a list with None for classes without data."""
    return ratios(totals(run, state, data))


@torch.no_grad()
def totals(run: Run, state: State, data: Rows) -> dict[str, Any]:
    """Numerators and denominators of what `measured` returns: `sums` per metric, and `by_class` with accuracy."""
    model = run.model.at(state.tracked)
    sums: dict[str, Any] = {name: [0.0, 0.0] for name in run.measures}
    by_class = run.metrics.get("accuracy") is accuracy and run.data.classes > 0
    right = torch.zeros(run.data.classes, device=data.index.device)
    seen = torch.zeros_like(right)
    for begin in range(0, len(data), BATCH):
        x, y = data.take(data.store, data.index[begin : begin + BATCH])
        output = model(state.params, x)
        for name, metric in run.measures.items():
            top, bottom = parts_of(metric, output, y)
            sums[name] = [sums[name][0] + top.sum(), sums[name][1] + bottom.sum()]
        if by_class:
            top, bottom = (t * (y >= 0) for t in accuracy(output, y))
            right.index_add_(0, y.clamp(min=0), top.to(right.dtype))
            seen.index_add_(0, y.clamp(min=0), bottom.to(right.dtype))
    return {"sums": sums} | ({"by_class": [right, seen]} if by_class else {})


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """The columns that sums stand for."""
    row: dict[str, Any] = {name: float(top / bottom) for name, (top, bottom) in found["sums"].items()}
    if "by_class" in found:
        pairs = zip(*(t.tolist() for t in found["by_class"]), strict=True)
        row["class_accuracy"] = [right / seen if seen else None for right, seen in pairs]
    return row


def parts_of(metric: Metric, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """A metric's numerators and denominators per sample; the denominators are 1 if it returns single values."""
    value = metric.parts(output, target) if isinstance(metric, PerSample) else metric(output, target)
    top, bottom = value if isinstance(value, tuple) else (value, torch.ones_like(value, dtype=torch.float64))
    return top.double(), bottom.double()
