"""The operations of a cohort's 2-d convolutions: the forward pass, and the gradients of the input and the weights.

Some are of a convolution together with ReLU and max-pooling after it, so that what is pooled is never written.

Every lane has its own weights. A convolution is the matrix product of the input's patches with the weights (im2col),
and one call of an operation does it for all lanes. The plain torch here defines each operation and is what the kernels
(`kernels.py`, `row_kernels.py`) are tested against. Where there are no kernels, `lanes.convolutions` leaves `F.conv2d`
to torch; only the squared weight gradient runs as it is written here.

Tensors are channels-last: inputs, outputs and their gradients are lanes × batch × height × width × channels, weights
are lanes × outputs × kernel height × kernel width × inputs. `g` is the gradient with respect to the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.functional.convolution.geometry import NO_ENTRY, Pair, channels_first, channels_last, output_size
from undrift.triton import available
from undrift.vmap import fold_into_lanes

Needed = tuple[bool, bool]
"""Whether the gradient of the input is needed, and whether that of the weight or the bias is."""


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
    size = output_size(x.shape[2:4], weight.shape[2:4], stride, padding)
    return x.new_empty(*x.shape[:2], *size, weight.shape[1])


@torch.library.custom_op("undrift::conv2d_pool", mutates_args=())
def conv2d_pool(
    x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int], relu: bool
) -> tuple[Tensor, Tensor]:
    """Return the largest output of each 2 × 2 window, and which of its four entries that is (bytes).

    With `relu`, of the outputs after ReLU; where they are all zero, no entry has a gradient (`NO_ENTRY`).
    """
    if available(x.device, x.dtype):
        from undrift.functional.convolution import kernels

        return kernels.conv2d_pool(x, weight, bias, stride, padding, relu)
    out = conv2d_forward(x, weight, bias, stride, padding)
    windows = out.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    largest, chosen = windows.max(-1)
    if relu:
        largest, chosen = F.relu(largest), torch.where(largest <= 0, NO_ENTRY, chosen)
    return largest.contiguous(), chosen.to(torch.uint8).contiguous()


@conv2d_pool.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, stride: list[int], padding: list[int], relu: bool
) -> tuple[Tensor, Tensor]:
    height, width = output_size(x.shape[2:4], weight.shape[2:4], stride, padding)
    out = x.new_empty(*x.shape[:2], height // 2, width // 2, weight.shape[1])
    return out, torch.empty_like(out, dtype=torch.uint8)


@torch.library.custom_op("undrift::pool_grad", mutates_args=())
def pool_grad(g: Tensor, chosen: Tensor, height: int, width: int) -> Tensor:
    """Return the gradient with respect to what `conv2d_pool` pooled, from that with respect to the largest entries.

    Args:
        g: The gradient with respect to these.
        chosen: Which entries they are.
        height: Of the convolution's output.
        width: Likewise.
    """
    if available(g.device, g.dtype):
        from undrift.functional.convolution import row_kernels

        return row_kernels.pool_grad(g, chosen, height, width)
    entry = torch.arange(4, dtype=torch.uint8, device=g.device).view(2, 1, 2, 1)
    spread = torch.where(chosen[:, :, :, None, :, None] == entry, g[:, :, :, None, :, None], 0)
    return F.pad(spread.flatten(4, 5).flatten(2, 3), (0, 0, 0, width % 2, 0, height % 2))


@pool_grad.register_fake
def _(g: Tensor, chosen: Tensor, height: int, width: int) -> Tensor:
    return g.new_empty(*g.shape[:2], height, width, g.shape[4])


def conv2d_input_grad(
    g: Tensor, weight: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Return the gradient with respect to an input of height and width `size`. Padding must be smaller than the kernel.

    It is a convolution of g, with the kernel flipped and the channels of its input and output swapped. The stride of
    the forward pass becomes zeros between the entries of g.
    """
    kernel = weight.shape[2:4]
    if _narrow(weight, stride):
        return _input_grad_of_narrow(g, weight, padding)
    flipped = weight.flip(2, 3).transpose(1, 4).contiguous()
    unread = [(n + 2 * p - k) % s for n, p, k, s in zip(size, padding, kernel, stride, strict=True)]
    g = F.pad(_dilate(_dilate(g, 2, stride[0]), 3, stride[1]), (0, 0, 0, unread[1], 0, unread[0]))
    border = (kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1])
    return conv2d_forward(g, flipped, flipped.new_zeros(flipped.shape[:2]), (1, 1), border)


def conv2d_grads(
    g: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], needed: Needed
) -> tuple[Tensor, ...]:
    """Return the gradients with respect to input, weight and bias, in torch's order of axes like `x` and `weight`.

    Those that are not needed are zeros. `g` is channels-last.
    """
    dx, dw, db = None, None, None
    if needed[1]:
        dw, db = split_bias(conv2d_weight_grad(g, channels_last(x), weight.shape[3:], stride, padding), weight)
    if needed[0]:
        weight = weight.permute(0, 1, 3, 4, 2)  # flipping makes the copy
        dx = channels_first(conv2d_input_grad(g, weight, x.shape[3:], stride, padding))
    return tuple(g.new_zeros(len(g)) if d is None else d for d in (dx, dw, db))


def _narrow(weight: Tensor, stride: Sequence[int]) -> bool:
    """Whether the gradient with respect to the input is faster by `_input_grad_of_narrow`.

    On an H200 it is if all columns of a kernel, for all channels of the input, fit into one tile's outputs, and if
    there are more than three. In bfloat16 the sum over columns would be one of rounded numbers.
    """
    width, channels = weight.shape[3:]
    return tuple(stride) == (1, 1) and width > 3 and width * channels <= 128 and weight.element_size() > 2


def _input_grad_of_narrow(g: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """Return the gradient with respect to an input of few channels, for a stride of 1.

    A tile with few outputs spends its time on reading patches. So the columns of the kernel become outputs, which makes
    patches smaller by their number, and their results are then added up, each in its place.
    """
    lanes, outputs, height, width, channels = weight.shape
    columns = weight.flip(2).permute(0, 3, 4, 2, 1).reshape(lanes, width * channels, height, 1, outputs)
    by_column = conv2d_forward(g, columns, columns.new_zeros(columns.shape[:2]), (1, 1), (height - 1 - padding[0], 0))
    return add_columns(by_column, width, padding[1])


@torch.library.custom_op("undrift::add_columns", mutates_args=())
def add_columns(x: Tensor, columns: int, padding: int) -> Tensor:
    """Add up groups of channels, one per column of a kernel, each shifted by its number; without the padding."""
    if available(x.device, x.dtype):
        from undrift.functional.convolution import row_kernels

        return row_kernels.add_columns(x, columns, padding)
    width = x.shape[3] + columns - 1
    each = (F.pad(group, (0, 0, i, columns - 1 - i)) for i, group in enumerate(x.chunk(columns, 4)))
    return torch.stack([*each]).sum(0)[:, :, :, padding : width - padding].contiguous()


@add_columns.register_fake
def _(x: Tensor, columns: int, padding: int) -> Tensor:
    return x.new_empty(*x.shape[:3], x.shape[3] + columns - 1 - 2 * padding, x.shape[4] // columns)


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


for operation in (conv2d_forward, conv2d_pool, pool_grad, add_columns, conv2d_weight_grad, conv2d_squared_weight_grad):
    operation.register_vmap(fold_into_lanes(operation))
