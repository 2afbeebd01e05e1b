"""FedNova (Wang et al., 2020): clients that take more steps do not count for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from undrift.method.context import Client, Totals
from undrift.method.part import Part
from undrift.tree import Tree, tree_map


@dataclass(frozen=True)
class FedNova(Part):
    """`dᵢ = Δᵢ/aᵢ`, `w ← w + (Σ pᵢaᵢ)·Σ pᵢdᵢ`.

    `aᵢ` is the work behind Δᵢ: its steps for plain SGD, more with momentum, less where rates decay; elementwise where
    a part's rates differ by neuron.
    """

    contradicts: ClassVar[tuple[str, ...]] = ("FedDyn",)

    def update(self, delta: Tree, client: Client) -> Tree:
        return tree_map(lambda d, a: d / torch.where(a > 0, a, 1.0), delta, client.work)  # no work, no update

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return tree_map(lambda a: client.weight * a, client.work), client.kept

    def transform(self, update: Tree, totals: Totals, state: Tree) -> tuple[Tree, Tree]:
        return tree_map(lambda d, a: a / totals.weight * d, update, totals.sums), state
