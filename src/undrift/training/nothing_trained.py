"""Runs that train nothing: rates of 0 in `Local`, in its groups or at the server, gradients that are all 0.

The weights tell: they are the same bits after training as before it. After the first round this is said only of what
comes with undrift, without schedules, since other methods may wait for several rounds before they change the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from undrift.functional.model import Params
from undrift.method.calls import ours
from undrift.schedule import sampled_rounds, value
from undrift.training.personal import has_own_models
from undrift.training.run import Run
from undrift.training.state import State

Row = Mapping[str, Any]
log = logging.getLogger("undrift")


def weights_unchanged(run: Run, before: Params, after: Params) -> Tensor | None:
    """Return whether the weights are the same, on the device; None if clients may train others than these."""
    if has_own_models(run):
        return None
    return torch.stack([(before[name] == w).all() for name, w in after.items()]).all()


def every_round_must_change(run: Run) -> bool:
    """Return whether every round must change the weights, if any does."""
    scheduled = len({str((run.composed.numbers(t), value(run.local.lr, t))) for t in sampled_rounds(run.rounds)}) > 1
    return all(map(ours, run.method.parts)) and run.local.step_schedule is None and not scheduled


def clients_trained(row: Row) -> bool:
    """Return whether clients have trained in a round, and count."""
    absent = {client for name in ("skipped", "dropped", "left_out") for client in row.get(name, ())}
    return not row.get("round_skipped") and not absent.issuperset(row["clients"])


def warn_nothing_trained(run: Run, rounds: int) -> None:
    if run.ranks.leads:
        log.warning(
            "Nothing has been trained: after %s, the weights are what they were before. Check the learning rates in "
            "Local, in its groups and at the server, and whether the loss depends on the weights.",
            f"{rounds} rounds" if rounds > 1 else "round 1",
        )


def warn_if_nothing_trained(run: Run, state: State) -> None:
    """Warn if all rounds have left the weights as they were, and clients have trained."""
    same = weights_unchanged(run, run.model.start, state.params) if any(map(clients_trained, state.history)) else None
    if same is not None and bool(same):
        warn_nothing_trained(run, state.round)
