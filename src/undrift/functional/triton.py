"""Kernels in Triton, where torch has no good one. What they compute is written beside the operations that use them.

Triton comes with torch's builds for GPUs; its modules here are imported where `available` says so, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels run here: Triton's, on a GPU from Ampere on. None is for float64."""
    return dtype != torch.float64 and _on(device)


@cache
def _on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) and bool(find_spec("triton"))


def precision() -> str:
    """What products of float32 are taken in, by torch's setting for all of them."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@cache
def memory(device: torch.device) -> int:
    """KiB of a processor's own memory that a program may take."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024  # type: ignore[attr-defined]


def stages(wanted: int, *runs: int) -> int:
    """How many turns of a loop to load ahead, given the bytes of the runs in memory that it reads.

    Triton 3.6 copies ahead of time wrongly where runs are shorter than what a thread reads, so those are not.
    """
    return 1 if any(run % 16 for run in runs) else wanted


def lanes_of(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the axis that vmap maps first, and with one where it has none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def more_lanes(operation: Callable[..., Tensor]) -> Any:
    """An operation's rule for a vmap around its lanes: so many times more lanes."""

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        folded = [
            lanes_of(arg, dim, size).flatten(0, 1) if isinstance(arg, Tensor) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        return operation(*folded).unflatten(0, (size, -1)), 0

    return rule
