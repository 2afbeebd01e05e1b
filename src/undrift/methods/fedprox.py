"""FedProx: a proximal term in the clients' loss."""

from __future__ import annotations

from dataclasses import dataclass

from undrift.method.context import Client
from undrift.methods.temporal import Targeted, TemporalEnsemble
from undrift.schedule import Number
from undrift.tree import Tree, tree_map


@dataclass(frozen=True)
class FedProx(Targeted):
    """A proximal term keeps each client near the weights that it received. `mu=0` is FedAvg.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, *Federated Optimization in Heterogeneous Networks* (2020).
    `½μ‖w − w₀‖²` is added to the client's loss, so its gradient is `g + μ·(w − w₀)`, with w₀ the weights received.

    Args:
        mu: The strength μ.
        target: `TemporalEnsemble(beta)` uses an average of the global models as w₀.
    """

    mu: Number
    target: TemporalEnsemble | None = None

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        return tree_map(lambda g, w, w0: g + self.mu * (w - w0), g, params, self.anchor(client))
