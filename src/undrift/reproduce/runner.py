"""Runs cells from the queue within a time budget; on a GPU, several at once.

Seeds of the same setting and method train in one program (`training/beside.py`); different ones share the GPU as
processes.

A cell is only started if it is expected to finish within the remaining time. If no cell is, one that takes longer than
the whole budget is run in part, and resumed from its checkpoint the next time. The same happens to a cell that takes
longer than expected.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

from undrift.errors import UndriftError, first_line
from undrift.reproduce import work
from undrift.reproduce.catalogue import Cell, Table
from undrift.reproduce.queue import Costs, first_needed, ordered, slower, with_samples
from undrift.reproduce.results import Result, Results
from undrift.tools.stopping import Stop
from undrift.training.beside import MOST, side_by_side

PAUSED = 3
"""The exit status of a process whose cell ran out of time."""
MARGIN = 6.0
"""How many seconds before the end of the budget cells are asked to stop, so that they can write their checkpoints."""
LEAST = 45.0
"""A cell is not run in part with fewer seconds left, most of which its start would take."""
SLACK = 1.15
"""The safety factor for estimates."""


@dataclass
class Runner:
    """How and where cells are run."""

    results: Results
    parts: Path
    """The folder of unfinished cells' checkpoints."""
    began: float
    """The start of the budget, by `time.monotonic`."""
    device: str = "auto"
    budget: float | None = None
    processes: int = 0
    """How many cells at once, each in its own process; 0 runs them one after another in this process."""
    data: Path | None = None
    quick: bool = False
    say: Callable[[str], None] = print
    stop: Stop = field(default_factory=Stop)
    finished: list[str] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    decided: tuple[int, bool] = (0, False)
    """The latest round that a cell has finished, and whether cells stop after it."""
    whole: float = float("inf")
    """The time left in the budget when the first cell could start."""

    def folder(self, cell: Cell) -> Path:
        found = self.parts / cell.digest
        found.mkdir(parents=True, exist_ok=True)
        return found

    @property
    def left(self) -> float:
        return float("inf") if self.budget is None else self.budget - (time.monotonic() - self.began)

    def late(self, t: int) -> bool:
        """Return whether cells must stop after their round t.

        Cells in one program get the same answer. If one of them went on alone, a program would be compiled for it.
        """
        if t != self.decided[0]:
            self.decided = t, self.decided[1] or self.stop.asked or self.left < MARGIN
        return self.decided[1]

    def fits(self, cell: Cell, costs: Costs) -> bool:
        """Return whether the cell is expected to finish in the time left, or its time is unknown."""
        expected = costs.seconds(cell)
        if expected is None:
            return self.left > LEAST
        return self.in_time(expected * (1 - self.rounds_done(cell)))

    def in_time(self, expected: float) -> bool:
        """Return whether something that is expected to take this many seconds would finish in the time left."""
        return expected * SLACK + MARGIN < self.left

    def waiting(self, tables: list[Table], busy: Iterable[str]) -> list[Cell]:
        """Return the cells that are not done, and have not been tried in this session."""
        tried = {*self.paused, *self.failed, *busy}
        return [cell for cell in ordered(tables, self.results) if cell.key not in tried]

    def beside(self, cell: Cell, tables: list[Table], costs: Costs, room: float, busy: Iterable[str]) -> list[Cell]:
        """Return the cell, and those of its other seeds that are not done, as far as time and memory allow."""
        if cell.options.get("kind", "train") != "train":
            return [cell]
        done = self.rounds_done(cell)  # cells at different rounds would not stop after the same one
        alike = [other for other in self.waiting(tables, busy) if siblings(cell, other)]
        chosen = [other for other in alike if self.rounds_done(other) == done][:MOST]
        expected = costs.seconds(cell) or 0.0
        while len(chosen) > 1 and not (
            share_of(chosen) <= room + 1e-9 and self.in_time(expected * slower(len(chosen)))
        ):
            chosen.pop()
        return chosen if cell in chosen else [cell]

    def rounds_done(self, cell: Cell) -> float:
        """Return the share of a cell's rounds that earlier parts have done."""
        return work.share_done(self.parts / cell.digest, cell)

    def too_long(self, cell: Cell, costs: Costs) -> bool:
        """Return whether the cell would not even finish in the whole budget."""
        expected = costs.seconds(cell)
        return expected is not None and expected * SLACK + MARGIN > self.whole

    def run(self, tables: list[Table]) -> None:
        """Run cells until no remaining one fits."""
        self.whole = self.left
        costs = Costs(self.results, work.hardware(self.device))
        if self.processes:
            self._side_by_side(tables, costs)
        else:
            self._one_by_one(tables, costs)

    def next(self, tables: list[Table], costs: Costs, room: float, busy: Iterable[str] = ()) -> Cell | None:
        """Return the first untried cell that fits into the time left, if there is room for it on the GPU.

        If none fits, the first that would not even fit into the whole budget.
        """
        if self.stop.asked:
            return None
        waiting = self.waiting(tables, busy)
        possible = [cell for cell in waiting if cell.share <= room + 1e-9]
        whole = next((cell for cell in possible if self.fits(cell, costs)), None)
        if whole is not None or not possible or self.left < LEAST:
            return whole
        if any(self.fits(cell, costs) for cell in waiting):  # it waits for room
            return None
        return next((cell for cell in possible if self.too_long(cell, costs)), None)

    def _one_by_one(self, tables: list[Table], costs: Costs) -> None:
        while cell := self.next(tables, costs, 1.0):
            self.several([cell])

    def several(self, cells: list[Cell]) -> None:
        """Run cells in one program, whether or not they fit, until they are finished or the time is up."""
        waiting = [cell for cell in cells if not self.results.get(cell)]
        self.decided = 0, False
        if len(waiting) == 1:
            self.one(waiting[0])
            return
        for error in side_by_side([partial(self.one, cell, len(waiting)) for cell in waiting]):
            if error is not None:
                raise error

    def one(self, cell: Cell, beside: int = 1) -> None:
        """Run a cell, whether or not it fits, until it is finished or the time is up. `beside`: see `work.run`."""
        if self.results.get(cell):
            return
        if first := first_needed(cell, self.results):
            self.fail(cell, f"its number of samples is that of {first[0].key}, which must be run before it")
            return
        try:
            whole = with_samples(cell, self.results)
            result = work.run(whole, self.folder(cell), self.late, self.device, beside)
        except work.Paused:
            self.pause(cell)
        except Exception as error:  # one cell that fails must not end the queue
            if not isinstance(error, UndriftError):
                traceback.print_exc()
            self.fail(cell, f"{type(error).__name__}: {first_line(error)}")
        else:
            self.results.add(cell, result)
            work.forget(self.parts / cell.digest)
            self.finish(cell, result)

    def _side_by_side(self, tables: list[Table], costs: Costs) -> None:
        running: dict[str, tuple[list[Cell], subprocess.Popen[str], TextIO]] = {}
        asked_to_stop: set[str] = set()
        try:
            while True:
                room = 1.0 - sum(share_of(cells) for cells, *_ in running.values())
                busy = [cell.key for cells, *_ in running.values() for cell in cells]
                while len(running) < self.processes and (cell := self.next(tables, costs, room, busy)):
                    cells = self.beside(cell, tables, costs, room, busy)
                    running[cell.key] = (cells, *self.start(cells))
                    room -= share_of(cells)
                    busy += [other.key for other in cells]
                if not running:
                    return
                time.sleep(0.2)
                for key, (cells, process, log) in list(running.items()):
                    if (
                        self.stop.asked and key not in asked_to_stop
                    ):  # only once: a second signal would interrupt the round
                        asked_to_stop.add(key)
                        process.terminate()
                    if self.left < -3 * MARGIN:
                        process.kill()
                    if (code := process.poll()) is not None:
                        del running[key]
                        close(process, log)
                        for cell in cells:
                            self.ended(cell, code, cells[0])
                        if all(self.results.get(cell) for cell in cells):
                            self.log(cells[0]).unlink()
        finally:
            for _, process, log in running.values():
                process.kill()
                close(process, log)

    def start(self, cells: list[Cell]) -> tuple[subprocess.Popen[str], TextIO]:
        command = [sys.executable, "-m", "undrift.reproduce", "--out", str(self.results.folder)]
        command += [word for cell in cells for word in ("--cell", cell.key)]
        command += ["--parts", str(self.parts), "--device", self.device]
        command += ["--budget", f"{max(0.0, self.left - MARGIN):.0f}s"] if self.budget is not None else []
        command += ["--data", str(self.data)] if self.data else []
        command += ["--quick"] if self.quick else []
        command += ["--child"]
        self.folder(cells[0])
        log = self.log(cells[0]).open("a", encoding="utf-8")
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True)
        return child, log

    def log(self, cell: Cell) -> Path:
        """Return the log file of the process whose first cell this is. The cell's own folder is removed at the end."""
        return self.parts / f"{cell.digest}.log"

    def ended(self, cell: Cell, code: int, first: Cell) -> None:
        """Handle the end of a process, whose log is with its `first` cell; finished cells' results are on disk."""
        self.results = Results(self.results.folder)
        if result := self.results.get(cell):
            self.finish(cell, result)
            return
        lines = self.log(first).read_text(encoding="utf-8").splitlines()
        said = [line.partition(f" {cell.key}: ")[2] for line in lines if line.startswith("FAILED")]
        if why := next((reason for reason in reversed(said) if reason), None):
            self.fail(cell, why)
        elif code in (PAUSED, -9):
            self.pause(cell)
        else:
            self.fail(cell, lines[-1] if lines else f"its process ended with status {code}")

    def finish(self, cell: Cell, result: Result) -> None:
        self.finished.append(cell.key)
        self.say(f"done    {result['seconds']:7.1f} s  {cell.key}")

    def pause(self, cell: Cell) -> None:
        self.paused.append(cell.key)
        self.say(f"paused  {100 * self.rounds_done(cell):6.0f} %  {cell.key}")

    def fail(self, cell: Cell, why: str) -> None:
        self.failed[cell.key] = why
        self.say(f"FAILED             {cell.key}: {why}")


def siblings(one: Cell, other: Cell) -> bool:
    """Return whether two cells differ in nothing but their seeds."""
    mine, theirs = ({**cell.settings, "seed": 0} for cell in (one, other))
    return one.quick == other.quick and one.options == other.options and mine == theirs


def share_of(cells: list[Cell]) -> float:
    """Return the share of a GPU that cells in one program use."""
    return min(1.0, sum(cell.share for cell in cells))


def close(process: subprocess.Popen[str], log: TextIO) -> None:
    """Wait for a process that is about to end, and close its files."""
    process.wait()
    if process.stdin:
        process.stdin.close()
    log.close()
