"""The texts of a report: title, state of the runs, table, settings."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from undrift.tools.compare import IGNORED_KEYS, Run, brief, spread
from undrift.tools.display import left_out, marks, number
from undrift.tools.report.curves import SOURCES
from undrift.training.run_folder import finished


def cells(runs: list[Run], metrics: list[str]) -> dict[str, str]:
    """A group's cells in the table, by column."""
    found: dict[str, str] = {"runs": str(len(runs)), "state": state(runs)}
    for name in metrics:
        key = next((k for k in (name, f"validation_{name}") if any(k in row for run in runs for row in run.rows)), name)
        found |= columns(runs, key, key.replace("_", " "), name)
    ends = [run.rows[-1] for run in runs if run.rows]
    if ends:
        found["rounds"] = counted([row["round"] for row in ends])
        found["SGD steps"] = counted([row["total_steps"] for row in ends])
        found["sent, down + up"] = size(float(np.mean([row["total_bytes"] for row in ends])))
        found["time"] = duration(float(np.mean([sum(row["seconds"] for row in run.rows) for run in runs if run.rows])))
    return found


def figures(runs: list[Run], metrics: list[str]) -> dict[str, dict[str, str]]:
    """The cells with metrics, by the data that these were measured on."""
    found: dict[str, dict[str, str]] = {}
    for source, form in SOURCES.items():
        for name in metrics:
            key = form.format(name)
            if any(key in row for run in runs for row in run.rows):
                best = not source.endswith("_std")  # neither more nor less of a deviation is best
                found.setdefault(source, {}).update(columns(runs, key, name.replace("_", " "), name, best))
    return found


def columns(runs: list[Run], key: str, label: str, metric: str, best: bool = True) -> dict[str, str]:
    """The last value of a column of the history, and the best of all rounds."""
    found = {f"last {label}": spread([last(run, key) for run in runs])}
    if best and metric != "loss":
        found[f"best {label}"] = spread([run.best(key) for run in runs])
    return found


def counted(values: list[int]) -> str:
    return f"{values[0]:,}" if len(set(values)) == 1 else spread(values, 0)


def last(run: Run, key: str) -> float:
    return float(next((row[key] for row in reversed(run.rows) if number(row.get(key))), math.nan))


def state(runs: list[Run]) -> str:
    """How the runs ended, or how far they have come."""
    said_of = marks(0, sum(left_out(run.rows) for run in runs))
    open_ = [run for run in runs if not finished(run.folder)]
    if open_:
        done, planned = sum(len(run.rows) for run in runs), sum(run.settings.get("rounds", 0) for run in runs)
        said = f"{done:,} of {planned:,} rounds"
    else:
        said = "finished"
    for how, count in Counter(filter(None, (run.mark for run in runs))).items():
        said_of.append(how if len(runs) == 1 else f"{count} of {len(runs)} {how}")
    return ", ".join([said, *said_of])


def shared(runs: list[Run]) -> dict[str, str]:
    """Settings that all runs have in common."""
    keys = [key for key in runs[0].settings if all(key in run.settings for run in runs)]
    same = [k for k in keys if all(run.settings[k] == runs[0].settings[k] for run in runs)]
    return {key: _text(runs[0].settings[key]) for key in same}


def differing(run: Run, same: dict[str, str]) -> dict[str, str]:
    return {key: _text(value) for key, value in run.settings.items() if key not in same and key not in IGNORED_KEYS}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else f"{text[:300]}…"


def title(runs: list[Run], grouped: dict[str, list[Run]]) -> str:
    """The method, if there is one, or the number of methods or settings, and the data set."""
    data = {Path(str(run.settings.get("data.name", "data of Python"))).name for run in runs}
    on = f" on {data.pop()}" if len(data) == 1 else ""
    methods = list(dict.fromkeys(brief(str(run.settings.get("method", run.folder.name))) for run in runs))
    if len(methods) == 1:
        return f"{methods[0]}{on}"
    return f"{len(methods)} methods{on}" if len(methods) == len(grouped) else f"{len(grouped)} settings{on}"


def subtitle(runs: list[Run]) -> str:
    """The settings that all runs share, in one line."""
    same = shared(runs)
    said = [same.get("model", ""), same.get("data.partition", "")]
    said += [f"{same[key]} {word}" for key, word in (("data.clients", "clients"), ("rounds", "rounds")) if key in same]
    cohorts = {len(row["clients"]) for run in runs for row in run.rows[:1]}
    said += [f"{cohorts.pop():,} clients per round"] if len(cohorts) == 1 else []
    return " · ".join(word for word in said if word)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
