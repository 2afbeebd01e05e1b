"""Helpers for the vmap rules of operations that have an axis of lanes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor


def lanes_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return the tensor with the vmapped axis first; a tensor that is not vmapped is expanded to `size` lanes."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def fold_into_lanes(operation: Callable[..., Any]) -> Any:
    """Return the vmap rule of an operation whose tensors all have lanes first: the vmapped axis becomes more lanes."""

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        folded = [
            lanes_first(arg, dim, size).flatten(0, 1) if isinstance(arg, Tensor) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        found = operation(*folded)
        if isinstance(found, tuple):
            return tuple(t.unflatten(0, (size, -1)) for t in found), (0,) * len(found)
        return found.unflatten(0, (size, -1)), 0

    return rule


def mapped(tensor: Tensor) -> bool:
    """Return whether vmap maps this tensor over an axis."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False
