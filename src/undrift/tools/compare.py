"""Groups of runs that differ only in their seed: how `undrift compare` finds, names and measures them."""

from __future__ import annotations

import glob
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from undrift.columns import direction, lower_is_better
from undrift.errors import UndriftError, listed, nearest, quoted
from undrift.method.parse import parse_method
from undrift.tools.run_folders import RunFolder, count_left_out, main_figure, nonfinite_remarks, runs_in
from undrift.tools.statistics import average_by_seed, deviation, mean, paired
from undrift.training.history import number
from undrift.training.learning_checks import CHANCE, DIVERGED
from undrift.training.run_folder import RUN, STOPPED, finished, recorded
from undrift.training.settings import KEYS

IGNORED_KEYS = {key for key, role in KEYS.items() if not role.compared}
"""Keys that say nothing about what is compared."""


# ---- what is compared ----------------------------------------------------------------------------------------------


@dataclass
class Given:
    """The runs and files that the arguments of `undrift compare` name."""

    folders: dict[Path, str | None] = field(default_factory=dict)
    """Runs, with the label of each, if it has one."""
    files: list[tuple[Path, str | None]] = field(default_factory=list)
    """Experiment files to run."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What is left out, and why."""


def parse_arguments(arguments: Sequence[str]) -> Given:
    """Find the runs and the experiment files among the arguments of `undrift compare`.

    Folders that are no run and contain none, unfinished runs and files that are no experiment files are skipped, as
    `runs/*` may name them, unless nothing else is left.

    Raises:
        UndriftError: If nothing is left, or if a path does not exist.
    """
    given = Given()
    for label, path in (pair for argument in arguments for pair in split_label(argument)):
        if not path.is_dir():
            if path.suffix == ".toml" or not os.path.lexists(path):
                given.files.append((path, label))
            else:
                given.skipped[str(path)] = "not a run"
            continue
        for folder in runs_in(path) or [path]:
            if not (folder / "metrics.jsonl").exists():
                given.skipped[str(folder)] = "not a run"
            elif not finished(folder) and not os.path.lexists(folder / STOPPED):
                given.skipped[str(folder)] = "not finished"
            else:
                if given.folders.get(folder, label) != label:
                    raise UndriftError(f"{folder} is given twice, under different labels; give it once.")
                given.folders[folder] = label
    if given.skipped and not given.folders and not given.files:
        name, why = next(iter(given.skipped.items()))
        raise UndriftError(
            f"The run in {name} is not finished. Finish it first: undrift resume {name}"
            if why == "not finished"
            else f"{name} is not a run: it has no metrics.jsonl."
        )
    return given


def split_label(argument: str) -> list[tuple[str | None, Path]]:
    """The label and the paths of `FedAvg=runs/a*`. A path that exists is a path, whatever is in its name."""
    label, equals, path = argument.partition("=")
    if not (equals and label and path) or os.path.lexists(argument):
        return [(None, Path(argument))]
    names = [] if os.path.lexists(path) else sorted(glob.glob(path))  # shells expand patterns only without a label
    return [(label, Path(name)) for name in names or [path]]


def describe_skipped(skipped: Mapping[str, str]) -> str:
    """One line about everything that is left out."""
    by_reason: dict[str, list[str]] = {}
    for name, why in skipped.items():
        by_reason.setdefault(why, []).append(name)
    return "skipped: " + "; ".join(f"{listed(names, 3)} ({why})" for why, names in by_reason.items())


# ---- groups --------------------------------------------------------------------------------------------------------


def group_runs(runs: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """Runs that differ only in their seed, under a name that says what distinguishes the groups."""
    runs = list({run.folder.resolve(): run for run in runs}.values())
    keys = {key for run in runs for key in run.settings} - IGNORED_KEYS
    differing = {key for key in keys if len({canonical(run.settings.get(key)) for run in runs}) > 1}
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        parts = [
            brief_method(str(run.settings.get(key))) if key == "method" else f"{key}={run.settings.get(key)}"
            for key in sorted(differing)
        ]
        name = ", ".join(parts) or brief_method(str(run.settings.get("method", run.folder.name)))
        groups.setdefault(name, []).append(run)
    return groups


def canonical(value: Any) -> str:
    """The same text for equal values, such as 1 and 1.0."""
    plain = float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value
    return json.dumps(plain, default=str)


def brief_method(method: str) -> str:
    """A method's expression without the arguments that have their default values."""
    try:
        parts = parse_method(method).parts
    except UndriftError:  # a user's own, which is not imported here
        return method
    texts: list[str] = []
    for part in parts:
        assert is_dataclass(part)
        changed = {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) != f.default}
        texts.append(f"{type(part).__name__}({', '.join(f'{name}={value}' for name, value in changed.items())})")
    return " + ".join(texts)


def group_by_label(runs: Sequence[RunFolder], labels: Mapping[Path, str | None]) -> dict[str, list[RunFolder]]:
    """Runs under their labels; those without one under what distinguishes them.

    Raises:
        UndriftError: If runs under one label differ in more than their seeds.
    """
    by_label: dict[str, list[RunFolder]] = {}
    for run in runs:
        if label := labels.get(run.folder):
            by_label.setdefault(label, []).append(run)
    for label, own in by_label.items():
        if len(several := group_runs(own)) > 1:
            names = " and ".join(quoted(name) for name in list(several)[:2])
            raise UndriftError(
                f"The runs labelled {label!r} differ in more than their seeds: {names}. Give them different labels."
            )
    for name, own in group_runs([run for run in runs if not labels.get(run.folder)]).items():
        if name in by_label:
            raise UndriftError(f"The label {name!r} is also the name of runs without a label; choose another.")
        by_label[name] = own
    return by_label


def find_mismatches(by_name: Mapping[str, Sequence[RunFolder]]) -> list[str]:
    """Sentences about what makes groups hard to compare: different seeds, a repeated seed, different data."""
    sentences = []
    seeds = {name: sorted(run.seed for run in runs) for name, runs in by_name.items()}
    twice = [name for name, own in seeds.items() if len(set(own)) < len(own)]
    if twice:
        sentences.append(
            f"{listed(twice, 3)}: a seed occurs twice, so the standard deviation is over fewer seeds than runs."
        )
    if len({frozenset(own) for own in seeds.values()}) > 1:
        some = "; ".join(f"{name}: {', '.join(map(str, dict.fromkeys(own)))}" for name, own in list(seeds.items())[:3])
        sentences.append(f"the groups have different seeds ({some}), and so different partitions and random draws.")
    runs = [run for own in by_name.values() for run in own]
    keys = sorted({key for run in runs for key in run.settings if key.startswith("data.")} - ELSEWHERE)
    differing = [key for key in keys if _differ(runs, partial(_setting, key))]
    if differing:
        sentences.append(f"the groups differ in {listed(differing, 3)}, so their results are on different data.")
    elif _differ(runs, _digests):
        sentences.append("the groups were trained or tested on different data, although their settings are the same.")
    return sentences


ELSEWHERE = {"data.data_dir", "data.workers"}
"""Keys that say where data are, not what they are."""


def _differ(runs: Sequence[RunFolder], value: Callable[[RunFolder], str | None]) -> bool:
    """Whether runs with the same seed have different values. None is unknown."""
    by_seed: dict[int, set[str]] = {}
    for run in runs:
        if (own := value(run)) is not None:
            by_seed.setdefault(run.seed, set()).add(own)
    return any(len(own) > 1 for own in by_seed.values())


def _setting(key: str, run: RunFolder) -> str:
    return str(run.settings.get(key))


def _digests(run: RunFolder) -> str | None:
    """The checksums of a run's data, from its `run.json`; None if they are not known."""
    known = recorded(run.folder) if (run.folder / RUN).exists() else None
    identity = known.get("identity", {}) if known else {}
    return str([identity.get(f"{kind} data") for kind in ("training", "test")]) if identity else None


# ---- the metric ----------------------------------------------------------------------------------------------------


def choose_metric(runs: Sequence[RunFolder], metric: str | None) -> str:
    """The metric to compare by: the one that is asked for, or the leading one. Raises if no run has it."""
    if metric is None:
        return leading_metric(runs)
    known = dict.fromkeys(key for run in runs for row in run.rows for key in row if number(row[key]))
    if metric not in known:
        close = nearest(metric, known)
        hint = f"did you mean {close!r}?" if close else f"the runs have {', '.join(known)}."
        raise UndriftError(f"No run has a metric named {quoted(metric)}; {hint}")
    return metric


def leading_metric(runs: Sequence[RunFolder]) -> str:
    """What runs are compared by: the first metric that one of them was evaluated with."""
    for run in runs:
        if figure := next(filter(None, (main_figure(row, run.metrics) for row in reversed(run.rows))), None):
            return figure[0]
    if any(run.stopped for run in runs):
        raise UndriftError(f"No run was evaluated before it stopped. {next(r.stopped for r in runs if r.stopped)}")
    raise UndriftError(f"The run in {runs[0].folder} was never evaluated, because its data have no test set.")


def validation_name(metric: str) -> str:
    """The column with a metric on validation data, by which settings are chosen."""
    return metric if metric.startswith("validation_") else f"validation_{metric}"


def lower_is_better_in(runs: Sequence[RunFolder], metric: str) -> bool:
    """Whether lower values of a metric are better in these runs. Raises if they disagree, so that none can be best."""
    ways = {run.lower(metric): run for run in runs if any(number(row.get(metric)) for row in run.rows)}
    if len(ways) > 1:
        raise UndriftError(
            f"These runs cannot be compared by {quoted(metric)}: lower values are better in {ways[True].folder}, and "
            f"higher ones in {ways[False].folder}. Compare them by another metric, or give one of the two another name."
        )
    return next(iter(ways), lower_is_better(metric))


def find_undecided(runs: Sequence[RunFolder], metric: str) -> RunFolder | None:
    """Return a run with this metric that does not say whether lower values are better, if there is one."""
    having = (run for run in runs if any(number(row.get(metric)) for row in run.rows))
    return next((run for run in having if direction(metric, run.directions) is None), None)


def require_direction(runs: Sequence[RunFolder], metric: str) -> bool:
    """Return whether lower values of a metric are better. Raises if the runs disagree, or do not say."""
    lower = lower_is_better_in(runs, metric)
    if run := find_undecided(runs, metric):
        raise UndriftError(
            f"The run in {run.folder} does not say whether lower or higher values of {quoted(metric)} are better, so "
            f"nothing can be chosen by it. {DECLARE}, and run it again in another folder."
        )
    return lower


DECLARE = "Set the attribute higher_is_better of the metric to True or False"


# ---- figures -------------------------------------------------------------------------------------------------------


def describe_count(runs: Sequence[RunFolder]) -> str:
    """How many runs there are, and how many of them did not end as they should."""
    remarks = [f"{count} {word}" for word in (DIVERGED, CHANCE) if (count := sum(run.mark == word for run in runs))]
    remarks += nonfinite_remarks(sum(bool(run.stopped) for run in runs), sum(count_left_out(run.rows) for run in runs))
    return f"{len(runs)} ({', '.join(remarks)})" if remarks else str(len(runs))


def remark(runs: Sequence[RunFolder]) -> str | None:
    """How the first of these runs that diverged did so, and how many did."""
    diverged = [run for run in runs if run.diverged]
    if not diverged or not diverged[0].diverged:
        return None
    several = f" (seed {diverged[0].seed}; {len(diverged)} of {len(runs)} runs)" if len(runs) > 1 else ""
    return f"{diverged[0].diverged.what}{several}"


Figures = dict[str, Any]
"""The figures of one group."""


@dataclass(frozen=True)
class Comparison:
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


def measure(groups: Mapping[str, Sequence[RunFolder]], comparison: Comparison) -> list[Figures]:
    """The figures of each group, in order. None stands for a figure that does not exist.

    Raises:
        UndriftError: If no group has the baseline's name.
    """
    if comparison.baseline is not None and comparison.baseline not in groups:
        close = nearest(comparison.baseline, groups)
        hint = f"did you mean {close!r}?" if close else f"the groups are {', '.join(groups)}."
        raise UndriftError(f"There is no group {quoted(comparison.baseline)} to use as the baseline; {hint}")
    by_seed = {name: values_by_seed(runs, comparison) for name, runs in groups.items()}
    return [_figures_of(name, runs, by_seed, comparison) for name, runs in groups.items()]


def values_by_seed(runs: Sequence[RunFolder], comparison: Comparison) -> dict[int, float]:
    """Each seed's figure; the mean, if there are several runs with one seed."""
    values = [run.last(comparison.metric, comparison.last) for run in runs]
    return average_by_seed([run.seed for run in runs], values)


def _figures_of(
    name: str, runs: Sequence[RunFolder], by_seed: Mapping[str, dict[int, float]], comparison: Comparison
) -> Figures:
    values = [run.last(comparison.metric, comparison.last) for run in runs]
    figures: Figures = {
        "name": name,
        "runs": len(runs),
        "lost": sum(run.lost for run in runs),
        "counted": describe_count(runs),
        "remark": remark(runs),
        "metric": comparison.metric,
        "last_rounds": comparison.last,
        "seeds": [run.seed for run in runs],
        "values": [_finite_or_none(value) for value in values],
        **summarize(values),
        "best_on_test_data": summarize([run.best(comparison.metric) for run in runs]),
    }
    if comparison.baseline is not None:
        figures["baseline"] = comparison.baseline
        if name != comparison.baseline:
            difference = paired(by_seed[name], by_seed[comparison.baseline])
            figures["difference"] = {key: _finite_or_none(value) for key, value in vars(difference).items()}
    if comparison.target is not None:
        figures |= {"target": comparison.target, **_costs(runs, comparison.metric, comparison.target)}
    fairness = {
        word: _figures_over_clients(runs, f"client_{_bare(comparison.metric)}_{word}") for word in ("worst", "std")
    }
    return figures | {f"client_{word}": summarize(own) for word, own in fairness.items() if own}


def _costs(runs: Sequence[RunFolder], metric: str, target: float) -> Figures:
    """Rounds, local steps, bytes and seconds until each run met the target, and how many did."""
    reached = [(run, row) for run in runs if (row := run.until(metric, target))]
    return {
        "reached": len(reached),
        "rounds_to_target": summarize([row["round"] for _, row in reached]),
        "steps_to_target": summarize([row["total_steps"] for _, row in reached]),
        "bytes_to_target": summarize([row["total_bytes"] for _, row in reached]),
        "seconds_to_target": summarize([run.seconds(row) for run, row in reached]),
    }


def _figures_over_clients(runs: Sequence[RunFolder], key: str) -> list[float]:
    """A figure over clients' own data, from the last round that has one, of runs that were not lost."""
    values = [run.latest(key) for run in runs]
    if not any(number(row.get(key)) for run in runs for row in run.rows):
        return []
    return [math.nan if run.lost else value for run, value in zip(runs, values, strict=True)]


def _bare(metric: str) -> str:
    return metric.removeprefix("validation_").removeprefix("client_")


def summarize(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation of the finite values."""
    return {"mean": _finite_or_none(mean(values)), "std": _finite_or_none(deviation(values))}


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
