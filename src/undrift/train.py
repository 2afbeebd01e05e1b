"""One federated run, readable from top to bottom: data → plan → lanes → sums → server → history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from undrift.checkpoint import Checkpoints, Progress
from undrift.checks import require, whole
from undrift.clock import Clock
from undrift.data.dataset import FederatedDataset
from undrift.data.holdings import holdings
from undrift.engine.cohort import on_device
from undrift.evaluate import evaluate
from undrift.local import Local
from undrift.method import Method, Part
from undrift.methods.fedavg import FedAvg
from undrift.personal import Personal
from undrift.record import record
from undrift.result import Folder, Result
from undrift.roles import Totals
from undrift.setup import Setup, arithmetic, prepare, selected
from undrift.track import Trackers
from undrift.tree import Tree, tree_add, tree_bytes, tree_to


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
    checkpoint_every: int | str | None = None,
    resume: bool = False,
    track: str | Sequence[str] | None = None,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    notes: dict[str, Any] | None = None,
) -> Result:
    """Train `model` on `data` with `method` for `rounds` rounds.

    `participation`: an int is a count of clients a round, a float a fraction of those that have data.
    `engine`: "lanes", "plain" (one client at a time) or "auto"; `result.choices` says what was chosen.
    Where clients have test data of their own, evaluated rounds also tell how the global model does on them, and the
    last round, or every `personalize_every`-th, how each client's does after one more local epoch.
    `out`: a folder for the run's files. `checkpoint_every`: rounds (10) or seconds ("30s") between checkpoints there;
    `resume=True` goes on from the last one. `on_round` is called with each round's history.
    `track`: "tensorboard", "mlflow" or a list of both, which get each round's figures too.
    `notes` are settings of the caller's own for the run's `config.toml`.
    """
    given = dict(locals())
    run = prepare(
        model, data, method, rounds=rounds, local=local, participation=participation, seed=seed, loss=loss,
        metrics=metrics, device=device, precision=precision, engine=engine, lanes=lanes, compile=compile,
    )  # fmt: skip
    require(whole(evaluate_every) and evaluate_every >= 1, f"evaluate_every must be 1 or more, not {evaluate_every!r}.")
    fine = personalize_every is None or (whole(personalize_every) and personalize_every >= 1)
    require(fine, f"personalize_every must be a whole number from 1, or None, not {personalize_every!r}.")
    files = Folder(out, resume)
    checkpoints = Checkpoints(files.path, run, checkpoint_every)
    trackers = Trackers(track, files.path)
    with files as folder, selected(run.resident.device), arithmetic(precision, deterministic), trackers:
        now = Progress(run.model.start, tree_to(bound(run, 0).start(run.model.start), run.resident.device))
        if resume and folder.finished and len(folder.rows()) == rounds:
            folder.load(run.model.module)
            weights = dict(run.model.module.named_parameters())
            params = {name: weights[name].detach().clone() for name in run.model.start}
            return Result(params, run.model.module.eval(), folder.rows(), run.choices)
        now = checkpoints.restore(now, folder.rows()) if resume else now
        config = record(run, given) if folder.path or trackers else ""
        trackers.begin(config, now.history)
        if folder.path and not now.round:
            folder.partition(holdings(data))
            folder.config(config)
        folder.begin(now.history)
        personal, clock = Personal(run), Clock(run.resident.device)
        for t in range(now.round, rounds):
            last = t == rounds - 1
            clock.start()
            method, server = bound(run, t), run.server(t)

            plan = run.checked(method.plan(run.plan(t), now.states))
            received = method.broadcast(now.params, now.states, server)
            orders = run.orders(plan, now.params, received)
            cohort = run.engine.run(orders, run.kept)

            totals = Totals(cohort.sums, len(plan.clients), cohort.weight, run.population, cohort.update)
            update, states = method.transform(totals, now.states)
            params = tree_add(now.params, update)
            run.model.track(cohort.statistics)
            params = method.refine(params, server)
            states = method.after(params, now.params, states)
            run.kept.commit(cohort.kept)
            down = len(plan.clients) * tree_bytes(
                [orders.shared["start"], orders.shared["received"], run.model.tracked]
            )
            up = len(plan.clients) * tree_bytes([cohort.update, cohort.sums, cohort.statistics, cohort.weight])
            if last and method.overriding("finish"):
                params, sent = finish(run, method, params, t)
                down, up = down + run.population * tree_bytes(params), up + sent

            now = replace(
                now,
                params=params,
                states=states,
                round=t + 1,
                total_steps=now.total_steps + int(plan.steps.sum()),
                constant_steps=now.constant_steps + int(run.steps_at(0, plan.clients).sum()),
                total_bytes=now.total_bytes + down + up,
            )
            row = {
                "round": t + 1,
                "clients": plan.clients.tolist(),
                "steps": int(plan.steps.sum()),
                "total_steps": now.total_steps,
                "steps_fraction": now.total_steps / now.constant_steps,
                "local_steps": plan.span,
                "lr": float(plan.lr),
                "samples": int(orders.batches.counts.sum()),
                "bytes_down": down,
                "bytes_up": up,
                "total_bytes": now.total_bytes,
            }
            clock.stop(row, partial(method.history, states))
            if last or (t + 1) % evaluate_every == 0:
                row |= evaluate(run, params) | personal.shared(params, last)
            if last or (personalize_every and (t + 1) % personalize_every == 0):
                row |= personal.tuned(params, states, method, t)
            now.history.append(row)
            due = checkpoints.due(now)
            for done in clock.settled(wait=bool(last or due or trackers or on_round)):
                folder.row(done)
                try:
                    trackers.row(done)
                    if on_round:
                        on_round(done)
                except BaseException:  # whoever stops a run here, with Ctrl-C say, finds it where it stood
                    folder.sync()
                    checkpoints.save(now)
                    raise
            if due:
                folder.sync()
                checkpoints.save(now)
        trained = run.model.load(now.params)
        folder.model(trained)
    return Result(now.params, trained, now.history, run.choices)


def bound(run: Setup, t: int) -> Method:
    """The method with the numbers of round `t` in it."""
    return run.method.bind(on_device(run.method.numbers(t), run.resident.device))


def finish(run: Setup, method: Method, params: Tree, t: int) -> tuple[Tree, int]:
    """Once, after the last round: what parts make of what they measure over all clients, and the bytes sent for it."""
    everyone = run.everyone(t, params)
    sums = run.engine.survey(everyone)
    totals = Totals(sums, run.population, everyone.lanes["weight"].sum(), run.population, None)
    return method.finish(params, totals, run.server(t)), run.population * tree_bytes(sums)
