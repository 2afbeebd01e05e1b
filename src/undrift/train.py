"""One federated run, readable from top to bottom: data → plan → lanes → sums → server → history."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from undrift.checks import require, whole
from undrift.data.dataset import FederatedDataset
from undrift.engine.cohort import on_device
from undrift.errors import UndriftError
from undrift.evaluate import evaluate
from undrift.local import Local
from undrift.method import Method, Part
from undrift.methods.fedavg import FedAvg
from undrift.personal import Personal
from undrift.result import Folder, Result
from undrift.roles import Totals
from undrift.setup import Setup, arithmetic, prepare
from undrift.tree import Tree, tree_add, tree_to


def train(
    model: nn.Module | str,
    data: FederatedDataset,
    method: Method | Part | str = FedAvg(),  # noqa: B008 - parts are frozen
    *,
    rounds: int,
    local: Local,
    participation: int | float = 1.0,
    seed: int = 0,
    loss: Any = None,
    metrics: Any = None,
    device: str | torch.device = "auto",
    precision: str = "auto",
    engine: str = "auto",
    lanes: int | None = None,
    compile: bool | None = None,
    deterministic: bool = False,
    evaluate_every: int = 1,
    personalize_every: int | None = None,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Train `model` on `data` with `method` for `rounds` rounds.

    `participation`: an int is a count of clients a round, a float a fraction of those that have data.
    `engine`: "lanes", "plain" (one client at a time) or "auto"; `result.choices` says what was chosen.
    Where clients have test data of their own, evaluated rounds also tell how the global model does on them, and the
    last round, or every `personalize_every`-th, how each client's does after one more local epoch.
    `out`: a folder for `metrics.jsonl` and `model.safetensors`. `on_round` is called with each round's history.
    """
    run = prepare(
        model, data, method, rounds=rounds, local=local, participation=participation, seed=seed, loss=loss,
        metrics=metrics, device=device, precision=precision, engine=engine, lanes=lanes,
    )  # fmt: skip
    require(whole(evaluate_every) and evaluate_every >= 1, f"evaluate_every must be 1 or more, not {evaluate_every!r}.")
    fine = personalize_every is None or (whole(personalize_every) and personalize_every >= 1)
    require(fine, f"personalize_every must be a whole number from 1, or None, not {personalize_every!r}.")
    if compile or checkpoint_every is not None:
        raise UndriftError("compile and checkpoint_every are not built yet; leave them out.")
    with Folder(out) as folder, arithmetic(precision, deterministic):
        params = run.model.start
        states = tree_to(bound(run, 0).start(params), run.resident.device)
        personal = Personal(run)
        history: list[dict[str, Any]] = []
        total_steps = constant_steps = 0
        for t in range(rounds):
            began = time.perf_counter()
            method, server = bound(run, t), run.server(t)

            plan = run.checked(method.plan(run.plan(t), states))
            received = method.broadcast(params, states, server)
            orders = run.orders(plan, params, received)
            cohort = run.engine.run(orders, run.kept)

            totals = Totals(cohort.sums, len(plan.clients), cohort.weight, run.population, cohort.update)
            update, states = method.transform(totals, states)
            previous, params = params, tree_add(params, update)
            run.model.track(cohort.statistics)
            params = method.refine(params, server)
            states = method.after(params, previous, states)
            run.kept.commit(cohort.kept)

            last = t == rounds - 1
            if last:
                params = finish(run, method, params, t)
            if run.resident.device.type == "cuda":
                torch.cuda.synchronize()
            total_steps += int(plan.steps.sum())
            constant_steps += int(run.steps_at(0, plan.clients).sum())
            row = {
                "round": t + 1,
                "clients": plan.clients.tolist(),
                "steps": int(plan.steps.sum()),
                "total_steps": total_steps,
                "steps_fraction": total_steps / constant_steps,
                "samples": int(orders.batches.counts.sum()),
                "seconds": time.perf_counter() - began,
                **method.history(states),
            }
            if last or (t + 1) % evaluate_every == 0:
                row |= evaluate(run.model, params, run.test, run.measures, data.classes) if run.test else {}
                row |= personal.shared(params, last)
            if last or (personalize_every and (t + 1) % personalize_every == 0):
                row |= personal.tuned(params, states, method, t)
            history.append(row)
            folder.row(row)
            if on_round:
                on_round(row)
        trained = run.model.load(params)
        folder.model(trained)
    return Result(params, trained, history, run.choices)


def bound(run: Setup, t: int) -> Method:
    """The method with the numbers of round `t` in it."""
    return run.method.bind(on_device(run.method.numbers(t), run.resident.device))


def finish(run: Setup, method: Method, params: Tree, t: int) -> Tree:
    """Once, after the last round: what parts measure over all clients, and what they make of it."""
    if not method.overriding("finish"):
        return params
    everyone = run.everyone(t, params)
    weight = everyone.lanes["weight"].sum()
    totals = Totals(run.engine.survey(everyone), run.population, weight, run.population, None)
    return method.finish(params, totals, run.server(t))
