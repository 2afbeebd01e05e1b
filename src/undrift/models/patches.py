"""Convolutions as products of matrices: the patches of a picture, times the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


def pair(x: Any) -> Pair:
    return (x, x) if isinstance(x, int) else tuple(x) * (2 // len(tuple(x)))


def arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Pair, Pair] | None:
    """Those of a call of `F.conv2d` if it is plain, one of whole pictures in one group, else None."""
    if groups != 1 or pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4:
        return None
    return input, weight, bias, pair(stride), pair(padding)


def channels_last(x: Tensor) -> Tensor:
    """Lanes × batch × height × width × channels, of what has the channels third. No copy where it lies so already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Pair]:
    """Lanes × (batch · positions) × (kernel · channels), and the number of positions each way.

    Of pictures whose channels come last, so that patches are made of runs of neighbours.
    """
    if any(padding):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    view = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])  # L B H' W' C k k
    lanes, batch, height, width = view.shape[:4]
    return view.permute(0, 1, 2, 3, 5, 6, 4).reshape(lanes, batch * height * width, -1), (height, width)


def as_weight(matrix: Tensor, weight: Tensor) -> Tensor:
    """… × outputs × (kernel · channels), as patches have them, in the shape of the weights."""
    channels, *kernel = weight.shape[-3:]
    return torch.movedim(matrix.unflatten(-1, (*kernel, channels)), -1, -3)
