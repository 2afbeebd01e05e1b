"""FedProx: a proximal term in the clients' loss."""

from __future__ import annotations

from dataclasses import dataclass

from undrift.method.context import Client
from undrift.methods.temporal import Targeted, TemporalEnsemble
from undrift.schedule import Number
from undrift.tree import Tree, tree_map


@dataclass(frozen=True)
class FedProx(Targeted):
    """Proximal term: keep each client close to the weights that it received. `mu=0` is FedAvg.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, *Federated Optimization in Heterogeneous Networks* (2020). The loss
    gets the term `½μ‖w − w₀‖²`, so the gradient becomes `g + μ·(w − w₀)`, where w₀ are the weights received.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedProx(mu=0.01)

    Args:
        mu: The strength μ.
        target: With `TemporalEnsemble(beta)`, w₀ is an average of the global models instead (FedProx-TE).
    """

    mu: Number
    target: TemporalEnsemble | None = None

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        return tree_map(lambda g, w, w0: g + self.mu * (w - w0), g, params, self.anchor(client))
