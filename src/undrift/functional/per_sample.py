"""Sums over samples of squared per-sample gradients, from one backward pass.

Suppose that samples do not interact and that a weight is used once, by a linear layer or an ordinary convolution. Then
its gradient is a sum over samples, and each sample's share follows from the layer's input x and the gradient g with
respect to its output. For a linear layer the share is `gxᵀ`, whose square is `g²(x²)ᵀ`: the sum over samples is one
matrix product. For a convolution it is a product over positions, one per sample; on a GPU, a kernel of
`convolution/kernels.py` adds up their squares without writing any of them to memory. So autograd never computes the
gradient of a single sample.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from undrift.functional.convolution.geometry import Pair, channels_last, conv2d_arguments
from undrift.functional.convolution.operations import conv2d_squared_weight_grad, split_bias


class Squares(TorchFunctionMode):
    """Inside it, autograd's gradient of a layer's weight is the sum over samples of squared per-sample gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = layer_arguments(func, args, kwargs or {})
        if not found:
            return func(*args, **(kwargs or {}))
        x, weight, bias, *geometry = found
        detached = (weight.detach(), None if bias is None else bias.detach())
        out = F.conv2d(x, *detached, *geometry) if geometry else F.linear(x, *detached)
        return SquaredGradients.apply(out, x.detach(), weight, bias, *(geometry or (None, None)))  # type: ignore[no-untyped-call]


def layer_arguments(func: Any, args: Any, kwargs: Any) -> Any:
    """Input, weight and bias of a linear layer, or these, stride and padding of an ordinary convolution; else None."""
    if func in (F.conv2d, torch.conv2d):
        return conv2d_arguments(*args, **kwargs)
    return _linear_arguments(*args, **kwargs) if func is F.linear else None


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class SquaredGradients(Function):
    """The identity on a layer's output, whose backward pass gives weight and bias their sums of squares."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair | None, padding: Pair | None
    ) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, x, weight, bias, ctx.stride, ctx.padding = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if g.dim() == 2:
            dw, db = g.square().mT @ x.square(), g.square().sum(0)
        elif ctx.stride is None:  # a linear layer that is applied at several positions of a sample
            positions = g.flatten(1, -2)
            dw, db = (positions.mT @ x.flatten(1, -2)).square().sum(0), positions.sum(1).square().sum(0)
        else:
            one_lane = (channels_last(t.detach()[None]) for t in (g, x))
            sums = conv2d_squared_weight_grad(*one_lane, weight.shape[2:], ctx.stride, ctx.padding)[0]
            dw, db = split_bias(sums, weight)
        return g, None, dw, db if ctx.has_bias else None, None, None


class Uses(TorchFunctionMode):
    """Finds the parameters that `Squares` does not cover.

    It covers those that are used exactly once, by a linear layer or an ordinary convolution whose input has the
    samples, `rows` of them, along its first axis.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.names = rows, dict[int, str]()
        self.seen: list[str] = []
        self.unsupported: set[str] = set()
        self.largest = 0
        """The most numbers that one sample's gradient has, over the layers that compute it sample by sample."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = [self.names[id(t)] for t in pytree.tree_leaves((args, kwargs)) if id(t) in self.names]
        found = layer_arguments(func, args, kwargs or {}) if used else None
        self.seen += used
        if found and len(found[0]) == self.rows and id(found[0]) not in self.names:
            self.largest = max(self.largest, found[1].numel() if found[0].dim() > 2 else 0)
        else:
            self.unsupported |= set(used)
        return func(*args, **(kwargs or {}))

    def fine(self, names: Any) -> bool:
        """Return whether `Squares` covers all of these parameters."""
        return not self.unsupported & set(names) and all(self.seen.count(name) == 1 for name in names)
