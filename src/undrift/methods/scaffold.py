"""SCAFFOLD: control variates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.method.context import Client, Server
from undrift.method.local import ADDED
from undrift.method.part import Part
from undrift.methods.account import refuse_unaccountable
from undrift.tree import Tree, tree_add, tree_map, tree_sub, tree_zeros


@dataclass(frozen=True)
class Scaffold(Part):
    """Control variates correct the drift of each client.

    Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, *SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning* (2020), option II. The client's gradient is `g − cᵢ + c`, and then `cᵢ⁺ = cᵢ − c + (w − wᵢ)/Σγ`. On the
    server `c ← c + (1/N)·Σ(cᵢ⁺ − cᵢ)`, with N the number of all clients.

    `Σγ` is the sum of the rates actually used, elementwise if they differ, so that cᵢ is the client's mean gradient.
    Personal parameters are not corrected: what clients do not share needs no correction.

    Args:
        correction: `"gradient"` corrects the gradient, as in the paper, and does not go with client momentum.
            `"after"` takes the step first and then `wᵢ ← wᵢ − γ·(c − cᵢ)`, outside of momentum, as NIID-Bench does
            (Li, Diao, Chen and He, *Federated Learning on Non-IID Data Silos: An Experimental Study*, 2022).
    """

    correction: str = field(default="gradient", metadata=ADDED)

    def __post_init__(self) -> None:
        if self.correction not in ("gradient", "after"):
            raise UndriftError(f'Scaffold(correction) must be "gradient" or "after", not {self.correction!r}.')

    def check(self, local: Any, data: Any) -> None:
        refuse_unaccountable("Scaffold", local)
        momentum = local.optimizer.momentum if local.optimizer is not None else local.momentum
        if self.correction == "gradient" and (callable(momentum) or momentum):
            raise UndriftError(
                "Scaffold and client momentum contradict each other; set Local(momentum=0), or use "
                'Scaffold(correction="after").'
            )

    def start(self, params: Tree) -> Tree:
        return tree_zeros(params)

    def keep(self, params: Tree) -> Tree:
        return tree_zeros(params)

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        return state

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        if self.correction == "after":
            return g
        return tree_map(lambda g, own, all_: g - own + all_, g, client.kept, client.received)

    def project(self, params: Tree, client: Client) -> Tree:
        if self.correction == "gradient":
            return params
        return tree_map(
            lambda w, rate, own, all_: w - rate.to(w.dtype) * (all_ - own),
            params,
            client.rates,
            client.kept,
            client.received,
        )

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        new = client.shared(tree_map(_variate, client.kept, client.received, delta, client.rate_sum))
        return tree_sub(new, client.kept), new

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        return update, tree_add(state, tree_map(lambda change: change / server.population, server.totals.sums))


def _variate(own: Tensor, all_: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
    # A coordinate whose rates were all 0 has not moved, so nothing is known about its gradient: keep its variate.
    moved = own - all_ - delta / torch.where(rate_sum > 0, rate_sum, 1.0)
    return torch.where(rate_sum > 0, moved, own)
