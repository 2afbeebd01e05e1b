"""Runs cells from the queue within a time budget; on a GPU, several at once.

Cells that differ only in seeds and numbers train in one program (`training/side_by_side.py`); others share the GPU as
processes.

A cell is only started if it is expected to finish within the remaining time. If no cell is, one that takes longer than
the whole budget is run in part, and resumed from its checkpoint the next time. The same happens to a cell that takes
longer than expected.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from papers import problems, work
from papers.archive import Archive
from papers.catalogue import Cell, Settings, Table
from papers.queue import Costs, first_needed, ordered, slower, with_samples
from papers.results import CLONE, Result, Results
from undrift.errors import UndriftError, first_line, machine_trouble
from undrift.method.parse import parse_method
from undrift.method.work import with_local_work
from undrift.tools.stopping import Stop
from undrift.training.identity import describe_deeply
from undrift.training.side_by_side import MAX_RUNS, side_by_side, structure

PAUSED = 3
"""The exit status of a process whose cell ran out of time."""
MARGIN = 6.0
"""How many seconds before the end of the budget cells are asked to stop, so that they can write their checkpoints."""
LEAST = 45.0
"""A cell is not run in part with fewer seconds left, most of which its start would take."""
SLACK = 1.15
"""The safety factor for estimates."""
REPORT = 60.0
"""The seconds between lines about running processes."""
OF_RUNS = ("lr", "momentum", "weight_decay", "clip_norm", "optimizer")
"""The settings of local training whose numbers are those of each run in a program: see `shape_of`."""


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
    archive: Archive | None = None
    """What is kept up to date with results and checkpoints."""
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
        self.keep()
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
        """Return the cell, and those of its siblings that are not done, as far as time and memory allow."""
        done = self.saved(cell)  # cells without a round in common would not stop after the same one
        alike = [other for other in self.waiting(tables, busy) if siblings(cell, other)]
        chosen = [o for o in alike if self.saved(o) & done or not (self.saved(o) or done)][:MAX_RUNS]

        def expected() -> float:
            longest = max(costs.seconds(other) or 0.0 for other in chosen) * (1 - self.rounds_done(cell))
            return longest * slower(len(chosen))

        while len(chosen) > 1 and not (share_of(chosen) <= room + 1e-9 and self.in_time(expected())):
            chosen.pop()
        return chosen if cell in chosen else [cell]

    def saved(self, cell: Cell) -> set[int]:
        """Return the rounds from which a cell can continue."""
        return work.saved(self.parts / cell.digest)

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
            self.keep(new=True)

    def keep(self, new: bool = False) -> None:
        """Bring the archives up to date: at once if there is a `new` result, and otherwise once a minute."""
        try:
            if self.archive:
                self.archive.write() if new else self.archive.keep_up()
        except OSError as error:  # what is trained is still on the disk, and archived at the next occasion
            self.say(f"not archived: {machine_trouble(error)}")

    def _side_by_side(self, tables: list[Table], costs: Costs) -> None:
        running: list[Process] = []
        reported = time.monotonic()
        try:
            while True:
                room = 1.0 - sum(share_of(process.cells) for process in running)
                busy = [cell.key for process in running for cell in process.cells]
                while len(running) < self.processes and (cell := self.next(tables, costs, room, busy)):
                    cells = self.beside(cell, tables, costs, room, busy)
                    running.append(self.start(cells))
                    room -= share_of(cells)
                    busy += [other.key for other in cells]
                if not running:
                    return
                time.sleep(0.2)
                self.keep()
                if time.monotonic() - reported >= REPORT:
                    reported = time.monotonic()
                    for process in running:
                        self.say(self.report(process))
                for process in list(running):
                    if self.stop.asked:
                        process.ask_to_stop()
                    if self.left < -3 * MARGIN:
                        process.child.kill()
                    if (code := process.child.poll()) is not None:
                        running.remove(process)
                        process.close()
                        for cell in process.cells:
                            self.ended(cell, code, process.cells[0])
                        if all(self.results.get(cell) for cell in process.cells):
                            self.log(process.cells[0]).unlink()
                        self.keep(new=True)
        finally:
            for process in running:
                process.child.kill()
                process.close()

    def report(self, process: Process) -> str:
        """Return one line about a process: its cells, their rounds, and how they train."""
        cells = process.cells
        found = [work.under_way(self.parts / cell.digest) for cell in cells]
        done, rounds = sum(t for t, _ in found), sum(int(cell.settings["rounds"]) for cell in cells)
        kinds = Counter(how(choices) for _, choices in found)
        engines = "; ".join(kind if len(cells) == 1 else f"{count} × {kind}" for kind, count in kinds.items())
        more = f" + {len(cells) - 1}" if len(cells) > 1 else ""
        seconds = time.monotonic() - process.began
        return f"running {seconds:7.0f} s  {cells[0].key}{more}: {done} of {rounds} rounds, {engines}"

    def start(self, cells: list[Cell]) -> Process:
        command = [sys.executable, "-m", "papers", "--out", str(self.results.folder)]
        command += [word for cell in cells for word in ("--cell", cell.key)]
        command += ["--parts", str(self.parts), "--device", self.device]
        command += ["--budget", f"{max(0.0, self.left - MARGIN):.0f}s"] if self.budget is not None else []
        command += ["--data", str(self.data)] if self.data else []
        command += ["--quick"] if self.quick else []
        command += ["--child"]
        self.folder(cells[0])
        log = self.log(cells[0]).open("a", encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(CLONE), os.environ.get("PYTHONPATH")]))
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        return Process(cells, child, log, time.monotonic())

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
    """Return whether two cells differ only in what runs in one program may differ in: seeds and some numbers.

    These are the rates, decays and clipping of local training, and the numbers of the method. Steps and epochs must be
    the same, as a client with fewer would wait for those with more.
    """
    mine, theirs = ({**cell.settings, "seed": 0, "method": "", "local": fixed(cell)} for cell in (one, other))
    alike = one.quick == other.quick and one.options == other.options and mine == theirs
    return alike and bool(shape := shape_of(one)) and shape == shape_of(other)


def fixed(cell: Cell) -> Settings:
    """Return the settings of local training whose values are the same in all runs of one program."""
    return {name: value for name, value in cell.settings.get("local", {}).items() if name not in OF_RUNS}


def shape_of(cell: Cell) -> str:
    """Return what `signature` has of the cell's method and local training; "" if the cell trains alone."""
    given = cell.settings
    if cell.options.get("kind", "train") != "train" or given.get("engine", "auto") == "plain" or "lanes" in given:
        return ""
    try:
        local = problems.local_work(given["local"])
        method = with_local_work(parse_method(given.get("method", "FedAvg()")), local, {}, (), frozenset())
        return describe_deeply([structure(method), callable(local.weight_decay) or bool(local.weight_decay)])
    except UndriftError:  # which the cell will raise when it runs
        return ""


def share_of(cells: list[Cell]) -> float:
    """Return the share of a GPU that cells in one program use."""
    return min(1.0, sum(cell.share for cell in cells))


def how(choices: dict[str, Any]) -> str:
    """Return in a few words how a run trains, from what it chose."""
    if not choices:
        return "starting"
    if choices["engine"] != "lanes":
        return f"{choices['engine']} engine ({choices['why']})"
    graphs = ["CUDA graphs"] if choices["device"].startswith("cuda") else []
    beside = [f"{1 + len(choices['beside'])} runs as one"] if "beside" in choices else []
    return ", ".join([f"{choices['lanes']} lanes", *graphs, *(["compiled"] if choices["compile"] else []), *beside])


@dataclass
class Process:
    """A process that runs cells in one program."""

    cells: list[Cell]
    child: subprocess.Popen[str]
    log: TextIO
    began: float
    asked: bool = False

    def ask_to_stop(self) -> None:
        """Let it stop after its round. Only once: a second signal would interrupt the round."""
        if not self.asked:
            self.asked = True
            self.child.terminate()

    def close(self) -> None:
        """Wait for the process, which is about to end, and close its files."""
        self.child.wait()
        if self.child.stdin:
            self.child.stdin.close()
        self.log.close()
