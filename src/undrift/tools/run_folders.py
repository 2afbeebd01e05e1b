"""The folders of runs, sweeps and studies, as compare, report and publish read them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from undrift import files
from undrift.columns import COLUMNS, Directions, lower_is_better, reserved
from undrift.errors import UndriftError, first_line, machine_trouble, quoted
from undrift.files import DamagedError
from undrift.metrics import METRICS
from undrift.tools.config import read
from undrift.tools.experiment import FREE
from undrift.tools.statistics import average
from undrift.training.config_writer import flatten, repeats
from undrift.training.history import number
from undrift.training.learning_checks import DIVERGED, Divergence
from undrift.training.run_folder import RUN, as_record, finished, parse_history, stopped

TUNING, FINAL = "tuning", "final"
"""The folders of a study's two phases."""
LABELS = "labels.json"
"""The file among the runs of a study with what the study file calls each."""


@dataclass(frozen=True)
class RunFolder:
    """What is in a run's folder: its settings, its history and how it ended."""

    folder: Path
    settings: dict[str, Any]
    """By dotted key."""
    rows: list[dict[str, Any]]
    stopped: str | None = None
    """Why it stopped before its last round, if a value was not finite."""
    directions: Directions = field(default_factory=dict)
    """Whether lower values are better, for those of its metrics that say so themselves."""
    diverged: Divergence | None = None
    """How it diverged, although all its figures are finite."""

    @classmethod
    def read(cls, folder: Path, unfinished: bool = False) -> RunFolder:
        """Read a run that has ended or, if `unfinished`, one that may still train. Raises `DamagedError`."""
        needed = "config.toml" if unfinished else "metrics.jsonl"
        if not (folder / needed).exists():
            raise UndriftError(f"{folder} is not a run: it has no {needed}.")
        with reporting_damage(folder, "stopped.json"):
            why = stopped(folder)
        ended = finished(folder)
        if not unfinished and not why and not ended:
            raise UndriftError(f"The run in {folder} is not finished. Finish it first: undrift resume {folder}")
        with reporting_damage(folder, "config.toml"):
            written = flatten(read(folder))
            settings = dict(written)
            _check_settings(settings)
            if not repeats(files.read_text(folder / "config.toml", "utf-8-sig")):
                # It was configured with Python objects, which cannot be compared, so it is a group of its own.
                settings["run"] = folder.name
        with reporting_damage(folder, RUN):
            known = _read_record(folder)
            if ended:
                _refuse_edited(folder, known, written)
        with reporting_damage(folder, "metrics.jsonl"):
            content = _read_history(folder, known)
            rows = parse_history(content)
            for t, row in enumerate(rows):
                _check_row(row, t)
            if ended and not rows:
                raise ValueError("the run is finished, but there are no rounds in it")
        with reporting_damage(folder, RUN):
            diverged = _divergence(known) if ended and not why else None
            return cls(folder, settings, rows, why, _directions(known), diverged)

    @property
    def metrics(self) -> list[str]:
        """The metrics that its settings name."""
        listed = self.settings.get("metrics", [])
        return [listed] if isinstance(listed, str) else list(listed)

    def lower(self, metric: str) -> bool:
        """Whether lower values of this metric, or column of the history, are better in this run."""
        return lower_is_better(metric, self.directions)

    @property
    def nonfinite(self) -> int | None:
        """The first round whose loss is not a finite number."""
        for t, row in enumerate(self.rows):
            for key in ("loss", "validation_loss"):
                if key in row and not (number(row[key]) and math.isfinite(row[key])):
                    return t + 1
        return None

    @property
    def lost(self) -> bool:
        """Whether it has no last figures: NaN stopped it or is in its losses, or no client was left at the end."""
        last = self.rows[-1] if self.rows else {}
        nobody = bool(last.get("skipped")) and set(last["skipped"]) >= set(last.get("clients", ()))
        return bool(self.stopped) or self.nonfinite is not None or nobody

    @property
    def mark(self) -> str | None:
        """A word on a run that did not end as it should."""
        if self.stopped:
            return "stopped"
        if self.nonfinite is not None:
            return DIVERGED
        return self.diverged.kind if self.diverged else None

    def final(self, metric: str) -> float:
        """The last round's figure; NaN if there is none, or if the run is `lost`."""
        value = self.rows[-1].get(metric) if self.rows and not self.lost else None
        return float(value if number(value) else np.nan)

    def last(self, metric: str, count: int = 1) -> float:
        """The mean over the last `count` rounds with this figure; NaN if there is none, or if the run is `lost`."""
        if count == 1 or self.lost:
            return self.final(metric)
        values = [row[metric] for row in self.rows if number(row.get(metric))][-count:]
        return average(values) if values else math.nan

    def latest(self, column: str) -> float:
        """The last value of a column of the history; NaN if there is none."""
        return float(next((row[column] for row in reversed(self.rows) if number(row.get(column))), math.nan))

    def best(self, metric: str) -> float:
        values = [row[metric] for row in self.rows if number(row.get(metric)) and np.isfinite(row[metric])]
        return float(min(values) if self.lower(metric) else max(values)) if values else float("nan")

    def until(self, metric: str, target: float) -> dict[str, Any] | None:
        """The first row that meets the target."""
        for row in self.rows:
            value = row.get(metric)
            if number(value) and (value <= target if self.lower(metric) else value >= target):
                return row
        return None

    def seconds(self, row: dict[str, Any]) -> float:
        """The time from the start to the end of this row's round."""
        return math.fsum(own["seconds"] for own in self.rows if own["round"] <= row["round"])

    @property
    def seed(self) -> int:
        return int(self.settings.get("seed", 0))


@contextmanager
def reporting_damage(folder: Path, file: str) -> Iterator[None]:
    """A context whose errors are raised as a `DamagedError` that names the folder and the file."""
    try:
        yield
    except UndriftError as error:
        raise DamagedError(str(error)) from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(f"{folder}: {file} is damaged ({first_line(error)}).") from error
    except OSError as error:
        raise DamagedError(f"{folder}: {file} cannot be read ({error.strerror}).") from error


def _read_record(folder: Path) -> dict[str, Any]:
    """The contents of `run.json`; empty if it is missing."""
    if not os.path.lexists(folder / RUN):
        return {}
    return as_record(files.unseal(folder / RUN), folder / RUN)


def _refuse_edited(folder: Path, known: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise if `config.toml` has other settings than the run was trained with."""
    if "config" not in known:
        return
    before = flatten(tomllib.loads(known["config"]))
    changed = [key for key in before | now if before.get(key) != now.get(key) and key not in FREE]
    if changed:
        key = changed[0]
        raise DamagedError(
            f"{folder}/config.toml has been changed since the run ended: {key} was {quoted(before.get(key))}, and is "
            f"{quoted(now.get(key))} now. Change it back."
        )


def _read_history(folder: Path, known: dict[str, Any]) -> bytes:
    """The contents of `metrics.jsonl`. Raises if the run has ended, and the file is not the one that it wrote then."""
    file = folder / "metrics.jsonl"
    content = files.read_bytes(file) if os.path.lexists(file) else b""
    sums = known.get("results") or {}
    written = hashlib.sha256(content).hexdigest() == sums.get(file.name)
    if sums and not written and finished(folder):  # rather than a run that is being resumed
        raise DamagedError(
            f"{file} has been changed since the run ended: its checksum is not the one in {RUN}. Restore the file, "
            f"or have it written again: undrift resume {folder}"
        )
    return content


def _directions(known: dict[str, Any]) -> dict[str, bool]:
    choices = known.get("choices")
    said = choices.get("lower_is_better") if isinstance(choices, dict) else None
    return {str(name): lower is True for name, lower in said.items()} if isinstance(said, dict) else {}


def _divergence(known: dict[str, Any]) -> Divergence | None:
    diverged = known.get("diverged")
    return Divergence(**{key: str(diverged[key]) for key in ("kind", "what")}) if diverged else None


def _check_settings(settings: dict[str, Any]) -> None:
    """Raise `ValueError` if a setting that a report or a figure is made of has the wrong type."""
    kinds = {"rounds": int, "seed": int, "method": str, "model": str, "data.name": str, "data.partition": str}
    for key, kind in kinds.items():
        value = settings.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{key} is {quoted(value)}")
    listed = settings.get("metrics", [])
    if not isinstance(listed, str) and not (isinstance(listed, list) and all(isinstance(x, str) for x in listed)):
        raise ValueError(f"metrics is {quoted(listed)}")


def _check_row(row: Any, t: int) -> None:
    """Raise `ValueError` unless a row has what every row has, and no number that is too large for a float."""
    if not isinstance(row, dict):
        raise ValueError(f"line {t + 1} is {quoted(row)}, not a round")
    for key in ("round", "total_steps", "total_bytes", "seconds"):
        if not number(row.get(key)) or not math.isfinite(row[key]):
            raise ValueError(f"line {t + 1} has no {key}")
        if abs(row[key]) >= 2**63:
            raise ValueError(f"in line {t + 1}, {key} is too large a number")
    for key, column in COLUMNS.items():
        if column.kind in (list, dict) and not isinstance(row.get(key, column.kind()), column.kind):
            raise ValueError(f"in line {t + 1}, {key} is {quoted(row[key])}")
        if column.kind is list and column.by_client and not all(isinstance(c, int | str) for c in row.get(key, ())):
            raise ValueError(f"in line {t + 1}, {key} is {quoted(row[key])}")
    for key, value in row.items():
        for x in value.values() if isinstance(value, dict) else (value,):
            if isinstance(x, int) and abs(x) >= 2**63:
                raise ValueError(f"in line {t + 1}, {key} is too large a number")


def read_runs(folders: Sequence[Path], unfinished: bool = False) -> tuple[list[RunFolder], list[str]]:
    """The runs that can be read, and what is wrong with the others. Raises if none can."""
    runs, problems = [], []
    for folder in folders:
        try:
            runs.append(RunFolder.read(folder, unfinished))
        except UndriftError as error:
            if not unfinished and not isinstance(error, DamagedError):
                raise
            problems.append(str(error))
        except OSError as error:
            problems.append(str(machine_trouble(error)))
    if problems and not runs:
        more = f" {len(problems) - 1} others cannot be read either." if len(problems) > 1 else ""
        raise UndriftError(f"{problems[0]}{more}")
    return runs, problems


# ---- a run in a few words ---------------------------------------------------------------------------------------


def main_figure(row: dict[str, Any], named: Iterable[str] = ()) -> tuple[str, float] | None:
    """The row's main figure: the run's first metric, or else the loss, on the test set or else on validation data.

    A row has the metrics in the order in which `metrics` lists them. Those with a name of their own are recognized if
    they are among the `named`, or were measured on validation data or on clients' own data as well.
    """
    known = {*METRICS, *named}
    for prefix in ("", "validation_"):
        metrics = [
            name for name in row if name.startswith(prefix) and _is_metric(name.removeprefix(prefix), row, known)
        ]
        for name in (*metrics, f"{prefix}loss"):
            if number(row.get(name)):
                return name, row[name]
    return None


def _is_metric(name: str, row: dict[str, Any], known: set[str]) -> bool:
    twins = (f"validation_{name}", f"client_{name}") if name != "loss" else ()
    return name in known or (not reserved(name) and any(twin in row for twin in twins))


def nonfinite_remarks(stopped: int, skipped: int) -> list[str]:
    """Remarks on non-finite values: how many runs stopped, and how many client updates were left out."""
    remarks = [f"{stopped} stopped"] if stopped else []
    return remarks + ([f"{skipped} client update{'s' if skipped > 1 else ''} left out"] if skipped else [])


def count_left_out(rows: Iterable[dict[str, Any]]) -> int:
    """How many client updates these rounds left out."""
    return sum(len(row.get("skipped", ())) + len(row.get("left_out", ())) for row in rows)


# ---- where the runs are ------------------------------------------------------------------------------------------


def runs_in(path: Path) -> list[Path]:
    """The folder itself, if it is a run, or else the runs in it: those of a sweep, or of a study on fresh seeds."""
    if (path / "config.toml").exists() or (path / "metrics.jsonl").exists():
        return [path]
    configs = path.glob(f"{FINAL}/*/config.toml" if (path / FINAL).is_dir() else "*/config.toml")
    return sorted(file.parent for file in configs)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs: each path itself or, for the folder of a sweep or a study, those in it.

    Raises:
        UndriftError: If one of the paths is neither a run nor a folder with runs in it.
    """
    runs: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UndriftError(f"{path} is not a run. Name a folder that undrift run or ud.train(out=…) has written.")
        inside = runs_in(path)
        if not inside:
            raise UndriftError(f"{path} is not a run: neither it nor a folder in it has a config.toml.")
        runs += inside
    return runs


# ---- the labels of a study's runs --------------------------------------------------------------------------------


class Label(NamedTuple):
    """What a study file calls a run."""

    partition: str
    """Empty in a study without partitions."""
    method: str


def write_labels(folder: Path, labels: Mapping[str, Label]) -> None:
    """Add the labels of runs, by the names of their folders, to those in the folder of a study's phase."""
    with contextlib.suppress(OSError):  # runs cannot be written there either, which has an error message of its own
        folder.mkdir(parents=True, exist_ok=True)
        merged = {**read_labels(folder), **labels}
        text = json.dumps({name: label._asdict() for name, label in merged.items()}, indent=1)
        files.write_text(folder / LABELS, text + "\n")


def read_labels(folder: Path) -> dict[str, Label]:
    """The labels of the runs in a folder; none if no study has written the file."""
    try:
        content = files.parse_json(files.read_bytes(folder / LABELS))
        labels = {name: Label(**label) for name, label in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return labels if all(isinstance(text, str) for label in labels.values() for text in label) else {}
