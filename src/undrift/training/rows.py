"""A round's row of the history: what is known once it has been launched, and what must be read from the device."""

from __future__ import annotations

from typing import Any, TypeGuard

from undrift.columns import reserved
from undrift.errors import require
from undrift.training import drift, nonfinite
from undrift.training.evaluate import Columns
from undrift.training.rounds import Round
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree


def number(value: Any) -> TypeGuard[float]:
    """Return whether a column's value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def history_row(run: Run, state: State, done: Round) -> dict[str, Any]:
    """Return the columns of a round that are known as soon as it has been launched."""
    work, answers = done.answers.work, done.answers
    row = {
        "round": state.round,
        "clients": answers.clients.tolist(),
        **answers.columns,
        "steps": int(work.steps.sum()),
        "total_steps": state.total_steps,
        "steps_fraction": state.total_steps / state.constant_steps if state.constant_steps else 1.0,
        "local_steps": work.span,
        "lr": float(work.lr),
        "samples": answers.samples,
        "bytes_down": done.bytes_down,
        "bytes_up": done.bytes_up,
        "total_bytes": state.total_bytes,
        "seconds": 0.0,
    }
    if run.choices.get("narrowed") == state.round:
        row["lanes"] = run.choices["lanes"]
    if run.choices.get("switched") == state.round:
        row["switched"] = run.choices["why"]
    return row


def late_columns(
    run: Run, guard: nonfinite.FiniteGuard, row: dict[str, Any], done: Round, states: list[Tree], figures: Columns
) -> dict[str, Any]:
    """Return the columns of a round that must be read from the device. Raises `NonFiniteError`."""
    found = figures()
    row = row | found
    settled, own = found | guard.settle(row), done.method.history(states)
    if done.drift:
        answers, by_layer = done.answers, run.drift == drift.LAYERS
        settled |= drift.columns(done.drift, answers.clients, answers.excused, list(run.model.start), by_layer)
    for name in own:
        require(
            name not in row | settled and not reserved(name),
            f"A part's history has a column {name!r}, a name that undrift uses itself; rename it.",
        )
    return settled | own
