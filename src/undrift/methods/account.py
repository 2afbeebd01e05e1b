"""Checks for methods that divide by the sum of the learning rates of all local steps."""

from __future__ import annotations

from typing import Any

from undrift.errors import UndriftError
from undrift.method.optimizers import is_sgd


def refuse_unaccountable(name: str, local: Any) -> None:
    """Refuse settings of `Local` whose steps are not a fixed multiple of the gradients; `name` is the method's."""
    optimizer = local.optimizer
    if local.clip_norm is not None:
        raise UndriftError(f"{name} cannot account for clipped gradients; leave out Local(clip_norm).")
    if optimizer is not None and (not is_sgd(optimizer) or optimizer.nesterov):
        kind = "SGD(nesterov=True)" if is_sgd(optimizer) else type(optimizer).__name__
        raise UndriftError(f"{name} cannot account for the steps of {kind}; use SGD without Nesterov's momentum.")
