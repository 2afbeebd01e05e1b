"""Server optimizers (Reddi et al., 2021): the aggregated update Δ is a step's direction, −Δ its pseudo-gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from undrift.method.context import Totals
from undrift.method.part import Part
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
class Adaptive(ServerOptimizer):
    """What three share. With `q = −Δ`: `m ← β₁m + (1−β₁)q`, `w ← w − lr·m/(√v + ε)`, m and v from zero."""

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
        v = tree_map(lambda v, d: self.second_moment(v, d * d), state["v"], update)
        rate = self.rate_at(tau)
        step = tree_map(lambda m, v: -rate * m / (torch.sqrt(v) + self.eps), m, v)
        return step, {"m": m, "v": v, "tau": tau}

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        raise NotImplementedError

    def rate_at(self, tau: Tensor) -> Tensor:
        return self.lr


@dataclass(frozen=True)
class ServerAdam(Adaptive):
    """FedAdam: `v ← β₂v + (1−β₂)q²`, and the rate `lr·√(1−β₂^τ)/(1−β₁^τ)`, τ = 1 in the first round."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared

    def rate_at(self, tau: Tensor) -> Tensor:
        return self.lr * torch.sqrt(1 - self.beta2**tau) / (1 - self.beta1**tau)


@dataclass(frozen=True)
class ServerYogi(Adaptive):
    """FedYogi: `v ← v − (1−β₂)·sign(v − q²)·q²`, without bias correction."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * torch.sign(v - squared) * squared


@dataclass(frozen=True)
class ServerAdagrad(Adaptive):
    """FedAdagrad: `v ← v + q²`, without bias correction (and without β₂)."""

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared
