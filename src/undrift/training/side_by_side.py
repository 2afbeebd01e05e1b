"""Runs side by side: several calls of `ud.train` whose cohorts train as one.

Each run has its own thread, in which it does everything as it does alone: its folder, its history, its server. Threads
take turns, one at a time. Once all runs of the same shape (`signature`) have reached the training of a round, the first
of them trains all of their cohorts in one program (`engine/stacked.py`), and each continues with its own outcome. They
meet in the same way to evaluate their models.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from undrift.data.digest import of_parts
from undrift.engine.choose import Choice, build_stacked, choose
from undrift.engine.fallback import Fallback
from undrift.engine.stacked import StackedEngine, data_of
from undrift.errors import listed
from undrift.method.local import Spread
from undrift.method.part import Method
from undrift.schedule import nested
from undrift.training.barrier import Interrupted, RunGroup
from undrift.training.checkpoint import LAST, companions_in
from undrift.training.identity import ATTRIBUTES, describe_deeply, identity
from undrift.training.run import Run
from undrift.training.settings import Settings
from undrift.tree import tree_map

T = TypeVar("T")
_here = threading.local()
log = logging.getLogger("undrift")

MAX_RUNS = 8
"""The largest number of runs that `undrift sweep` and `undrift reproduce` train as one program."""
MAY_DIFFER = {"rounds", "seed", "method", "local", "metrics", "clients a round", "stop_when", ATTRIBUTES}
"""The entries of a run's identity in which runs side by side may differ, in addition to the partition."""


def side_by_side(tasks: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Train several runs side by side, such that runs of the same shape train as one vectorized program.

    Runs may differ in their seeds, in numbers (learning rates, steps, the numbers of every part, participation), and in
    the partition of the same samples. Runs that differ in the model, the method or the batch size take turns.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", partition=ud.IID(), clients=5)
        >>> def task(seed):
        ...     work = ud.Local(steps=2, lr=0.1)
        ...     return lambda: ud.train("logistic", data, ud.FedAvg(), rounds=2, local=work, seed=seed)
        >>> [len(result.history) for result in side_by_side([task(0), task(1)])]
        [2, 2]

    Args:
        tasks: Functions without arguments, each of which calls `ud.train`. Each runs in its own thread, one at a time.

    Returns:
        What each function returned, or the exception that it raised.
    """
    coordinator = Coordinator(len(tasks))
    results: list[Any] = [None] * len(tasks)
    cpus = torch.get_num_threads()

    def work(i: int) -> None:
        torch.set_num_threads(cpus)
        _here.place = coordinator, i
        with coordinator.lock:
            try:
                results[i] = tasks[i]()
            except BaseException as error:  # returned to the caller
                results[i] = error
                if isinstance(error, KeyboardInterrupt):  # all stop where they are: in the same round
                    coordinator.interrupt()
            finally:
                coordinator.leave(i)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        coordinator.interrupt()
        for thread in threads:
            thread.join()
        raise
    return results


def join(run: Run, given: Settings) -> None:
    """Let a run train side by side with others, and list them in its choices, if it is in `side_by_side`."""
    place = getattr(_here, "place", None)
    if place is None:
        return
    coordinator, i = place
    if others := coordinator.join(i, run, given):
        run.choices["beside"] = others


def check_interrupted() -> None:
    """Raise `Interrupted` in a run side by side once all must stop: Ctrl-C only reaches the main thread."""
    place = getattr(_here, "place", None)
    if place is not None and place[0].interrupted:
        raise Interrupted


class Coordinator:
    """The runs that are side by side, and whose turn it is."""

    def __init__(self, tasks: int) -> None:
        self.lock = threading.RLock()
        """Held by the thread whose turn it is."""
        self.complete = threading.Condition(self.lock)
        self.missing = set(range(tasks))
        """The tasks that have neither joined nor ended."""
        self.ended: set[int] = set()
        self.interrupted = False
        self.runs: dict[int, tuple[Run, str, str]] = {}
        self.folders: dict[int, Path | None] = {}
        self.resumed: dict[int, bool] = {}
        self.groups: dict[int, RunGroup] | None = None
        self.switches: dict[int, tuple[str, bool, int]] = {}
        """The process-wide settings of each run."""

    def join(self, i: int, run: Run, given: Settings) -> list[str]:
        if i not in self.missing:  # a task's second run trains alone
            return []
        name = Path(given.out).name if given.out is not None else f"run {i}"
        self.runs[i] = run, signature(run, given), name
        self.folders[i] = Path(given.out) if given.out is not None else None
        self.resumed[i] = bool(given.resume)
        self.switches[i] = given.precision, given.deterministic, run.choices["threads"]
        self._arrive(i)
        self.complete.wait_for(lambda: not self.missing)
        if self.groups is None:
            self.groups = self._formed()
        self.complete.wait_for(lambda: self.ended >= self._before(i))
        group = self.groups.get(i)
        return [self.runs[j][2] for j in group.members if j != i] if group else []

    def _before(self, i: int) -> set[int]:
        """Return the runs that must end first: earlier ones that need other process-wide settings."""
        kinds = list(dict.fromkeys(self.switches[j] for j in sorted(self.switches)))
        return {j for j, kind in self.switches.items() if kinds.index(kind) < kinds.index(self.switches[i])}

    def leave(self, i: int) -> None:
        """Note that a run is over, so that no other waits for it."""
        self.ended.add(i)
        self._arrive(i)
        self.complete.notify_all()
        if self.groups and i in self.groups:
            self.groups[i].proceed()

    def interrupt(self) -> None:
        """Stop all runs before their next round."""
        self.interrupted = True
        with self.lock:
            for group in (self.groups or {}).values():
                for engine in group.engines.values():
                    engine.turn.notify()

    def _arrive(self, i: int) -> None:
        self.missing.discard(i)
        if not self.missing:
            self.complete.notify_all()

    def _formed(self) -> dict[int, RunGroup]:
        """Return the groups of runs that train as one, by run."""
        alike: dict[str, list[int]] = {}
        for i, (run, shape, _) in sorted(self.runs.items()):
            if shape and i not in self.ended and isinstance(run.engine, Fallback):
                alike.setdefault(shape, []).append(i)
        groups: dict[int, RunGroup] = {}
        for members in alike.values():
            runs = {i: self.runs[i][0] for i in members}
            if len(runs) > 1 and (engine := stacked_engine(list(runs.values()))):
                group = RunGroup(self, runs, engine, self.folders)
                group.resume_rounds = resume_rounds({i: self.folders[i] for i in members if self.resumed[i]})
                groups |= dict.fromkeys(members, group)
        return groups


def resume_rounds(folders: dict[int, Path | None]) -> dict[int, int]:
    """Return the round from which runs that are resumed continue, as their checkpoints say who trained together.

    The bits of a run side by side depend on the others. So all that trained the latest round of which each has a
    checkpoint go back to it; those that had ended by then are free. They start over if they were killed as they wrote
    their first ones.
    """
    own = {i: Path(os.path.abspath(folder)) for i, folder in folders.items() if folder is not None}
    known = {i: companions_in(folder) for i, folder in own.items()}
    numbers = {folder: i for i, folder in own.items()}
    for t in sorted({t for rounds in known.values() for t in rounds}, reverse=True):
        for i, rounds in known.items():
            others = rounds.get(t)
            if others is not None and all(t in known.get(numbers.get(other, -1), ()) for other in others):
                return dict.fromkeys([i, *(numbers[other] for other in others)], t)
    said = any(others is not None for rounds in known.values() for others in rounds.values())
    if said and all(len(rounds) < LAST for rounds in known.values()):
        return dict.fromkeys(own, 0)
    if said:
        log.warning(
            "%s trained side by side, and have no checkpoint of one round in common: the last digits of their results "
            "may differ from those of uninterrupted runs", listed(str(folder) for folder in own.values()),
        )  # fmt: skip
    return {}


def signature(run: Run, given: Settings) -> str:
    """Return the signature of a run: runs with the same one can train as one program. Empty if it must train alone.

    It contains everything that may be a constant in a traced program, but not what a client is given as data: the
    weights, numbers and draws of its run.
    """
    if run.choices["engine"] != "lanes" or given.lanes is not None:
        return ""
    program = run.engine.program
    known = {
        name: value for name, value in identity(run, given).items() if name not in MAY_DIFFER | run.data.digests.keys()
    }
    return describe_deeply(
        {
            **known,
            "model itself": given.model,
            "functions": [run.loss, run.data.take, run.data.augment, run.conditions],
            "method": structure(run.composed),
            "hooks": program.using,
            "rates": program.reads_rates,
            "program": [type(program).__name__, program.weight_decay, program.decay, program.personal],
            "norms": [getattr(program, name, 0) for name in ("norms", "cohort", "layers")],
            "batches": run.local.widest(run.data.size_counts[0]),
            "store": of_parts(run.data.store),
            "classes": [run.data.classes, run.model.outputs],
            "tracked": sorted(run.model.tracked),
            "device": str(run.device),
            "compile": run.choices["compile"],
            "deterministic": given.deterministic,
            "threads": run.choices["threads"],
        }
    )


def structure(method: Method) -> list[Any]:
    """Return what methods must have in common to be one program: all but the values of their numbers."""
    numbers = method.numbers(0)
    bound = method.bind(tree_map(lambda number: 0.0, numbers))
    names, more = [sorted(own) for own in numbers], [constants(part) for part in method.parts]
    return [bound, names, more, method.weighting, method.batches]


def constants(owner: Any) -> list[Any]:
    """Return what a part has beside its fields, such as which of its numbers are 0, and what the objects in it have."""
    known = {field.name for field in dataclasses.fields(owner)}
    own = {name: value for name, value in getattr(owner, "__dict__", {}).items() if name not in known}
    return [own, *(constants(inner) for _, inner in nested(owner))]


def stacked_engine(runs: list[Run]) -> StackedEngine | None:
    """Return the engine for the cohorts of all these runs, or None if it would have fewer lanes than one run alone."""
    first, data = runs[0], data_of([run.device_data for run in runs])
    each = [run.local.spread(0, run.data, run.composed.batches) for run in runs]
    mean = float(np.average([one.mean for one in each], weights=[run.cohort_size for run in runs]))
    steps = Spread(mean, max(one.largest for one in each))
    cohort, width = sum(run.cohort_size for run in runs), first.local.widest(first.data.size_counts[0])
    choice = choose("auto", None, first.model, data, cohort, steps, width)
    if choice.engine != "lanes" or choice.lanes < max(2, *(run.choices["lanes"] for run in runs)):
        return None
    whole = Choice(choice.engine, choice.lanes, choice.why, first.choices["compile"])
    return build_stacked(whole, first.engine.program, data)
