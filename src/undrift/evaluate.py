"""The model on data it was not trained on: loss, metrics, and accuracy by class."""

from __future__ import annotations

from typing import Any

import torch

from undrift.data.dataset import Rows
from undrift.losses import Loss, Metric, accuracy
from undrift.models.functional import Model, Params

BATCH = 1000


@torch.no_grad()
def evaluate(
    model: Model, params: Params, rows: Rows, loss: Loss, metrics: dict[str, Metric], classes: int
) -> dict[str, Any]:
    """The mean loss and each metric; beside accuracy also `class_accuracy`, a list with None for a class not seen."""
    sums: dict[str, Any] = {"loss": [0.0, 0.0]} | {name: [0.0, 0.0] for name in metrics}
    right = torch.zeros(classes, device=rows.index.device)
    seen = torch.zeros_like(right)
    for begin in range(0, len(rows), BATCH):
        x, y = rows.take(rows.store, rows.index[begin : begin + BATCH])
        output = model(params, x)
        for name, metric in {"loss": loss, **metrics}.items():
            value = metric(output, y)
            top, bottom = value if isinstance(value, tuple) else (value, torch.ones_like(value, dtype=torch.float64))
            sums[name] = [sums[name][0] + top.double().sum(), sums[name][1] + bottom.double().sum()]
        if metrics.get("accuracy") is accuracy:
            right.index_add_(0, y, accuracy(output, y).to(right.dtype))
            seen.index_add_(0, y, torch.ones_like(y, dtype=right.dtype))
    found: dict[str, Any] = {name: float(top / bottom) for name, (top, bottom) in sums.items()}
    if metrics.get("accuracy") is accuracy:
        found["class_accuracy"] = [r / s if s else None for r, s in zip(right.tolist(), seen.tolist(), strict=True)]
    return found
