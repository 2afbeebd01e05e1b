"""Learning rates that decay over rounds and over local steps.

Mo, Chen, Li, Xu and Xue, *Two-Dimensional Learning Rate Decay: Towards Accurate Federated Learning with Non-IID Data*
(2021).

TwoDLRD, AllDecreasing and AdditiveTuning use Pflug's diagnostic (Pflug, 1990) to detect that training has become
stationary. The server sums the inner products of successive rounds' updates, `S ← S + ⟨g_r, g_{r−1}⟩`. If `S < 0` and
more than `window` rounds have passed since the last decay, it counts a decay, `d ← d + 1`, and resets S to 0. The three
methods differ in how the learning rates of the local steps depend on d. They take the uniform mean over the cohort.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from undrift.method.context import Client, Plan, Server
from undrift.method.part import Part
from undrift.schedule import Number
from undrift.tree import Tree, tree_leaves, tree_sub, tree_zeros


@dataclass(frozen=True)
class StepRates(Part):
    """Base class of parts with a learning rate per local step.

    The history has the first four rates (`rates`), each averaged over the clients that took that many steps, whatever
    their weights.
    """

    reads_rates: ClassVar[bool] = False
    harmless_sums: ClassVar[bool] = True

    def start(self, params: Tree, server: Server) -> Tree:
        return {"rates": torch.zeros(4, dtype=torch.float64)}

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        steps = torch.arange(4, device=client.steps.device)
        rates = torch.stack([torch.as_tensor(self.rate(k, client)) * client.lr for k in steps.unbind()])
        taken = steps < client.steps
        return {"rates": torch.where(taken, rates, 0.0), "taken": taken}, client.kept

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        sums = server.totals.sums
        return update, {**state, "rates": sums["rates"] / sums["taken"].clamp(min=1)}

    def history(self, state: Tree) -> dict[str, Any]:
        return {"rates": state["rates"].tolist()}


@dataclass(frozen=True)
class Pflug(StepRates):
    """Base class of parts with Pflug's diagnostic, computed on the global weights. Implies the uniform mean."""

    window: Number

    implies_weighting: ClassVar[str | None] = "uniform"
    contradicts: ClassVar[tuple[str, ...]] = ("StepRates",)

    def start(self, params: Tree, server: Server) -> Tree:
        zero = torch.zeros((), dtype=torch.float64)
        counts = {name: torch.zeros((), dtype=torch.int64) for name in ("round", "last", "decays")}
        return {**super().start(params, server), "g": tree_zeros(params), "S": zero, **counts}

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        return state["decays"]

    def observe(self, params: Tree, state: Tree, server: Server) -> Tree:
        g, r = tree_sub(params, server.params), state["round"] + 1
        product = sum((a * b).sum().double() for a, b in zip(tree_leaves(g), tree_leaves(state["g"]), strict=True))
        total = state["S"] + product
        stalled = (r > self.window + state["last"]) & (total < 0)
        return {
            **state,
            "g": g,
            "round": r,
            "S": torch.where(stalled, 0.0, total),
            "last": torch.where(stalled, r, state["last"]),
            "decays": state["decays"] + stalled,
        }

    def history(self, state: Tree) -> dict[str, Any]:
        return {"diagnostic": float(state["S"]), "decays": int(state["decays"]), **super().history(state)}


@dataclass(frozen=True)
class TwoDLRD(Pflug):
    """2D-LRD: the learning rate decays over local steps, and more so after each decay. `C=0` is uniform FedAvg.

    Mo et al., *Two-Dimensional Learning Rate Decay: Towards Accurate Federated Learning with Non-IID Data* (2021).
    Local step k has the learning rate `γ·α^k` with `α = 1 − C·d`, where d counts the decays. The first step always has
    the full learning rate. Once `C·d ≥ 1`, clients take one step per round, at the full learning rate.

    Cannot be combined with `AllDecreasing`, `AdditiveTuning` or `FirstStepOnly`.

    Example:
        >>> import undrift as ud
        >>> method = ud.TwoDLRD(window=50)

    Args:
        window: The next decay waits until more than this many rounds have passed since the last one.
        C: How much α falls with each decay.
    """

    C: Number = 0.2

    def plan(self, plan: Plan, state: Tree, server: Server) -> tuple[Plan, Tree]:
        spent = bool(self._spent(state["decays"]))
        return replace(plan, steps=np.ones_like(plan.steps)) if spent else plan, state

    def rate(self, k: Tensor, client: Client) -> Tree:
        alpha = torch.where(self._spent(client.received), 1.0, 1 - self.C * client.received)
        return alpha**k

    def _spent(self, decays: Tensor) -> Tensor:
        return self.C * decays >= 1 - 1e-9  # so that 5 × 0.2 counts as 1


@dataclass(frozen=True)
class AllDecreasing(Pflug):
    """All local steps have the same learning rate, which falls with each decay. `factor=1` is uniform FedAvg.

    Mo et al., *Two-Dimensional Learning Rate Decay: Towards Accurate Federated Learning with Non-IID Data* (2021).
    After d decays, every local step has the learning rate `γ·factor^d`. The paper calls this AD.

    Cannot be combined with `TwoDLRD`, `AdditiveTuning` or `FirstStepOnly`.

    Example:
        >>> import undrift as ud
        >>> method = ud.AllDecreasing(window=50)

    Args:
        window: The next decay waits until more than this many rounds have passed since the last one.
        factor: The factor of the learning rate per decay.
    """

    factor: Number = 0.8

    ranges: ClassVar[dict[str, str]] = {"factor": "[0, 1]"}

    def rate(self, k: Tensor, client: Client) -> Tree:
        return self.factor**client.received


@dataclass(frozen=True)
class AdditiveTuning(Pflug):
    """Every local step but the first has a learning rate that falls with each decay. `C=0` is uniform FedAvg.

    Mo et al., *Two-Dimensional Learning Rate Decay: Towards Accurate Federated Learning with Non-IID Data* (2021). The
    first local step has the learning rate γ, every later one `γ·max(1 − C·d, 0)`. The paper calls this AT.

    Cannot be combined with `TwoDLRD`, `AllDecreasing` or `FirstStepOnly`.

    Example:
        >>> import undrift as ud
        >>> method = ud.AdditiveTuning(window=50)

    Args:
        window: The next decay waits until more than this many rounds have passed since the last one.
        C: How much the factor falls with each decay.
    """

    C: Number = 0.2

    def rate(self, k: Tensor, client: Client) -> Tree:
        return torch.where(k == 0, 1.0, (1 - self.C * client.received).clamp(min=0))


@dataclass(frozen=True)
class FirstStepOnly(StepRates):
    """From round `after` on, only the first local step has an effect. Earlier rounds are FedAvg's.

    Mo et al., *Two-Dimensional Learning Rate Decay: Towards Accurate Federated Learning with Non-IID Data* (2021). The
    experiment of its Figure 2, in which accuracy rises once all later local steps have the learning rate 0.

    Cannot be combined with `TwoDLRD`, `AllDecreasing` or `AdditiveTuning`.

    Example:
        >>> import undrift as ud
        >>> method = ud.FirstStepOnly(after=100)

    Args:
        after: The first round, counted from 0, in which later steps have no effect.
    """

    after: Number

    def rate(self, k: Tensor, client: Client) -> Tree:
        return torch.where((client.round >= self.after) & (k > 0), 0.0, 1.0)
