"""Runs side by side: those that differ in their seed alone are one row, with mean ± standard deviation."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from undrift import files
from undrift.columns import COLUMNS, Directions, direction, lower_is_better
from undrift.errors import UndriftError, first_line, machine_trouble, nearest, quoted
from undrift.method.parse import parse_method
from undrift.tools.config import read
from undrift.tools.display import left_out, marks, number, score
from undrift.tools.experiment import FREE
from undrift.tools.study.statistics import average, deviation
from undrift.training.config_writer import flatten, repeats
from undrift.training.learning_checks import CHANCE, DIVERGED, Divergence, divergence
from undrift.training.run_folder import RUN, as_record, finished, parse_history, stopped
from undrift.training.settings import KEYS

IGNORED_KEYS = {key for key, role in KEYS.items() if not role.compared}
"""Keys that say nothing about what is compared."""


class DamagedError(UndriftError):
    """A run's folder holds something that undrift did not write."""


@dataclass(frozen=True)
class Run:
    """What a run's folder tells of it."""

    folder: Path
    settings: dict[str, Any]
    """By dotted key."""
    rows: list[dict[str, Any]]
    stopped: str | None = None
    """Why it stopped before its last round, if something in it was not finite."""
    directions: Directions = field(default_factory=dict)
    """What its metrics say themselves about whether lower values are better."""
    diverged: Divergence | None = None
    """What is wrong with its end, although all its figures are finite."""

    @classmethod
    def read(cls, folder: Path, unfinished: bool = False) -> Run:
        """A run that has ended, or, where that is asked for, one as far as it is. Raises `DamagedError`."""
        needed = "config.toml" if unfinished else "metrics.jsonl"
        if not (folder / needed).exists():
            raise UndriftError(f"{folder} is not a run: it has no {needed}.")
        with damage(folder, "stopped.json"):
            why = stopped(folder)
        ended = finished(folder)
        if not unfinished and not why and not ended:
            raise UndriftError(f"The run in {folder} is not finished. Finish it first: undrift resume {folder}")
        with damage(folder, "config.toml"):
            # What folders of earlier versions do not mention.
            older = {"on_nonfinite": "stop", "local.optimizer_state": "reset", "local.sampling": "shuffle"}
            written = flatten(read(folder))
            settings = older | written
            _check_settings(settings)
            if not repeats(files.read_text(folder / "config.toml", "utf-8-sig")):
                settings["run"] = (
                    folder.name
                )  # configured with Python objects, which cannot be compared: a group of its own
        with damage(folder, RUN):
            known = _recorded(folder)
            if ended:
                _refuse_edited(folder, known, written)
        with damage(folder, "metrics.jsonl"):
            content = _history(folder, known)
            rows = parse_history(content)
            for t, row in enumerate(rows):
                _check_row(row, t)
            if ended and not rows:
                raise ValueError("the run is finished, but there are no rounds in it")
        with damage(folder, RUN):
            run = cls(folder, settings, rows, why, _directions(known))
            return replace(run, diverged=_diverged(known, run)) if ended and not why else run

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
        found = self.rows[-1].get(metric) if self.rows and not self.lost else None
        return float(found if number(found) else np.nan)

    def last(self, metric: str, count: int = 1) -> float:
        """The mean over the last `count` rounds with this figure; NaN if there is none, or if the run is `lost`."""
        if count == 1 or self.lost:
            return self.final(metric)
        values = [row[metric] for row in self.rows if number(row.get(metric))][-count:]
        return average(values) if values else math.nan

    def best(self, metric: str) -> float:
        values = [row[metric] for row in self.rows if number(row.get(metric)) and np.isfinite(row[metric])]
        return float(min(values) if self.lower(metric) else max(values)) if values else float("nan")

    def until(self, metric: str, target: float) -> dict[str, Any] | None:
        """The first row that meets the target."""
        for row in self.rows:
            found = row.get(metric)
            if number(found) and (found <= target if self.lower(metric) else found >= target):
                return row
        return None

    def seconds(self, row: dict[str, Any]) -> float:
        """The time from the start to the end of this row's round."""
        return math.fsum(own["seconds"] for own in self.rows if own["round"] <= row["round"])

    @property
    def seed(self) -> int:
        return int(self.settings.get("seed", 0))


@contextmanager
def damage(folder: Path, file: str) -> Iterator[None]:
    """What goes wrong inside it says which file of which folder is damaged."""
    try:
        yield
    except UndriftError as error:
        raise DamagedError(str(error)) from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(f"{folder}: {file} is damaged ({first_line(error)}).") from error
    except OSError as error:
        raise DamagedError(f"{folder}: {file} cannot be read ({error.strerror}).") from error


def _recorded(folder: Path) -> dict[str, Any]:
    """The contents of `run.json`, which runs of the first versions do not have."""
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


def _history(folder: Path, known: dict[str, Any]) -> bytes:
    """The contents of `metrics.jsonl`. Raises if the run has ended, and the file is not the one that it wrote then."""
    file = folder / "metrics.jsonl"
    content = files.read_bytes(file) if os.path.lexists(file) else b""
    sums = known.get("results") or {}
    written = hashlib.sha256(content).hexdigest() == sums.get(file.name)
    if sums and not written and finished(folder):  # not, as before, one that has been resumed since
        raise DamagedError(
            f"{file} has been changed since the run ended: its checksum is not the one in {RUN}. Restore the file, "
            f"or have it written again: undrift resume {folder}"
        )
    return content


def _directions(known: dict[str, Any]) -> dict[str, bool]:
    """Whether lower values are better, by those metrics of a run that said so themselves."""
    choices = known.get("choices")
    found = choices.get("lower_is_better") if isinstance(choices, dict) else None
    return {str(name): lower is True for name, lower in found.items()} if isinstance(found, dict) else {}


def _diverged(known: dict[str, Any], run: Run) -> Divergence | None:
    """What is wrong with the end of a run, as its folder says; of runs of earlier versions, as its history says."""
    if "diverged" not in known:
        return divergence(run.rows, run.metrics, run.directions)
    found = known["diverged"]
    return Divergence(**{key: str(found[key]) for key in ("kind", "what")}) if found else None


def _check_settings(settings: dict[str, Any]) -> None:
    """Of the settings, those that something is computed or built from."""
    kinds = {"rounds": int, "seed": int, "method": str, "model": str, "data.name": str, "data.partition": str}
    for key, kind in kinds.items():
        found = settings.get(key)
        if found is not None and not isinstance(found, kind):
            raise ValueError(f"{key} is {quoted(found)}")
    listed = settings.get("metrics", [])
    if not isinstance(listed, str) and not (isinstance(listed, list) and all(isinstance(x, str) for x in listed)):
        raise ValueError(f"metrics is {quoted(listed)}")


def _check_row(row: Any, t: int) -> None:
    """A round's row has what every row has, and no number that a float cannot hold."""
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


def read_runs(folders: Sequence[Path], unfinished: bool = False) -> tuple[list[Run], list[str]]:
    """The runs that can be read, and what is wrong with the others. Raises if none can."""
    runs, problems = [], []
    for folder in folders:
        try:
            runs.append(Run.read(folder, unfinished))
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


def chosen_metric(runs: Sequence[Run], metric: str | None) -> str:
    """The metric to compare by: the one that is asked for, or the leading one. Raises if no run has it."""
    if metric is None:
        return leading_metric(runs)
    known = dict.fromkeys(key for run in runs for row in run.rows for key in row if number(row[key]))
    if metric not in known:
        close = nearest(metric, known)
        hint = f"did you mean {close!r}?" if close else f"the runs have {', '.join(known)}."
        raise UndriftError(f"No run has a metric named {quoted(metric)}; {hint}")
    return metric


def leading_metric(runs: Sequence[Run]) -> str:
    """What runs are compared by: the first metric that one of them was evaluated with."""
    for run in runs:
        if found := next(filter(None, (score(row, run.metrics) for row in reversed(run.rows))), None):
            return found[0]
    if any(run.stopped for run in runs):
        raise UndriftError(f"No run was evaluated before it stopped. {next(r.stopped for r in runs if r.stopped)}")
    raise UndriftError(f"The run in {runs[0].folder} was never evaluated, because its data have no test set.")


def agreed(runs: Sequence[Run], metric: str) -> bool:
    """Whether lower values of a metric are better in these runs. Raises if they disagree, so that none can be best."""
    ways = {run.lower(metric): run for run in runs if any(number(row.get(metric)) for row in run.rows)}
    if len(ways) > 1:
        raise UndriftError(
            f"These runs cannot be compared by {quoted(metric)}: lower values are better in {ways[True].folder}, and "
            f"higher ones in {ways[False].folder}. Compare them by another metric, or give one of the two another name."
        )
    return next(iter(ways), lower_is_better(metric))


def undecided(runs: Sequence[Run], metric: str) -> Run | None:
    """Return a run with this metric that does not say whether lower values are better, if there is one."""
    having = (run for run in runs if any(number(row.get(metric)) for row in run.rows))
    return next((run for run in having if direction(metric, run.directions) is None), None)


def decided(runs: Sequence[Run], metric: str) -> bool:
    """Return whether lower values of a metric are better. Raises if the runs disagree, or do not say."""
    lower = agreed(runs, metric)
    if run := undecided(runs, metric):
        raise UndriftError(
            f"The run in {run.folder} does not say whether lower or higher values of {quoted(metric)} are better, so "
            f"nothing can be chosen by it. {DECLARE}, and run it again in another folder."
        )
    return lower


DECLARE = "Set the attribute higher_is_better of the metric to True or False"


def counted(runs: Sequence[Run]) -> str:
    """How many runs there are, and how many of them did not end as they should."""
    said = [f"{count} {word}" for word in (DIVERGED, CHANCE) if (count := sum(run.mark == word for run in runs))]
    said += marks(sum(bool(run.stopped) for run in runs), sum(left_out(run.rows) for run in runs))
    return f"{len(runs)} ({', '.join(said)})" if said else str(len(runs))


def remark(runs: Sequence[Run]) -> str | None:
    """What is wrong with the ends of some of these runs, if they are finite."""
    found = [run for run in runs if run.diverged]
    if not found or not found[0].diverged:
        return None
    several = f" (seed {found[0].seed}; {len(found)} of {len(runs)} runs)" if len(runs) > 1 else ""
    return f"{found[0].diverged.what}{several}"


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed alone, under a name that says what tells the groups apart."""
    runs = list({run.folder.resolve(): run for run in runs}.values())
    keys = {key for run in runs for key in run.settings} - IGNORED_KEYS
    told = {key for key in keys if len({same(run.settings.get(key)) for run in runs}) > 1}
    found: dict[str, list[Run]] = {}
    for run in runs:
        parts = [
            brief(str(run.settings.get(key))) if key == "method" else f"{key}={run.settings.get(key)}"
            for key in sorted(told)
        ]
        name = ", ".join(parts) or brief(str(run.settings.get("method", run.folder.name)))
        found.setdefault(name, []).append(run)
    return found


def same(value: Any) -> str:
    """One text for values that are one: 1 and 1.0."""
    plain = float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value
    return json.dumps(plain, default=str)


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
    mean = f"{average(known):.{digits}f}" if digits else f"{average(known):,.0f}"
    if len(known) < 2:
        return mean
    return f"{mean} ± {deviation(known):.{digits}f}" if digits else f"{mean} ± {deviation(known):,.0f}"
