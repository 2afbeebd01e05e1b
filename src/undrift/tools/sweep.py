"""Sweeps: runs of one experiment over a grid of its keys, including seeds, and the best by validation data."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undrift.cpus import THREADS, usable_cpus
from undrift.data import warn_once
from undrift.errors import DEBUG, UndriftError, first_line, machine_trouble, quoted
from undrift.files import lock, parse_json, read_bytes, regular, write_text
from undrift.tools.compare import Run, agreed, counted, decided, groups, leading_metric, remark, same
from undrift.tools.config import Document, checked, put, toml_value
from undrift.tools.display import score
from undrift.tools.experiment import about, refuse_undecided, run, understood
from undrift.tools.stopping import stopping
from undrift.tools.study.statistics import average, deviation
from undrift.tools.workers import GRACE, each
from undrift.training import side_by_side
from undrift.training.argument_checks import find_device
from undrift.training.config_writer import flatten
from undrift.training.learning_checks import CHANCE, DIVERGED
from undrift.training.nonfinite import mute
from undrift.training.run_folder import finished, stopped
from undrift.training.threads import use_threads

Grid = dict[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Point:
    """One run of a sweep."""

    name: str
    settings: Document


def file_grid(section: Any) -> Grid:
    """The file's `[sweep]`: keys, dotted or in subsections, with lists of values."""
    grid = flatten(section) if isinstance(section, dict) else {}
    if not isinstance(section, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        raise UndriftError("[sweep] must have keys with lists of values, such as local.lr = [0.01, 0.1].")
    return grid


def parse_grid(assignments: list[str]) -> Grid:
    """A grid from assignments such as `local.lr=[0.01, 0.1]`."""
    grid: Grid = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        values = toml_value(text.strip()) if text.strip() else None
        if not isinstance(values, list) or not values:
            raise UndriftError(
                f"--grid {quoted(assignment)}: write it as key=[value, …], such as 'local.lr=[0.01, 0.1]'."
            )
        grid[key.strip()] = values
    return grid


@dataclass(frozen=True)
class Parallel:
    """How many runs train at a time, and where. None leaves it to undrift."""

    workers: int | None = None
    """The number of processes."""
    devices: list[str] | None = None
    """Instead, the device of each process."""
    together: int | None = None
    """The largest number of runs in one process that train as one program."""


def parallel(workers: int | None, devices: str | None, together: int | None) -> Parallel:
    """What the options of a command ask for. Of the devices in `cuda:0,cuda:1`, one named twice takes two processes."""
    if devices is None:
        return Parallel(workers, None, together)
    names = [name.strip() for name in devices.split(",")]
    if workers is not None:
        raise UndriftError("--workers and --devices both set how many runs train in parallel; use only one of them.")
    for name in names:
        find_device(name or quoted(devices))
    return Parallel(None, names, together)


MOST = 10_000
"""The most runs of a sweep."""
NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
DIGITS = 4
"""Decimals of metrics in tables."""
LONGEST = 200
"""The most bytes in the name of a run's folder."""


def points(settings: Document, grid: Grid, where: str) -> list[Point]:
    """All combinations; each is checked before the first one runs."""
    count = math.prod(len(values) for values in grid.values())
    if count > MOST:
        raise UndriftError(f"{where}: the grid has {count:,} combinations; a sweep runs at most {MOST:,}.")
    for key, values in grid.items():
        seen: set[str] = set()
        for value in values:
            if same(value) in seen:  # two runs that are one would count as two, with a deviation of 0
                raise UndriftError(f"{where}: the grid lists {quoted(value)} twice for {key}; list every value once.")
            seen.add(same(value))
    found = []
    for choice in itertools.product(*grid.values()):
        pairs = dict(zip(grid, choice, strict=True))
        changed = settings
        for key, value in pairs.items():
            changed = put(changed, key, value, where)
        name = ",".join(f"{key}={word(value)}" for key, value in pairs.items()) or "run"
        with about(f"{where}, {name}"):
            understood(checked(changed, where))
        found.append(Point(name, changed))
    found = unique(found)
    choices = [values for key, values in grid.items() if key != "seed"]
    if not any(len(values) > 1 for values in choices):
        return found
    experiments = [checked(point.settings, where) for point in found]
    if not all(experiment.data.validation_fraction for experiment in experiments):
        raise UndriftError(
            f"{where}: data.validation_fraction is 0. A sweep chooses on validation data, never on test data; set it "
            "to 0.1, for example."
        )
    for experiment in experiments:
        refuse_undecided(experiment, where)
    return found


def unique(found: list[Point]) -> list[Point]:
    """The points with unique names that are valid folder names on every file system."""
    seen: dict[str, int] = {}
    named = []
    for point in found:
        name = point.name
        if len(raw := os.fsencode(name)) > LONGEST:
            name = f"{raw[: LONGEST - 9].decode(errors='ignore')}-{hashlib.sha256(raw).hexdigest()[:8]}"
        seen[name] = seen.get(name, 0) + 1
        named.append(Point(name if seen[name] == 1 else f"{name}-{seen[name]}", point.settings))
    return named


def word(value: Any) -> str:
    """A value as it appears in a folder's name."""
    return re.sub(r"[^A-Za-z0-9.+=-]+", "_", str(value)).strip("_")[:60]


def sweep(
    found: list[Point],
    out: Path,
    where: str,
    how: Parallel,
    done: Callable[[Point, str | None], None],
    kind: str = "sweep",
) -> list[Run]:
    """Run the points that are not finished yet, in parallel on CPUs or devices.

    `kind` is what messages call all of them together. Returns the runs that finished or stopped.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UndriftError(f"The folder {quoted(str(out), 200)} cannot be created ({error.strerror}).") from error
    _refuse_others(out)
    for point in found:
        _claim(point, out, kind)
    waiting = [point for point in found if not finished(out / point.name)]
    some: Sequence[str | None] = how.devices or [None] * (how.workers or _workers(found[0], where))
    share = min(side_by_side.MAX_RUNS, -(-len(found) // len(some)))  # so that every process has some
    size = how.together or (share if any(_on_gpu(found[0], where, place) for place in some) else 1)
    # Bundles with a run that is not finished are those of the first time: the others' bits depend on the finished ones.
    left = set(waiting)
    together = [bundle for bundle in bundles(found, max(1, size)) if left.intersection(bundle)]
    places = some[: len(together)]
    chosen = any(name in os.environ for name in THREADS)  # which torch has read, in every process
    threads = None if chosen else max(1, usable_cpus() // max(len(places), 1))
    tasks = {
        bundle: ([(point.settings, str(out / point.name), where, threads) for point in bundle],) for bundle in together
    }
    for point, message in _finished(tasks, places):
        if point in left or message:
            done(point, message)
    ended = {point: out / point.name for point in found}
    runs = []
    for point, folder in ended.items():
        try:
            if finished(folder) or stopped(folder):
                runs.append(Run.read(folder))
        except UndriftError as error:  # damaged: still list the others
            done(point, str(error))
    return runs


def _refuse_others(out: Path) -> None:
    """Raise if the folder has a `sweep.json`, which would be replaced, that no sweep wrote."""
    file = out / "sweep.json"
    if not os.path.lexists(file):
        return
    try:
        ours = regular(file) and {"chosen_by", "settings"} <= parse_json(read_bytes(file)).keys()
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise UndriftError(f"{file} was not written by a sweep; choose another --out, or move that file away.")


def _claim(point: Point, out: Path, kind: str) -> None:
    """Record the settings of a run's folder; raise if it has other settings, so that a sweep only continues itself."""
    file = out / f"{point.name}.json"
    mine = json.dumps(point.settings, sort_keys=True)
    if file.exists() and read_bytes(file) != mine.encode():
        raise UndriftError(f"{out / point.name} is a run with other settings; choose another --out for this {kind}.")
    write_text(file, mine)


def _workers(point: Point, where: str) -> int:
    """How many processes: one per CPU that may be used, as small models gain little from threads, or one on a GPU."""
    return 1 if _on_gpu(point, where, None) else usable_cpus()


def _on_gpu(point: Point, where: str, place: str | None) -> bool:
    asked = checked(point.settings, where).device if place is None else place
    return asked.startswith("cuda") or (asked == "auto" and torch.cuda.is_available())


def bundles(points: list[Point], size: int) -> list[tuple[Point, ...]]:
    """The points, up to `size` at a time, such that those of a bundle seem to differ only in numbers.

    Whether they do is found out when they train; those that do not take turns.
    """
    alike: dict[str, list[Point]] = {}
    for point in points:
        alike.setdefault(NUMBER.sub("#", json.dumps(point.settings, sort_keys=True)), []).append(point)
    return [tuple(own[i : i + size]) for own in alike.values() for i in range(0, len(own), size)]


def _finished(tasks: dict[tuple[Point, ...], Any], places: Sequence[str | None]) -> Iterator[tuple[Point, str | None]]:
    """Points as they finish, with an error message or None. Raises KeyboardInterrupt after a stop."""
    with stopping() as stop:
        if len(places) > 1:
            found = each(_several, tasks, places, stop)
        else:
            found = ((bundle, _several(places[0], runs, stop.check)) for bundle, (runs,) in tasks.items())
        for bundle, answer in found:
            messages = [answer] * len(bundle) if isinstance(answer, str) else answer  # about a process that died
            yield from zip(bundle, messages, strict=True)


def _several(
    device: str | None, runs: list[tuple[Document, str, str, int | None]], check: Callable[[], None]
) -> list[str | None]:
    """Runs in this process, those that can as one program. Returns of each why it did not finish, if so."""
    check()
    tasks = [partial(_one, device, *given, check=check) for given in runs]
    if len(tasks) == 1:
        return [tasks[0]()]
    messages: list[str | None] = []
    for found in side_by_side.side_by_side(tasks):
        if isinstance(found, BaseException):  # only a stop is not a message
            raise found
        messages.append(found)
    return messages


def _one(
    device: str | None, settings: Document, folder: str, where: str, threads: int | None, check: Callable[[], None]
) -> str | None:
    """One run, in this process. Returns why it did not finish, if so; no exception must end the sweep.

    `device` takes the place of that of the settings. `threads` is the number of torch's threads; None leaves it.
    """
    mute()  # the reason for a stop is returned
    if parent_process() is not None:  # that process has read the data, and given the warnings about them
        warn_once.silence()
    _wait_for(Path(folder))
    settings = settings if device is None else {**settings, "device": device}
    try:
        resume = (Path(folder) / "config.toml").exists()
        with use_threads(threads):
            result = run(checked(settings, where), folder, resume, on_round=lambda row: check())
    except UndriftError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        if DEBUG in os.environ:
            traceback.print_exc()
        return machine_trouble(error) or f"{type(error).__name__}: {first_line(error)}"
    return f"stopped. {result.stopped}" if result.stopped else None


def _wait_for(folder: Path) -> None:
    """Give the workers of a parent that was killed the time that they have to end."""
    end = time.monotonic() + 2 * GRACE
    while folder.is_dir() and time.monotonic() < end:
        try:
            with lock(folder):
                return
        except UndriftError:
            time.sleep(0.1)


def summary(runs: list[Run], out: Path, failed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Each setting's validation and test metrics, as mean and standard deviation over seeds, and the best setting.

    The best is chosen by validation data; `tied` has those with the same mean to the digits shown. A setting with a
    run that diverged or stopped has no mean and is never best.
    """
    metric = leading_metric(runs) if any(score(row) for run in runs for row in run.rows) else None
    held = metric if metric is None or metric.startswith("validation_") else f"validation_{metric}"
    chosen_by = held if any(held in row for run in runs for row in run.rows) else None
    rows = []
    for name, own in groups(runs).items():
        row: dict[str, Any] = {"name": name, "runs": [str(run.folder.name) for run in own], "counted": counted(own)}
        row["stopped"] = [run.folder.name for run in own if run.stopped]
        row["diverged"] = [run.folder.name for run in own if run.mark == DIVERGED]
        row["at_chance"] = [run.folder.name for run in own if run.mark == CHANCE]
        row["remark"] = remark(own)
        for key in dict.fromkeys(key for key in (chosen_by, metric) if key):
            row[key] = _figures([run.final(key) for run in own])
        rows.append(row)
    lower = decided if len(rows) > 1 else agreed
    best = _best(rows, chosen_by, lower(runs, chosen_by)) if chosen_by else []
    found: dict[str, Any] = {"metric": metric, "chosen_by": chosen_by}
    found |= {"best": best[0] if best else None, "tied": best[1:]}
    found |= {"settings": rows, "failed": dict(failed or {})}
    write_text(out / "sweep.json", json.dumps(found, indent=2))
    return found


def _best(rows: list[dict[str, Any]], key: str, lower: bool) -> list[str]:
    """The setting with the best mean of a metric, and those whose mean is the same to the digits shown."""
    known = {row["name"]: row[key]["mean"] for row in rows if row[key]["mean"] is not None}
    if not known:
        return []
    best = (min if lower else max)(known, key=lambda name: known[name])
    shown = {name: f"{mean:.{DIGITS}f}" for name, mean in known.items()}
    return [best, *(name for name in known if name != best and shown[name] == shown[best])]


def _figures(values: list[float]) -> dict[str, float | None]:
    """Mean and standard deviation; None if a value is not finite, which JSON cannot hold."""
    if not np.isfinite(values).all():
        return {"mean": None, "std": None}
    return {"mean": average(values), "std": deviation(values) if len(values) > 1 else None}
