"""Draws inside a loss: in a local step from the client's key, elsewhere from a fixed one. Most losses draw nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor

from undrift.functional.draws import KeyedDraws, Row, Trial, fixed_key
from undrift.functional.generators import seeded
from undrift.random import Key

if TYPE_CHECKING:
    from undrift.functional.model import Model

STREAMS = 3 << 13
"""Where a loss's draws begin among a step's streams: after those of the model, before augmentation."""


def with_draws_of_loss(model: Model, trial: Trial, drew: bool) -> Model:
    """Return the model with the information whether its loss draws, and draws that no key controls."""
    return model._with(loss_draws=drew, unkeyed=model.unkeyed or trial.unkeyed) if drew else model


def in_step(model: Model, key: Key, row: Row | None = None) -> AbstractContextManager[Any]:
    """A context for the loss of a local step."""
    if not model.loss_draws:
        return nullcontext()
    return model.seeding(key, row) if model.unkeyed else KeyedDraws(key.stream_at(STREAMS), row)


def repeating(model: Model, function: Any) -> Any:
    """Return the loss or a metric with fixed draws, for evaluation and for hooks."""
    if not model.loss_draws:
        return function

    @wraps(function)
    def repeated(output: Tensor, target: Tensor) -> Any:
        key = fixed_key(target.device)
        with seeded(key) if model.unkeyed else KeyedDraws(key):
            return function(output, target)

    return repeated
