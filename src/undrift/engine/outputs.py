"""The outputs of a model in evaluation mode, for batch after batch, and of the models of several runs at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.engine.compiler import distance, rounding
from undrift.engine.fallback import out_of_memory
from undrift.engine.trace import Traced
from undrift.errors import first_sentence
from undrift.functional.model import Model, Params
from undrift.tree import Tree, tree_leaves, tree_map, tree_unstack

log = logging.getLogger("undrift")
Forward = Callable[[Params, Params, Tree], Tree]
"""A function of weights, running statistics and samples."""


class Outputs:
    """A model's outputs, as a function of weights, running statistics and samples.

    Args:
        model: The model.
        traced: Whether to trace the forward pass, as training does. Calling a module with other weights takes the host
            longer than a GPU needs to compute a batch.
    """

    def __init__(self, model: Model, traced: bool) -> None:
        self.model = model
        self.alone: Forward = Checked(self._called, self._called, model) if traced else self._called
        self.of_all: Forward = Checked(self._in_lanes, self._one_by_one, model) if traced else self._one_by_one
        """A list of the outputs for each of several sets of weights and statistics, stacked along a first axis."""
        self.most: int | None = None
        """The size of the largest batch that fits into memory, once it has run out."""

    @cached_property
    def sample_bytes(self) -> float | None:
        """By how many bytes the largest tensor of a forward pass grows with each sample; None if that is not known."""
        try:
            few, more = (self._sizes(rows) for rows in (2, 4))
        except Exception:  # a model may raise anything on repeated samples
            return None
        growth = max((after - before for before, after in zip(few, more, strict=False)), default=0) / 2
        return growth if growth > 0 and len(few) == len(more) else None

    @torch.no_grad()
    def _sizes(self, rows: int) -> list[int]:
        """The sizes in bytes of all tensors that operations return, for a batch of one sample repeated."""
        x = tree_map(lambda t: t[:1].expand(rows, *t.shape[1:]).contiguous(), self.model.sample)
        with Sizes() as seen:
            self._called(self.model.trial(), self.model.tracked, x)
        return seen.sizes

    @property
    def traced(self) -> bool:
        """Whether the forward pass runs as it was traced."""
        return isinstance(self.alone, Checked) and self.alone.traced is not None

    def __call__(self, params: Params, tracked: Params, x: Tree) -> Tree:
        return self.alone(params, tracked, x)

    def _called(self, params: Params, tracked: Params, x: Tree) -> Tree:
        return self.model.at(tracked)(params, x)

    def _in_lanes(self, params: Params, tracked: Params, x: Tree) -> list[Tree]:
        return tree_unstack(vmap(self._called, (0, 0, None))(params, tracked, x))

    def _one_by_one(self, params: Params, tracked: Params, x: Tree) -> list[Tree]:
        return [self.alone(own, statistics, x) for own, statistics in tree_unstack((params, tracked))]


class Checked:
    """A forward pass that runs as it was traced.

    A model that cannot be traced, or whose traced pass gives other outputs for the first two batches of a shape, is
    called.

    Args:
        function: What to trace.
        called: What to call otherwise.
        model: The model, for its precision.
    """

    def __init__(self, function: Forward, called: Forward, model: Model) -> None:
        self.called, self.model, self.calls = called, model, Counter[Any]()
        self.traced: Traced | None = Traced(function)

    def __call__(self, params: Params, tracked: Params, x: Tree) -> Tree:
        if self.traced is None:
            return self.called(params, tracked, x)
        try:
            found = self.traced(*tree_map(torch.Tensor.contiguous, (params, tracked, x)))
        except Exception as error:  # in evaluation mode, a model may do what it does not do in training
            if out_of_memory(error):
                raise
            self._stop_tracing(first_sentence(error))
        if self.traced is None:
            return self.called(params, tracked, x)
        shape = tuple(t.shape for t in tree_leaves((params, x)))
        self.calls[shape] += 1
        if self.calls[shape] > 2:
            return found
        wanted = self.called(params, tracked, x)  # the second batch also shows what became a constant in the trace
        off = distance(*([t for t in tree_leaves(z) if isinstance(t, Tensor)] for z in (found, wanted)))
        if off > rounding(self.model.compute_dtype):
            self._stop_tracing(f"traced, it is off by {off:.2g}")
        return wanted

    def _stop_tracing(self, why: str) -> None:
        self.traced = None
        log.debug("the model is evaluated without tracing it: %s", why)


class Sizes(TorchDispatchMode):
    """Records the size of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.sizes += [t.numel() * t.element_size() for t in pytree.tree_leaves(found) if isinstance(t, Tensor)]
        return found
