"""Better targets for penalties: a temporal ensemble of the global models in place of the last one.

`T̂ ← (1−β)·G_t + β·T̂` over the global models as rounds leave them, `T = T̂/(1 − β^t)`; before the first round is over
the target is the starting model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from undrift.errors import UndriftError, quoted
from undrift.method.context import Client, Server
from undrift.method.part import Part
from undrift.schedule import Number
from undrift.tree import Tree, tree_map, tree_zeros


@dataclass(frozen=True)
class TemporalEnsemble:
    """A `target` for `FedProx` and `FedCL`. `beta=0` is the plain method."""

    beta: Number

    ranges: ClassVar[dict[str, str]] = {"beta": "[0, 1)"}

    def start(self, params: Tree) -> Tree:
        return {"sum": tree_zeros(params), "left": torch.ones((), dtype=torch.float64)}

    def after(self, params: Tree, state: Tree) -> Tree:
        total = tree_map(lambda t, w: (1 - self.beta) * w + self.beta * t, state["sum"], params)
        return {"sum": total, "left": state["left"] * self.beta}

    def target(self, params: Tree, state: Tree) -> Tree:
        fresh = state["left"] == 1
        share = torch.where(fresh, 1.0, 1 - state["left"])
        return tree_map(lambda t, w: torch.where(fresh, w, t / share), state["sum"], params)


class Targeted(Part):
    """A part whose penalty pulls towards `target`: the weights received, or what a temporal ensemble gives.

    Parts that inherit this have a field `target`, and take the anchor from `self.anchor(client)`.
    """

    target: TemporalEnsemble | None

    def __post_init__(self) -> None:
        if self.target is not None and not all(hasattr(self.target, name) for name in ("start", "after", "target")):
            raise UndriftError(
                f"{type(self).__name__}(target) must be a TemporalEnsemble(beta), or None, not {quoted(self.target)}."
            )

    def start(self, params: Tree) -> Tree:
        return self.target.start(params) if self.target else ()

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        return {"target": self.target.target(params, state)} if self.target else {}

    def after(self, params: Tree, previous: Tree, state: Tree) -> Tree:
        return self.target.after(params, state) if self.target else state

    def anchor(self, client: Client) -> Tree:
        return client.received["target"] if self.target else client.start
