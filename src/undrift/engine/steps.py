"""A segment of local steps of every lane: one traced program per step, or one captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from undrift.engine.graph import StepGraph
from undrift.engine.trace import Traced
from undrift.tree import Tree, tree_leaves, tree_map, tree_structure, tree_unflatten

Batches = tuple[Tree, Tensor, Tensor]
"""Per step and lane: the rows of each batch's samples (`DeviceData`), how many of them are real, and the number of the
local step."""


class Stepper(Protocol):
    step: Traced
    """The local step of every lane."""

    def run(self, state: Tree, lanes: Tree, shared: Tree, batches: Batches) -> Tree:
        """Take the steps that `batches` holds along its first axis. Returns the new training state."""


class EagerSteps:
    """Calls the traced step once per step. Trees are flattened once per segment, not at every step."""

    def __init__(self, step: Callable[..., Tree]) -> None:
        self.step = Traced(step)

    def run(self, state: Tree, lanes: Tree, shared: Tree, batches: Batches) -> Tree:
        program, tree = traced_step(self.step, state, lanes, shared, batches)
        # Lanes that have just started share one copy of the weights, with stride 0; traced code needs contiguous ones.
        leaves, rest = [t.contiguous() for t in tree_leaves(state)], tree_leaves((lanes, shared))
        for batch in zip(*tree_leaves(batches), strict=True):
            leaves = program(*leaves, *rest, *batch)
        return tree_unflatten(leaves, tree)


class GraphSteps:
    """Replays the step as a CUDA graph, one graph per set of shapes."""

    def __init__(self, step: Callable[..., Tree], compiled: torch.dtype | None) -> None:
        """`compiled`: the precision in which a compiled step computes; None leaves it as it was traced."""
        self.step, self.compiled = Traced(step), compiled
        self.graphs: dict[Callable[..., Any], StepGraph] = {}

    def run(self, state: Tree, lanes: Tree, shared: Tree, batches: Batches) -> Tree:
        program, _ = traced_step(self.step, state, lanes, shared, batches)
        rest, leaves = (lanes, shared), tuple(tree_leaves(batches))
        if program not in self.graphs:
            self.graphs[program] = StepGraph(program, state, rest, leaves, self.compiled)
        return self.graphs[program].run(state, rest, leaves)


def traced_step(step: Traced, state: Tree, lanes: Tree, shared: Tree, batches: Batches) -> tuple[Any, Any]:
    """Return the program for steps of these shapes, and the structure of the state that it returns."""
    program, tree = step.at(state, lanes, shared, *tree_map(lambda t: t[0], batches))
    assert tree == tree_structure(state), "a step must keep the structure of the training state"
    return program, tree
