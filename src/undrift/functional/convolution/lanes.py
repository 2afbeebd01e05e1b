"""2-d convolutions of a cohort, in which each lane has its own weights.

Under `vmap`, torch turns them into one grouped convolution with channels first, for which GPUs have no good kernel. So
inside `LaneConvolutions` calls of `F.conv2d` (users' modules stay as they are) go to an autograd function with its own
vmap rule, which is channels-last in memory and runs the operations of `operations.py`. On a GPU these are Triton
kernels, 1.3 to 10 times as fast for the layers of the papers' models (`python -m benchmarks.convolutions`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from undrift.functional.convolution.geometry import Pair, channels_first, channels_last, conv2d_arguments
from undrift.functional.convolution.operations import Needed, conv2d_forward, conv2d_grads
from undrift.functional.convolution.pooled import Pooling
from undrift.triton import available
from undrift.vmap import lanes_first, mapped


class ConvolutionMode(TorchFunctionMode):
    """Inside it, calls of `F.conv2d` go to `conv2d`.

    Its outputs may have other strides than torch's own would have, so `Tensor.view` gets a contiguous copy where it
    needs one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.conv2d, torch.conv2d):
            return self.conv2d(*args, **(kwargs or {}))
        return self.other(func, args, kwargs or {})

    def conv2d(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of another function."""
        if func in (Tensor.view, Tensor.view_as):
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **kwargs)


class LaneConvolutions(ConvolutionMode):
    """For a cohort under vmap: `LaneConv2d`, and `LaneConvPool` where pooling follows.

    Convolutions that are batchless, grouped, dilated, padded by name or by as much as the kernel's size stay torch's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pooling = Pooling()

    def conv2d(self, *args: Any, **kwargs: Any) -> Tensor:
        found = conv2d_arguments(*args, **kwargs)
        # The input's gradient is itself a convolution, with padding kernel - 1 - padding, which must not be below 0.
        if not found or any(p >= k for p, k in zip(found[4], found[1].shape[2:], strict=True)):
            return F.conv2d(*args, **kwargs)
        x, weight, bias, stride, padding = found
        arguments = (x, weight, weight.new_zeros(len(weight)) if bias is None else bias, stride, padding)
        return self.pooling.convolved(LaneConv2d.apply(*arguments), arguments)  # type: ignore[no-untyped-call]

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.pooling.follow(func, args, kwargs)
        return super().other(func, args, kwargs) if out is None else out


class ChannelsLast(ConvolutionMode):
    """For one model on a CPU: channels-last in memory, which is up to 1.4 times as fast, pooling included."""

    def conv2d(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        last = torch.channels_last
        # A clone, for with one channel a weight is contiguous in both formats, and torch would take the wrong one.
        if input.dim() == 4:
            input, weight = input.contiguous(memory_format=last), weight.clone(memory_format=last)
        return F.conv2d(input, weight, *args, **kwargs)


def convolutions(params: dict[str, Tensor], x: Tensor, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the mode in which a model with these parameters runs its convolutions on `x`, computing in `dtype`.

    Under vmap with parameters per lane: those of this module, where they have kernels. Not under vmap, on a CPU:
    channels-last. Otherwise torch's own.
    """
    if any(map(mapped, params.values())):
        return LaneConvolutions() if available(x.device, dtype) else nullcontext()
    return ChannelsLast() if x.device.type == "cpu" and not mapped(x) else nullcontext()


class LaneConv2d(Function):
    """`F.conv2d`, and under vmap the operations of `operations.py`."""

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
        needed = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3]))
        grads = LaneConv2dBackward.apply(g, x, weight, ctx.stride, ctx.padding, needed)  # type: ignore[no-untyped-call]
        return (grads[0] if needed[0] else None), *(grads[1:] if needed[1] else (None, None)), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair) -> Any:
        tensors = zip((x, weight, bias), in_dims[:3], strict=True)
        x, weight, bias = (lanes_first(t, dim, info.batch_size) for t, dim in tensors)
        out = conv2d_forward(channels_last(x), channels_last(weight), bias.contiguous(), stride, padding)
        return channels_first(out), 0


class LaneConv2dBackward(Function):
    """The gradients of `LaneConv2d` with respect to input, weight and bias. It has no derivative of its own.

    A function must return tensors, so gradients that are not needed are zeros, which `LaneConv2d` drops.
    """

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, needed: Needed) -> Any:
        grads = torch.ops.aten.convolution_backward(
            g, x, weight, [len(weight)], stride, padding, (1, 1), False, (0, 0), 1, (*needed, needed[1])
        )
        return tuple(g.new_zeros(()) if d is None else d for d in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, g: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, needed: Needed
    ) -> Any:
        tensors = zip((g, x, weight), in_dims[:3], strict=True)
        g, x, weight = (lanes_first(t, dim, info.batch_size) for t, dim in tensors)
        return conv2d_grads(channels_last(g), x, weight, stride, padding, needed), (0, 0, 0)
