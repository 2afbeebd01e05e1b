"""Sweeps: an experiment over a grid of its keys, including seeds, and the best setting by validation data."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from undrift.errors import UndriftError, quoted
from undrift.files import write_text
from undrift.tools.compare import (
    canonical,
    describe_count,
    group_runs,
    leading_metric,
    lower_is_better_in,
    remark,
    require_direction,
    validation_name,
)
from undrift.tools.config import Document, checked, put, toml_value
from undrift.tools.experiment import about, refuse_undecided, understood
from undrift.tools.parallel import MOST, Point, unique_names, word
from undrift.tools.run_folders import RunFolder, main_figure
from undrift.tools.statistics import average, deviation
from undrift.training.config_writer import flatten
from undrift.training.learning_checks import CHANCE, DIVERGED

if TYPE_CHECKING:
    from rich.table import Table

Grid = dict[str, list[Any]]
DIGITS = 4
"""Decimals of metrics in tables."""


def file_grid(section: Any) -> Grid:
    """A file's `[sweep]`: keys, dotted or in subsections, with lists of values."""
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


def seeds_from(settings: Document, count: int | None) -> list[int]:
    """`count` consecutive seeds, beginning with the experiment's own."""
    first = settings.get("seed", 0)
    plain = isinstance(first, int) and not isinstance(first, bool)
    return [first + i for i in range(count or 1)] if plain else [first]


def grid_points(settings: Document, grid: Grid, where: str) -> list[Point]:
    """All combinations of a grid, checked before the first one runs."""
    count = math.prod(len(values) for values in grid.values())
    if count > MOST:
        raise UndriftError(f"{where}: the grid has {count:,} combinations; a sweep runs at most {MOST:,}.")
    for key, values in grid.items():
        seen: set[str] = set()
        for value in values:
            if canonical(value) in seen:  # two runs that are one would count as two, with a deviation of 0
                raise UndriftError(f"{where}: the grid lists {quoted(value)} twice for {key}; list every value once.")
            seen.add(canonical(value))
    points = []
    for choice in itertools.product(*grid.values()):
        pairs = dict(zip(grid, choice, strict=True))
        changed = settings
        for key, value in pairs.items():
            changed = put(changed, key, value, where)
        name = ",".join(f"{key}={word(value)}" for key, value in pairs.items()) or "run"
        with about(f"{where}, {name}"):
            understood(checked(changed, where))
        points.append(Point(name, changed))
    points = unique_names(points)
    choices = [values for key, values in grid.items() if key != "seed"]
    if not any(len(values) > 1 for values in choices):  # there is nothing to choose
        return points
    experiments = [checked(point.settings, where) for point in points]
    if not all(experiment.data.validation_fraction for experiment in experiments):
        raise UndriftError(
            f"{where}: data.validation_fraction is 0. A sweep chooses on validation data, never on test data; set it "
            "to 0.1, for example."
        )
    for experiment in experiments:
        refuse_undecided(experiment, where)
    return points


def summary(runs: list[RunFolder], out: Path, failed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write `sweep.json`, and return its content.

    It has each setting's validation and test metrics, as mean and standard deviation over seeds, and the best setting,
    which is chosen on validation data. `tied` has those with the same mean to the digits shown. A setting with a run
    that diverged or stopped has no mean and is never best.
    """
    metric = leading_metric(runs) if any(main_figure(row) for run in runs for row in run.rows) else None
    validated = metric and validation_name(metric)
    chosen_by = validated if any(validated in row for run in runs for row in run.rows) else None
    rows = []
    for name, own in group_runs(runs).items():
        row: dict[str, Any] = {
            "name": name,
            "runs": [run.folder.name for run in own],
            "counted": describe_count(own),
            "stopped": [run.folder.name for run in own if run.stopped],
            "diverged": [run.folder.name for run in own if run.mark == DIVERGED],
            "at_chance": [run.folder.name for run in own if run.mark == CHANCE],
            "remark": remark(own),
        }
        for key in dict.fromkeys(key for key in (chosen_by, metric) if key):
            row[key] = _figures([run.final(key) for run in own])
        rows.append(row)
    lower = require_direction if len(rows) > 1 else lower_is_better_in
    best = _best(rows, chosen_by, lower(runs, chosen_by)) if chosen_by else []
    content = {
        "metric": metric,
        "chosen_by": chosen_by,
        "best": best[0] if best else None,
        "tied": best[1:],
        "settings": rows,
        "failed": dict(failed or {}),
    }
    write_text(out / "sweep.json", json.dumps(content, indent=2))
    return content


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


def sweep_table(content: dict[str, Any]) -> Table:
    """What `sweep.json` has, as a table."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    keys = [key for key in (content["chosen_by"], content["metric"]) if key]
    for column in ("", "runs", *(f"last {key.replace('_', ' ')}" for key in keys)):
        table.add_column(column, justify="left" if not column else "right", no_wrap=bool(column))
    for row in content["settings"]:
        cells = [_cell(row[key]) for key in keys]
        table.add_row(row["name"], row["counted"], *cells)
    return table


def _cell(figures: dict[str, Any]) -> str:
    """Mean ± standard deviation, the value itself for one run, or a dash if there is none."""
    if figures["mean"] is None:
        return "–"
    return f"{figures['mean']:.4f}" + (f" ± {figures['std']:.4f}" if figures["std"] is not None else "")
