"""The texts of a report: names of groups, title, state of the runs, table, settings."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from undrift.tools.compare import IGNORED_KEYS, brief_method
from undrift.tools.report.curves import SOURCES
from undrift.tools.run_folders import RunFolder, count_left_out, nonfinite_remarks, read_labels
from undrift.tools.statistics import average, deviation
from undrift.training.run_folder import finished

LONGEST = 60
"""The most characters of a name that is made of settings."""
SPEAKING = ("method", "model", "data.name", "data.partition")
"""Settings whose value says what it is. They come first."""


# ---- names of groups ------------------------------------------------------------------------------------------------


def name_groups(grouped: dict[str, list[RunFolder]]) -> dict[str, list[RunFolder]]:
    """The groups, in their order, under names that are short and differ.

    A name begins with the method, followed by what differs; where that is too long, by the folder. Runs of a study have
    the study's labels.
    """
    own = list(grouped.values())
    labels = _study_names(own)
    texts = [
        label or _settings_name(runs[0], _differing_keys([g[0] for g in own]))
        for label, runs in zip(labels, own, strict=True)
    ]
    counts = Counter(texts)
    names = [
        text if counts[text] == 1 and (label or len(text) <= LONGEST) else _folder_name(runs)
        for text, label, runs in zip(texts, labels, own, strict=True)
    ]
    unique = len(set(names)) == len(names)
    return dict(zip(names if unique else grouped, own, strict=True))


def _study_names(groups: list[list[RunFolder]]) -> list[str | None]:
    """The label of each group whose runs have one, from a study: the method's, and the partition's if these differ.

    Groups with the same label, such as the settings that a method tried, also have what they differ in.
    """
    places = [[run.folder.resolve() for run in runs] for runs in groups]
    known = {folder: read_labels(folder) for folder in {place.parent for own in places for place in own}}
    of_runs = [{known[place.parent].get(place.name) for place in own} for own in places]
    labels = [next(iter(own)) if len(own) == 1 else None for own in of_runs]
    several = len({label.partition for label in labels if label}) > 1
    names: list[str | None] = []
    for label, runs in zip(labels, groups, strict=True):
        parts = [label.method, label.partition if several else ""] if label else []
        alike = [other[0] for other, own in zip(groups, labels, strict=True) if own == label]
        if label and len(alike) > 1:
            parts.append(_settings_name(runs[0], _differing_keys(alike)))
        names.append(", ".join(filter(None, parts)) or None)
    return names


def _differing_keys(runs: list[RunFolder]) -> list[str]:
    """The keys in which these runs differ, with those in `SPEAKING` first."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in IGNORED_KEYS)
    differing = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]
    return sorted(differing, key=lambda key: (SPEAKING.index(key) if key in SPEAKING else len(SPEAKING), key))


def _settings_name(run: RunFolder, keys: list[str]) -> str:
    return ", ".join(_part(key, run.settings[key]) for key in keys if run.settings.get(key) is not None) or _method(run)


def _part(key: str, value: Any) -> str:
    if key == "method":
        return brief_method(str(value))
    return str(value) if key in SPEAKING else f"{key.rpartition('.')[2]}={value}"


def _method(run: RunFolder) -> str:
    return brief_method(str(run.settings.get("method", run.folder.name)))


def _folder_name(runs: list[RunFolder]) -> str:
    """The method, and the name of the run's folder; of several, what the names begin with."""
    folders = [run.folder.name or run.folder.resolve().name for run in runs]
    same = "".join(letters[0] for letters in takewhile(lambda one: len(set(one)) == 1, zip(*folders, strict=False)))
    common = re.sub(r"([\W_]+seed)?[\W_]*$", "", same) if len(folders) > 1 else folders[0]
    method = brief_method(str(runs[0].settings["method"])) if "method" in runs[0].settings else ""
    place = common or folders[0]
    return f"{method} · {place}" if method and len(method) <= LONGEST and method != place else place


# ---- the table, the title and settings ------------------------------------------------------------------------------


def cells(runs: list[RunFolder], metrics: list[str]) -> dict[str, str]:
    """A group's cells in the table, by column."""
    table: dict[str, str] = {"runs": str(len(runs)), "state": state(runs)}
    for name in metrics:
        key = next((k for k in (name, f"validation_{name}") if any(k in row for run in runs for row in run.rows)), name)
        table |= columns(runs, key, key.replace("_", " "), name)
    ends = [run.rows[-1] for run in runs if run.rows]
    if ends:
        table["rounds"] = count_or_spread([row["round"] for row in ends])
        table["SGD steps"] = count_or_spread([row["total_steps"] for row in ends])
        table["sent, down + up"] = size(float(np.mean([row["total_bytes"] for row in ends])))
        table["time"] = duration(float(np.mean([sum(row["seconds"] for row in run.rows) for run in runs if run.rows])))
    return table


def figures(runs: list[RunFolder], metrics: list[str]) -> dict[str, dict[str, str]]:
    """The cells with metrics, by the data that these were measured on."""
    by_source: dict[str, dict[str, str]] = {}
    for source, form in SOURCES.items():
        for name in metrics:
            key = form.format(name)
            if any(key in row for run in runs for row in run.rows):
                best = not source.endswith("_std")  # neither more nor less of a deviation is best
                by_source.setdefault(source, {}).update(columns(runs, key, name.replace("_", " "), name, best))
    return by_source


def columns(runs: list[RunFolder], key: str, label: str, metric: str, best: bool = True) -> dict[str, str]:
    """The last value of a column of the history, and the best of all rounds."""
    last_and_best = {f"last {label}": spread([run.latest(key) for run in runs])}
    if best and metric != "loss":
        last_and_best[f"best {label}"] = spread([run.best(key) for run in runs])
    return last_and_best


def count_or_spread(values: list[int]) -> str:
    return f"{values[0]:,}" if len(set(values)) == 1 else spread(values, 0)


def state(runs: list[RunFolder]) -> str:
    """How the runs ended, or how far they have come."""
    remarks = nonfinite_remarks(0, sum(count_left_out(run.rows) for run in runs))
    open_ = [run for run in runs if not finished(run.folder)]
    if open_:
        done, planned = sum(len(run.rows) for run in runs), sum(run.settings.get("rounds", 0) for run in runs)
        progress = f"{done:,} of {planned:,} rounds"
    else:
        progress = "finished"
    for how, count in Counter(filter(None, (run.mark for run in runs))).items():
        remarks.append(how if len(runs) == 1 else f"{count} of {len(runs)} {how}")
    return ", ".join([progress, *remarks])


def shared_settings(runs: list[RunFolder]) -> dict[str, str]:
    """Settings that all runs have in common."""
    keys = [key for key in runs[0].settings if all(key in run.settings for run in runs)]
    same = [k for k in keys if all(run.settings[k] == runs[0].settings[k] for run in runs)]
    return {key: _text(runs[0].settings[key]) for key in same}


def differing_settings(run: RunFolder, same: dict[str, str]) -> dict[str, str]:
    return {key: _text(value) for key, value in run.settings.items() if key not in same and key not in IGNORED_KEYS}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 300 else f"{text[:300]}…"


def title(runs: list[RunFolder], grouped: dict[str, list[RunFolder]]) -> str:
    """The method, if there is one, or the number of methods or settings, and the data set."""
    data = {Path(str(run.settings.get("data.name", "data of Python"))).name for run in runs}
    on = f" on {data.pop()}" if len(data) == 1 else ""
    methods = list(dict.fromkeys(brief_method(str(run.settings.get("method", run.folder.name))) for run in runs))
    if len(methods) == 1:
        return f"{methods[0]}{on}"
    return f"{len(methods)} methods{on}" if len(methods) == len(grouped) else f"{len(grouped)} settings{on}"


def subtitle(runs: list[RunFolder]) -> str:
    """The settings that all runs share, in one line."""
    same = shared_settings(runs)
    words = [same.get("model", ""), same.get("data.partition", "")]
    words += [f"{same[key]} {word}" for key, word in (("data.clients", "clients"), ("rounds", "rounds")) if key in same]
    cohorts = {len(row["clients"]) for run in runs for row in run.rows[:1]}
    words += [f"{cohorts.pop():,} clients per round"] if len(cohorts) == 1 else []
    return " · ".join(word for word in words if word)


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


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean ± standard deviation, or the only value; if some are not finite, also how many are."""
    known = [v for v in values if np.isfinite(v)]
    if not known:
        return "–"
    if len(known) < len(values):
        return f"{spread(known, digits)} ({len(known)} of {len(values)})"
    mean = f"{average(known):.{digits}f}" if digits else f"{average(known):,.0f}"
    if len(known) < 2:
        return mean
    return f"{mean} ± {deviation(known):.{digits}f}" if digits else f"{mean} ± {deviation(known):,.0f}"
