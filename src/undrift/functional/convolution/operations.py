"""The operations of a cohort's 2-d convolutions: the forward pass, and the gradients of the input and the weights.

Every lane has its own weights. A convolution is the matrix product of the input's patches with the weights (im2col),
and one call of an operation does it for all lanes. The plain torch here defines each operation and is what the kernels
(`kernels.py`) are tested against. Where there are no kernels, `lanes.convolutions` leaves `F.conv2d` to torch; only the
squared weight gradient runs as it is written here.

Tensors are channels-last: inputs, outputs and their gradients are lanes × batch × height × width × channels, weights
are lanes × outputs × kernel height × kernel width × inputs. `g` is the gradient with respect to the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.triton import available
from undrift.vmap import fold_into_lanes

Pair = tuple[int, int]


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


def channels_last(x: Tensor) -> Tensor:
    """From torch's lanes × batch × channels × height × width. Copies only if memory is not channels-last already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def channels_first(x: Tensor) -> Tensor:
    """Return a channels-last tensor in torch's order of axes, as a view."""
    return x.permute(0, 1, 4, 2, 3)


def split_bias(grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a result of `conv2d_weight_grad` as the gradients of weight and bias, with torch's order of axes."""
    grad = grad.to(weight.dtype)
    channels, *kernel = weight.shape[-3:]
    return torch.movedim(grad[..., :-1].unflatten(-1, (*kernel, channels)), -1, -3), grad[..., -1]


def patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Pair]:
    """Lanes × (batch · positions) × (kernel · channels), and how many positions there are vertically and horizontally.

    The input is channels-last, so that a patch consists of contiguous runs of memory.
    """
    if any(padding):
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    view = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])  # L B H' W' C k k
    lanes, batch, height, width = view.shape[:4]
    return view.permute(0, 1, 2, 3, 5, 6, 4).reshape(lanes, batch * height * width, -1), (height, width)


@torch.library.custom_op("undrift::conv2d_forward", mutates_args=())
def conv2d_forward(x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """patches · weightᵀ + bias, lanes × batch × height × width × outputs."""
    if available(x.device, x.dtype):
        from undrift.functional.convolution import kernels

        return kernels.conv2d_forward(x, weight, bias, stride, padding)
    columns, size = patches(x, weight.shape[2:4], stride, padding)
    return (columns @ weight.flatten(2).mT + bias[:, None]).unflatten(1, (x.shape[1], *size))


@conv2d_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    size = [
        (n + 2 * p - k) // s + 1 for n, p, k, s in zip(x.shape[2:4], padding, weight.shape[2:4], stride, strict=True)
    ]
    return x.new_empty(*x.shape[:2], *size, weight.shape[1])


def conv2d_input_grad(
    g: Tensor, weight: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the gradient with respect to an input of height and width `size`. Padding must be smaller than the kernel.

    It is a convolution of g, with the kernel flipped and the channels of its input and output swapped. The stride of
    the forward pass becomes zeros between the entries of g.
    """
    kernel = weight.shape[2:4]
    flipped = weight.flip(2, 3).transpose(1, 4).contiguous()
    unread = [(n + 2 * p - k) % s for n, p, k, s in zip(size, padding, kernel, stride, strict=True)]
    g = F.pad(_dilate(_dilate(g, 2, stride[0]), 3, stride[1]), (0, 0, 0, unread[1], 0, unread[0]))
    border = (kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1])
    return conv2d_forward(g, flipped, flipped.new_zeros(flipped.shape[:2]), (1, 1), border)


def _dilate(x: Tensor, axis: int, step: int) -> Tensor:
    """Put `step` - 1 zeros between the entries of an axis."""
    if step == 1:
        return x
    spaced = torch.stack([x, *[torch.zeros_like(x)] * (step - 1)], axis + 1).flatten(axis, axis + 1)
    return spaced.narrow(axis, 0, (x.shape[axis] - 1) * step + 1)


@torch.library.custom_op("undrift::conv2d_weight_grad", mutates_args=())
def conv2d_weight_grad(g: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """gᵀ · patches, lanes × outputs × (kernel · channels + 1). The last column, Σ g, is the gradient of the bias."""
    if available(x.device, x.dtype):
        from undrift.functional.convolution import kernels

        return kernels.conv2d_weight_grad(g, x, kernel, stride, padding)
    return _weight_grad(g.flatten(1, 3), patches(x, kernel, stride, padding)[0])


@torch.library.custom_op("undrift::conv2d_squared_weight_grad", mutates_args=())
def conv2d_squared_weight_grad(
    g: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    """Return the sum over samples of the squared gradient of each; laid out as by `conv2d_weight_grad`."""
    if available(x.device, x.dtype):
        from undrift.functional.convolution import kernels

        return kernels.conv2d_squared_weight_grad(g, x, kernel, stride, padding)
    columns = patches(x, kernel, stride, padding)[0].unflatten(1, (x.shape[1], -1))
    return _weight_grad(g.flatten(2, 3), columns).square().sum(1)


def _weight_grad(g: Tensor, columns: Tensor) -> Tensor:
    """Of g, … × positions × outputs, and patches, … × positions × (kernel · channels)."""
    grad = torch.cat([g.mT @ columns, g.sum(-2)[..., None]], -1)
    return grad.to(torch.promote_types(columns.dtype, torch.float32))


@conv2d_weight_grad.register_fake
@conv2d_squared_weight_grad.register_fake
def _(g: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(len(x), g.shape[4], kernel[0] * kernel[1] * x.shape[4] + 1, dtype=dtype)


for operation in (conv2d_forward, conv2d_weight_grad, conv2d_squared_weight_grad):
    operation.register_vmap(fold_into_lanes(operation))
