"""Server optimizers: the aggregated update Δ takes the place of the negative gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, *Adaptive Federated Optimization* (2021), describe
the family as FedOpt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from undrift.method.context import Server
from undrift.method.part import Part
from undrift.schedule import Number
from undrift.tree import Tree, tree_map, tree_zeros


class ServerOptimizer(Part):
    """Base class of server optimizers, of which a method can have one."""

    contradicts: ClassVar[tuple[str, ...]] = ("ServerOptimizer",)


@dataclass(frozen=True)
class ServerSGD(ServerOptimizer):
    """FedAvgM: SGD with momentum on the server. `ServerSGD(lr=1, momentum=0)` is FedAvg.

    Hsu, Qi and Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification*
    (2019). `v ← β·v + Δ`, `w ← w + η·v`, from `v = 0`.

    Cannot be combined with another server optimizer: `ServerAdam`, `ServerYogi` or `ServerAdagrad`.

    Example:
        >>> import undrift as ud
        >>> method = ud.ServerSGD(momentum=0.9)

    Args:
        lr: The server's learning rate η.
        momentum: The momentum β.
    """

    lr: Number = 1.0
    momentum: Number = 0.0

    ranges: ClassVar[dict[str, str]] = {"momentum": "[0, 1)"}

    def start(self, params: Tree, server: Server) -> Tree:
        return tree_zeros(params)

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        velocity = tree_map(lambda v, d: self.momentum * v + d, state, update)
        return tree_map(lambda v: self.lr * v, velocity), velocity


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """Base class. With `q = −Δ`: `m ← β₁m + (1−β₁)q`, `w ← w − lr·m/(√v + ε)`, from `m = v = 0`."""

    lr: Number
    beta1: Number = 0.9
    beta2: Number = 0.999
    eps: Number = 1e-8

    ranges: ClassVar[dict[str, str]] = {"beta1": "[0, 1)", "beta2": "[0, 1)"}

    def start(self, params: Tree, server: Server) -> Tree:
        return {"m": tree_zeros(params), "v": tree_zeros(params), "tau": torch.zeros(())}

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
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
    """FedAdam: Adam on the server, with bias correction.

    Reddi et al., *Adaptive Federated Optimization* (2021). With `q = −Δ`: `m ← β₁m + (1−β₁)q`, `v ← β₂v + (1−β₂)q²`,
    `w ← w − η·m/(√v + ε)`, from `m = v = 0`. The learning rate of the τ-th round, counted from 1, is
    `η = lr·√(1−β₂^τ)/(1−β₁^τ)`.

    Cannot be combined with another server optimizer: `ServerSGD`, `ServerYogi` or `ServerAdagrad`.

    Example:
        >>> import undrift as ud
        >>> method = ud.ServerAdam(lr=0.01)

    Args:
        lr: The server's learning rate.
        beta1: The decay rate β₁ of the first moment.
        beta2: The decay rate β₂ of the second moment.
        eps: The constant ε in the denominator.
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared

    def rate_at(self, tau: Tensor) -> Tensor:
        return self.lr * torch.sqrt(1 - self.beta2**tau) / (1 - self.beta1**tau)


@dataclass(frozen=True)
class ServerYogi(Adaptive):
    """FedYogi: Yogi on the server, without bias correction.

    Reddi et al., *Adaptive Federated Optimization* (2021). With `q = −Δ`: `m ← β₁m + (1−β₁)q`,
    `v ← v − (1−β₂)·sign(v − q²)·q²`, `w ← w − lr·m/(√v + ε)`, from `m = v = 0`.

    Cannot be combined with another server optimizer: `ServerSGD`, `ServerAdam` or `ServerAdagrad`.

    Example:
        >>> import undrift as ud
        >>> method = ud.ServerYogi(lr=0.01)

    Args:
        lr: The server's learning rate.
        beta1: The decay rate β₁ of the first moment.
        beta2: The decay rate β₂ of the second moment.
        eps: The constant ε in the denominator.
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * torch.sign(v - squared) * squared


@dataclass(frozen=True)
class ServerAdagrad(Adaptive):
    """FedAdagrad: Adagrad on the server, without bias correction.

    Reddi et al., *Adaptive Federated Optimization* (2021). With `q = −Δ`: `m ← β₁m + (1−β₁)q`, `v ← v + q²`,
    `w ← w − lr·m/(√v + ε)`, from `m = v = 0`.

    Cannot be combined with another server optimizer: `ServerSGD`, `ServerAdam` or `ServerYogi`.

    Example:
        >>> import undrift as ud
        >>> method = ud.ServerAdagrad(lr=0.01, eps=1e-3)

    Args:
        lr: The server's learning rate.
        beta1: The decay rate β₁ of the first moment.
        beta2: Not used.
        eps: The constant ε in the denominator.
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared
