"""A run from the settings of `ud.train`: what decides the training is checked, and what was left open is chosen."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from undrift import models
from undrift.data.dataset import FederatedDataset, Rows
from undrift.engine.choose import build, choose, compiles
from undrift.engine.client import Program
from undrift.engine.cohort import Kept, Resident
from undrift.engine.graph import captures
from undrift.errors import require
from undrift.functional.model import Model
from undrift.losses import Loss, Metric, get_loss, get_metrics
from undrift.method.parse import as_method
from undrift.models import parse_model
from undrift.random import derive
from undrift.training.checks import (
    check_augment,
    check_gradient,
    check_split,
    check_types,
    cohort_size_of,
    find_device,
)
from undrift.training.run import Problem, Run
from undrift.training.settings import Settings
from undrift.training.survivors import Conditions

log = logging.getLogger("undrift")


def prepare(given: Settings) -> Run:
    """Check what decides the training, and choose what was left open. Raises `UndriftError`."""
    check_types(given)
    data, local, rounds, seed = given.data, given.local, given.rounds, given.seed
    method = as_method(given.method)
    where = find_device(given.device)
    cohort_size = cohort_size_of(given.participation, len(data.nonempty))
    conditions = Conditions(given.faults, given.max_norm_ratio, given.min_clients)
    conditions.check(rounds, cohort_size)
    local.check(data, rounds)
    method.check(local, data, rounds)
    derive(seed, "check")  # a seed that is no whole number is refused here

    chosen_loss = get_loss(given.loss if given.loss is not None else data.task.loss)
    chosen_metrics = get_metrics(given.metrics if given.metrics is not None else data.task.metrics, chosen_loss)
    function = Model(module_of(given.model, data, seed), where, given.precision)
    resident = Resident(data, where, function.exact)
    check_data(function, data, where, chosen_loss, chosen_metrics)
    for part in method.parts:
        part.check_model(function, rounds)
    problem = Problem(
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
        conditions=conditions,
    )
    return with_engine(problem, given.engine, given.lanes, given.compile, given.precision)


def module_of(model: Any, data: FederatedDataset, seed: int) -> nn.Module:
    """The user's module, or a new one of the name that was given."""
    if isinstance(model, str):
        name, options = parse_model(model)
        shape = data.take(data.store, data.index[:1])[0].shape[1:]
        needs: dict[str, Any] = {"classes": data.outputs, "shape": shape, "vocabulary": data.task.vocabulary}
        model = models.get(name, seed=seed, **needs, **options)
    kind = type(model).__name__
    require(isinstance(model, nn.Module), f"model must be an nn.Module or the name of a model, not {kind}.")
    module: nn.Module = model
    return module


def check_data(
    model: Model, data: FederatedDataset, device: torch.device, loss: Loss, metrics: dict[str, Metric]
) -> None:
    """Try the model, the loss, the metrics and the augmentation on samples of every split."""
    splits = {"clients'": Rows(data.store, data.index, data.take)}
    for name in ("test", "validation", "server"):
        rows = getattr(data, f"{name}_rows")
        splits |= {f"{name} data's": rows} if rows else {}
    for whose, rows in splits.items():
        check_split(model, whose, rows, device, loss, metrics)
    check_gradient(model, splits["clients'"], device, loss)
    if data.augment:
        check_augment(data.augment, splits["clients'"], device)


def with_engine(problem: Problem, engine: str, lanes: int | None, compile: bool | None, precision: str) -> Run:
    """The run with the engine that was asked for, or that suits the problem."""
    local, data, where = problem.local, problem.data, problem.resident.device
    moves, decays = (callable(number) or bool(number) for number in (local.momentum, local.weight_decay))
    program = Program(problem.model, problem.method, problem.loss, moves, decays, data.augment)
    program = problem.conditions.program(program, problem.cohort_size)
    steps = local.step_counts(0, data.nonempty, data.sizes[data.nonempty])
    probe = problem.orders(problem.plan(0), problem.model.start, [() for _ in problem.method.parts])
    width = local.widest(data.sizes)
    with selected(where):
        choice = choose(engine, lanes, program, problem.resident, probe, steps, width)
    work = problem.cohort_size * float(steps.mean())
    choice = replace(choice, compile=compiles(compile, choice, where, problem.rounds, work))
    choices = {
        "engine": choice.engine,
        "lanes": choice.lanes,
        "compile": choice.compile,
        "device": str(where),
        "precision": precision,
        "dtype": str(problem.model.dtype),
        "why": choice.why,
    }
    log.info("engine %s, %d lanes, on %s: %s", choice.engine, choice.lanes, where, choice.why)
    given = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return Run(**given, engine=build(choice, program, problem.resident, width), choices=choices)


def selected(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` the current GPU: CUDA graphs and Triton's kernels go to that one, wherever their tensors are."""
    return torch.cuda.device(device) if captures(device) else contextlib.nullcontext()
