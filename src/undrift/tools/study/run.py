"""A study, run: tune each method on each partition by validation data, then run the chosen settings on fresh seeds."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from undrift.errors import UndriftError
from undrift.tools.compare import Run, chosen_metric, decided
from undrift.tools.config import checked
from undrift.tools.display import score
from undrift.tools.experiment import about, refuse_undecided, understood
from undrift.tools.study import labels
from undrift.tools.study.file import Cell, Study
from undrift.tools.study.metric import not_validated, with_metric
from undrift.tools.study.search import Search, Values, new_search
from undrift.tools.study.statistics import mean
from undrift.tools.sweep import MOST, Point, unique, word

TUNING, FINAL = "tuning", "final"
"""The folders of a study's two phases."""


Figure = tuple[str, float]
"""The name of a run's figure, and its value; NaN if the run was lost."""


@dataclass(eq=False)
class Outcome:
    """What becomes of a cell."""

    cell: Cell
    tried: list[tuple[Values, list[Figure]]] = field(default_factory=list)
    """The settings tried, and the validation figure of each tuning seed."""
    chosen: Values | None = None
    why: str | None = None
    """Why there is no chosen setting, or not every run."""
    runs: list[Run] = field(default_factory=list)
    """Those on fresh seeds."""
    left: int = 0
    """How many runs of the current phase have not ended."""


Runner = Callable[[Sequence[Point], Path, Callable[[Point], None]], dict[str, Run]]
"""Runs points in a folder, and calls a function with each that is done. Returns the runs that finished or stopped, by
the points' names."""


def prepare(study: Study, where: str) -> Study:
    """Check the settings that the study will run, before the first run; of a range, those that are tried first.

    Returns the study, whose runs measure its metric.

    Raises:
        UndriftError: If one is wrong, or if something is to be tuned without validation data or by a metric that is not
            measured on them.
    """
    plan = study.plan
    trials = sum((plan.trials or cell.combinations) * len(plan.tuning_seeds) for cell in study.cells if cell.tuned)
    count = trials + len(study.cells) * len(plan.seeds)
    if count > MOST:
        raise UndriftError(f"{where}: the study has {count:,} runs; it may have at most {MOST:,}.")
    for cell in study.cells:
        for values in new_search(cell, plan).ask() if cell.tuned else [cell.fixed]:
            point = new_point(cell, values, plan.seeds[0], where)
            with about(f"{where}, {point.name}"):
                experiment = checked(point.settings, where)
                understood(experiment)
            if cell.tuned:
                refuse_undecided(experiment, where, plan.metric)
            if cell.tuned and not experiment.data.validation_fraction:
                raise UndriftError(
                    f"{where}: data.validation_fraction is 0. Settings are chosen on validation data, never on test "
                    "data; set it to 0.1, for example."
                )
    return with_metric(study, where)


def new_point(cell: Cell, values: Values, seed: int, where: str) -> Point:
    """A run of a cell, named after its labels, what was chosen for it, and its seed."""
    called = [distinct(label) for label in (cell.partition, cell.method) if label]
    choices = {key: value for key, value in values.items() if key not in cell.fixed} | {"seed": seed}
    name = ",".join([*called, *(f"{key}={word(value)}" for key, value in choices.items())])
    return Point(name, cell.chosen(values, seed, where))


def distinct(label: str) -> str:
    """A label in a folder's name; with a digest, where letters that folders' names do not have are lost."""
    plain = word(label)
    lost = not re.fullmatch(r"[\x20-\x7e]*", label)
    return f"{plain}-{hashlib.sha256(label.encode()).hexdigest()[:6]}" if lost else plain


def run_study(outcomes: list[Outcome], study: Study, out: Path, where: str, run: Runner) -> None:
    """Both phases; fills in the outcomes as they come. Finished runs are not repeated.

    Args:
        outcomes: One per cell of the study.
        study: What to run.
        out: Its folder.
        where: The file's name, for messages.
        run: Runs points.
    """
    tune([outcome for outcome in outcomes if outcome.cell.tuned], study, out / TUNING, where, run)
    points: dict[Outcome, list[Point]] = {}
    for outcome in outcomes:
        if not outcome.cell.tuned:
            outcome.chosen = outcome.cell.fixed
        if outcome.chosen is not None:
            points[outcome] = [new_point(outcome.cell, outcome.chosen, seed, where) for seed in study.plan.seeds]
    runs = _run(points, out / FINAL, run)
    for outcome, own in points.items():
        outcome.runs = [runs[point] for point in own if point in runs]
        if lost := [point for point in own if point not in runs]:
            outcome.why = f"{len(lost)} of {len(own)} runs failed"


def tune(outcomes: list[Outcome], study: Study, out: Path, where: str, run: Runner) -> None:
    """Choose the setting of each cell by its mean validation figure over the tuning seeds; the first of equals.

    A setting with a run that diverged is never chosen. A cell of which a run failed for another reason, such as a full
    disk, is not decided: the same command tries it again.
    """
    plan = study.plan
    searches: dict[Outcome, Search] = {outcome: new_search(outcome.cell, plan) for outcome in outcomes}
    ended: dict[Outcome, list[Run]] = {outcome: [] for outcome in outcomes}
    while asked := {o: values for o, search in searches.items() if o.why is None and (values := search.ask())}:
        points = {
            o: [new_point(o.cell, values, seed, where) for values in own for seed in plan.tuning_seeds]
            for o, own in asked.items()
        }
        runs = _run(points, out, run)
        for o, own in asked.items():
            if any(point not in runs for point in points[o]):
                o.why = "a tuning run failed, so no setting was chosen"
                continue
            ended[o] += [runs[point] for point in points[o]]
            figures = iter([validation(runs[point], plan.metric, plan.last) for point in points[o]])
            tried = [(values, [next(figures) for _ in plan.tuning_seeds]) for values in own]
            o.tried += tried
            lower = lower_of(o, ended[o])
            searches[o].tell([quality(found, lower) for _, found in tried])
    for o in outcomes:
        lower = lower_of(o, ended[o])
        qualities = [quality(found, lower) for _, found in o.tried]
        if o.why is None and not any(map(math.isfinite, qualities)):
            o.why = "no setting was chosen: each diverged on a tuning seed"
        if o.why is None:
            o.chosen = o.tried[max(range(len(qualities)), key=lambda i: qualities[i])][0]


def validation(run: Run, metric: str | None, last: int) -> Figure:
    """A run's figure on validation data."""
    if run.lost or not any(score(row) for row in run.rows):
        return "", math.nan
    name = chosen_metric([run], metric)
    held = name if name.startswith("validation_") else f"validation_{name}"
    if not any(held in row for row in run.rows):
        raise UndriftError(not_validated(name))
    return held, run.last(held, last)


def lower_of(outcome: Outcome, runs: list[Run]) -> bool:
    """Whether lower values of the figure that a cell is tuned by are better. Raises unless its runs agree on it."""
    return decided(runs, next((name for _, figures in outcome.tried for name, _ in figures if name), ""))


def quality(figures: list[Figure], lower: bool) -> float:
    """The mean over seeds, negated where lower is better; minus infinity if a run was lost."""
    if not all(math.isfinite(value) for _, value in figures):
        return -math.inf
    return (-1 if lower else 1) * mean([value for _, value in figures])


def _run(points: dict[Outcome, list[Point]], out: Path, run: Runner) -> dict[Point, Run]:
    """Run the points of some cells; those with the same settings are one run. Returns what each point's run is."""
    same: dict[str, Point] = {}
    keys = {point: json.dumps(point.settings, sort_keys=True, default=str) for own in points.values() for point in own}
    for point, key in keys.items():
        same.setdefault(key, point)
    renamed = dict(zip(same, unique(list(same.values())), strict=True))
    owners: dict[str, list[Outcome]] = {}
    for outcome, own in points.items():
        outcome.left = len(own)
        for point in own:
            owners.setdefault(renamed[keys[point]].name, []).append(outcome)

    def ended(point: Point) -> None:
        for outcome in owners[point.name]:
            outcome.left -= 1

    if not renamed:
        return {}
    labels.write(out, {name: _label([outcome.cell for outcome in own]) for name, own in owners.items()})
    runs = run(list(renamed.values()), out, ended)
    return {point: runs[renamed[key].name] for point, key in keys.items() if renamed[key].name in runs}


def _label(cells: list[Cell]) -> labels.Label:
    """The label of a run that these cells share."""
    partitions, methods = (
        dict.fromkeys(names) for names in zip(*((c.partition, c.method) for c in cells), strict=True)
    )
    return labels.Label(" = ".join(partitions), " = ".join(methods))
