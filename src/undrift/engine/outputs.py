"""The outputs of a model in evaluation mode, for batch after batch."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from undrift.engine.compiler import distance, rounding
from undrift.engine.trace import Traced
from undrift.errors import first_sentence
from undrift.functional.model import Model, Params
from undrift.tree import Tree, tree_leaves, tree_map

log = logging.getLogger("undrift")


class Outputs:
    """A model's outputs, as a function of weights, running statistics and samples.

    Args:
        model: The model.
        traced: Whether to trace the forward pass, as training does. Calling a module with other weights takes the host
            longer than a GPU needs to compute a batch. A model that cannot be traced, or whose traced pass gives other
            outputs for the second batch of a shape, is called.
    """

    def __init__(self, model: Model, traced: bool) -> None:
        self.model, self.calls = model, Counter[Any]()
        self.traced = Traced(self._called) if traced else None

    def __call__(self, params: Params, tracked: Params, x: Tree) -> Tree:
        if self.traced is None:
            return self._called(params, tracked, x)
        try:
            found = self.traced(*tree_map(torch.Tensor.contiguous, (params, tracked, x)))
        except Exception as error:  # in evaluation mode, a model may do what it does not do in training
            return self._untraced(first_sentence(error), self._called(params, tracked, x))
        shape = tuple(t.shape for t in tree_leaves(x))
        self.calls[shape] += 1
        if self.calls[shape] == 2:  # the first is the one that was traced
            wanted = self._called(params, tracked, x)
            off = distance(*([t for t in tree_leaves(z) if isinstance(t, Tensor)] for z in (found, wanted)))
            if off > rounding(self.model.compute_dtype):
                return self._untraced(f"traced, it is off by {off:.2g}", wanted)
        return found

    def _untraced(self, why: str, output: Tree) -> Tree:
        """Go on without tracing. Returns the output."""
        self.traced = None
        log.debug("the model is evaluated without tracing it: %s", why)
        return output

    def _called(self, params: Params, tracked: Params, x: Tree) -> Tree:
        return self.model.at(tracked)(params, x)
