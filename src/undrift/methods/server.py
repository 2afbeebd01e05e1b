"""Server optimizers (Reddi et al., 2021): the aggregated update Δ is a step's direction, −Δ its pseudo-gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from undrift.method import Part
from undrift.roles import Totals
from undrift.schedule import Number
from undrift.tree import Tree, tree_map, tree_zeros


class ServerOptimizer(Part):
    """What all server optimizers share: there can be only one."""

    contradicts: ClassVar[tuple[str, ...]] = ("ServerOptimizer",)


@dataclass(frozen=True)
class ServerSGD(ServerOptimizer):
    """`v ← β·v + Δ`, `w ← w + η·v`. `ServerSGD(1, 0)` is FedAvg."""

    lr: Number = 1.0
    momentum: Number = 0.0

    ranges: ClassVar[dict[str, str]] = {"momentum": "[0, 1)"}

    def start(self, params: Tree) -> Tree:
        return tree_zeros(params)

    def transform(self, update: Tree, totals: Totals, state: Tree) -> tuple[Tree, Tree]:
        velocity = tree_map(lambda v, d: self.momentum * v + d, state, update)
        return tree_map(lambda v: self.lr * v, velocity), velocity


@dataclass(frozen=True)
class ServerAdam(ServerOptimizer):
    """FedAdam with Adam's bias correction. With `q = −Δ` and τ = 1 in the first round:

    `m ← β₁m + (1−β₁)q`, `v ← β₂v + (1−β₂)q²`, `w ← w − lr·√(1−β₂^τ)/(1−β₁^τ) · m/(√v + ε)`.
    """

    lr: Number
    beta1: Number = 0.9
    beta2: Number = 0.999
    eps: Number = 1e-8

    ranges: ClassVar[dict[str, str]] = {"beta1": "[0, 1)", "beta2": "[0, 1)"}

    def start(self, params: Tree) -> Tree:
        return {"m": tree_zeros(params), "v": tree_zeros(params), "tau": torch.zeros(())}

    def transform(self, update: Tree, totals: Totals, state: Tree) -> tuple[Tree, Tree]:
        tau = state["tau"] + 1
        m = tree_map(lambda m, d: self.beta1 * m - (1 - self.beta1) * d, state["m"], update)
        v = tree_map(lambda v, d: self.beta2 * v + (1 - self.beta2) * d * d, state["v"], update)
        lr = self.lr * torch.sqrt(1 - self.beta2**tau) / (1 - self.beta1**tau)
        step = tree_map(lambda m, v: -lr * m / (torch.sqrt(v) + self.eps), m, v)
        return step, {"m": m, "v": v, "tau": tau}
