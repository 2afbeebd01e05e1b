"""Runs that train nothing: rates of 0 in `Local`, in its groups or at the server, gradients that are all 0.

The weights tell: they are the same bits after training as before it. After the first round this is said only of what
comes with undrift, without schedules, since other methods may wait for several rounds before they change the weights.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from undrift.functional.model import Params
from undrift.method.calls import ours
from undrift.schedule import sampled_rounds, value
from undrift.training.personal import has_own_models
from undrift.training.run import Run
from undrift.training.state import State

log = logging.getLogger("undrift")


def unchanged(run: Run, before: Params, after: Params) -> Tensor | None:
    """Return whether the weights are the same, on the device; None if clients may train others than these."""
    if has_own_models(run):
        return None
    return torch.stack([(before[name] == w).all() for name, w in after.items()]).all()


def from_the_first_round(run: Run) -> bool:
    """Return whether every round must change the weights, if any does."""
    scheduled = len({str((run.composed.numbers(t), value(run.local.lr, t))) for t in sampled_rounds(run.rounds)}) > 1
    return all(map(ours, run.method.parts)) and run.local.step_schedule is None and not scheduled


def warn(run: Run, rounds: int) -> None:
    if run.ranks.leads:
        log.warning(
            "Nothing has been trained: after %s, the weights are what they were before. Check the learning rates in "
            "Local, in its groups and at the server, and whether the loss depends on the weights.",
            f"{rounds} rounds" if rounds > 1 else "round 1",
        )


def warn_at_the_end(run: Run, state: State) -> None:
    """Warn if all rounds have left the weights as they were, and clients have trained."""
    trained = any(row["clients"] and not row.get("round_skipped") for row in state.history)
    same = unchanged(run, run.model.start, state.params) if trained else None
    if same is not None and bool(same):
        warn(run, state.round)
