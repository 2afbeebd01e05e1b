"""Runs side by side: those that differ in their seed alone are one row, with mean ± standard deviation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from undrift.config import read
from undrift.display import left_out, marks, score
from undrift.errors import UndriftError
from undrift.record import repeats
from undrift.registry import parse_method
from undrift.result import finished, history, stopped

UNTOLD = set(
    """seed data.seed data.data_dir threads checkpoint_every engine lanes device compile evaluate_every
    personalize_every track imports""".split()  # noqa: SIM905
)
"""Keys that say nothing about what is compared."""


@dataclass(frozen=True)
class Run:
    """What a run's folder tells of it."""

    folder: Path
    settings: dict[str, Any]
    """By dotted key."""
    rows: list[dict[str, Any]]
    stopped: str | None = None
    """Why it stopped before its last round, if something in it was not finite."""

    @classmethod
    def read(cls, folder: Path, unfinished: bool = False) -> Run:
        """A run that has ended, or, where that is asked for, one as far as it is."""
        needed = "config.toml" if unfinished else "metrics.jsonl"
        if not (folder / needed).exists():
            raise UndriftError(f"{folder} is no run: it has no {needed}.")
        why = stopped(folder)
        if not unfinished and not why and not finished(folder):
            raise UndriftError(f"The run in {folder} is not finished; first: undrift resume {folder}")
        settings = {"on_nonfinite": "stop"} | flat(read(folder))  # which older folders do not mention
        if not repeats(folder):
            settings["run"] = folder.name  # what is of Python cannot be compared, so it stands for itself
        return cls(folder, settings, history(folder), why)

    def final(self, metric: str) -> float:
        """The last round's figure; a run that stopped before its last round has none."""
        found = self.rows[-1].get(metric) if self.rows and not self.stopped else None
        return float(np.nan if found is None else found)

    def best(self, metric: str) -> float:
        values = [row[metric] for row in self.rows if row.get(metric) is not None and np.isfinite(row[metric])]
        return float(min(values) if lower_is_better(metric) else max(values)) if values else float("nan")

    def until(self, metric: str, target: float) -> dict[str, Any] | None:
        """The first row that meets the target."""
        for row in self.rows:
            found = row.get(metric)
            if found is not None and (found <= target if lower_is_better(metric) else found >= target):
                return row
        return None


def leading_metric(runs: Sequence[Run]) -> str:
    """What runs are compared by: the first metric that one of them was evaluated with."""
    for run in runs:
        if found := next(filter(None, map(score, reversed(run.rows))), None):
            return found[0]
    if any(run.stopped for run in runs):
        raise UndriftError(f"No run was evaluated before it stopped. {next(r.stopped for r in runs if r.stopped)}")
    raise UndriftError(f"The run in {runs[0].folder} was never evaluated; give its data a test set.")


def counted(runs: Sequence[Run]) -> str:
    """How many runs there are, and how many of them were not finite."""
    said = marks(sum(bool(run.stopped) for run in runs), sum(left_out(run.rows) for run in runs))
    return f"{len(runs)} ({', '.join(said)})" if said else str(len(runs))


def lower_is_better(metric: str) -> bool:
    return metric.endswith("loss")


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """`{"local": {"lr": 0.1}}` as `{"local.lr": 0.1}`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return found


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed alone, under a name that says what tells the groups apart."""
    runs = list({run.folder.resolve(): run for run in runs}.values())
    keys = {key for run in runs for key in run.settings} - UNTOLD
    told = {key for key in keys if len({_same(run.settings.get(key)) for run in runs}) > 1}
    found: dict[str, list[Run]] = {}
    for run in runs:
        parts = [
            brief(str(run.settings.get(key))) if key == "method" else f"{key}={run.settings.get(key)}"
            for key in sorted(told)
        ]
        name = ", ".join(parts) or brief(str(run.settings.get("method", run.folder.name)))
        found.setdefault(name, []).append(run)
    return found


def _same(value: Any) -> str:
    """One text for values that are one: 1 and 1.0."""
    return json.dumps(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def brief(method: str) -> str:
    """A method without the arguments that are as they are by default."""
    try:
        parts = parse_method(method).parts
    except UndriftError:  # a user's own, which is not imported here
        return method
    texts: list[str] = []
    for part in parts:
        assert is_dataclass(part)
        told = {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) != f.default}
        texts.append(f"{type(part).__name__}({', '.join(f'{name}={value}' for name, value in told.items())})")
    return " + ".join(texts)


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean ± standard deviation; of one value that value. Where some are no numbers, of how many it is."""
    known = [v for v in values if np.isfinite(v)]
    if not known:
        return "–"
    if len(known) < len(values):
        return f"{spread(known, digits)} ({len(known)} of {len(values)})"
    mean = f"{np.mean(known):.{digits}f}" if digits else f"{np.mean(known):,.0f}"
    if len(known) < 2:
        return mean
    return f"{mean} ± {np.std(known, ddof=1):.{digits}f}" if digits else f"{mean} ± {np.std(known, ddof=1):,.0f}"


def table(runs: Sequence[Run], target: float | None) -> Any:
    """The comparison as a Rich table."""
    from rich.table import Table

    metric = leading_metric(runs)
    word = metric.replace("_", " ")
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    made.add_column("")
    for column in ("runs", f"last {word}", f"best {word}"):
        made.add_column(column, justify="right", no_wrap=True)
    for column in ("rounds", "steps", "MB") if target is not None else ():
        made.add_column(f"{column} to {target:g}", justify="right", no_wrap=True)
    for name, own in groups(runs).items():
        cells = [spread([run.final(metric) for run in own]), spread([run.best(metric) for run in own])]
        if target is not None:
            reached = [row for run in own if (row := run.until(metric, target))]
            missed = "" if len(reached) == len(own) else f" ({len(reached)} of {len(own)})"
            cells.append(spread([row["round"] for row in reached], 0) + missed)
            cells.append(spread([row["total_steps"] for row in reached], 0))
            cells.append(spread([row["total_bytes"] / 1e6 for row in reached], 1))
        made.add_row(name, counted(own), *cells)
    return made
