"""FedDyn (Acar et al., 2021): each client's regulariser is bent until the clients' optima agree with the server's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from undrift.method.context import Client, Totals
from undrift.method.part import Part
from undrift.schedule import Number
from undrift.tree import Tree, tree_map, tree_zeros


@dataclass(frozen=True)
class FedDyn(Part):
    """Gradient `g − hᵢ + α(wᵢ − w)`, then `hᵢ ← hᵢ − α·Δᵢ`; server `h ← h − (α/N)·ΣΔᵢ`, `w ← mean wᵢ − h/α`."""

    alpha: Number

    reads_rates: ClassVar[bool] = False
    implies_weighting: ClassVar[str | None] = "uniform"
    contradicts: ClassVar[tuple[str, ...]] = ("FedNova",)
    ranges: ClassVar[dict[str, str]] = {"alpha": "(0, inf)"}

    def start(self, params: Tree) -> Tree:
        return tree_zeros(params)

    def keep(self, params: Tree) -> Tree:
        return tree_zeros(params)

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        return tree_map(lambda g, h, w, w0: g - h + self.alpha * (w - w0), g, client.kept, params, client.start)

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return (), tree_map(lambda h, d: h - self.alpha * d, client.kept, delta)

    def transform(self, update: Tree, totals: Totals, state: Tree) -> tuple[Tree, Tree]:
        # The mean is uniform, so Σ Δᵢ is the mean times the cohort's size and needs no upload of its own.
        share = self.alpha * totals.size / totals.population
        h = tree_map(lambda h, d: h - share * d, state, totals.update)
        return tree_map(lambda d, h: d - h / self.alpha, update, h), h
