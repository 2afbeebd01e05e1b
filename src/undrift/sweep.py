"""Many runs of one experiment: a grid over any of its keys, seeds included, and the best by validation data."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undrift.compare import Run, counted, flat, groups, leading_metric, lower_is_better
from undrift.config import Settings, checked, override, toml_value
from undrift.display import stopping
from undrift.errors import UndriftError
from undrift.experiment import about, run, understood
from undrift.files import write_text
from undrift.nonfinite import mute
from undrift.result import finished, stopped

Grid = dict[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Point:
    """One run of a sweep."""

    name: str
    settings: Settings


def file_grid(section: Any) -> Grid:
    """The file's `[sweep]`: keys, in quotes or in sections of their own, and lists of values."""
    grid = flat(section) if isinstance(section, dict) else {}
    if not isinstance(section, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        raise UndriftError("[sweep] must have keys with lists of values, such as local.lr = [0.01, 0.1].")
    return grid


def parse_grid(assignments: list[str]) -> Grid:
    """`local.lr=[0.01, 0.1]`: a key and the values it takes."""
    grid: Grid = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        values = toml_value(text.strip()) if text.strip() else None
        if not isinstance(values, list) or not values:
            raise UndriftError(f"--grid {assignment}: write it as key=[value, …], such as 'local.lr=[0.01, 0.1]'.")
        grid[key.strip()] = values
    return grid


def points(settings: Settings, grid: Grid, where: str) -> list[Point]:
    """Every combination, each checked before the first one runs."""
    found = []
    for values in itertools.product(*grid.values()):
        pairs = dict(zip(grid, values, strict=True))
        changed = override(settings, [f"{key}={json.dumps(value)}" for key, value in pairs.items()])
        name = ",".join(f"{key}={_word(value)}" for key, value in pairs.items()) or "run"
        with about(f"{where}, {name}"):
            understood(checked(changed, where))
        found.append(Point(name, changed))
    found = unique(found)
    choices = [values for key, values in grid.items() if key != "seed"]
    held = [checked(point.settings, where).data.validation_fraction for point in found]
    if any(len(values) > 1 for values in choices) and not all(held):
        raise UndriftError(
            f"{where}: data.validation_fraction is 0. A sweep chooses on validation data, never on test data; set it "
            "to 0.1, say."
        )
    return found


def unique(found: list[Point]) -> list[Point]:
    """The points with names that no two share: a name is a folder's."""
    seen: dict[str, int] = {}
    named = []
    for point in found:
        seen[point.name] = seen.get(point.name, 0) + 1
        number = seen[point.name]
        named.append(point if number == 1 else Point(f"{point.name}-{number}", point.settings))
    return named


def _word(value: Any) -> str:
    """A value in a folder's name."""
    return re.sub(r"[^A-Za-z0-9.+=-]+", "_", str(value)).strip("_")[:60]


def sweep(
    found: list[Point], out: Path, where: str, workers: int | None, done: Callable[[Point, str | None], None]
) -> list[Run]:
    """Run what is not finished yet, several at a time where that pays. Returns the runs that finished or stopped."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UndriftError(f"The folder {out} cannot be made ({error.strerror}); choose another.") from error
    for point in found:
        _claim(point, out)
    waiting = [point for point in found if not finished(out / point.name)]
    workers = min(workers or _workers(found[0], where), len(waiting))
    threads = max(1, (os.cpu_count() or 1) // max(workers, 1))
    tasks = {point: (point.settings, str(out / point.name), where, threads) for point in waiting}
    for point, message in _finished(tasks, workers):
        done(point, message)
    ended = [out / point.name for point in found]
    return [Run.read(folder) for folder in ended if finished(folder) or stopped(folder)]


def _claim(point: Point, out: Path) -> None:
    """Note whose folder it is, and refuse one that is another's: a sweep goes on only where it left off."""
    file = out / f"{point.name}.json"
    mine = json.dumps(point.settings, sort_keys=True)
    if file.exists() and file.read_text(encoding="utf-8") != mine:
        raise UndriftError(f"{out / point.name} is a run with other settings; choose another --out for this sweep.")
    write_text(file, mine)


def _workers(point: Point, where: str) -> int:
    """How many runs at once: a CPU's cores each take one, as small models gain little from threads; a GPU is one."""
    asked = checked(point.settings, where).device
    on_gpu = asked.startswith("cuda") or (asked == "auto" and torch.cuda.is_available())
    return 1 if on_gpu else (os.cpu_count() or 1)


def _finished(tasks: dict[Point, Any], workers: int) -> Iterator[tuple[Point, str | None]]:
    """Points as they finish, with what went wrong, if anything."""
    if workers <= 1:
        for point, task in tasks.items():
            yield point, _one(*task)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_one, *task): point for point, task in tasks.items()}
        try:
            for future in as_completed(futures):
                error = future.exception()
                yield futures[future], str(error) if error else future.result()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # the workers, interrupted too, finish their rounds and stop
            raise


_stopped: list[bool] = []


def _one(settings: Settings, folder: str, where: str, threads: int) -> str | None:
    """One run, in this process; gives the sentence if it is refused or stopped."""
    if _stopped:  # a worker that was asked to stop takes up nothing new
        return "stopped"
    torch.set_num_threads(threads)
    mute()  # what stops a run is returned
    try:
        with stopping() as stop_if_asked:
            resume = (Path(folder) / "config.toml").exists()
            result = run(checked(settings, where), folder, resume, on_round=lambda row: stop_if_asked())
            return f"stopped. {result.stopped}" if result.stopped else None
    except UndriftError as error:
        return str(error)
    except KeyboardInterrupt:
        if get_context().parent_process() is None:  # no worker: the whole sweep stops
            raise
        _stopped.append(True)
        return "stopped"


def _number(x: Any) -> float | None:
    """A number as JSON knows it."""
    return float(x) if np.isfinite(x) else None


def summary(runs: list[Run], out: Path) -> dict[str, Any]:
    """Each setting's validation and test figures, mean and deviation over seeds, and the best by validation."""
    metric = leading_metric(runs)
    held = metric if metric.startswith("validation_") else f"validation_{metric}"
    chosen_by = held if any(held in row for run in runs for row in run.rows) else None
    rows = []
    for name, own in groups(runs).items():
        row: dict[str, Any] = {"name": name, "runs": [str(run.folder.name) for run in own], "counted": counted(own)}
        row["stopped"] = [run.folder.name for run in own if run.stopped]
        for key in {metric, chosen_by or metric}:
            values = [run.final(key) for run in own]
            deviation = _number(np.std(values, ddof=1)) if len(values) > 1 else None
            row[key] = {"mean": _number(np.mean(values)), "std": deviation}
        rows.append(row)
    best = None
    if chosen_by:
        sign = 1 if lower_is_better(metric) else -1
        known = [row for row in rows if row[chosen_by]["mean"] is not None]  # what diverged is not the best
        best = min(known, key=lambda row: sign * row[chosen_by]["mean"])["name"] if known else None
    found = {"metric": metric, "chosen_by": chosen_by, "best": best, "settings": rows}
    write_text(out / "sweep.json", json.dumps(found, indent=2))
    return found
