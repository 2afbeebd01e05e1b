"""Sums of squared per-sample gradients from one backward pass.

Where samples do not touch and a weight is used once, by a linear layer or a plain convolution, its gradient is a sum
over samples, and what each of them adds is known from the layer's input x and the gradient g of its output. For a
linear layer it is `gxᵀ`, whose square is `g²(x²)ᵀ`: the sum over samples is one product of matrices. For a convolution
it is a product over the positions, sample by sample: on a GPU a kernel of `convolution/kernels.py`, which adds up the
squares of what it never writes. So no gradient of a single sample is ever asked of autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from undrift.functional.convolution.operations import Pair, arguments, as_weight, channels_last, gradient


class Squares(TorchFunctionMode):
    """Inside it, the gradient of a layer's weight is the sum over samples of squared gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = layer(func, args, kwargs or {})
        if not found:
            return func(*args, **(kwargs or {}))
        x, weight, bias, *geometry = found
        bare = (weight.detach(), None if bias is None else bias.detach())
        out = F.conv2d(x, *bare, *geometry) if geometry else F.linear(x, *bare)
        return Tap.apply(out, x.detach(), weight, bias, *(geometry or (None, None)))  # type: ignore[no-untyped-call]


def layer(func: Any, args: Any, kwargs: Any) -> Any:
    """Input, weight and bias of a linear layer, with the stride and the padding of a plain convolution; else None."""
    if func in (F.conv2d, torch.conv2d):
        return arguments(*args, **kwargs)
    return _linear(*args, **kwargs) if func is F.linear else None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class Tap(Function):
    """A layer's output as it is; on the way back, the squares for its weight and bias."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair | None, padding: Pair | None
    ) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, x, weight, bias, ctx.stride, ctx.padding = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if g.dim() == 2:
            dw, db = g.square().mT @ x.square(), g.square().sum(0)
        elif ctx.stride is None:  # a linear layer on several positions
            rows = g.flatten(1, -2)
            dw, db = (rows.mT @ x.flatten(1, -2)).square().sum(0), rows.sum(1).square().sum(0)
        else:
            pictures = (channels_last(t.detach()[None]) for t in (g, x))
            sums = gradient(*pictures, weight.shape[2:], ctx.stride, ctx.padding, squared=True)[0].to(weight.dtype)
            dw, db = as_weight(sums[..., :-1], weight), sums[..., -1]
        return g, None, dw, db if ctx.biased else None, None, None


class Uses(TorchFunctionMode):
    """Finds weights that anything but one call of such a layer, with the samples first, uses."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.names = rows, dict[int, str]()
        self.seen: list[str] = []
        self.strange: set[str] = set()
        self.largest = 0
        """The most numbers that a sample's own gradient has, of those that are made one by one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = [self.names[id(t)] for t in pytree.tree_leaves((args, kwargs)) if id(t) in self.names]
        found = layer(func, args, kwargs or {}) if used else None
        self.seen += used
        if found and len(found[0]) == self.rows and id(found[0]) not in self.names:
            self.largest = max(self.largest, found[1].numel() if found[0].dim() > 2 else 0)
        else:
            self.strange |= set(used)
        return func(*args, **(kwargs or {}))

    def fine(self, names: Any) -> bool:
        return not self.strange & set(names) and all(self.seen.count(name) == 1 for name in names)
