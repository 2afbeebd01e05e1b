"""A cohort's convolutions, each lane with weights of its own.

`vmap` makes one grouped convolution of them, channels first, for which GPUs have no good kernel. Two-dimensional
convolutions are therefore taken over (users' modules stay as they are) by a function with a vmap rule of its own, in
which channels come last in memory and two operations do all the work: a correlation of every lane, which with the
kernel turned round is also the way back to the input, and the gradient of the weights (`operations.py`). On a GPU
they are kernels of ours, 1.3 to 10 times as fast for the layers of the papers' models (`python -m
benchmarks.convolutions`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from undrift.functional.convolution.operations import Pair, arguments, as_weight, channels_last, correlate, gradient
from undrift.functional.triton import available, lanes_of

Wanted = tuple[bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Convolutions(TorchFunctionMode):
    """Inside it, two-dimensional convolutions are those of `convolve`.

    What these put out may lie in memory as torch's own would not, so whoever asks for a view gets one of a copy.
    """

    convolve: Callable[..., Tensor]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.conv2d, torch.conv2d):
            return type(self).convolve(*args, **(kwargs or {}))
        if func in (Tensor.view, Tensor.view_as):
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


def _in_lanes(*args: Any, **kwargs: Any) -> Tensor:
    found = arguments(*args, **kwargs)
    if not found or any(p >= k for p, k in zip(found[4], found[1].shape[2:], strict=True)):
        return F.conv2d(*args, **kwargs)
    x, weight, bias, stride, padding = found
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    return Convolution.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]


def _channels_last(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    last = torch.channels_last
    if input.dim() == 4:  # a clone, since with one channel both orders look alike, and torch takes the other
        input, weight = input.contiguous(memory_format=last), weight.clone(memory_format=last)
    return F.conv2d(input, weight, *args, **kwargs)


class LaneConvolutions(Convolutions):
    """Those of a cohort: plain ones by the functions below, all others as they are."""

    convolve = _in_lanes


class ChannelsLast(Convolutions):
    """Those of one model on a CPU, channels last in memory: up to 1.4 times as fast, pooling included."""

    convolve = _channels_last


def convolutions(params: dict[str, Tensor], x: Tensor, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The mode in which a model with these parameters runs its convolutions on `x`, computing in `dtype`.

    Under vmap with parameters per lane: those of this module, where they have kernels. Not under vmap, on a CPU:
    channels-last. Otherwise torch's own.
    """
    if any(map(mapped, params.values())):
        return LaneConvolutions() if available(x.device, dtype) else nullcontext()
    return ChannelsLast() if x.device.type == "cpu" and not mapped(x) else nullcontext()


def mapped(tensor: Tensor) -> bool:
    """Whether vmap maps this tensor over an axis."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


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
        x, weight, bias = (lanes_of(t, dim, info.batch_size) for t, dim in tensors)
        return forward(x, weight, bias, stride, padding), 0


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
        g, x, weight = (lanes_of(t, dim, info.batch_size) for t, dim in tensors)
        found = backward(g, x, weight, stride, padding, wanted)
        return tuple(g.new_zeros(len(g)) if d is None else d for d in found), (0, 0, 0)


def forward(x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair) -> Tensor:
    return correlate(channels_last(x), channels_last(weight), bias.contiguous(), stride, padding).permute(0, 1, 4, 2, 3)


def backward(g: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, wanted: Wanted) -> Gradients:
    g, kernel = channels_last(g), (weight.shape[3], weight.shape[4])
    dx = dw = db = None
    if wanted[1]:
        sums = gradient(g, channels_last(x), kernel, stride, padding).to(weight.dtype)
        dw, db = as_weight(sums[..., :-1], weight), sums[..., -1]
    if wanted[0]:
        turned = channels_last(weight.flip(3, 4).transpose(1, 2))
        beyond = [(n + 2 * p - k) % s for n, p, k, s in zip(x.shape[3:], padding, kernel, stride, strict=True)]
        g = F.pad(_dilated(_dilated(g, 2, stride[0]), 3, stride[1]), (0, 0, 0, beyond[1], 0, beyond[0]))
        around = (kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1])
        zeros = turned.new_zeros(turned.shape[:2])
        dx = correlate(g, turned, zeros, (1, 1), around).permute(0, 1, 4, 2, 3)
    return dx, dw, db


def _dilated(x: Tensor, axis: int, step: int) -> Tensor:
    """Zeros between the entries of an axis, for patches that lie `step` apart."""
    if step == 1:
        return x
    spaced = torch.stack([x, *[torch.zeros_like(x)] * (step - 1)], axis + 1).flatten(axis, axis + 1)
    return spaced.narrow(axis, 0, (x.shape[axis] - 1) * step + 1)
