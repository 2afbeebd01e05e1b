"""Convolutions as products of matrices: the patches of a picture, times the weights.

Two operations do it for all lanes at once; on a GPU they are the kernels of `kernels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.functional.triton import available, more_lanes

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


@torch.library.custom_op("undrift::correlate", mutates_args=())
def correlate(x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Σ over kernel and channels of patches · weights, plus bias: lanes × batch × height × width × outputs."""
    if available(x.device, x.dtype):
        from undrift.functional.convolution import kernels

        return kernels.correlate(x, weight, bias, stride, padding)
    columns, size = patches(x, weight.shape[2:4], stride, padding)
    return (columns @ weight.flatten(2).mT + bias[:, None]).unflatten(1, (x.shape[1], *size))


@correlate.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    size = [
        (n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:4], padding, weight.shape[2:4], stride, strict=True)
    ]
    return x.new_empty(*x.shape[:2], *size, weight.shape[1])


@torch.library.custom_op("undrift::gradient", mutates_args=())
def gradient(
    g: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], squared: bool = False
) -> Tensor:
    """Σ over positions of g · patches: lanes × outputs × (kernel · channels + 1), the last column the bias's, Σ g.

    `squared`: Σ over samples of the square of each one's.
    """
    if available(x.device, x.dtype):
        from undrift.functional.convolution import kernels

        return kernels.gradient(g, x, kernel, stride, padding, squared)
    columns, rows = patches(x, kernel, stride, padding)[0], g.flatten(1, 3)
    if squared:
        columns, rows = (t.unflatten(1, (x.shape[1], -1)) for t in (columns, rows))
    found = torch.cat([rows.mT @ columns, rows.sum(-2)[..., None]], -1).to(torch.promote_types(x.dtype, torch.float32))
    return found.square().sum(1) if squared else found


@gradient.register_fake
def _(g: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], squared: bool = False) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(len(x), g.shape[4], kernel[0] * kernel[1] * x.shape[4] + 1, dtype=dtype)


correlate.register_vmap(more_lanes(correlate))
gradient.register_vmap(more_lanes(gradient))
