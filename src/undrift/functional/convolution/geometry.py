"""The shapes of 2-d convolutions, and how their tensors lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Pair = tuple[int, int]
NO_ENTRY = 4
"""In the place of the chosen entry of a window: none, because ReLU made all of them zero."""


def pair(x: Any) -> Pair:
    """Height and width, of an argument that may be one number for both."""
    return (x, x) if isinstance(x, int) else tuple(x) * (2 // len(tuple(x)))


def conv2d_arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Pair, Pair] | None:
    """Return the arguments of a call of `F.conv2d`, or None if it is batchless, grouped, dilated or padded by name."""
    if groups != 1 or pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4:
        return None
    return input, weight, bias, pair(stride), pair(padding)


def output_size(size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> list[int]:
    """Return the height and width of a convolution's output."""
    return [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, kernel, stride, padding, strict=True)]


def channels_last(x: Tensor) -> Tensor:
    """From torch's lanes × batch × channels × height × width. Copies only if memory is not channels-last already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def channels_first(x: Tensor) -> Tensor:
    """Return a channels-last tensor in torch's order of axes, as a view."""
    return x.permute(0, 1, 4, 2, 3)
