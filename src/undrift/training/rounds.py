"""One federated round: the server plans and broadcasts, clients train, the server updates the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from undrift.engine.base import Outcome, RoundInputs
from undrift.engine.client import Program
from undrift.method.context import Plan, Server, Totals
from undrift.method.part import Method
from undrift.training import drift
from undrift.training.client_failures import Answers
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree, tree_add, tree_bytes, tree_leaves, tree_map, tree_structure, tree_to, tree_where


@dataclass(frozen=True)
class Round:
    """What a round leaves beside its state."""

    method: Method
    """With the round's numbers bound."""
    answers: Answers
    bytes_down: int
    bytes_up: int
    drift: dict[str, torch.Tensor] = field(default_factory=dict)
    """Figures of client drift, on the device, if the run has them."""


def federated_round(run: Run, state: State, skip: bool) -> tuple[State, Round]:
    """Train one more round. Returns the new state, and what happened.

    `skip` leaves out clients that send or keep anything that is not finite.
    """
    t = state.round
    method = run.bound(t)

    inputs, server, planned = inputs_of(run, method, state)
    measured = server.totals.sums if server.totals else ()
    answers = run.conditions.collect(run.engine, inputs, skip)  # run.engine trains; who must not count is left out
    answers, drifted = take_drift(run, answers)
    outcome = answers.outcome

    update, parts = aggregate_updates(method, planned, outcome, replace(server, totals=None))  # type: ignore[arg-type]
    server = replace(server, totals=Totals(outcome.sums, outcome.size, outcome.weight, update, measured))
    update, parts, server = method.transform(update, parts, server)
    server.model.track(keep_if_no_clients(outcome, outcome.statistics, shared_buffers(run, state)))
    params, parts = method.refine(tree_add(state.params, update), parts, server)
    params |= {name: state.params[name] for name in run.engine.program.personal & params.keys()}  # as they began
    parts = tree_to(method.observe(params, parts, server), run.device)

    down, up = traffic(run, inputs, answers, measured)
    after = replace(
        state,
        params=keep_if_no_clients(outcome, params, state.params),
        parts=[keep_if_no_clients(outcome, new, old) for new, old in zip(parts, state.parts, strict=True)],
        tracked=keep_if_no_clients(outcome, server.model.tracked, state.tracked),
        clients=state.clients.updated(outcome.kept, t + 1),
        round=t + 1,
        total_steps=state.total_steps + int(answers.work.steps.sum()),
        constant_steps=state.constant_steps + int(run.steps_at(0, answers.clients).sum()),
        total_bytes=state.total_bytes + down + up,
    )
    return after, Round(method, answers, down, up, figures(run, drifted, outcome, state, after))


def figures(run: Run, drifted: Tree, outcome: Outcome, before: State, after: State) -> dict[str, torch.Tensor]:
    """Return figures of client drift, on the device, where a run asks for them."""
    program = run.engine.program
    if not isinstance(program, drift.Drifting) or not run.drift:
        return {}
    return drift.figures(program, drifted, outcome, before.params, after.params)


def take_drift(run: Run, answers: Answers) -> tuple[Answers, Tree]:
    """Return the answers without what clients sent about their drift, and what that is, where a run asks for it."""
    if not run.drift:
        return answers, ()
    outcome, drifted = drift.split_off_drift(answers.outcome)
    return replace(answers, outcome=outcome), drifted


def inputs_of(
    run: Run, method: Method, state: State, changed: Callable[[Plan], Plan] = lambda plan: plan
) -> tuple[RoundInputs, Server, list[Tree]]:
    """Return the next round's inputs to the engine: the cohort, its work, and what clients receive beside the weights.

    `changed` may change the plan. Also returns the server as it stands before training, with what parts measured over
    the cohort, and the parts' states after `plan`.
    """
    server, plan, parts = run.server(state.round, state), run.plan(state.round), state.parts
    if method.overriding("plan"):
        plan, parts = method.plan(plan, parts, server)
        plan = run.checked(plan, state.round)
    plan = changed(run.conditions.with_fates(plan, run.seed))
    server = replace(server, cohort=plan.clients, client_weights=run.weights(plan.clients))
    server = with_measurements(run, method, plan, state, server)
    received = method.broadcast(state.params, parts, server)
    return run.inputs(plan, state, received, state.clients), server, parts


def broadcast(run: Run, method: Method, plan: Plan, state: State, server: Server) -> list[Tree]:
    """Return what clients receive beside the weights; parts that measure the cohort do so first, at these weights."""
    return method.broadcast(state.params, state.parts, with_measurements(run, method, plan, state, server))


def with_measurements(run: Run, method: Method, plan: Plan, state: State, server: Server) -> Server:
    """Return the server with what parts measure over the cohort, if they do."""
    if not method.measuring("cohort"):
        return server
    sums = run.engine.measure_all(run.inputs(plan, state, None, state.clients), "cohort")
    size = torch.full((), len(plan.clients), dtype=torch.float64, device=run.device)
    return replace(server, totals=Totals(sums, size, server.client_weights.sum(), None, sums))


def aggregate_updates(method: Method, parts: list[Tree], outcome: Outcome, server: Server) -> tuple[Tree, list[Tree]]:
    """Return the update and the parts' states: the mean, or what the part that aggregates makes of all updates."""
    updates = outcome.updates
    if not updates:
        return outcome.update, parts
    if outcome.finite is not None:  # the host has to know who counts
        counts = outcome.finite.nonzero().flatten()
        if not len(counts):
            return outcome.update, parts
        updates = tree_map(lambda u: u[counts], updates)
        cohort = server.cohort[counts.cpu().numpy()]
        server = replace(server, cohort=cohort, client_weights=server.client_weights[counts])
    return method.aggregate(updates, parts, server)


def shared_buffers(run: Run, state: State) -> Tree:
    """Return the buffers that clients send: those that training changes and that are not personal."""
    return {name: t for name, t in state.tracked.items() if name not in run.engine.program.personal}


def traffic(run: Run, inputs: RoundInputs, answers: Answers, measured: Tree) -> tuple[int, int]:
    """Return the bytes to the sampled clients, and from those that answered. Personal parameters are not sent.

    `measured` is what all of the cohort measured and sent before they trained.
    """
    program, outcome = run.engine.program, answers.outcome
    start, received, tracked = (inputs.shared[name] for name in ("start", "received", "tracked"))
    down = sent_bytes(program, [start, received, tracked])
    update = program.without_personal(outcome.update, drop=True)
    numbers = run.composed.numbers(inputs.plan.round)  # as floats: nothing waits for the device
    up = run.composed.bind(numbers).update_bytes(update, tree_bytes(update))
    up += sent_bytes(program, [outcome.sums, outcome.statistics, outcome.weight])
    before = len(answers.clients) * sent_bytes(program, measured)
    return len(answers.clients) * down, len(answers.work.clients) * up + before


def sent_bytes(program: Program, tree: Tree) -> int:
    """Return the size of the tree without what is personal, which is not sent."""
    return tree_bytes(program.without_personal(tree, drop=True))


def finish(run: Run, state: State, done: Round) -> tuple[State, Round]:
    """Let parts change the final weights by what they measure over all clients. `done` is the last round."""
    if not done.method.overriding("finish"):
        return state, done
    t = state.round - 1
    everyone = run.everyone(t, state)
    sums = run.engine.measure_all(everyone, "finish")
    size = torch.full((), run.population, dtype=torch.float64, device=run.device)
    totals = Totals(sums, size, run.weights(everyone.plan.clients).sum(), None)
    server = replace(run.server(t, state), totals=totals)
    params = done.method.finish(state.params, state.parts, server)
    program = run.engine.program
    down, up = (run.population * sent_bytes(program, tree) for tree in (params, sums))
    done = replace(done, bytes_down=done.bytes_down + down, bytes_up=done.bytes_up + up)
    total = state.total_bytes + down + up
    return replace(state, params=params, tracked=server.model.tracked, total_bytes=total), done


def keep_if_no_clients(outcome: Outcome, new: Tree, old: Tree) -> Tree:
    """Return `new`, or `old` if no client of the cohort counts; decided on the device."""
    if outcome.finite is None:
        return new
    new = tree_to(new, outcome.size.device)
    forms = [(tree_structure(tree), [t.shape for t in tree_leaves(tree)]) for tree in (new, old)]
    if forms[0] != forms[1]:  # a part's state may have no form before its first round; then the host decides
        return new if int(outcome.size) else old
    return tree_where(outcome.size > 0, new, old)
