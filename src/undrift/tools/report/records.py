"""What one run adds to a report beyond its curves: when its metrics were first so good, and how far clients moved."""

from __future__ import annotations

from typing import Any

import numpy as np

from undrift.tools.compare import Run
from undrift.tools.display import number
from undrift.tools.report.curves import AXES, SOURCES
from undrift.tools.report.downsample import rounded

LONGEST = 20
"""How many of the clients with the longest updates are shown."""


def records(run: Run, metrics: list[str]) -> dict[str, dict[str, Any]]:
    """The rounds in which a metric was better than ever before, with what had been spent by then.

    The first round that meets a target is one of them, whatever the target is.
    """
    seconds = np.cumsum([row["seconds"] for row in run.rows])
    found: dict[str, dict[str, Any]] = {}
    for source, form in SOURCES.items():
        for name in metrics if not source.endswith("_std") else ():
            lower = run.lower(name)
            better = _improvements([row.get(form.format(name)) for row in run.rows], lower)
            if better:
                rows = [run.rows[i] for i in better]
                spent = {axis: rounded(row[key] for row in rows) for axis, key in AXES.items() if axis != "seconds"}
                values = rounded(row[form.format(name)] for row in rows)
                found[f"{source}.{name}"] = {
                    "value": values,
                    **spent,
                    "seconds": rounded(seconds[better]),
                    "lower": lower,
                }
    return found


def _improvements(values: list[Any], lower: bool) -> list[int]:
    best, found = np.inf, []
    for i, value in enumerate(values):
        score = (value if lower else -value) if number(value) else np.nan
        if score < best:
            best = score
            found.append(i)
    return found


def longest_updates(run: Run, names: dict[str, str]) -> dict[str, Any] | None:
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
        "mean": rounded([np.mean(norms[client]) for client in chosen]),
        "most": rounded([max(norms[client]) for client in chosen]),
        "rounds": [len(norms[client]) for client in chosen],
    }
