"""Learning rates that decay by round and by local step.

Mo, Chen, Li, Xu and Xue, *Two-Dimensional Learning Rate Decay: Towards Accurate Federated Learning with Non-IID Data*
(2021).

TwoDLRD, AllDecreasing and AdditiveTuning use Pflug's diagnostic (1988) to detect that training has become stationary.
The server sums the inner products of successive rounds' updates, `S ← S + ⟨g_r, g_{r−1}⟩`. If S < 0, and more than
`window` rounds have passed since the last decay, it counts one more, `d ← d + 1`, and resets S to 0. The three methods
differ in how the local rates depend on d.
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
    """Common base class: rates by local step. The history has the first four, averaged over the clients that took
    that many steps.
    """

    reads_rates: ClassVar[bool] = False
    harmless_sums: ClassVar[bool] = True

    def start(self, params: Tree) -> Tree:
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
    """The diagnostic, on the global weights after each round. It implies uniform weights."""

    window: Number

    implies_weighting: ClassVar[str | None] = "uniform"
    contradicts: ClassVar[tuple[str, ...]] = ("StepRates",)

    def start(self, params: Tree) -> Tree:
        zero = torch.zeros((), dtype=torch.float64)
        counts = {name: torch.zeros((), dtype=torch.int64) for name in ("round", "last", "decays")}
        return {**super().start(params), "g": tree_zeros(params), "S": zero, **counts}

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
    """Learning rates decay over local steps, and faster after each decay. `C=0` is FedAvg.

    Mo et al., *Two-Dimensional Learning Rate Decay* (2021). Local step k has the rate `γ·α^k`, `α = 1 − C·d`. Once
    `C·d ≥ 1`, clients take one step per round at the full rate.

    Args:
        window: More than this many rounds pass between two decays.
        C: By how much α falls with each decay.
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
    """All local steps have the same rate, which falls with each decay: `γ·factor^d`. `factor=1` is FedAvg.

    Mo et al., *Two-Dimensional Learning Rate Decay* (2021).

    Args:
        window: More than this many rounds pass between two decays.
        factor: The factor by which the rate falls with each decay.
    """

    factor: Number = 0.8

    ranges: ClassVar[dict[str, str]] = {"factor": "[0, 1]"}

    def rate(self, k: Tensor, client: Client) -> Tree:
        return self.factor**client.received


@dataclass(frozen=True)
class AdditiveTuning(Pflug):
    """The first local step has the rate γ, every later one `γ·max(1 − C·d, 0)`. `C=0` is FedAvg.

    Mo et al., *Two-Dimensional Learning Rate Decay* (2021).

    Args:
        window: More than this many rounds pass between two decays.
        C: By how much the factor falls with each decay.
    """

    C: Number = 0.2

    def rate(self, k: Tensor, client: Client) -> Tree:
        return torch.where(k == 0, 1.0, (1 - self.C * client.received).clamp(min=0))


@dataclass(frozen=True)
class FirstStepOnly(StepRates):
    """From round `after` on, only the first local step has an effect: all later ones have rate 0.

    The experiment of Figure 2 in Mo et al., *Two-Dimensional Learning Rate Decay* (2021). Earlier rounds are FedAvg's.

    Args:
        after: The first round, counted from 0, with this rule.
    """

    after: Number

    def rate(self, k: Tensor, client: Client) -> Tree:
        return torch.where((client.round >= self.after) & (k > 0), 0.0, 1.0)
