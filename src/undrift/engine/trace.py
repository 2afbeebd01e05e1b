"""A function of trees of tensors, traced into one flat program.

For small models, `vmap(grad(…))` spends far more time in Python and dispatch than in arithmetic. Tracing it once gives
a list of tensor operations that runs without autograd, functorch or our own code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from undrift.engine.compiler import Tried
from undrift.errors import UndriftError
from undrift.functional.convolution.pooled import computed_twice, fused
from undrift.method.calls import blaming_the_model
from undrift.tree import tree_flatten, tree_leaves, tree_unflatten

CALLING = RLock()
"""Held by the threads of `ThreadedEngine` while they trace or call `visit`: both call the module, whose weights are
swapped in for the call. Running a traced program does not."""
VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.expand.default}


class Traced:
    """Traces `function` at the first call of each set of shapes; later calls run what was traced.

    It is compiled where `compiled` names the precision in which it computes.
    """

    def __init__(self, function: Callable[..., Any], compiled: torch.dtype | None = None) -> None:
        self.function, self.compiled = function, compiled
        self.programs: dict[Any, tuple[Callable[..., list[Tensor]], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        program, out = self.at(*args)
        return tree_unflatten(program(*tree_leaves(args)), out)

    def at(self, *args: Any) -> tuple[Callable[..., list[Tensor]], Any]:
        """Return the program for arguments of these shapes, from leaves to leaves, and the structure of its result."""
        leaves, spec = tree_flatten(args)
        signature = (spec, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if signature not in self.programs:
            with CALLING:
                if signature not in self.programs:  # another thread may have traced it first
                    self.programs[signature] = self._trace(leaves, spec)
        return self.programs[signature]

    def _trace(self, leaves: list[Tensor], spec: Any) -> tuple[Callable[..., list[Tensor]], Any]:
        shape: list[Any] = []

        def flat(*leaves: Tensor) -> list[Tensor]:
            found, out = tree_flatten(self.function(*tree_unflatten(list(leaves), spec)))
            shape.append(out)
            return found

        # Tracing identifies tensors by identity: one that is passed twice must look like two, or later calls with
        # two different ones would use the first for both. Views are traced as contiguous tensors.
        copies = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in leaves]
        program = _traced_fused(flat, copies) or _traced(flat, copies)
        return (Tried(program, self.compiled) if self.compiled else program), shape[-1]


def _traced_fused(function: Callable[..., Any], leaves: list[Tensor]) -> GraphModule | None:
    """Return the program in which convolutions are fused with what follows; None if that is not possible."""
    with fused() as fusion:
        try:
            program = _traced(function, leaves)
        except Exception:
            if fusion.skipped:  # perhaps why: the gradient with respect to one of them, for example, is not known
                return None
            raise
    return None if fusion.observed or computed_twice(program) else program


def _traced(function: Callable[..., Any], leaves: list[Tensor]) -> GraphModule:
    with blaming_the_model(" in lanes"), _one_mode():
        program = make_fx(function)(*leaves)
    _refuse_dynamic_shapes(program)
    return _without_idle_views(program)


def _refuse_dynamic_shapes(program: GraphModule) -> None:
    """Reject operations whose result's shape depends on values: the program is correct only for the first values."""
    for node in program.graph.nodes:
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) and not _known_shape(node):
            raise UndriftError(
                "The lanes engine cannot run the model, the loss or one of the method's hooks: the shape of a result "
                "depends on values (x[mask], torch.nonzero, torch.unique). Multiply by the mask or use torch.where; or "
                'use engine="plain".'
            )


def _known_shape(node: Node) -> bool:
    """Return whether arguments fix the shape of a result that in general depends on values."""
    aten, given = torch.ops.aten, node.args + tuple(node.kwargs.values())
    if node.target is aten.index.Tensor:
        return not any(m is not None and m.meta["val"].dtype == torch.bool for m in node.args[1])  # type: ignore[union-attr]
    if node.target is aten.bincount.default:  # minlength
        return len(node.meta["val"]) in [n for n in given if isinstance(n, int)]
    return node.target is aten.repeat_interleave.Tensor and any(isinstance(n, int) for n in given)  # output_size


class RefuseLists(TorchFunctionMode):
    """Makes `tolist` of a traced tensor raise, as `item` does, instead of returning the values of the first call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist and args[0].numel():
            args[0].flatten()[0].item()
        return func(*args, **(kwargs or {}))


def _one_mode() -> Any:
    """Return one fake-tensor mode for the whole trace: without it, tracing creates a new one per operation."""
    try:
        from torch._guards import TracingContext, tracing
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:  # private to torch; without them tracing takes twice as long
        return nullcontext()
    return tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))


def _without_idle_views(program: GraphModule) -> GraphModule:
    """Remove reshapes to the same shape, which vmap's rules add; on a CPU each costs as much as a small product."""
    for node in program.graph.nodes:
        if node.target in VIEWS and isinstance(node.args[0], Node):
            source, result = (n.meta.get("val") for n in (node.args[0], node))
            if source is not None and result is not None and source.shape == result.shape:
                node.replace_all_uses_with(node.args[0])
    program.graph.eliminate_dead_code()
    program.recompile()
    return program
