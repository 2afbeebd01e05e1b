"""SCAFFOLD: control variates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.method.context import Client, Server, Totals
from undrift.method.part import Part
from undrift.tree import Tree, tree_add, tree_map, tree_sub, tree_zeros


@dataclass(frozen=True)
class Scaffold(Part):
    """Control variates correct the drift of each client.

    Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, *SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning* (2020), option II. The client's gradient is `g − cᵢ + c`, and then `cᵢ⁺ = cᵢ − c + (w − wᵢ)/Σγ`. On the
    server `c ← c + (1/N)·Σ(cᵢ⁺ − cᵢ)`, with N the number of all clients.

    `Σγ` is the sum of the rates actually used, elementwise if they differ, so that cᵢ is the client's mean gradient.
    """

    def check(self, local: Any, data: Any) -> None:
        if callable(local.momentum) or local.momentum:
            raise UndriftError("Scaffold and client momentum contradict each other; set Local(momentum=0).")

    def start(self, params: Tree) -> Tree:
        return tree_zeros(params)

    def keep(self, params: Tree) -> Tree:
        return tree_zeros(params)

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        return state

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        return tree_map(lambda g, own, all_: g - own + all_, g, client.kept, client.received)

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        new = tree_map(_variate, client.kept, client.received, delta, client.rate_sum)
        return tree_sub(new, client.kept), new

    def transform(self, update: Tree, totals: Totals, state: Tree) -> tuple[Tree, Tree]:
        return update, tree_add(state, tree_map(lambda change: change / totals.population, totals.sums))


def _variate(own: Tensor, all_: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
    # A coordinate whose rates were all 0 has not moved, so nothing is known about its gradient: keep its variate.
    moved = own - all_ - delta / torch.where(rate_sum > 0, rate_sum, 1.0)
    return torch.where(rate_sum > 0, moved, own)
