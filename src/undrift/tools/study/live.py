"""A study as it goes: a live table of its cells, above the runs in progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from undrift.tools import launch
from undrift.tools.board import Board
from undrift.tools.compare import Run
from undrift.tools.study.run import TUNING, Outcome
from undrift.tools.study.tables import described
from undrift.tools.sweep import Parallel, Point


def board(console: Console, outcomes: list[Outcome]) -> Board:
    return Board(console, lambda: table(outcomes))


def table(outcomes: list[Outcome]) -> Table:
    """Methods by partitions, with how far each is."""
    partitions = list(dict.fromkeys(outcome.cell.partition for outcome in outcomes))
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", *partitions):
        made.add_column(name)
    for method in dict.fromkeys(outcome.cell.method for outcome in outcomes):
        own = {outcome.cell.partition: outcome for outcome in outcomes if outcome.cell.method == method}
        made.add_row(method, *(state(own[name]) for name in partitions))
    return made


def state(outcome: Outcome) -> str:
    """What is going on in a cell."""
    left = f"{outcome.left} run{'s' if outcome.left > 1 else ''} left" if outcome.left else ""
    if outcome.why:
        return outcome.why
    if outcome.chosen is None:
        tried = f"{len(outcome.tried)} tried" if outcome.tried else ""
        return ", ".join(filter(None, ("tuning", tried, left))) if outcome.cell.tuned else "waiting"
    return ", ".join(filter(None, (described(outcome.chosen), left or "done")))


class Runner:
    """Runs the points of a study, and shows them on its board."""

    def __init__(self, board: Board, where: str, how: Parallel) -> None:
        self.board, self.where, self.how = board, where, how

    def __call__(self, points: Sequence[Point], folder: Path, ended: Callable[[Point], None]) -> dict[str, Run]:
        if not self.board.console.is_terminal:
            what = "to choose settings" if folder.name == TUNING else "with the chosen settings, on fresh seeds"
            self.board.say(f"{len(points)} runs {what}")
        runs, _ = launch.run_on(self.board, points, folder, self.where, self.how, ended, "study")
        return {run.folder.name: run for run in runs}
