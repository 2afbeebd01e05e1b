"""Curves of runs that differ only in their seed: mean and standard deviation, by round and by cost."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from undrift.tools.compare import Run
from undrift.tools.display import number
from undrift.tools.report.downsample import downsample, rounded

Numbers = np.ndarray

POINTS = 300
"""The most points per curve."""
SHORT = 150
"""The same for curves in small charts."""

AXES = {"round": "round", "steps": "total_steps", "bytes": "total_bytes", "seconds": "seconds"}
"""The choices of x axis, and the key of each in a history row; seconds are cumulated."""
COUNTED = {"round", "steps", "total_steps", "steps_fraction", "samples", "bytes_down", "bytes_up", "total_bytes"}
SCHEDULE = ("lr", "diagnostic", "decays")
SOURCES = {
    "test": "{}",
    "validation": "validation_{}",
    "client": "client_{}",
    "client_worst": "client_{}_worst",
    "client_std": "client_{}_std",
    "tuned": "tuned_{}",
    "tuned_worst": "tuned_{}_worst",
    "tuned_std": "tuned_{}_std",
}
"""The data that a metric may have been evaluated on, and its key in a history row."""


def curves(runs: list[Run], metrics: list[str]) -> dict[str, Any]:
    """A group's curves: of metrics, over the rounds with an evaluation; of everything else, over all rounds."""
    length = max(len(run.rows) for run in runs)
    forms = {f"{source}.{name}": form.format(name) for name in metrics for source, form in SOURCES.items()}
    evaluated = {key: _stack(runs, length, own) for key, own in forms.items()}
    evaluated = {key: values for key, values in evaluated.items() if np.isfinite(values).any()}
    at = np.flatnonzero(np.any([~np.isnan(v).all(0) for v in evaluated.values()], 0)) if evaluated else np.empty(0, int)
    others = {key: _stack(runs, length, key) for key in (*SCHEDULE, *_others(runs, set(forms.values())))}
    others = {key: values for key, values in others.items() if np.isfinite(values).any()}
    span = {k: _stack(runs, length, "local_steps", k) for k in ("fewest", "mean", "most")}
    axes = {name: _stack(runs, length, key) for name, key in AXES.items()}
    axes["seconds"] = np.cumsum(axes["seconds"], 1)
    axes = {name: _mean(values) for name, values in axes.items()}

    leading = [_mean(evaluated[key])[at] for key in evaluated][:2]
    fine = at[downsample(leading, len(at), POINTS)]
    coarse = downsample([_mean(v) for v in others.values()], length, SHORT)
    found: dict[str, Any] = {
        "evaluated": {name: rounded(values[fine]) for name, values in axes.items()},
        "every": {name: rounded(values[coarse]) for name, values in axes.items()},
        "curves": {key: _curve(values[:, fine]) for key, values in evaluated.items()},
        "schedules": {key: _curve(values[:, coarse]) for key, values in others.items()},
    }
    if np.isfinite(span["mean"]).any():
        ends = {
            "fewest": _mean(span["fewest"], np.fmin),
            "mean": _mean(span["mean"]),
            "most": _mean(span["most"], np.fmax),
        }
        steps = {k: rounded(values[coarse]) for k, values in ends.items()}
        low_high = {"low": steps["fewest"], "high": steps["most"]} if steps["fewest"] != steps["most"] else {}
        found["schedules"]["local_steps"] = {"mean": steps["mean"], **low_high}
    return found


def _others(runs: list[Run], known: set[str]) -> list[str]:
    """The numbers that a method's parts add to the history, including users' own parts."""
    keys = {key: None for run in runs for row in run.rows for key, value in row.items() if number(value)}
    return [key for key in keys if key not in known | COUNTED | {"seconds", *SCHEDULE}]


def _stack(runs: list[Run], length: int, key: str, inner: str | None = None) -> Numbers:
    """One value per run and round, NaN where a run has none."""
    values = np.full((len(runs), length), np.nan)
    for r, run in enumerate(runs):
        for t, row in enumerate(run.rows):
            value = row.get(key) if inner is None else row.get(key, {}).get(inner)
            if number(value):
                values[r, t] = value
    return values


def _finite(values: Numbers) -> Numbers:
    return np.where(np.isfinite(values), values, np.nan)


def _mean(values: Numbers, of: np.ufunc | None = None) -> Numbers:
    """The mean over runs, or what `of` makes of them."""
    if of is not None:
        return of.reduce(_finite(values), 0)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of an empty slice: no run has a value in that round
        return np.nanmean(_finite(values), 0) if len(values) else values


def _curve(values: Numbers) -> dict[str, Any]:
    """The mean over runs and, if there are several and they differ, their standard deviation."""
    known = np.isfinite(values).sum(0)
    found = {"mean": rounded(_mean(values))}
    if (known > 1).any():
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            deviation = np.where(known > 1, np.nanstd(_finite(values), 0, ddof=1), 0.0)
        if (deviation > 0).any():
            found["std"] = rounded(deviation)
    return found
