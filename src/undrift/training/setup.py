"""Everything that is settled, and everything that is refused, before a run starts."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from undrift import models
from undrift.data.dataset import FederatedDataset, Rows
from undrift.engine.choose import build, choose, compiles
from undrift.engine.client import Program
from undrift.engine.cohort import Kept, Orders, Resident, draw_up
from undrift.engine.graph import captures
from undrift.engine.lanes import LanesEngine
from undrift.engine.plain import PlainEngine
from undrift.errors import require, whole
from undrift.local import Local, cohort_batches
from undrift.losses import Loss, Metric, get_loss, get_metrics
from undrift.method import Method, as_method
from undrift.models import parse_model
from undrift.models.functional import Model, Params
from undrift.random import Key, derive
from undrift.random import choose as choose_clients
from undrift.roles import Plan, Server
from undrift.schedule import value
from undrift.training.checks import (
    check_augment,
    check_gradient,
    check_split,
    cohort_size_of,
    find_device,
)
from undrift.training.identity import identity
from undrift.training.survivors import Conditions
from undrift.tree import Tree, to_device

log = logging.getLogger("undrift")


@dataclass
class Setup:
    """A run that is ready to start."""

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
    engine: LanesEngine | PlainEngine
    choices: dict[str, Any]
    conditions: Conditions

    @cached_property
    def identity(self) -> dict[str, str]:
        """What must be the same for a run to go on from a checkpoint."""
        return identity(self)

    @property
    def measures(self) -> dict[str, Metric]:
        """What evaluations give: the loss and every metric."""
        return {"loss": self.loss, **self.metrics}

    @property
    def population(self) -> int:
        return len(self.data.nonempty)

    def plan(self, t: int) -> Plan:
        """Round `t` before any part has changed it: the cohort, drawn from (seed, round) alone, and its work."""
        drawn = choose_clients(derive(self.seed, "cohort", t), self.population, self.cohort_size)
        clients = self.data.nonempty[drawn]
        rates: dict[str, Any] = {
            name: value(getattr(self.local, name), t) for name in ("lr", "momentum", "weight_decay")
        }
        return Plan(round=t, clients=clients, steps=self.steps_at(t, clients), **rates)

    def steps_at(self, t: int, clients: np.ndarray) -> np.ndarray:
        return self.local.step_counts(t, clients, self.data.sizes[clients])

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


def prepare(
    model: Any,
    data: Any,
    method: Any,
    *,
    rounds: int,
    local: Any,
    participation: float,
    seed: int,
    loss: Any,
    metrics: Any,
    device: Any,
    precision: str,
    engine: str,
    lanes: int | None,
    compile: bool | None,
    conditions: Conditions = Conditions(),  # noqa: B008 - frozen
) -> Setup:
    """Check every argument and choose what was left to us. Refuses with a sentence; touches nothing."""
    kind = type(data).__name__
    require(isinstance(data, FederatedDataset), f"data must be a FederatedDataset (ud.load, from_clients), not {kind}.")
    require(isinstance(local, Local), f"local must be a ud.Local, not {type(local).__name__}.")
    require(whole(rounds) and rounds >= 1, f"rounds must be a whole number from 1, not {rounds!r}.")
    require(engine in ("auto", "lanes", "plain"), f'engine must be "auto", "lanes" or "plain", not {engine!r}.')
    precisions = ("auto", "tf32", "bfloat16")
    require(precision in precisions, f'precision must be "auto", "tf32" or "bfloat16", not {precision!r}.')
    fine = lanes is None or (whole(lanes) and lanes >= 1)
    require(fine, f"lanes must be a whole number from 1, or None, not {lanes!r}.")
    require(compile in (None, True, False), f"compile must be True, False, or None, not {compile!r}.")
    method = as_method(method)
    where = find_device(device)
    cohort_size = cohort_size_of(participation, len(data.nonempty))
    conditions.check(rounds, cohort_size)
    local.check(data, rounds)
    method.check(local, data, rounds)
    derive(seed, "check")  # a seed that is no whole number is refused here

    chosen_loss = get_loss(loss if loss is not None else data.task.loss)
    chosen_metrics = get_metrics(metrics if metrics is not None else data.task.metrics, chosen_loss)
    shape = data.take(data.store, data.index[:1])[0].shape[1:]
    if isinstance(model, str):
        name, options = parse_model(model)
        needs = {"classes": data.outputs, "shape": shape, "vocabulary": data.task.vocabulary}
        model = models.get(name, seed=seed, **needs, **options)
    kind = type(model).__name__
    require(isinstance(model, nn.Module), f"model must be an nn.Module or the name of a model, not {kind}.")
    function = Model(model, where, precision)
    resident = Resident(data, where, function.exact)
    splits = {"clients'": Rows(data.store, data.index, data.take)}
    for name in ("test", "validation", "server"):
        rows = getattr(data, f"{name}_rows")
        splits |= {f"{name} data's": rows} if rows else {}
    for whose, rows in splits.items():
        check_split(function, whose, rows, where, chosen_loss, chosen_metrics)

    check_gradient(function, splits["clients'"], where, chosen_loss)
    if data.augment:
        check_augment(data.augment, splits["clients'"], where)
    for part in method.parts:
        part.check_model(function, rounds)
    moves, decays = (callable(number) or bool(number) for number in (local.momentum, local.weight_decay))
    program = Program(function, method, chosen_loss, moves, decays, data.augment)
    program = conditions.program(program, cohort_size)
    setup = Setup(
        method=method,
        model=function,
        data=data,
        resident=resident,
        local=local,
        loss=chosen_loss,
        metrics=chosen_metrics,
        test=resident.place(data.test_rows) if data.test_rows else None,
        validation=resident.place(data.validation_rows) if data.validation_rows else None,
        server_data=tuple(t.to(where) for t in data.server) if data.server else None,
        rounds=rounds,
        cohort_size=cohort_size,
        seed=seed,
        kept=Kept(method, where, len(data.nonempty)),
        engine=PlainEngine(program, resident),
        choices={},
        conditions=conditions,
    )
    steps = local.step_counts(0, data.nonempty, data.sizes[data.nonempty])
    probe = setup.orders(setup.plan(0), function.start, [() for _ in method.parts])
    width = local.widest(data.sizes)
    with selected(where):
        choice = choose(engine, lanes, program, resident, probe, steps, width)
    choice = replace(choice, compile=compiles(compile, choice, where, rounds, cohort_size * float(steps.mean())))
    setup.engine = build(choice, program, resident, width)
    setup.choices = {
        "engine": choice.engine,
        "lanes": choice.lanes,
        "compile": choice.compile,
        "device": str(where),
        "precision": precision,
        "dtype": str(function.dtype),
        "why": choice.why,
    }
    log.info("engine %s, %d lanes, on %s: %s", choice.engine, choice.lanes, where, choice.why)
    return setup


def selected(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` the current GPU: CUDA graphs and Triton's kernels go to that one, wherever their tensors are."""
    return torch.cuda.device(device) if captures(device) else contextlib.nullcontext()
