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

from undrift.engine.compiler import Tried
from undrift.errors import UndriftError
from undrift.functional.convolution.pooled import computed_twice, fused
from undrift.method.calls import blaming_the_model
from undrift.tree import tree_flatten, tree_leaves, tree_unflatten

CALLING = RLock()
"""Held by the threads of `ThreadedEngine` while they trace or call `visit`: both call the module, whose weights are
swapped in for the call. Running a traced program does not."""
DYNAMIC = {torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default, torch.ops.aten._unique2.default}
"""Operations whose result has a shape that depends on values."""
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
        masks = node.args[1] if node.target is torch.ops.aten.index.Tensor else ()
        by_mask = any(m is not None and m.meta["val"].dtype == torch.bool for m in masks)
        if by_mask or node.target in DYNAMIC:
            raise UndriftError(
                "The lanes engine cannot run the model or one of the method's hooks: the shape of a result depends on "
                'values (x[mask], torch.nonzero). Multiply by the mask or use torch.where; or use engine="plain".'
            )


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
