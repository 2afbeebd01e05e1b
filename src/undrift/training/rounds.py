"""One federated round: the server plans and broadcasts, clients train, the server updates the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from undrift.engine.cohort import Orders, on_device
from undrift.method.context import Totals
from undrift.method.part import Method
from undrift.training.checkpoint import Progress
from undrift.training.nonfinite import unless_nobody
from undrift.training.run import Run
from undrift.training.survivors import Answers
from undrift.tree import tree_add, tree_bytes


@dataclass(frozen=True)
class Round:
    """What happened in a round, beside the state that it left."""

    method: Method
    """With the round's numbers bound."""
    answers: Answers
    bytes_down: int
    bytes_up: int
    undo: list[Callable[[], None]]
    """Restores what the round changed in place: running statistics, and what clients keep."""


def federated_round(run: Run, state: Progress, skip: bool) -> tuple[Progress, Round]:
    """Train one more round. Returns the new state, and what happened.

    What clients keep and the model's running statistics are changed in place; `Round.undo` restores them. `skip` leaves
    out clients that send or keep anything that is not finite.
    """
    t = state.round
    method, server = bound(run, t), run.server(t)

    orders = orders_of(run, method, state)
    answers = run.conditions.collect(run.engine, run.kept, orders, skip)
    cohort = answers.cohort

    totals = Totals(cohort.sums, cohort.size, cohort.weight, run.population, cohort.update)
    update, states = method.transform(totals, state.states)
    untrack = run.model.track(unless_nobody(cohort, cohort.statistics, run.model.tracked))
    params = method.refine(tree_add(state.params, update), server)
    states = method.after(params, state.params, states)
    params = unless_nobody(cohort, params, state.params)
    states = [unless_nobody(cohort, new, old) for new, old in zip(states, state.states, strict=True)]
    undo = [untrack, run.kept.commit(cohort.kept)]

    down, up = traffic(run, orders, answers)
    after = replace(
        state,
        params=params,
        states=states,
        round=t + 1,
        total_steps=state.total_steps + int(answers.plan.steps.sum()),
        constant_steps=state.constant_steps + int(run.steps_at(0, answers.clients).sum()),
        total_bytes=state.total_bytes + down + up,
    )
    return after, Round(method, answers, down, up, undo)


def bound(run: Run, t: int) -> Method:
    """The method with the numbers of round `t` bound."""
    return run.method.bind(on_device(run.method.numbers(t), run.resident.device))


def orders_of(run: Run, method: Method, state: Progress) -> Orders:
    """The next round's inputs to the engine: the cohort, its work, and what clients receive beside the weights."""
    plan = run.conditions.plan(run.checked(method.plan(run.plan(state.round), state.states)), run.seed)
    received = method.broadcast(state.params, state.states, run.server(state.round))
    return run.orders(plan, state.params, received)


def traffic(run: Run, orders: Orders, answers: Answers) -> tuple[int, int]:
    """Bytes to the clients that were sampled, and from those that answered."""
    cohort = answers.cohort
    down = tree_bytes([orders.shared["start"], orders.shared["received"], run.model.tracked])
    up = tree_bytes([cohort.update, cohort.sums, cohort.statistics, cohort.weight])
    return len(answers.clients) * down, len(answers.plan.clients) * up


def finish(run: Run, state: Progress, done: Round) -> tuple[Progress, Round]:
    """Let parts change the final weights by what they measure over all clients. `done` is the last round."""
    if not done.method.overriding("finish"):
        return state, done
    t = state.round - 1
    everyone = run.everyone(t, state.params)
    sums = run.engine.survey(everyone)
    size = torch.full((), run.population, dtype=torch.float64, device=run.resident.device)
    totals = Totals(sums, size, everyone.lanes["weight"].sum(), run.population, None)
    params = done.method.finish(state.params, totals, run.server(t))
    down, up = run.population * tree_bytes(params), run.population * tree_bytes(sums)
    done = replace(done, bytes_down=done.bytes_down + down, bytes_up=done.bytes_up + up)
    return replace(state, params=params, total_bytes=state.total_bytes + down + up), done
