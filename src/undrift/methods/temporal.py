"""Targets of proximal terms: a moving average of the global models in place of the latest one."""

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
    """A moving average of the global models, as the `target` of `FedProx` or `FedCL`. `beta=0` is the plain method.

    Zhu and Ye, *Towards More Efficient Federated Learning with Better Optimization Objects* (2021).
    `T̂ ← (1−β)·G_t + β·T̂` over the global models G_t after each round, and the target is `T = T̂/(1 − β^t)`. In the
    first round, the target is the initial model. The paper calls the results FedProx-TE and FedCL-TE.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedProx(mu=0.01, target=ud.TemporalEnsemble(beta=0.2))

    Args:
        beta: The decay rate β.
    """

    beta: Number

    ranges: ClassVar[dict[str, str]] = {"beta": "[0, 1)"}

    def start(self, params: Tree) -> Tree:
        return {"sum": tree_zeros(params), "left": torch.ones((), dtype=torch.float64)}

    def observe(self, params: Tree, state: Tree) -> Tree:
        total = tree_map(lambda t, w: (1 - self.beta) * w + self.beta * t, state["sum"], params)
        return {"sum": total, "left": state["left"] * self.beta}

    def target(self, params: Tree, state: Tree) -> Tree:
        fresh = state["left"] == 1
        share = torch.where(fresh, 1.0, 1 - state["left"])
        return tree_map(lambda t, w: torch.where(fresh, w, t / share), state["sum"], params)


class Targeted(Part):
    """Base class of parts whose penalty pulls towards the weights received, or towards a temporal ensemble.

    Subclasses have a field `target`, and get the weights to pull towards from `self.anchor(client)`.
    """

    target: TemporalEnsemble | None

    def __post_init__(self) -> None:
        if self.target is not None and not all(hasattr(self.target, name) for name in ("start", "observe", "target")):
            raise UndriftError(
                f"{type(self).__name__}(target) must be a TemporalEnsemble(beta), or None, not {quoted(self.target)}."
            )

    def start(self, params: Tree, server: Server) -> Tree:
        return self.target.start(params) if self.target else ()

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        return {"target": self.target.target(params, state)} if self.target else {}

    def observe(self, params: Tree, state: Tree, server: Server) -> Tree:
        return self.target.observe(params, state) if self.target else state

    def anchor(self, client: Client) -> Tree:
        if not self.target:
            return client.start
        target = client.received["target"]  # of personal parameters, the server has no history
        return {n: client.start[n] if n in client.personal else t for n, t in target.items()}
