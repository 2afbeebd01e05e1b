"""What `undrift list` prints: names by kind, with a line about each."""

from __future__ import annotations

import inspect
from typing import Any

import undrift
from undrift import losses as known_losses
from undrift import metrics as known_metrics
from undrift import models as known_models
from undrift.data import sources
from undrift.method.parse import known_optimizers, known_parts

Lines = dict[str, str]


def _line(thing: Any) -> str:
    """The first line of its docstring."""
    text = inspect.getdoc(thing) or ""
    return text.splitlines()[0] if text else ""


def methods() -> Lines:
    return {name: _line(part) for name, part in known_parts().items()}


def optimizers() -> Lines:
    return {name: _line(optimizer) for name, optimizer in known_optimizers().items()}


def partitions() -> Lines:
    return {name: _line(getattr(undrift, name)) for name in undrift.PARTITIONS}


def models() -> Lines:
    return {name: _line(model) for name, model in known_models.MODELS.items()}


def losses() -> Lines:
    return {name: _line(loss) for name, loss in known_losses.LOSSES.items()}


def metrics() -> Lines:
    return {name: _line(metric) for name, metric in known_metrics.METRICS.items()}


def data() -> Lines:
    return {name: _line(sources.FUNCTIONS[name]) for name in sources.FUNCTIONS} | {
        name: f"{_line(recipe)} ({recipe.hub})" for name, recipe in sources.RECIPES.items()
    }
