"""One federated round: the server plans and broadcasts, clients train, the server updates the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from undrift.engine.base import Outcome, RoundInputs
from undrift.method.context import Totals
from undrift.method.part import Method
from undrift.training.run import Run
from undrift.training.state import State
from undrift.training.survivors import Answers
from undrift.tree import Tree, tree_add, tree_bytes, tree_leaves, tree_structure, tree_to, tree_where


@dataclass(frozen=True)
class Round:
    """A round's record, beside the state that it left."""

    method: Method
    """With the round's numbers bound."""
    answers: Answers
    bytes_down: int
    bytes_up: int


def federated_round(run: Run, state: State, skip: bool) -> tuple[State, Round]:
    """Train one more round. Returns the new state, and what happened.

    `skip` leaves out clients that send or keep anything that is not finite.
    """
    t = state.round
    method, server = run.bound(t), run.server(t, state)

    inputs = inputs_of(run, method, state)
    answers = run.conditions.collect(run.engine, inputs, skip)  # run.engine trains; who must not count is left out
    outcome = answers.outcome

    totals = Totals(outcome.sums, outcome.size, outcome.weight, run.population, outcome.update)
    update, parts = method.transform(totals, state.parts)
    server.model.track(unless_nobody(outcome, outcome.statistics, state.tracked))
    params = method.refine(tree_add(state.params, update), server)
    parts = method.after(params, state.params, parts)

    down, up = traffic(run, inputs, answers)
    after = replace(
        state,
        params=unless_nobody(outcome, params, state.params),
        parts=[unless_nobody(outcome, new, old) for new, old in zip(parts, state.parts, strict=True)],
        tracked=unless_nobody(outcome, server.model.tracked, state.tracked),
        clients=state.clients.updated(outcome.kept, t + 1),
        round=t + 1,
        total_steps=state.total_steps + int(answers.work.steps.sum()),
        constant_steps=state.constant_steps + int(run.steps_at(0, answers.clients).sum()),
        total_bytes=state.total_bytes + down + up,
    )
    return after, Round(method, answers, down, up)


def inputs_of(run: Run, method: Method, state: State) -> RoundInputs:
    """The next round's inputs to the engine: the cohort, its work, and what clients receive beside the weights."""
    plan = run.checked(method.plan(run.plan(state.round), state.parts))
    plan = run.conditions.with_fates(plan, run.seed)
    received = method.broadcast(state.params, state.parts, run.server(state.round, state))
    return run.inputs(plan, state, received, state.clients)


def traffic(run: Run, inputs: RoundInputs, answers: Answers) -> tuple[int, int]:
    """Bytes to the clients that were sampled, and from those that answered."""
    outcome = answers.outcome
    down = tree_bytes([inputs.shared["start"], inputs.shared["received"], inputs.shared["tracked"]])
    up = tree_bytes([outcome.update, outcome.sums, outcome.statistics, outcome.weight])
    return len(answers.clients) * down, len(answers.work.clients) * up


def finish(run: Run, state: State, done: Round) -> tuple[State, Round]:
    """Let parts change the final weights by what they measure over all clients. `done` is the last round."""
    if not done.method.overriding("finish"):
        return state, done
    t = state.round - 1
    everyone = run.everyone(t, state)
    sums = run.engine.measure_all(everyone)
    size = torch.full((), run.population, dtype=torch.float64, device=run.device)
    totals = Totals(sums, size, everyone.clients["weight"].sum(), run.population, None)
    server = run.server(t, state)
    params = done.method.finish(state.params, totals, server)
    down, up = run.population * tree_bytes(params), run.population * tree_bytes(sums)
    done = replace(done, bytes_down=done.bytes_down + down, bytes_up=done.bytes_up + up)
    total = state.total_bytes + down + up
    return replace(state, params=params, tracked=server.model.tracked, total_bytes=total), done


def unless_nobody(outcome: Outcome, new: Tree, old: Tree) -> Tree:
    """`new`, or `old` where no client of the cohort counts; decided on the device."""
    if outcome.finite is None:
        return new
    new = tree_to(new, outcome.size.device)
    forms = [(tree_structure(tree), [t.shape for t in tree_leaves(tree)]) for tree in (new, old)]
    if forms[0] != forms[1]:  # a part's state may have no form before its first round; then the host decides
        return new if int(outcome.size) else old
    return tree_where(outcome.size > 0, new, old)
