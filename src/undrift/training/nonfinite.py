"""Rounds that leave NaN or an infinity behind.

Each round ends with one flag on the device: whether what clients sent and kept, the new weights and the method's state
at the server are all finite. It is read together with the round's history row, when the device is done with the round,
so nothing waits for it; what was computed since then is thrown away. The run stops where it stood before that round.
The clients to blame are found by running the round once more, with the check that `on_nonfinite="skip"` makes of each.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.engine.client_states import finite_in_files, in_memory
from undrift.errors import UndriftError, listed, quoted
from undrift.functional.model import Params
from undrift.method.calls import name, ours
from undrift.method.rules import overrides
from undrift.training.client_failures import Answers
from undrift.training.rounds import inputs_of
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree, to_device, tree_finite

log = logging.getLogger("undrift.nonfinite")

Row = dict[str, Any]

SKIP = "skip"
LOSSES = {"loss": "test loss", "validation_loss": "validation loss", "client_loss": "loss on clients' own test data"}
NAMED = 5
"""The number of clients that a message names."""


class NonFiniteError(Exception):
    """Round `round`, counted from 1, left something that is not finite; `loss` says so if it was a loss."""

    def __init__(self, round: int, loss: str | None = None) -> None:
        super().__init__(round, loss)
        self.round, self.loss = round, loss


@dataclass(frozen=True)
class PendingRound:
    """A round that may turn out not to be finite."""

    before: State
    answers: Answers
    finite: Tensor
    """Whether all that the round left is finite."""


class FiniteGuard:
    """Keeps the state before each round until the round is known to be finite.

    `states` are the parts' states at the start: one that is not finite there, such as a minimum so far, may stay so.
    """

    def __init__(self, run: Run, states: list[Tree], skip: bool) -> None:
        self.run, self.skip = run, skip
        self.watched = [i for i, state in enumerate(states) if bool(tree_finite(state))]
        self.attempts: list[PendingRound] = []
        """Rounds that are not yet known to be finite, oldest first."""

    def add(self, before: State, answers: Answers) -> None:
        """Add a round whose clients have trained, or will have trained once the device gets there."""
        outcome = answers.outcome
        finite = tree_finite((outcome.update, outcome.sums, outcome.statistics, in_memory(outcome.kept)))
        if not finite_in_files(outcome.kept):
            finite = torch.zeros_like(finite)
        if outcome.finite is not None and not self.skip:
            excused = to_device(torch.from_numpy(answers.excused), outcome.finite.device)
            finite = finite & (outcome.finite | excused).all()
        if self.run.keeps:  # what clients keep is in one process
            finite = self.run.ranks.every(finite)
        self.attempts.append(PendingRound(before, answers, finite))

    def left(self, state: State) -> None:
        """Also check the state that the latest round leaves at the server."""
        latest = self.attempts[-1]
        finite = tree_finite((state.params, state.tracked, [state.parts[i] for i in self.watched]))
        self.attempts[-1] = replace(latest, finite=latest.finite & finite)

    def settle(self, row: Row) -> Row:
        """Note that the oldest round is done, and that `row` is its history.

        Returns more columns for it: `skipped`, `survivors`, `round_skipped`. Raises `NonFiniteError`; then call `undo`.
        """
        attempt = self.attempts[0]
        if not bool(attempt.finite):
            raise NonFiniteError(row["round"])
        if bad := bad_loss(row):
            raise NonFiniteError(row["round"], bad)
        self.attempts.pop(0)
        return (self._skipped(attempt.answers, row) if self.skip else {}) | survivor_columns(attempt.answers, row)

    def _skipped(self, answers: Answers, row: Row) -> Row:
        """Return who was left out for NaN or an infinity."""
        if answers.outcome.finite is None:  # an empty cohort
            return {"skipped": []}
        skipped = answers.clients[~(answers.outcome.finite.cpu().numpy() | answers.excused)].tolist()
        if skipped:
            log.warning("round %d: skipped %s (non-finite update or state)", row["round"], name_clients(skipped))
        return {"skipped": skipped}

    def check(self) -> None:
        """Wait for the rounds that have no row yet. Raises `NonFiniteError`."""
        if self.attempts and not bool(self.attempts[0].finite):
            raise NonFiniteError(self.attempts[0].before.round + 1)

    def undo(self, error: NonFiniteError) -> tuple[State, str]:
        """Undo that round and those that have begun since. Returns where the run stands again, and what went wrong."""
        before = self.attempts[0].before
        self.attempts.clear()
        del before.history[before.round :]
        why = f"Round {error.round}: {f'{error.loss}. {DIVERGES}' if error.loss else self._reason(before)}"
        log.warning("stopped: %s", why)
        return before, why

    def _reason(self, before: State) -> str:
        """Return which clients are responsible, found by running the round once more, and what to try."""
        inputs, _, _ = inputs_of(self.run, self.run.bound(before.round), before)
        if not len(inputs.plan.clients):
            return self._reason_without_clients()
        finite = self.run.engine.run(inputs, skip=True).finite
        assert finite is not None
        clients, fates, failed = inputs.plan.clients, inputs.plan.fates, ~finite.cpu().numpy()
        answered = np.ones(len(clients), bool) if fates is None else ~fates.dropped
        bad = clients[failed & answered].tolist()
        if not bad:
            return (
                "every client's update is finite, but the server's step made the weights or the method's state NaN or "
                "infinite. Try a smaller server learning rate."
            )
        if len(bad) == answered.sum():
            who = "of the cohort" if answered.all() else "that answered"
            return f"every client {who} sent non-finite values. {DIVERGES}"
        return f"{name_clients(bad)} sent or kept non-finite values. {DIVERGES} {LEAVE_OUT}"

    def _reason_without_clients(self) -> str:
        hooks = ("transform", "refine", "observe")
        parts = [part for part in self.run.method.parts if not ours(part)]
        named = [f"{name(part)}.{hook}" for part in parts for hook in hooks if overrides(part, hook)]
        return (
            "the cohort is empty, and the server's step made the weights or the method's state NaN or infinite. "
            f"server.totals.size and server.totals.weight are 0 then{'; look at ' if named else ''}{listed(named)}. "
            "Divide by server.totals.size.clamp(min=1), for example."
        )


def bad_loss(row: Row) -> str | None:
    """Return which loss on held-out data is not finite, if one is not."""
    bad = [f"the {loss} is {row[name]}" for name, loss in LOSSES.items() if not math.isfinite(row.get(name, 0.0))]
    return f"{bad[0]}, although all weights are finite" if bad else None


def problem_at_end(row: Row, finite: bool, finishes: bool) -> str | None:
    """Return what is wrong with the end of a run, whose last row this is, if its weights or a loss are not finite."""
    bad = bad_loss(row) if finite else "the weights are not finite"
    if not bad:
        return None
    after = f"after the method's finish, {bad}. The result is from before it."
    return f"Round {row['round']}: {after if finishes else f'{bad}. {DIVERGES}'}"


DIVERGES = "Training may have diverged: try a smaller learning rate."
LEAVE_OUT = 'Or leave such clients out, with on_nonfinite="skip".'


def survivor_columns(answers: Answers, row: Row) -> Row:
    """Return how many clients count, and whether they suffice for the round, in a run with faults or rules."""
    if answers.survivors is None:
        return {}
    if row.get("left_out"):
        log.warning("round %d: left out %s (update too long)", row["round"], name_clients(row["left_out"]))
    count = int(answers.survivors)
    if count < answers.least:
        log.warning(
            "round %d: the model is left unchanged, because %d of %d clients remain and %d are required",
            row["round"], count, len(answers.clients), answers.least,
        )  # fmt: skip
    return {"survivors": count, "round_skipped": count < answers.least}


def mute() -> None:
    """Do not log stops and skips, which the caller reports."""
    log.setLevel(logging.ERROR)


def check_on_nonfinite(on_nonfinite: Any) -> None:
    if on_nonfinite not in ("stop", SKIP):
        raise UndriftError(f'on_nonfinite must be "stop" or "skip", not {quoted(on_nonfinite)}.')


def check_start(params: Params) -> None:
    """Reject a model whose initial weights are not finite."""
    bad = [name for name, w in params.items() if not bool(w.isfinite().all())]
    if bad:
        raise UndriftError(f"The model's parameter {bad[0]!r} is NaN or infinite before training starts.")


def name_clients(clients: list[int]) -> str:
    """`client 3`, `clients 3 and 7`, `clients 1, 2, 3, 4, 5 and 20 more`."""
    if len(clients) == 1:
        return f"client {clients[0]}"
    shown = [str(c) for c in clients[:NAMED]]
    rest = f"{len(clients) - NAMED} more" if len(clients) > NAMED else shown.pop()
    return f"clients {', '.join(shown)} and {rest}"
