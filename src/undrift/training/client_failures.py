"""Which clients of a cohort count, where some fail: those that drop out, return NaN or explode do not.

A client that does not count stays in the cohort, so that shapes, and with them traces, CUDA graphs and compiled steps,
are the same in every round. Its weights become NaN when its training ends, and the engine's check for NaN then leaves
it out: out of the mean and of every part's sums, with its kept state as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.engine.base import Engine, Outcome, RoundInputs
from undrift.engine.client import Program, Sent
from undrift.errors import require, whole
from undrift.method.context import Plan
from undrift.method.faults import Faults, unharmed
from undrift.training.drift import Drifting
from undrift.tree import Tree, to_device, tree_leaves, tree_map

Array = np.ndarray


@dataclass(frozen=True)
class Conditions:
    """The simulated faults of clients, and which replies the server accepts: see `ud.train`."""

    faults: Faults | None = None
    max_norm_ratio: float | None = None
    min_clients: int | float | None = None

    @property
    def ordinary(self) -> bool:
        """Whether there is nothing to do beyond an ordinary run."""
        return self == Conditions()

    def check(self, rounds: int, cohort: int) -> None:
        faults, ratio, least = self.faults, self.max_norm_ratio, self.min_clients
        require(
            faults is None or isinstance(faults, Faults), f"faults must be a ud.Faults, not {type(faults).__name__}."
        )
        if faults is not None:
            faults.check(rounds)
        fine = ratio is None or ((whole(ratio) or isinstance(ratio, float)) and 1 <= ratio < math.inf)
        require(fine, f"max_norm_ratio must be a number from 1, or None, not {ratio!r}.")
        number = least is None or whole(least) or isinstance(least, float)
        require(number, f"min_clients must be a count (an int) or a fraction (a float), not {least!r}.")
        if isinstance(least, float):
            require(0 < least <= 1, f"min_clients as a fraction must be in (0, 1], not {least}.")
        elif least is not None:
            require(least >= 1, f"min_clients must be at least 1 client, not {least}.")
            require(least <= cohort, f"min_clients is {least}, but only {cohort} clients are sampled in a round.")

    def least(self, cohort: int) -> int:
        """Return how many clients of a cohort must count for its round to count."""
        if isinstance(self.min_clients, float):
            return max(1, math.ceil(self.min_clients * cohort - 1e-9))
        return int(self.min_clients or 1)

    def program(self, program: Program, cohort: int) -> Program:
        """Return the program of a client that may fail."""
        if self.ordinary:
            return program
        return Unreliable.of(program, norms=0 if self.max_norm_ratio is None else cohort)

    def with_fates(self, plan: Plan, seed: int) -> Plan:
        """Return the plan with its clients' fates."""
        if self.ordinary:
            return plan
        fates = self.faults.draw(seed, plan.round, plan.clients, plan.steps) if self.faults else unharmed(plan.steps)
        return replace(plan, steps=fates.steps, fates=fates)

    def with_factors(self, inputs: RoundInputs) -> RoundInputs:
        """Return the inputs with what `Unreliable` reads in addition to clients' positions."""
        if self.ordinary:
            return inputs
        fates = inputs.plan.fates or unharmed(inputs.plan.steps)
        return _with_factor(inputs, fates.factor)

    def collect(self, engine: Engine, inputs: RoundInputs, skip: bool) -> Answers:
        """Train the round's cohort, and leave out the clients that must not count."""
        plan = inputs.plan
        counts = inputs.counts
        if self.ordinary:
            outcome = _count_empty_cohort(engine.run(inputs, skip=skip), plan)
            lost = lost_clients(outcome, plan)
            work, samples = _work_of(~lost, plan, counts, inputs)
            return Answers(outcome, plan.clients, work, samples, lost, columns=outcome.columns)
        fates, ratio = plan.fates, self.max_norm_ratio
        assert fates is not None
        outcome = engine.run(inputs, skip=True)
        if self.min_clients is None:
            outcome = _count_empty_cohort(outcome, plan)
        columns: dict[str, Any] = {}
        if self.faults:
            columns = {name: plan.clients[getattr(fates, name)].tolist() for name in ("dropped", "stragglers")}
        columns |= {} if ratio is None else {"left_out": []}
        excused = fates.dropped | lost_clients(outcome, plan)
        if ratio is not None and outcome.finite is not None:
            norms = outcome.sums[-1].cpu().numpy()[: len(plan.clients)]  # a plan may have fewer clients than usual
            far = outliers(norms, outcome.finite.cpu().numpy(), ratio)
            if far.any():  # a round is a function of its inputs, so it can be run once more without them
                again = _with_factor(inputs, np.where(far, np.nan, fates.factor))
                outcome = engine.run(again, skip=True)
            excused, columns["left_out"] = excused | far | lost_clients(outcome, plan), plan.clients[far].tolist()
        outcome = replace(outcome, sums=outcome.sums if ratio is None else outcome.sums[:-1])
        gone = set(plan.clients[excused].tolist())
        own = {i: {c: state for c, state in states.items() if c not in gone} for i, states in outcome.kept.items()}
        outcome, survivors, least = replace(outcome, kept=own), outcome.size, self.least(len(plan.clients))
        least = 0 if outcome.finite is None else least
        if least > 1 and int(outcome.size) < least:  # a round without survivors is found on the device, without waiting
            outcome = replace(outcome, size=torch.zeros_like(outcome.size), kept={})
        work, samples = _work_of(~(fates.dropped | lost_clients(outcome, plan)), plan, counts, inputs)
        return Answers(outcome, plan.clients, work, samples, excused, least, survivors, columns | outcome.columns)


def lost_clients(outcome: Outcome, plan: Plan) -> Array:
    """By place in the cohort: whose answer is missing."""
    return np.zeros(len(plan.clients), bool) if outcome.lost is None else outcome.lost


def _work_of(answered: Array, plan: Plan, counts: Array, inputs: RoundInputs) -> tuple[Plan, int]:
    """Return the plan of those that answered, and on how many samples they trained."""
    work = replace(plan, clients=plan.clients[answered], steps=plan.steps[answered])
    return work, int(counts[np.repeat(answered, plan.steps * inputs.batches.per_step)].sum())


def _count_empty_cohort(outcome: Outcome, plan: Plan) -> Outcome:
    """Let a round with an empty cohort that a part planned count: the server's hooks get a zero update."""
    return outcome if len(plan.clients) else replace(outcome, finite=None)


def _with_factor(inputs: RoundInputs, factor: Array) -> RoundInputs:
    like = inputs.clients["weight"]
    missing = len(like) - inputs.cohort  # clients that fill up the cohort, which are harmless
    factor = np.concatenate([factor[inputs.places], np.ones(missing)])
    own = {"factor": to_device(torch.as_tensor(factor, dtype=like.dtype), like.device)}
    return replace(inputs, clients=inputs.clients | own)


@dataclass(frozen=True)
class Unreliable(Drifting):
    """A client's program whose weights may be spoiled at the end of training, and which may send its update's norm."""

    norms: int = 0
    """The size of a cohort, if norms are sent: as a vector with the client's at its place, so that they add up."""

    def conclude(self, state: Tree, given: Tree, skip: bool = False) -> Sent:
        factor = given["factor"]

        def spoiled(w: Tensor, start: Tensor) -> Tensor:  # unchanged, bit by bit, if nothing happens
            return torch.where(factor == 1, w, (start + factor * (w - start)).to(w.dtype))

        state = {**state, "params": tree_map(spoiled, state["params"], given["start"])}
        sent = super().conclude(state, given, skip)
        if not self.norms:
            return sent
        update, sums, tracked = sent.sums
        places, weight = torch.arange(self.norms, device=factor.device), given["weight"]
        length = tree_norm(update) / torch.where(weight > 0, weight, 1.0)
        norms = torch.where(places == given["place"], length, 0.0)
        return sent._replace(sums=(update, [*sums, norms], tracked))


def tree_norm(tree: Tree) -> Tensor:
    """Return the Euclidean norm of all of the tree, whose squares may overflow where the norm does not."""
    leaves = [t for t in tree_leaves(tree) if t.numel()]
    largest = torch.stack([t.abs().amax() for t in leaves]).amax()
    scale = torch.where(largest > 0, largest, 1)
    return scale * torch.stack([(t / scale).square().sum() for t in leaves]).sum().sqrt()


def outliers(norms: Array, counting: Array, ratio: float) -> Array:
    """Return which of the clients that count have an update longer than `ratio` times the median.

    The median of an even number is the mean of the two in the middle. If it is 0, there are no outliers.
    """
    if not counting.any():
        return np.zeros(len(norms), bool)
    median = np.median(norms[counting])
    return counting & (norms > ratio * median) & (median > 0)


@dataclass(frozen=True)
class Answers:
    """The replies of a cohort."""

    outcome: Outcome
    clients: Array
    """The plan of all clients that were sampled."""
    work: Plan
    """The plan of those that replied."""
    samples: int
    """The number of samples on which they trained."""
    excused: Array
    """By position in the cohort: whether the client is known not to count, since it dropped out or was left out."""
    least: int = 0
    """How many clients must count; 0 in a run without faults and rules."""
    survivors: Tensor | None = None
    """How many clients count."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of the history about them."""
