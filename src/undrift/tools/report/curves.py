"""The numbers of a report: curves of runs that differ only in their seed, and details of single runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from undrift.tools.run_folders import RunFolder
from undrift.training.history import number

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
LONGEST = 20
"""How many of the clients with the longest updates are shown."""


def curves(runs: list[RunFolder], metrics: list[str]) -> dict[str, Any]:
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
    content: dict[str, Any] = {
        "evaluated": {name: round_digits(values[fine]) for name, values in axes.items()},
        "every": {name: round_digits(values[coarse]) for name, values in axes.items()},
        "curves": {key: _curve(values[:, fine]) for key, values in evaluated.items()},
        "schedules": {key: _curve(values[:, coarse]) for key, values in others.items()},
    }
    if np.isfinite(span["mean"]).any():
        ends = {
            "fewest": _mean(span["fewest"], np.fmin),
            "mean": _mean(span["mean"]),
            "most": _mean(span["most"], np.fmax),
        }
        steps = {k: round_digits(values[coarse]) for k, values in ends.items()}
        low_high = {"low": steps["fewest"], "high": steps["most"]} if steps["fewest"] != steps["most"] else {}
        content["schedules"]["local_steps"] = {"mean": steps["mean"], **low_high}
    return content


def _others(runs: list[RunFolder], known: set[str]) -> list[str]:
    """The numbers that a method's parts add to the history, including users' own parts."""
    keys = {key: None for run in runs for row in run.rows for key, value in row.items() if number(value)}
    return [key for key in keys if key not in known | COUNTED | {"seconds", *SCHEDULE}]


def _stack(runs: list[RunFolder], length: int, key: str, inner: str | None = None) -> Numbers:
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
    curve = {"mean": round_digits(_mean(values))}
    if (known > 1).any():
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            deviation = np.where(known > 1, np.nanstd(_finite(values), 0, ddof=1), 0.0)
        if (deviation > 0).any():
            curve["std"] = round_digits(deviation)
    return curve


# ---- single runs ----------------------------------------------------------------------------------------------------


def records(run: RunFolder, metrics: list[str]) -> dict[str, dict[str, Any]]:
    """The rounds in which a metric was better than in all rounds before, and their costs.

    The first round that meets a target is one of them, for every target.
    """
    seconds = np.cumsum([row["seconds"] for row in run.rows])
    by_metric: dict[str, dict[str, Any]] = {}
    for source, form in SOURCES.items():
        for name in metrics if not source.endswith("_std") else ():
            lower = run.lower(name)
            better = _improvements([row.get(form.format(name)) for row in run.rows], lower)
            if better:
                rows = [run.rows[i] for i in better]
                spent = {
                    axis: round_digits(row[key] for row in rows) for axis, key in AXES.items() if axis != "seconds"
                }
                values = round_digits(row[form.format(name)] for row in rows)
                by_metric[f"{source}.{name}"] = {
                    "value": values,
                    **spent,
                    "seconds": round_digits(seconds[better]),
                    "lower": lower,
                }
    return by_metric


def _improvements(values: list[Any], lower: bool) -> list[int]:
    best, rounds = np.inf, []
    for i, value in enumerate(values):
        score = (value if lower else -value) if number(value) else np.nan
        if score < best:
            best = score
            rounds.append(i)
    return rounds


def longest_updates(run: RunFolder, names: dict[str, str]) -> dict[str, Any] | None:
    """The clients with the longest updates on average over their rounds, from the column `client_norms`."""
    norms: dict[str, list[float]] = {}
    for row in run.rows:
        by_client = row.get("client_norms")
        for client, value in by_client.items() if isinstance(by_client, dict) else ():
            if number(value) and np.isfinite(value):
                norms.setdefault(str(client), []).append(float(value))
    if not norms:
        return None
    chosen = sorted(norms, key=lambda client: -float(np.mean(norms[client])))[:LONGEST]
    return {
        "of": len(norms),
        "who": [names.get(client, client) for client in chosen],
        "mean": round_digits([np.mean(norms[client]) for client in chosen]),
        "most": round_digits([max(norms[client]) for client in chosen]),
        "rounds": [len(norms[client]) for client in chosen],
    }


# ---- fewer and shorter numbers, without a visible difference --------------------------------------------------------


def round_digits(values: Iterable[Any], digits: int = 5) -> list[float | int | None]:
    """Numbers rounded to `digits` significant digits, whole ones as integers; None for what is not finite."""
    short: list[float | int | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            short.append(None)
        else:
            x = float(f"{value:.{digits}g}")
            short.append(int(x) if x.is_integer() and abs(x) < 1e15 else x)
    return short


def even_positions(count: int, most: int) -> np.ndarray:
    """At most `most` evenly spaced positions, including the first and the last."""
    return (
        np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)) if count else np.empty(0, int)
    )


def downsample(series: Sequence[np.ndarray], count: int, most: int) -> np.ndarray:
    """At most `most` positions for curves with a common x axis: the end and each curve's extremes of every segment."""
    if count <= most:
        return np.arange(count)
    chosen = {0, count - 1}
    for segment in np.array_split(np.arange(count), most // (2 * max(1, len(series)) + 1)):
        chosen.add(int(segment[-1]))
        for values in series:
            here = values[segment]
            if np.isfinite(here).any():
                chosen |= {int(segment[np.nanargmin(here)]), int(segment[np.nanargmax(here)])}
    return np.array(sorted(chosen))
