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
from undrift.tree import Tree, tree_map, tree_scaled, tree_sub, tree_zeros


@dataclass(frozen=True)
class Scaffold(Part):
    """SCAFFOLD: control variates correct the client drift of local training.

    Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, *SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning* (2020), option II. The gradient of client i becomes `g − cᵢ + c`. After local training,
    `cᵢ⁺ = cᵢ − c + (w − wᵢ)/Σγ`. On the server, `c ← c + Σ pᵢ(cᵢ⁺ − cᵢ)` over the cohort. All control variates start at
    zero.

    `Σγ` is the sum of the learning rates that were used, elementwise if they differ by neuron, so that cᵢ is the
    client's mean gradient. Personal parameters are not corrected, since clients do not share them.

    Weighting: pᵢ is the client's weight in the mean over the sum of all clients' weights. So `c = Σ pᵢcᵢ` over all
    clients, and the corrections `c − cᵢ` cancel out in the mean of the updates. With `FedAvg(weighting="uniform")`,
    `pᵢ = 1/N`, where N is the number of all clients, as in the paper. The fixed point is the minimum of the objective
    with the weights of the control variates, whatever those of the updates.

    Cannot be combined with client momentum (except for `correction="after"`), with clipping (`Local(clip_norm)`), with
    a local optimizer other than SGD without Nesterov's momentum, or with a part that overrides `aggregate`.

    Example:
        >>> import undrift as ud
        >>> method = ud.Scaffold() + ud.ServerSGD(momentum=0.9)

    Args:
        correction: `"gradient"` corrects the gradient, as in the paper. `"after"` takes the step first and then
            `wᵢ ← wᵢ − γ·(c − cᵢ)`, so that momentum does not see the correction, as NIID-Bench does (Li, Diao, Chen and
            He, *Federated Learning on Non-IID Data Silos: An Experimental Study*, 2022).
        variates: The weights of the control variates: `"mean"` for those of the mean of the updates, or `"uniform"` for
            1/N whatever the updates are weighted by. NIID-Bench's code has the latter beside updates weighted by
            samples, and so had undrift's earlier results.
    """

    correction: str = field(default="gradient", metadata=ADDED)
    variates: str = field(default="mean", metadata={"before": "uniform"})

    def __post_init__(self) -> None:
        for name, (one, other) in {"correction": ("gradient", "after"), "variates": ("mean", "uniform")}.items():
            if getattr(self, name) not in (one, other):
                raise UndriftError(f'Scaffold({name}) must be "{one}" or "{other}", not {getattr(self, name)!r}.')

    def check(self, local: Any, data: Any) -> None:
        refuse_unaccountable("Scaffold", local)
        momentum = local.optimizer.momentum if local.optimizer is not None else local.momentum
        if self.correction == "gradient" and (callable(momentum) or momentum):
            raise UndriftError(
                "Scaffold and client momentum contradict each other; set Local(momentum=0), or use "
                'Scaffold(correction="after").'
            )

    def start(self, params: Tree, server: Server) -> Tree:
        return tree_zeros(params)

    def keep(self, params: Tree, client: Client) -> Tree:
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
        change = tree_sub(new, client.kept)
        return tree_scaled(change, client.weight) if self.variates == "mean" else change, new

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        whole = server.total_weight if self.variates == "mean" else server.population
        return update, tree_map(lambda c, change: c + (change / whole).to(c.dtype), state, server.totals.sums)


SCAFFOLD = Scaffold
"""The name as the paper writes it."""


def _variate(own: Tensor, all_: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
    # A coordinate whose rates were all 0 has not moved, so nothing is known about its gradient: keep its variate.
    moved = own - all_ - delta / torch.where(rate_sum > 0, rate_sum, 1.0)
    return torch.where(rate_sum > 0, moved, own)
