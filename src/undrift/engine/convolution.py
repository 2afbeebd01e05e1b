"""A cohort's convolutions, each lane with weights of its own.

`vmap` makes one grouped convolution of them, channels first, for which GPUs have no good kernel. Two-dimensional
convolutions are therefore taken over (users' modules stay as they are) by a function with a vmap rule of its own. It
goes one of two ways. Patches: of the picture, as one view, times the weights, as one batched matrix product, and
likewise on the way back; compiled, the patches are made in one pass, and the sum that folds them back is another.
Grouped: torch's own, with channels last in memory. Measured over the papers' layers, patches win where a layer widens,
grouped where it does not (its patches are then the larger part of the work).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from undrift.models.patches import Pair, arguments, as_weight, missing, patches

Wanted = tuple[bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class LaneConvolutions(TorchFunctionMode):
    """Inside it, plain two-dimensional convolutions are the functions below; all others stay as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.conv2d, torch.conv2d):
            return _convolve(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _convolve(*args: Any, **kwargs: Any) -> Tensor:
    found = arguments(*args, **kwargs)
    if not found:
        return F.conv2d(*args, **kwargs)
    x, weight, bias, stride, padding = found
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return Convolution.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]


class Convolution(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wanted = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3]))
        dx, dw, db = Back.apply(g, x, weight, ctx.stride, ctx.padding, wanted)  # type: ignore[no-untyped-call]
        return (dx if wanted[0] else None), *((dw, db) if wanted[1] else (None, None)), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair) -> Any:
        tensors = zip((x, weight, bias), in_dims[:3], strict=True)
        x, weight, bias = (_lanes(t, dim, info.batch_size) for t, dim in tensors)
        if x.dim() != 5:  # a vmap inside a vmap: torch's own rule
            return torch.vmap(lambda x, w, b: F.conv2d(x, w, b, stride, padding))(x, weight, bias), 0
        way = forward if widens(weight) else grouped_forward
        return way(x, weight, bias, stride, padding), 0


class Back(Function):
    """The gradients of a convolution, of its input and its weights as `wanted`; not to be differentiated again."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, wanted: Wanted) -> Any:
        found = torch.ops.aten.convolution_backward(
            g, x, weight, [len(weight)], stride, padding, (1, 1), False, (0, 0), 1, (*wanted, wanted[1])
        )
        return tuple(g.new_zeros(()) if d is None else d for d in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, g: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, wanted: Wanted
    ) -> Any:
        tensors = zip((g, x, weight), in_dims[:3], strict=True)
        g, x, weight = (_lanes(t, dim, info.batch_size) for t, dim in tensors)
        if x.dim() != 5:
            back = torch.vmap(lambda g, x, w: Back.forward(g, x, w, stride, padding, wanted))
            return back(g, x, weight), (0, 0, 0)
        way = backward if widens(weight) else grouped_backward
        found = way(g, x, weight, stride, padding, wanted)
        return tuple(g.new_zeros(len(g)) if d is None else d for d in found), (0, 0, 0)


def _lanes(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def widens(weight: Tensor) -> bool:
    """Whether the layer has more outputs than inputs; weights are lanes × outputs × inputs × kernel."""
    return weight.shape[1] > weight.shape[2]


def grouped_forward(x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair) -> Tensor:
    out = F.conv2d(_joined(x), weight.flatten(0, 1), bias.flatten(), stride, padding, groups=len(weight))
    return _parted(out, len(weight))


def grouped_backward(g: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, wanted: Wanted) -> Gradients:
    lanes, outputs = weight.shape[:2]
    dx, dw, db = torch.ops.aten.convolution_backward(
        _joined(g), _joined(x), weight.flatten(0, 1), [lanes * outputs], stride, padding, (1, 1), False, (0, 0), lanes,
        (*wanted, wanted[1]),
    )  # fmt: skip
    weights = (dw.view(weight.shape), db.view(lanes, outputs)) if wanted[1] else (None, None)
    return _parted(dx, lanes) if wanted[0] else None, *weights


def _joined(x: Tensor) -> Tensor:
    """Lanes × batch × channels … as batch × (lanes · channels) …, channels last in memory."""
    return x.permute(1, 3, 4, 0, 2).contiguous().flatten(3, 4).permute(0, 3, 1, 2)


def _parted(x: Tensor, lanes: int) -> Tensor:
    return x.unflatten(1, (lanes, -1)).movedim(1, 0)


def _matrix(weight: Tensor) -> Tensor:
    """The weights as lanes × outputs × (kernel · channels), as wide as patches are."""
    flat = weight.permute(0, 1, 3, 4, 2).flatten(2)
    return F.pad(flat, (0, missing(flat.shape[2])))


def forward(x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair) -> Tensor:
    kernel = (weight.shape[-2], weight.shape[-1])
    columns, (height, width) = patches(x, kernel, stride, padding)
    out = torch.bmm(columns, _matrix(weight).mT) + bias[:, None]
    return out.view(x.shape[0], x.shape[1], height, width, weight.shape[1]).permute(0, 1, 4, 2, 3)


def backward(g: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, wanted: Wanted) -> Gradients:
    lanes, outputs, channels, *kernel = weight.shape
    rows = g.permute(0, 1, 3, 4, 2).reshape(lanes, -1, outputs)
    dx = dw = db = None
    if wanted[1]:
        columns = patches(x, (kernel[0], kernel[1]), stride, padding)[0]
        dw = as_weight(torch.bmm(rows.mT, columns), weight)
        db = torch.bmm(rows.new_ones(1, 1, 1).expand(lanes, 1, rows.shape[1]), rows)[:, 0]  # faster than their sum
    if wanted[0]:
        spread = torch.bmm(rows, _matrix(weight))[..., : channels * kernel[0] * kernel[1]]
        spread = spread.reshape(lanes, x.shape[1], *g.shape[3:], *kernel, channels)
        dx = fold(spread, (x.shape[3], x.shape[4]), stride, padding)
    return dx, dw, db


def fold(spread: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """What every patch sends back, added up where patches overlap: L B H' W' k k C to L B C H W."""
    kernel = spread.shape[4:6]
    high, wide = size[0] + 2 * padding[0], size[1] + 2 * padding[1]
    total = None
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            one = spread[..., i, j, :]
            if stride != (1, 1):
                one = _dilated(_dilated(one, 2, stride[0]), 3, stride[1])
            below, right = high - i - one.shape[2], wide - j - one.shape[3]
            one = F.pad(one, (0, 0, j, right, i, below))
            total = one if total is None else total + one
    assert total is not None
    inner = total[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]
    return inner.permute(0, 1, 4, 2, 3)


def _dilated(x: Tensor, axis: int, step: int) -> Tensor:
    """Zeros between the entries of an axis, for patches that lie `step` apart."""
    if step == 1:
        return x
    spaced = torch.stack([x, *[torch.zeros_like(x)] * (step - 1)], axis + 1).flatten(axis, axis + 1)
    return spaced.narrow(axis, 0, (x.shape[axis] - 1) * step + 1)
