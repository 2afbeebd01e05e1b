"""What groups of runs are reported by, as plain numbers: JSON can hold them, and every table is made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undrift.errors import UndriftError, nearest, quoted
from undrift.tools.compare import Run, counted, remark
from undrift.tools.display import number
from undrift.tools.study.statistics import average, deviation, mean, paired

Figures = dict[str, Any]
"""The figures of one group."""


@dataclass(frozen=True)
class Asked:
    """What is to be reported."""

    metric: str
    last: int = 1
    """A run's figure is the mean over so many last rounds."""
    target: float | None = None
    """Also report what it costs to reach this value."""
    baseline: str | None = None
    """The group that the others are compared with, seed by seed."""
    lower: bool = False
    """Whether lower values of the metric are better."""


def measure(groups: Mapping[str, Sequence[Run]], asked: Asked) -> list[Figures]:
    """The figures of each group, in order. None stands for a figure that does not exist.

    Raises:
        UndriftError: If no group has the baseline's name.
    """
    if asked.baseline is not None and asked.baseline not in groups:
        close = nearest(asked.baseline, groups)
        hint = f"did you mean {close!r}?" if close else f"the groups are {', '.join(groups)}."
        raise UndriftError(f"There is no group {quoted(asked.baseline)} to use as the baseline; {hint}")
    by_seed = {name: values_by_seed(runs, asked) for name, runs in groups.items()}
    return [_group(name, runs, by_seed, asked) for name, runs in groups.items()]


def values_by_seed(runs: Sequence[Run], asked: Asked) -> dict[int, float]:
    """Each seed's figure; the mean, if there are several runs with one seed."""
    found: dict[int, list[float]] = {}
    for run in runs:
        found.setdefault(run.seed, []).append(run.last(asked.metric, asked.last))
    return {seed: average(values) for seed, values in sorted(found.items())}


def _group(name: str, runs: Sequence[Run], by_seed: Mapping[str, dict[int, float]], asked: Asked) -> Figures:
    values = [run.last(asked.metric, asked.last) for run in runs]
    found: Figures = {
        "name": name,
        "runs": len(runs),
        "lost": sum(run.lost for run in runs),
        "counted": counted(runs),
        "remark": remark(runs),
        "metric": asked.metric,
        "last_rounds": asked.last,
        "seeds": [run.seed for run in runs],
        "values": [_known(value) for value in values],
        **summary(values),
        "best_on_test_data": summary([run.best(asked.metric) for run in runs]),
    }
    if asked.baseline is not None:
        found["baseline"] = asked.baseline
        if name != asked.baseline:
            difference = paired(by_seed[name], by_seed[asked.baseline])
            found["difference"] = {key: _known(value) for key, value in vars(difference).items()}
    if asked.target is not None:
        found |= {"target": asked.target, **_costs(runs, asked.metric, asked.target)}
    fairness = {word: _over_clients(runs, f"client_{_bare(asked.metric)}_{word}") for word in ("worst", "std")}
    return found | {f"client_{word}": summary(own) for word, own in fairness.items() if own}


def _costs(runs: Sequence[Run], metric: str, target: float) -> Figures:
    """Rounds, local steps, bytes and seconds until each run met the target, and how many did."""
    reached = [(run, row) for run in runs if (row := run.until(metric, target))]
    return {
        "reached": len(reached),
        "rounds_to_target": summary([row["round"] for _, row in reached]),
        "steps_to_target": summary([row["total_steps"] for _, row in reached]),
        "bytes_to_target": summary([row["total_bytes"] for _, row in reached]),
        "seconds_to_target": summary([run.seconds(row) for run, row in reached]),
    }


def _over_clients(runs: Sequence[Run], key: str) -> list[float]:
    """A figure over clients' own data, from the last round that has one, of runs that were not lost."""
    found = [next((row[key] for row in reversed(run.rows) if number(row.get(key))), None) for run in runs]
    if all(value is None for value in found):
        return []
    return [math.nan if value is None or run.lost else value for run, value in zip(runs, found, strict=True)]


def _bare(metric: str) -> str:
    return metric.removeprefix("validation_").removeprefix("client_")


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation of the finite values."""
    return {"mean": _known(mean(values)), "std": _known(deviation(values))}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
