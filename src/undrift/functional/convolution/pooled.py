"""A convolution with max-pooling after it, and with ReLU in between or not, as one operation.

A convolution's output is often the largest tensor of a model, and is read only to be pooled. Users' modules call three
functions, though, one after the other. So `Pooling` remembers what the latest convolution was called with, and a
pooling of its output, or of what ReLU made of that, starts from there. If the module makes no other use of what it
computed on the way, a traced program leaves that out. Hence all of this is only for tracing (`fused`).

A module may use the output in another way too: in a skip connection, as a U-Net does, or with a hook on its gradient.
The convolution would be computed twice then, or the hook never called. `Traced` learns of both (`computed_twice`,
`Fusion.observed`), and traces again without this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from undrift.functional.convolution.geometry import Pair, channels_first, channels_last, output_size, pair
from undrift.functional.convolution.operations import Needed, conv2d_grads, conv2d_pool, pool_grad
from undrift.vmap import lanes_first

_here = threading.local()

RELU = (F.relu, torch.relu, Tensor.relu)
POOL = (F.max_pool2d, torch.max_pool2d)
MOST_OUTPUTS = 64
"""With more, a tile is larger if its outputs are not pooled, which is faster on the whole."""
COPIES = {getattr(torch.ops.aten, name).default for name in ("permute", "clone", "expand", "view")}
"""What `LaneConv2d` and `LaneConvPool` do to their arguments before they call an operation."""


class Fusion:
    """What has been fused in a trace."""

    def __init__(self) -> None:
        self.skipped: list[Tensor] = []
        """Outputs of convolutions and of ReLU from which pooling did not start."""
        self.observed = False
        """Whether one of them was used later."""

    def note_use(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a later use: of a value, of its history, or for a hook."""
        if self.skipped:
            used = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
            self.observed = self.observed or not used.isdisjoint(map(id, self.skipped))


@contextmanager
def fused() -> Iterator[Fusion]:
    """Inside it, this thread's `LaneConvolutions` fuse convolutions with what follows."""
    before = _fusion()
    _here.fusion = Fusion()
    try:
        yield _here.fusion
    finally:
        _here.fusion = before


def _fusion() -> Fusion | None:
    return getattr(_here, "fusion", None)


class Latest(NamedTuple):
    """The latest call, if that was a convolution, or ReLU of one."""

    outputs: list[Tensor]
    """Of the convolution, and of ReLU."""
    arguments: tuple[Any, ...]
    """Of `LaneConv2d`."""
    tracking: tuple[bool, bool]
    """How autograd tracked it (`_tracking`)."""


class Pooling:
    """Recognizes convolution, ReLU and pooling in a sequence of calls. Any other call in between ends it."""

    def __init__(self) -> None:
        self.latest: Latest | None = None

    def convolved(self, out: Tensor, arguments: tuple[Any, ...]) -> Tensor:
        """Note a convolution and its output, which is returned."""
        self.latest = Latest([out], arguments, _tracking()) if _fusion() else None
        return out

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the result of a call that is not of a convolution; None if it does not continue the sequence."""
        latest, self.latest, fusion = self.latest, None, _fusion()
        if fusion is None:
            return None
        fusion.note_use(args, kwargs)
        if latest is None or not args or args[0] is not latest.outputs[-1] or latest.tracking != _tracking():
            return None
        if func in RELU and len(latest.outputs) == 1 and not any((*args[1:], *kwargs.values())):  # not in place
            latest.outputs.append(func(*args))
            self.latest = latest
            return latest.outputs[-1]
        outputs, *size = latest.outputs[0].shape[1:]
        if func in POOL and outputs <= MOST_OUTPUTS and min(size) > 1 and _halves(*args[1:], **kwargs):
            fusion.skipped += latest.outputs
            out: Tensor = LaneConvPool.apply(*latest.arguments, len(latest.outputs) > 1)[0]  # type: ignore[no-untyped-call]
            return out
        return None


def _tracking() -> tuple[bool, bool]:
    """How autograd tracks calls. `torch.no_grad` is itself a call, which ends a sequence; `inference_mode` is not."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _halves(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Whether `F.max_pool2d` with these arguments takes windows of 2 × 2 that neither overlap nor reach outside."""
    if ceil_mode or return_indices:
        return False
    steps = kernel_size if stride is None or stride == [] else stride
    return (pair(kernel_size), pair(steps), pair(padding), pair(dilation)) == ((2, 2), (2, 2), (0, 0), (1, 1))


def computed_twice(program: GraphModule) -> bool:
    """Whether a program has a convolution both with pooling and without."""
    alone, pooled = (
        {_call(node) for node in program.graph.nodes if node.target is operation}
        for operation in (torch.ops.undrift.conv2d_forward.default, torch.ops.undrift.conv2d_pool.default)
    )
    return not alone.isdisjoint(pooled)


def _call(node: Node) -> tuple[Any, ...]:
    """What a convolution is called with, whether pooling follows or not."""
    x, weight, bias, stride, padding, *_ = node.args
    return *map(_source, (x, weight, bias)), tuple(stride), tuple(padding)  # type: ignore[arg-type]


def _source(node: Node) -> Node:
    """What a node is a copy of, with its axes in another order."""
    while node.target in COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


class LaneConvPool(Function):
    """Convolution, ReLU if wanted, and max-pooling in windows of 2 × 2. Also returns which entry each window has."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, relu: bool) -> Any:
        return tuple(t[0] for t in _forward(x[None], weight[None], bias[None], stride, padding, relu))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.stride, ctx.padding, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, weight, chosen = ctx.saved_tensors
        needed = (ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3]))
        grads = LaneConvPoolBackward.apply(g, chosen, x, weight, ctx.stride, ctx.padding, needed)  # type: ignore[no-untyped-call]
        return (grads[0] if needed[0] else None), *(grads[1:] if needed[1] else (None, None)), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        tensors = (lanes_first(t, dim, info.batch_size) for t, dim in zip(inputs[:3], in_dims[:3], strict=True))
        return _forward(*(*tensors, *inputs[3:])), (0, 0)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, relu: bool) -> tuple[Tensor, Tensor]:
    found = conv2d_pool(channels_last(x), channels_last(weight), bias.contiguous(), stride, padding, relu)
    out, chosen = map(channels_first, found)
    return out, chosen


class LaneConvPoolBackward(Function):
    """The gradients of `LaneConvPool`, as `LaneConv2dBackward` has them."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return tuple(t[0] for t in _backward(*(t[None] for t in inputs[:4]), *inputs[4:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        tensors = (lanes_first(t, dim, info.batch_size) for t, dim in zip(inputs[:4], in_dims[:4], strict=True))
        return _backward(*(*tensors, *inputs[4:])), (0, 0, 0)


def _backward(
    g: Tensor, chosen: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, needed: Needed
) -> tuple[Tensor, ...]:
    height, width = output_size(x.shape[3:], weight.shape[3:], stride, padding)
    g = pool_grad(channels_last(g), channels_last(chosen), height, width)
    return conv2d_grads(g, x, weight, stride, padding, needed)
