"""Torch's compiler, with two precautions.

Kernels are chosen by rule. By default, the compiler times variants, some of which sum in another order, and takes the
fastest, so that two processes could give different bits. And the first call also runs the uncompiled program and
compares the results: in bfloat16, torch 2.11 silently computes the gradient of SiLU before pooling incorrectly, by more
than half its norm. If the two differ, the run continues uncompiled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("undrift")

ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TF32 = 2.0**-11


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return the function, compiled with static shapes: dynamic ones made some kernels ten times slower."""
    from torch._inductor import config  # takes a second, and only runs that compile need it

    by_rule: dict[str, Any] | None = {"deterministic": True} if hasattr(config, "deterministic") else None
    return torch.compile(function, dynamic=False, options=by_rule, **options)


class Tried:
    """A program and its compiled form. The first call runs both and compares; later calls run the correct one."""

    def __init__(self, program: Callable[..., list[Tensor]], compute: torch.dtype) -> None:
        self.program, self.compute = program, compute
        self.chosen: Callable[..., list[Tensor]] | None = None

    def __call__(self, *leaves: Tensor) -> list[Tensor]:
        if self.chosen:
            return self.chosen(*leaves)
        made = compiled(getattr(self.program, "forward", self.program))
        found, wanted = made(*leaves), self.program(*leaves)
        self.chosen = made if trusted(distance(found, wanted), self.compute) else self.program
        return found if self.chosen is made else wanted


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor], start: Sequence[Tensor] | None = None) -> float:
    """Return ‖found − wanted‖ / ‖wanted − start‖ over all floating-point tensors as one vector.

    NaN if that is not informative: if `wanted` is not finite, or if `found` and `wanted` both equal `start`.
    """
    error, size = 0.0, 0.0
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if other.is_floating_point():
            moved = other if start is None else other - start[i]
            error += float((one.double() - other.double()).square().sum())
            size += float(moved.double().square().sum())
    if not math.isfinite(size):
        return math.nan
    if not math.isfinite(error) or not size:
        return math.inf if error else math.nan
    return math.sqrt(error / size)


def rounding(compute: torch.dtype) -> float:
    """Return the largest distance that rounding alone explains, in the precision of the products.

    A rounding error of u flips about that share of a model's kinks (ReLU, pooling), whose gradients are then entirely
    wrong, which is √u of the norm. The bound is four times that.
    """
    tf32 = compute == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 4 * math.sqrt(TF32 if tf32 else ROUNDING[compute])


def trusted(off: float, compute: torch.dtype) -> bool:
    """Return whether rounding alone explains a distance. NaN is not informative, so it passes."""
    bound = rounding(compute)
    if off > bound:
        log.warning(
            "torch's compiler made a program that is off by %.2g (rounding alone: at most %.2g) from the one it was "
            "given; this run goes on without compiling it. Pass compile=False to skip this check.",
            off,
            bound,
        )
    return not off > bound
