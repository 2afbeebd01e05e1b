"""What happens when a round leaves NaN or an infinity behind.

Each round ends with one flag on the device: whether what clients sent and kept, and the new weights, are all finite. It
is read together with the round's history row, when the device is done with the round, so nothing waits for it; what was
computed since then is thrown away. The run stops where it stood before that round. Who is to blame is found by running
the round once more, with the check that `on_nonfinite="skip"` makes of every client.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from undrift.checkpoint import Progress
from undrift.engine.cohort import Orders, Outcome
from undrift.errors import UndriftError
from undrift.models.functional import Params
from undrift.setup import Setup
from undrift.tree import Tree, tree_finite, tree_leaves, tree_structure, tree_to, tree_where

log = logging.getLogger("undrift")

Row = dict[str, Any]

STOP, SKIP = CHOICES = ("stop", "skip")
LOSSES = {"loss": "test loss", "validation_loss": "validation loss", "client_loss": "loss on clients' own test data"}
NAMED = 5
"""How many clients a message names."""


class NonFiniteError(Exception):
    """A round left something that is not finite, and has been undone; `before` is where the run stands again."""

    def __init__(self, before: Progress, why: str) -> None:
        super().__init__(why)
        self.before, self.why = before, why


@dataclass(frozen=True)
class Attempt:
    """A round that may turn out not to be finite."""

    before: Progress
    cohort: Outcome
    clients: np.ndarray
    finite: Tensor
    """Whether all that the round left is finite."""
    undo: list[Callable[[], None]]


class Watch:
    """Keeps what it takes to undo each round, until it is known to be finite."""

    def __init__(self, run: Setup, repeat: Callable[[Progress], Orders]) -> None:
        self.run, self.repeat = run, repeat
        self.attempts: list[Attempt] = []
        """Those not known to be finite yet, oldest first."""

    def add(
        self, before: Progress, cohort: Outcome, clients: np.ndarray, params: Params, undo: list[Callable[[], None]]
    ) -> None:
        """A round has been computed, or will be once the device gets there: from `before` to `params`."""
        left = (cohort.update, cohort.sums, cohort.statistics, cohort.kept, params)
        self.attempts.append(Attempt(before, cohort, clients, tree_finite(left), undo))

    def settle(self, row: Row) -> Row:
        """The oldest round is done, and `row` is its history: returns who was skipped, where clients may be.

        Raises `NonFiniteError`, with that round and all later ones undone, where something is not finite.
        """
        attempt, finite = self.attempts[0], self.attempts[0].cohort.finite
        if not bool(attempt.finite):
            self._undo()
            raise NonFiniteError(attempt.before, f"Round {row['round']}: {self._reason(attempt.before)}")
        for name, loss in LOSSES.items():
            if name in row and not math.isfinite(row[name]):
                self._undo()
                raise NonFiniteError(
                    attempt.before,
                    f"Round {row['round']}: the {loss} is {row[name]}, although all weights are finite; {DIVERGES}",
                )
        self.attempts.pop(0)
        if finite is None:
            return {}
        skipped = attempt.clients[~finite.cpu().numpy()].tolist()
        if skipped:
            log.warning("round %d leaves out %s: what was sent is not finite", row["round"], named(skipped))
        return {"skipped": skipped}

    def _undo(self) -> None:
        for attempt in reversed(self.attempts):
            for undo in attempt.undo:
                undo()
        before = self.attempts[0].before
        del before.history[before.round :]
        self.attempts.clear()

    def _reason(self, before: Progress) -> str:
        """Who is to blame, found by going through the round once more, and what to try."""
        orders = self.repeat(before)
        finite = self.run.engine.run(orders, self.run.kept, skip=True).finite
        assert finite is not None
        bad = orders.plan.clients[~finite.cpu().numpy()].tolist()
        if not bad:
            return (
                "the weights are not finite, although what each client sent is: the server's steps made them so. Try a "
                "smaller server learning rate."
            )
        if len(bad) == len(orders.plan.clients):
            return f"what every client of the cohort sent is not finite; {DIVERGES}"
        return f"what {named(bad)} sent or kept is not finite; {DIVERGES} {LEAVE_OUT}"


DIVERGES = "training diverges, so try a smaller learning rate."
LEAVE_OUT = 'Or leave such clients out: on_nonfinite="skip".'


def check(on_nonfinite: Any) -> None:
    if on_nonfinite not in CHOICES:
        raise UndriftError(f'on_nonfinite must be "stop" or "skip", not {on_nonfinite!r}.')


def check_start(params: Params) -> None:
    """Refuse a model that is not finite to begin with."""
    bad = [name for name, w in params.items() if not bool(w.isfinite().all())]
    if bad:
        raise UndriftError(f"The model's parameter {bad[0]!r} has values that are not finite before training starts.")


def unless_nobody(cohort: Outcome, new: Tree, old: Tree) -> Tree:
    """`new`, or `old` where every client of the cohort was skipped; decided on the device."""
    if cohort.finite is None:
        return new
    new = tree_to(new, cohort.size.device)
    forms = [(tree_structure(tree), [t.shape for t in tree_leaves(tree)]) for tree in (new, old)]
    if forms[0] != forms[1]:  # a part's state may have no form before its first round; then the host decides
        return new if int(cohort.size) else old
    return tree_where(cohort.size > 0, new, old)


def named(clients: list[int]) -> str:
    """`client 3`, `clients 3 and 7`, `clients 1, 2, 3, 4, 5 and 20 more`."""
    if len(clients) == 1:
        return f"client {clients[0]}"
    shown = [str(c) for c in clients[:NAMED]]
    rest = f"{len(clients) - NAMED} more" if len(clients) > NAMED else shown.pop()
    return f"clients {', '.join(shown)} and {rest}"
