"""A run, built once: what is trained, on which data, by which engine. What training changes is its `State`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.engine import graph
from undrift.engine.base import Engine, RoundInputs
from undrift.engine.client_states import ClientStates
from undrift.engine.device_data import DeviceData
from undrift.engine.inputs import build_inputs, mean_weights, on_device
from undrift.engine.outputs import Outputs
from undrift.engine.ranked import shares
from undrift.engine.ranks import ALONE, Ranks
from undrift.engine.slots import SlotFiles
from undrift.errors import require
from undrift.functional.loss_draws import repeating
from undrift.functional.model import Model
from undrift.losses import Loss
from undrift.method.context import Plan, Server
from undrift.method.local import Local, cohort_batches, slices
from undrift.method.part import Method
from undrift.method.work import Momentum
from undrift.metrics import measure
from undrift.random import Key, choose, derive
from undrift.schedule import check_number, value
from undrift.training.batch_checks import check_batch_sizes
from undrift.training.client_failures import Conditions
from undrift.training.drift import with_places
from undrift.training.state import State
from undrift.tree import Tree, to_device, tree_clone, tree_to

if TYPE_CHECKING:
    from undrift.training.hook_rehearsal import Rehearsal
    from undrift.training.model_rehearsal import OwnModule


@dataclass(frozen=True)
class Run:
    """A method, a model and data, checked and on their device, with the engine that trains them."""

    method: Method
    """The method as the user wrote it."""
    composed: Method
    """The method that the engine runs, with the parts for local training."""
    model: Model
    data: FederatedDataset
    device_data: DeviceData
    local: Local
    loss: Loss
    metrics: dict[str, Any]
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
    drift: bool | str = False
    """Whether the history has figures of client drift, and of each layer: see `drift.py`."""
    ranks: Ranks = ALONE
    """The processes that train it together."""
    files: SlotFiles | None = None
    """The files for what clients keep, if that may be too much for memory."""
    rehearsal: Rehearsal | None = None
    """What repeats the trial of users' hooks during the run, if there are any in lanes."""
    own_module: OwnModule | None = None
    """The caller's own module, with which engines are compared; None if they are not."""

    @property
    def measures(self) -> dict[str, Any]:
        """The loss and every metric, which evaluations compute."""
        every = {"loss": self.loss, **self.metrics}
        return {name: measure(one, lambda function: repeating(self.model, function)) for name, one in every.items()}

    @cached_property
    def outputs(self) -> Outputs:
        """The model in evaluation mode."""
        lanes = self.choices["engine"] == "lanes" and graph.captures(self.device)
        return Outputs(self.model, traced=lanes)

    @cached_property
    def digests(self) -> dict[str, str]:
        """What identifies the data of every split: see `FederatedDataset.digests`."""
        return self.data.digests

    @property
    def population(self) -> int:
        """The number of clients with data."""
        return self.data.population

    @property
    def device(self) -> torch.device:
        return self.device_data.device

    def start(self) -> State:
        """Return the state before the first round."""
        state = State(self.model.start, [], self.model.tracked, self.no_states())
        parts = self.bound(0).start(state.params, self.server(0, state))
        return replace(state, parts=tree_clone(tree_to(parts, self.device)))

    def no_states(self) -> ClientStates:
        """Return what clients keep before the first round."""
        return ClientStates.none(self.composed, self.device, self.population, self.files)

    def held_out(self, state: State, last: bool) -> dict[str, Any] | None:
        """Return the history's columns on held-out data that are elsewhere; None if the data are here."""
        return None

    def bound(self, t: int) -> Method:
        """Return the method with the numbers of round `t`."""
        return self.composed.bind(on_device(self.composed.numbers(t), self.device))

    def plan(self, t: int) -> Plan:
        """Return the plan of round `t` before parts change it: the cohort, drawn from (seed, round), and its steps."""
        drawn = choose(derive(self.seed, "cohort", t), self.population, self.cohort_size)
        clients = self.data.holders(drawn)
        rates: dict[str, Any] = {
            name: value(getattr(self.local, name), t) for name in ("lr", "momentum", "weight_decay")
        }
        return Plan(round=t, clients=clients, steps=self.steps_at(t, clients), **rates)

    def checked(self, plan: Plan, t: int) -> Plan:
        """Return the plan after the parts' own hooks, refused where no engine could carry it out."""
        clients, steps = np.asarray(plan.clients), np.asarray(plan.steps)
        require(plan.round == t, "A part's plan must not change the round.")
        known = clients.ndim == 1 and (clients.dtype.kind in "iu" or not len(clients))
        require(known, "A part's plan must list its clients as a one-dimensional array of integer ids.")
        clients = clients.astype(np.int64)
        there = (clients >= 0) & (clients < len(self.data))
        strange = clients[~there | (self.data.sizes_of(np.where(there, clients, 0)) == 0)]
        require(not len(strange), f"A part's plan has client {strange[:1]}, which does not exist or has no data.")
        require(len(np.unique(clients)) == len(clients), "A part's plan lists a client twice.")
        alike = steps.shape == clients.shape
        require(
            alike, f"A part's plan has {len(clients)} clients and {steps.size} step counts; see server.steps(clients)."
        )
        fine = not len(steps) or (steps.dtype.kind in "iu" and steps.min() >= 1)
        require(fine, "A part's plan must give each client a positive integer number of steps.")
        most = len(clients) <= self.cohort_size or self.conditions.max_norm_ratio is None
        require(most, "A part's plan has more clients than are sampled, which max_norm_ratio does not allow.")
        for name, interval in (("lr", "[0, inf)"), ("momentum", "[0, 1)"), ("weight_decay", "[0, inf)")):
            check_number(getattr(plan, name), 1, f"A part's plan: its {name}", interval)
        require(not plan.momentum or self.moves, MUST_BE_SET.format("momentum"))
        require(not plan.weight_decay or self.engine.program.weight_decay, MUST_BE_SET.format("weight_decay"))
        order = np.argsort(clients, kind="stable")
        return replace(plan, clients=clients[order], steps=steps.astype(np.int64)[order])

    @property
    def moves(self) -> bool:
        """Whether `Local` has momentum in some round."""
        return any(isinstance(part, Momentum) for part in self.composed.parts)

    def steps_at(self, t: int, clients: np.ndarray) -> np.ndarray:
        return self.local.step_counts(t, clients, self.data.sizes_of(clients), self.composed.batches)

    def weights(self, clients: np.ndarray) -> Tensor:
        """Return the clients' weights in the mean, before normalisation, on the device."""
        weights = mean_weights(self.composed, self.data.sizes_of(clients))
        return to_device(torch.as_tensor(weights, dtype=self.device_data.dtype), self.device)

    @cached_property
    def total_weight(self) -> float:
        """The sum of all clients' weights in the mean, before normalisation."""
        sizes, counts = self.data.size_counts
        return float(mean_weights(self.composed, sizes) @ counts)

    @property
    def keeps(self) -> bool:
        """Whether clients keep state between rounds."""
        return bool(self.composed.overriding("keep"))

    @property
    def fills(self) -> bool:
        """Whether cohorts may be smaller than the engine's width: if a part chooses them, or processes share them."""
        return bool(self.composed.overriding("plan")) or self.ranks.several

    def share(self, plan: Plan) -> np.ndarray | None:
        """Return the places in the cohort of the clients that this process trains; None for all."""
        if not self.ranks.several:
            return None
        return shares(plan.clients, plan.steps, self.ranks.size, self.engine.width, self.keeps)[self.ranks.rank]

    def counts(self, plan: Plan) -> np.ndarray:
        """Return the sizes of the cohort's batches, client after client."""
        sizes = self.data.sizes_of(plan.clients)
        return slices(sizes, plan.steps * self.composed.batches, self.local.per_epoch(sizes), self.local.batch_size)[3]

    def filled(self, plan: Plan) -> Plan:
        """Return the plan filled up to the engine's width, where cohorts may be smaller: see `RoundInputs`.

        The client that fills it up takes as many steps as the longest, so that all lanes end together if they would
        with a full cohort.
        """
        missing = self.engine.width - len(plan.clients)
        if missing <= 0 or not self.fills:
            return plan
        clients = np.concatenate([plan.clients, np.full(missing, self.data.holders(np.zeros(1, np.int64)))])
        steps = np.concatenate([plan.steps, np.full(missing, plan.steps.max(initial=1))])
        return replace(plan, clients=clients, steps=steps)

    def inputs(
        self, plan: Plan, state: State, received: list[Tree] | None = None, clients: ClientStates | None = None
    ) -> RoundInputs:
        """Return the plan as tensors for the engine, with what the parts broadcast and what clients have kept."""
        mine = self.share(plan)
        here = plan if mine is None else replace(plan, clients=plan.clients[mine], steps=plan.steps[mine])
        filled = self.filled(here)
        sizes, width = self.data.sizes_of(filled.clients), self.local.widest(self.data.size_counts[0])
        batches = cohort_batches(
            self.seed,
            plan.round,
            filled.clients,
            sizes,
            filled.steps,
            self.local.batch_size,
            width,
            self.composed.batches,
            self.local.drop_last,
            draw=self.local.order(self.data, filled.clients),
        )
        counts = None if mine is None else self.counts(plan)
        model = self.model.at(state.tracked)
        inputs = build_inputs(
            here, filled, batches, self.engine.program, model, self.device_data, state.params, received, clients,
            self.seed, self.fills,
        )  # fmt: skip
        inputs = replace(inputs, plan=plan, mine=mine, all_counts=counts)
        check_batch_sizes(self.model, inputs.counts)
        if self.drift or not self.conditions.ordinary:
            inputs = with_places(inputs)
        return self.conditions.with_factors(inputs)

    def everyone(self, t: int, state: State) -> RoundInputs:
        """Return all clients that have data, for measurements without training."""
        nobody_trains = np.zeros(self.population, np.int64)
        plan = replace(self.plan(t), clients=self.data.nonempty, steps=nobody_trains)
        return self.inputs(plan, state, None, state.clients if self.engine.program.personal else None)

    def server(self, t: int, state: State) -> Server:
        """Return the server in round `t`, with the model as it stands."""
        words = to_device(torch.tensor(derive(self.seed, "server", t)), self.device)
        return Server(
            model=self.model.at(state.tracked),
            loss=repeating(self.model, self.loss),
            data=self.server_data,
            round=t,
            key=Key(words, torch.zeros_like(words[0])),
            params=state.params,
            population=self.population,
            total_weight=self.total_weight,
            having_data=lambda: self.data.nonempty,
            steps=partial(self.steps_at, t),
            augment=self.data.augment,
        )


MUST_BE_SET = "A part's plan sets {0}, which Local leaves at 0 in every round; set it there."
