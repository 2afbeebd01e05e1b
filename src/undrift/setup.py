"""Everything that is settled, and everything that is refused, before a run starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from undrift import models
from undrift.data.dataset import FederatedDataset, Rows
from undrift.engine.choose import build, choose
from undrift.engine.client import Program
from undrift.engine.cohort import Kept, Orders, Resident, draw_up
from undrift.engine.lanes import LanesEngine
from undrift.engine.plain import PlainEngine
from undrift.errors import UndriftError
from undrift.local import Local, cohort_batches
from undrift.losses import Loss, Metric, cross_entropy, get_loss, get_metrics
from undrift.method import Method, as_method
from undrift.models.functional import Model, Params
from undrift.random import Key, derive
from undrift.random import choose as choose_clients
from undrift.roles import Plan, Server
from undrift.schedule import value
from undrift.tree import Tree

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
    server_data: Any
    cohort_size: int
    seed: int
    kept: Kept
    engine: LanesEngine | PlainEngine
    choices: dict[str, Any]

    @property
    def population(self) -> int:
        return len(self.data.nonempty)

    def plan(self, t: int, clients: np.ndarray | None = None) -> Plan:
        """Round `t` before any part has changed it: the cohort, drawn from (seed, round) alone, and its work."""
        if clients is None:
            clients = self.data.nonempty[
                choose_clients(derive(self.seed, "cohort", t), self.population, self.cohort_size)
            ]
        steps = self.local.step_counts(t, clients, self.data.sizes[clients])
        rates = {name: value(getattr(self.local, name), t) for name in ("lr", "momentum", "weight_decay")}
        return Plan(round=t, clients=clients, steps=steps, **rates)

    def orders(self, plan: Plan, params: Params, received: list[Tree]) -> Orders:
        """The plan as tensors for the engine."""
        size, width = self.local.batch_size, self.local.widest(self.data.sizes)
        batches = cohort_batches(
            self.seed, plan.round, plan.clients, self.data.sizes[plan.clients], plan.steps, size, width
        )
        return draw_up(plan, self.method, self.resident, params, received, self.kept, self.seed, batches)

    def server(self, t: int) -> Server:
        words = torch.tensor(derive(self.seed, "server", t), device=self.resident.device)
        return Server(self.model, self.loss, self.server_data, t, Key(words, torch.zeros_like(words[0])))


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
) -> Setup:
    """Check every argument and choose what was left to us. Refuses with a sentence; touches nothing."""
    _require(
        isinstance(data, FederatedDataset),
        f"data must be a FederatedDataset, from ud.load or from_clients, not {type(data).__name__}.",
    )
    _require(isinstance(local, Local), f"local must be a ud.Local, not {type(local).__name__}.")
    _require(_whole(rounds) and rounds >= 1, f"rounds must be a whole number from 1, not {rounds!r}.")
    _require(engine in ("auto", "lanes", "plain"), f'engine must be "auto", "lanes" or "plain", not {engine!r}.')
    _require(
        precision in ("auto", "tf32", "bfloat16"), f'precision must be "auto", "tf32" or "bfloat16", not {precision!r}.'
    )
    _require(
        lanes is None or (_whole(lanes) and lanes >= 1), f"lanes must be a whole number from 1, or None, not {lanes!r}."
    )
    method = as_method(method)
    where = _device(device)
    cohort_size = _cohort_size(participation, len(data.nonempty))
    local.check(data, rounds)
    method.check(local, data, rounds)
    derive(seed, "check")  # a seed that is no whole number is refused here

    resident = Resident(data, where)
    chosen_loss = get_loss(loss if loss is not None else data.task.loss)
    sample = data.take(data.store, data.index[:1])[0]
    if isinstance(model, str):
        classes = data.classes or (data.store["y"].shape[1] if data.store["y"].dim() > 1 else 1)
        model = models.get(model, classes=classes, shape=sample.shape[1:], seed=seed)
    _require(
        isinstance(model, nn.Module), f"model must be an nn.Module or the name of a model, not {type(model).__name__}."
    )
    function = Model(model, where, precision)
    _check_outputs(function, data, resident, chosen_loss, sample.shape[1:])

    moves = [value(local.momentum, t) for t in range(rounds if callable(local.momentum) else 1)]
    decays = [value(local.weight_decay, t) for t in range(rounds if callable(local.weight_decay) else 1)]
    program = Program(function, method, chosen_loss, momentum=any(moves), weight_decay=any(decays))
    setup = Setup(
        method=method,
        model=function,
        data=data,
        resident=resident,
        local=local,
        loss=chosen_loss,
        metrics=get_metrics(metrics if metrics is not None else data.task.metrics, chosen_loss),
        test=data.test_rows.to(where) if data.test_rows else None,
        server_data=tuple(t.to(where) for t in data.server) if data.server else None,
        cohort_size=cohort_size,
        seed=seed,
        kept=Kept(method),
        engine=PlainEngine(program, resident),
        choices={},
    )
    steps = local.step_counts(0, data.nonempty, data.sizes[data.nonempty])
    probe = setup.orders(setup.plan(0), function.start, [() for _ in method.parts])
    choice = choose(engine, lanes, program, resident, probe, steps, local.widest(data.sizes))
    setup.engine = build(choice, program, resident)
    setup.choices = {
        "engine": choice.engine,
        "lanes": choice.lanes,
        "device": str(where),
        "precision": precision,
        "dtype": str(function.dtype),
        "why": choice.why,
    }
    log.info("engine %s, %d lanes, on %s: %s", choice.engine, choice.lanes, where, choice.why)
    return setup


@contextlib.contextmanager
def arithmetic(precision: str, deterministic: bool) -> Iterator[None]:
    """The process-wide switches of a run, put back as they were when it ends."""
    matmul, cudnn, strict = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.use_deterministic_algorithms(deterministic or strict)
        with torch.no_grad():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
        torch.use_deterministic_algorithms(strict)


def _check_outputs(model: Model, data: FederatedDataset, resident: Resident, loss: Loss, shape: Any) -> None:
    """One forward pass: the model takes these samples, the loss takes its outputs, the labels are among them."""
    if loss is cross_entropy:
        _require(
            not data.store["y"].is_floating_point(),
            "Cross-entropy needs whole-number labels, but the data's are floats; convert them with y.long(), "
            "or choose another loss.",
        )
    row = torch.from_numpy(resident.index[:2]).to(resident.device)
    batch = resident.batch(row, torch.ones_like(row))
    try:
        with torch.no_grad():
            output = model(model.start, batch.x)
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's forward pass may raise
        raise UndriftError(f"The model does not take samples of shape {tuple(shape)}: {error}") from error
    if loss is cross_entropy:
        outputs = output.shape[-1]
        splits = {"clients'": data.store["y"]} | {
            f"{n} data's": r.store["y"] for n in ("test", "validation", "server") if (r := getattr(data, f"{n}_rows"))
        }
        for whose, y in splits.items():
            low, high = int(y.min()), int(y.max())
            _require(
                low >= 0 and high < outputs,
                f"The {whose} labels run from {low} to {high}, but the model has {outputs} outputs; "
                f"labels must be from 0 to {outputs - 1}.",
            )
    losses = loss(output, batch.y)
    _require(
        losses.shape == (len(row),),
        f"The loss must give one value a sample: shape ({len(row)},) here, not {tuple(losses.shape)}.",
    )


def _cohort_size(participation: Any, population: int) -> int:
    number = isinstance(participation, int | float) and not isinstance(participation, bool)
    _require(number, f"participation must be a count (an int) or a fraction (a float), not {participation!r}.")
    if isinstance(participation, int):
        _require(participation >= 1, f"participation must be at least 1 client, not {participation}.")
        _require(
            participation <= population,
            f"participation asks for {participation} clients a round, but only {population} have data.",
        )
        return participation
    _require(0 < participation <= 1, f"participation as a fraction must be in (0, 1], not {participation}.")
    return max(1, int(participation * population + 0.5))


def _device(device: Any) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UndriftError(
            f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); leave it out to choose by itself."
        ) from error


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _require(fine: bool, sentence: str) -> None:
    if not fine:
        raise UndriftError(sentence)
