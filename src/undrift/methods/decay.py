"""Learning rates that decay by round and by local step (Mo et al., *Two-Dimensional Learning Rate Decay*).

A diagnostic says when progress has stalled (Pflug's, 1988): the inner products of successive rounds' updates are
summed, `S ← S + ⟨g_r, g_{r−1}⟩`, and once more than `window` rounds have passed since the last time, S < 0 counts a
decay, `d ← d + 1`, and starts anew. The three methods differ in what d does to the local rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from undrift.method.context import Client, Plan, Server, Totals
from undrift.method.part import Part
from undrift.schedule import Number
from undrift.tree import Tree, tree_leaves, tree_sub, tree_zeros


@dataclass(frozen=True)
class StepRates(Part):
    """What all four share: a rate by local step, and in the history the first four, averaged over who took them."""

    reads_rates: ClassVar[bool] = False

    def start(self, params: Tree) -> Tree:
        return {"rates": torch.zeros(4, dtype=torch.float64)}

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        steps = torch.arange(4, device=client.steps.device)
        rates = torch.stack([torch.as_tensor(self.rate(k, client)) * client.lr for k in steps.unbind()])
        taken = steps < client.steps
        return {"rates": torch.where(taken, rates, 0.0), "taken": taken}, client.kept

    def transform(self, update: Tree, totals: Totals, state: Tree) -> tuple[Tree, Tree]:
        return update, {**state, "rates": totals.sums["rates"] / totals.sums["taken"].clamp(min=1)}

    def history(self, state: Tree) -> dict[str, Any]:
        return {"rates": state["rates"].tolist()}


@dataclass(frozen=True)
class Pflug(StepRates):
    """The diagnostic, on the weights that each round leaves. Its mean of clients is uniform."""

    window: Number

    implies_weighting: ClassVar[str | None] = "uniform"
    contradicts: ClassVar[tuple[str, ...]] = ("StepRates",)

    def start(self, params: Tree) -> Tree:
        zero = torch.zeros((), dtype=torch.float64)
        counts = {name: torch.zeros((), dtype=torch.int64) for name in ("round", "last", "decays")}
        return {**super().start(params), "g": tree_zeros(params), "S": zero, **counts}

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        return state["decays"]

    def after(self, params: Tree, previous: Tree, state: Tree) -> Tree:
        g, r = tree_sub(params, previous), state["round"] + 1
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
    """Local step k uses `γ·α^k`, `α = 1 − C·d`; once `C·d ≥ 1`, one step per round at full rate. `C=0` is FedAvg."""

    C: Number = 0.2

    def plan(self, plan: Plan, state: Tree) -> Plan:
        return replace(plan, steps=np.ones_like(plan.steps)) if bool(self._spent(state["decays"])) else plan

    def rate(self, k: Tensor, client: Client) -> Tree:
        alpha = torch.where(self._spent(client.received), 1.0, 1 - self.C * client.received)
        return alpha**k

    def _spent(self, decays: Tensor) -> Tensor:
        return self.C * decays >= 1 - 1e-9  # 5 × 0.2 counts as 1


@dataclass(frozen=True)
class AllDecreasing(Pflug):
    """Every local step uses `γ·factor^d`. `factor=1` is FedAvg."""

    factor: Number = 0.8

    ranges: ClassVar[dict[str, str]] = {"factor": "[0, 1]"}

    def rate(self, k: Tensor, client: Client) -> Tree:
        return self.factor**client.received


@dataclass(frozen=True)
class AdditiveTuning(Pflug):
    """Step 0 uses γ, every later one `γ·max(1 − C·d, 0)`. `C=0` is FedAvg."""

    C: Number = 0.2

    def rate(self, k: Tensor, client: Client) -> Tree:
        return torch.where(k == 0, 1.0, (1 - self.C * client.received).clamp(min=0))


@dataclass(frozen=True)
class FirstStepOnly(StepRates):
    """From round `after` on only the first local step moves; every later one has rate 0. Rounds before are plain."""

    after: Number = field()  # the design's word; the hook of that name is not this part's, nor its default

    def rate(self, k: Tensor, client: Client) -> Tree:
        return torch.where((client.round >= self.after) & (k > 0), 0.0, 1.0)
