"""A round's row of the history: what is known once it has been launched, and what is read from the device later.

The GPU works asynchronously while the host prepares the next round. So a round is timed between two CUDA events, and
values on the GPU are read once all that the round has launched, evaluation included, is done. They are read on a
separate stream, which does not queue behind later rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeGuard

import torch

from undrift.columns import reserved
from undrift.errors import require
from undrift.training import drift, nonfinite
from undrift.training.evaluation import Columns
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
    evaluated = figures()
    row = row | evaluated
    settled, own = evaluated | guard.settle(row), done.method.history(states)
    if done.drift:
        answers, by_layer = done.answers, run.drift == drift.LAYERS
        settled |= drift.columns(done.drift, answers.clients, answers.excused, list(run.model.start), by_layer)
    for name in own:
        require(
            name not in row | settled and not reserved(name),
            f"A part's history has a column {name!r}, a name that undrift uses itself; rename it.",
        )
    return settled | own


# ---- when a round is over ------------------------------------------------------------------------------------------

Row = dict[str, Any]
AHEAD = 1
"""The number of rounds that may wait for the device. One keeps it busy; each more keeps another state in memory."""


@cache
def _reading_stream(device: torch.device) -> Any:
    """Return the stream for reading from this device, which runs side by side share."""
    return torch.cuda.Stream(device)


class Clock:
    """Measures the times of rounds.

    Args:
        device: Where they are trained.
        alone: Whether rows may be passed on as soon as the device is done with them. Several processes must pass on the
            same rows at the same points, so there a row waits for the next round's.
    """

    def __init__(self, device: torch.device, alone: bool = True) -> None:
        self.on_gpu, self.alone = device.type == "cuda", alone
        self.reading = torch.cuda.stream(_reading_stream(device)) if self.on_gpu else nullcontext()
        self.began: Any = None
        self.ended: Any = None
        self.waiting: list[tuple[Row, Callable[[], Row], Any, Any, Any]] = []

    def start(self) -> None:
        self.began = self._now()

    def stop(self) -> None:
        self.ended = self._now()

    def add(self, row: Row, rest: Callable[[], Row]) -> None:
        """Note that all of this round has been launched. `settled` will add its seconds and the result of `rest`."""
        self.waiting.append((row, rest, self.began, self.ended, self._now()))

    def settled(self, wait: bool) -> Iterator[Row]:
        """Yield the completed rows of rounds that the device has finished, in order; with `wait`, of all rounds."""
        while self.waiting and (wait or len(self.waiting) > AHEAD or self._passed(self.waiting[0][-1])):
            row, rest, began, ended, launched = self.waiting.pop(0)
            if self.on_gpu:
                launched.synchronize()
            row["seconds"] = began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
            with self.reading:
                row |= rest()
            yield row

    def _passed(self, moment: Any) -> bool:
        return not self.on_gpu or (self.alone and bool(moment.query()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
