"""FedProx (Li et al., 2020): a proximal term holds a client near the weights it received, or near a better target."""

from __future__ import annotations

from dataclasses import dataclass

from undrift.method.context import Client
from undrift.methods.temporal import Targeted, TemporalEnsemble
from undrift.schedule import Number
from undrift.tree import Tree, tree_map


@dataclass(frozen=True)
class FedProx(Targeted):
    """`½μ‖w − w₀‖²` joins the client's loss, so its gradient is `g + μ·(w − w₀)`. `mu=0` is FedAvg.

    `target=TemporalEnsemble(beta)` puts the ensemble in w₀'s place.
    """

    mu: Number
    target: TemporalEnsemble | None = None

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        return tree_map(lambda g, w, w0: g + self.mu * (w - w0), g, params, self.anchor(client))
