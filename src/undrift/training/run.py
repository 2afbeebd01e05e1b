"""A run, built once: what is trained, on which data, by which engine. What training changes is its `State`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from undrift.data.dataset import FederatedDataset, Rows
from undrift.engine.base import Engine, RoundInputs
from undrift.engine.client_states import ClientStates
from undrift.engine.device_data import DeviceData
from undrift.engine.inputs import build_inputs, on_device
from undrift.errors import require
from undrift.functional.model import Model
from undrift.losses import Loss, Metric
from undrift.method.context import Plan, Server
from undrift.method.local import Local, cohort_batches
from undrift.method.part import Method
from undrift.random import Key, choose, derive
from undrift.schedule import value
from undrift.training.state import State
from undrift.training.survivors import Conditions
from undrift.tree import Tree, to_device, tree_to


@dataclass(frozen=True)
class Run:
    """A method, a model and data, checked and on their device, and the engine that trains them."""

    method: Method
    model: Model
    data: FederatedDataset
    device_data: DeviceData
    local: Local
    loss: Loss
    metrics: dict[str, Metric]
    test: Rows | None
    validation: Rows | None
    server_data: Any
    rounds: int
    cohort_size: int
    seed: int
    conditions: Conditions
    engine: Engine
    choices: dict[str, Any]
    """The settings that were chosen automatically, and why: `result.choices`."""

    @property
    def measures(self) -> dict[str, Metric]:
        """The loss and every metric, which evaluations compute."""
        return {"loss": self.loss, **self.metrics}

    @property
    def population(self) -> int:
        """How many clients have data."""
        return len(self.data.nonempty)

    @property
    def device(self) -> torch.device:
        return self.device_data.device

    def start(self) -> State:
        """The state before the first round."""
        parts = tree_to(self.bound(0).start(self.model.start), self.device)
        clients = ClientStates.none(self.method, self.device, self.population)
        return State(self.model.start, parts, self.model.tracked, clients)

    def bound(self, t: int) -> Method:
        """The method with the numbers of round `t`."""
        return self.method.bind(on_device(self.method.numbers(t), self.device))

    def plan(self, t: int) -> Plan:
        """Round `t` before any part has changed it: the cohort, drawn from (seed, round) alone, and its work."""
        drawn = choose(derive(self.seed, "cohort", t), self.population, self.cohort_size)
        clients = self.data.nonempty[drawn]
        rates: dict[str, Any] = {
            name: value(getattr(self.local, name), t) for name in ("lr", "momentum", "weight_decay")
        }
        return Plan(round=t, clients=clients, steps=self.steps_at(t, clients), **rates)

    def checked(self, plan: Plan) -> Plan:
        """The plan after the parts' own hooks, refused where no engine could carry it out."""
        steps = np.asarray(plan.steps)
        require(len(plan.clients) > 0, f"A part's plan leaves no client in round {plan.round + 1}; keep at least one.")
        whole = steps.dtype.kind in "iu" and steps.shape == plan.clients.shape
        require(whole and steps.min() >= 1, "A part's plan must leave each client a whole number of steps from 1.")
        most = len(plan.clients) <= self.cohort_size or self.conditions.max_norm_ratio is None
        require(most, "A part's plan has more clients than are sampled, which max_norm_ratio does not allow.")
        for name in ("momentum", "weight_decay"):
            fine = not getattr(plan, name) or getattr(self.engine.program, name)
            require(fine, f"A part's plan sets {name}, which Local leaves at 0 in every round; set it there.")
        return replace(plan, steps=steps)

    def steps_at(self, t: int, clients: np.ndarray) -> np.ndarray:
        return self.local.step_counts(t, clients, self.data.sizes[clients])

    def inputs(
        self, plan: Plan, state: State, received: list[Tree], clients: ClientStates | None = None
    ) -> RoundInputs:
        """The plan as tensors for the engine, with what the parts broadcast and what clients have kept."""
        sizes, width = self.data.sizes[plan.clients], self.local.widest(self.data.sizes)
        batches = cohort_batches(self.seed, plan.round, plan.clients, sizes, plan.steps, self.local.batch_size, width)
        model = self.model.at(state.tracked)
        inputs = build_inputs(
            plan, batches, self.method, model, self.device_data, state.params, received, clients, self.seed
        )
        return self.conditions.with_factors(inputs)

    def everyone(self, t: int, state: State) -> RoundInputs:
        """All clients that have data, for measurements without training."""
        nobody_trains = np.zeros(self.population, np.int64)
        plan = replace(self.plan(t), clients=self.data.nonempty, steps=nobody_trains)
        return self.inputs(plan, state, [() for _ in self.method.parts])

    def server(self, t: int, state: State) -> Server:
        """The server in round `t`, with the model as it stands."""
        words = to_device(torch.tensor(derive(self.seed, "server", t)), self.device)
        key = Key(words, torch.zeros_like(words[0]))
        return Server(self.model.at(state.tracked), self.loss, self.server_data, t, key, self.data.augment)
