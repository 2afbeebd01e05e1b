"""Server optimizers: the aggregated update Δ takes the place of the negative gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, *Adaptive Federated Optimization* (2021), describe
the family as FedOpt. `FedAvgM`, `FedAdam`, `FedYogi` and `FedAdagrad` are those of the literature, with its defaults.
`ServerSGD` has momentum 0 by default. `ServerAdam`, `ServerYogi` and `ServerAdagrad` are variants with the defaults of
Adam outside of federated learning: they begin with `v = 0`, and `ServerAdam` corrects the bias of its moments, as in
Mills, Hu and Min, *Faster Federated Learning with Decaying Number of Local SGD Steps* (2023).
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
    """SGD on the server, with momentum if asked for. `ServerSGD(lr=1, momentum=0)` is FedAvg.

    Hsu et al., *Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification* (2019).
    `v ← β·v + Δ`, `w ← w + η·v`, from `v = 0`. `FedAvgM` is the same with momentum 0.9 by default.

    Cannot be combined with another server optimizer.

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
class FedAvgM(ServerSGD):
    """FedAvgM: SGD with momentum 0.9 on the server.

    Hsu, Qi and Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification*
    (2019). `v ← β·v + Δ`, `w ← w + η·v`, from `v = 0`, where Δ is the mean of the updates, by samples unless
    `FedAvg(weighting="uniform")` is added. `ServerSGD` is the same with momentum 0 by default.

    Cannot be combined with another server optimizer.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedAvgM()

    Args:
        lr: The server's learning rate η.
        momentum: The momentum β.
    """

    momentum: Number = 0.9


class FedOpt(ServerOptimizer):
    """Base class. `m ← β₁m + (1−β₁)Δ`, `w ← w + η·m/(√v + τ)`, from `m = 0` and `v = τ²`."""

    lr: Number
    beta1: Number
    tau: Number
    initial_v: Number | None

    ranges: ClassVar[dict[str, str]] = {"beta1": "[0, 1)", "beta2": "[0, 1)", "tau": "(0, inf)"}

    def start(self, params: Tree, server: Server) -> Tree:
        v = self.tau * self.tau if self.initial_v is None else self.initial_v
        return {"m": tree_zeros(params), "v": tree_map(lambda zero: zero + v, tree_zeros(params))}

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        m = tree_map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, state["m"], update)
        v = tree_map(lambda v, d: self.second_moment(v, d * d), state["v"], update)
        step = tree_map(lambda m, v: self.lr * m / (torch.sqrt(v) + self.tau), m, v)
        return step, {"m": m, "v": v}

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """FedAdam: Adam on the server, as in the paper that introduced it.

    Reddi et al., *Adaptive Federated Optimization* (2021), Algorithm 2. `m ← β₁m + (1−β₁)Δ`, `v ← β₂v + (1−β₂)Δ²`,
    `w ← w + η·m/(√v + τ)`, from `m = 0` and `v = τ²`, where Δ is the mean of the updates, by samples unless
    `FedAvg(weighting="uniform")` is added. There is no bias correction. `ServerAdam` has one, begins with `v = 0`, and
    has other defaults (β₂ = 0.999, ε = 1e-8 in place of τ).

    Cannot be combined with another server optimizer.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedAdam(lr=0.01)

    Args:
        lr: The server's learning rate η, which the paper tunes for every task.
        beta1: The decay rate β₁ of the first moment.
        beta2: The decay rate β₂ of the second moment.
        tau: The degree of adaptivity τ, greater than 0; smaller values adapt more.
        initial_v: Where v begins. None for τ²; the paper asks for at least that, some implementations begin at 0.
    """

    lr: Number
    beta1: Number = 0.9
    beta2: Number = 0.99
    tau: Number = 1e-3
    initial_v: Number | None = None

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """FedYogi: Yogi on the server, as in the paper that introduced it.

    Reddi et al., *Adaptive Federated Optimization* (2021), Algorithm 2. `m ← β₁m + (1−β₁)Δ`,
    `v ← v − (1−β₂)·sign(v − Δ²)·Δ²`, `w ← w + η·m/(√v + τ)`, from `m = 0` and `v = τ²`, where Δ is the mean of the
    updates, by samples unless `FedAvg(weighting="uniform")` is added. `ServerYogi` begins with `v = 0` and has other
    defaults (β₂ = 0.999, ε = 1e-8 in place of τ).

    Cannot be combined with another server optimizer.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedYogi(lr=0.01)

    Args:
        lr: The server's learning rate η, which the paper tunes for every task.
        beta1: The decay rate β₁ of the first moment.
        beta2: The decay rate β₂ of the second moment.
        tau: The degree of adaptivity τ, greater than 0; smaller values adapt more.
        initial_v: Where v begins. None for τ²; the paper asks for at least that, some implementations begin at 0.
    """

    lr: Number
    beta1: Number = 0.9
    beta2: Number = 0.99
    tau: Number = 1e-3
    initial_v: Number | None = None

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * torch.sign(v - squared) * squared


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """FedAdagrad: Adagrad on the server, as in the paper that introduced it.

    Reddi et al., *Adaptive Federated Optimization* (2021), Algorithm 2. `m ← β₁m + (1−β₁)Δ`, `v ← v + Δ²`,
    `w ← w + η·m/(√v + τ)`, from `m = 0` and `v = τ²`, where Δ is the mean of the updates, by samples unless
    `FedAvg(weighting="uniform")` is added. As in the paper's experiments, β₁ is 0, which makes `m = Δ`.
    `ServerAdagrad` begins with `v = 0` and has other defaults (β₁ = 0.9, ε = 1e-8 in place of τ).

    Cannot be combined with another server optimizer.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedAdagrad(lr=0.1)

    Args:
        lr: The server's learning rate η, which the paper tunes for every task.
        beta1: The decay rate β₁ of the first moment.
        tau: The degree of adaptivity τ, greater than 0; smaller values adapt more.
        initial_v: Where v begins. None for τ²; the paper asks for at least that, some implementations begin at 0.
    """

    lr: Number
    beta1: Number = 0.0
    tau: Number = 1e-3
    initial_v: Number | None = None

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


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
    """Adam on the server, with bias correction. `FedAdam` is the one of the literature, without it.

    Mills, Hu and Min, *Faster Federated Learning with Decaying Number of Local SGD Steps* (2023), Algorithm 3. With
    `q = −Δ`: `m ← β₁m + (1−β₁)q`, `v ← β₂v + (1−β₂)q²`, `w ← w − η·m/(√v + ε)`, from `m = v = 0`. The learning rate of
    the τ-th round, counted from 1, is `η = lr·√(1−β₂^τ)/(1−β₁^τ)`.

    Cannot be combined with another server optimizer.

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
    """Yogi on the server, with the defaults of `ServerAdam`. `FedYogi` is the one of the literature.

    Reddi et al., *Adaptive Federated Optimization* (2021), with other constants. With `q = −Δ`:
    `m ← β₁m + (1−β₁)q`, `v ← v − (1−β₂)·sign(v − q²)·q²`, `w ← w − lr·m/(√v + ε)`, from `m = v = 0`.

    Cannot be combined with another server optimizer.

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
    """Adagrad on the server, with the defaults of `ServerAdam`. `FedAdagrad` is the one of the literature.

    Reddi et al., *Adaptive Federated Optimization* (2021), with other constants. With `q = −Δ`:
    `m ← β₁m + (1−β₁)q`, `v ← v + q²`, `w ← w − lr·m/(√v + ε)`, from `m = v = 0`.

    Cannot be combined with another server optimizer.

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
