"""A run, built once: what is trained, on which data, by which engine.

What changes as it trains is its `Progress`; and in place, what clients keep (`kept`) and the model's running
statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from undrift.data.dataset import FederatedDataset, Rows
from undrift.engine.cohort import Kept, Orders, Resident, draw_up
from undrift.engine.lanes import LanesEngine
from undrift.engine.plain import PlainEngine
from undrift.errors import require
from undrift.functional.model import Model, Params
from undrift.losses import Loss, Metric
from undrift.method.context import Plan, Server
from undrift.method.local import Local, cohort_batches
from undrift.method.part import Method
from undrift.random import Key, choose, derive
from undrift.schedule import value
from undrift.training.survivors import Conditions
from undrift.tree import Tree, to_device


@dataclass(frozen=True)
class Problem:
    """A method, a model and data, checked and on their device; no engine has been chosen yet."""

    method: Method
    model: Model
    data: FederatedDataset
    resident: Resident
    local: Local
    loss: Loss
    metrics: dict[str, Metric]
    test: Rows | None
    validation: Rows | None
    server_data: Any
    rounds: int
    cohort_size: int
    seed: int
    kept: Kept
    conditions: Conditions

    @property
    def measures(self) -> dict[str, Metric]:
        """What evaluations give: the loss and every metric."""
        return {"loss": self.loss, **self.metrics}

    @property
    def population(self) -> int:
        return len(self.data.nonempty)

    def plan(self, t: int) -> Plan:
        """Round `t` before any part has changed it: the cohort, drawn from (seed, round) alone, and its work."""
        drawn = choose(derive(self.seed, "cohort", t), self.population, self.cohort_size)
        clients = self.data.nonempty[drawn]
        rates: dict[str, Any] = {
            name: value(getattr(self.local, name), t) for name in ("lr", "momentum", "weight_decay")
        }
        return Plan(round=t, clients=clients, steps=self.steps_at(t, clients), **rates)

    def steps_at(self, t: int, clients: np.ndarray) -> np.ndarray:
        return self.local.step_counts(t, clients, self.data.sizes[clients])

    def orders(self, plan: Plan, params: Params, received: list[Tree]) -> Orders:
        """The plan as tensors for the engine."""
        sizes, width = self.data.sizes[plan.clients], self.local.widest(self.data.sizes)
        batches = cohort_batches(self.seed, plan.round, plan.clients, sizes, plan.steps, self.local.batch_size, width)
        kept = self.kept if plan.steps.any() else None
        outputs = self.model.outputs
        orders = draw_up(plan, self.method, self.resident, params, received, kept, self.seed, batches, outputs)
        return self.conditions.orders(orders)

    def everyone(self, t: int, params: Params) -> Orders:
        """All clients that have data, for a survey without training."""
        nobody_trains = np.zeros(self.population, np.int64)
        plan = replace(self.plan(t), clients=self.data.nonempty, steps=nobody_trains)
        return self.orders(plan, params, [() for _ in self.method.parts])

    def server(self, t: int) -> Server:
        words = to_device(torch.tensor(derive(self.seed, "server", t)), self.resident.device)
        key = Key(words, torch.zeros_like(words[0]))
        return Server(self.model, self.loss, self.server_data, t, key, self.data.augment)


@dataclass(frozen=True)
class Run(Problem):
    """A run that is ready to start."""

    engine: LanesEngine | PlainEngine
    choices: dict[str, Any]
    """What was chosen for the user, and why: `result.choices`."""

    def checked(self, plan: Plan) -> Plan:
        """The plan after the parts' own hooks, refused where no engine could carry it out."""
        steps = np.asarray(plan.steps)
        require(len(plan.clients) > 0, f"A part's plan leaves no client in round {plan.round + 1}; keep at least one.")
        whole = steps.dtype.kind in "iu" and steps.shape == plan.clients.shape
        require(whole and steps.min() >= 1, "A part's plan must leave each client a whole number of steps from 1.")
        for name in ("momentum", "weight_decay"):
            fine = not getattr(plan, name) or getattr(self.engine.program, name)
            require(fine, f"A part's plan sets {name}, which Local leaves at 0 in every round; set it there.")
        return replace(plan, steps=steps)
