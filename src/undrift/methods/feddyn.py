"""FedDyn: dynamic regularization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from undrift.method.context import Client, Server
from undrift.method.part import Part
from undrift.schedule import Number
from undrift.tree import Tree, tree_map, tree_sub, tree_zeros


@dataclass(frozen=True)
class FedDyn(Part):
    """Dynamic regularization: a term per client aligns the minima of the clients' losses with the global one.

    Acar, Zhao, Matas Navarro, Mattina, Whatmough and Saligrama, *Federated Learning Based on Dynamic Regularization*
    (2021). The gradient of client i becomes `g − hᵢ + α(wᵢ − w)`. After local training, `hᵢ ← hᵢ − α·Δᵢ`. On the
    server, `h ← h − (α/N)·ΣΔᵢ` and `w ← mean wᵢ − h/α`, where the mean is uniform and N is the number of all clients.
    hᵢ and h start at zero.

    Weighting: uniform throughout, as in the paper: in the mean of the weights, and in h, which is the mean of all hᵢ.
    Personal parameters are not corrected, since clients do not share them.

    Cannot be combined with `FedNova`, with `FedAvg("samples")`, or with a part that overrides `aggregate`.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedDyn(alpha=0.1)

    Args:
        alpha: The strength α, greater than 0.
    """

    alpha: Number

    reads_rates: ClassVar[bool] = False
    implies_weighting: ClassVar[str | None] = "uniform"
    contradicts: ClassVar[tuple[str, ...]] = ("FedNova",)
    ranges: ClassVar[dict[str, str]] = {"alpha": "(0, inf)"}

    def start(self, params: Tree, server: Server) -> Tree:
        return tree_zeros(params)

    def keep(self, params: Tree, client: Client) -> Tree:
        return tree_zeros(params)

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        def corrected(g: Tensor, h: Tensor, w: Tensor, w0: Tensor) -> Tensor:
            return g - h + self.alpha * (w - w0)

        found = tree_map(corrected, g, client.kept, params, client.start)
        return {n: g[n] if n in client.personal else t for n, t in found.items()}

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return (), client.shared(
            tree_map(lambda h, d: h - self.alpha * d, client.kept, tree_sub(client.final, client.start))
        )

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        # The mean is uniform, so ΣΔᵢ is the mean times the size of the cohort and needs no separate upload.
        share = self.alpha * server.totals.size / server.population
        h = tree_map(lambda h, d: h - share * d, state, server.totals.update)
        return tree_map(lambda d, h: d - h / self.alpha, update, h), h
