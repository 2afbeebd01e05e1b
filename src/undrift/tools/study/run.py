"""A study, run: tune each method on each partition by validation data, then run the chosen settings on fresh seeds."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from undrift.errors import UndriftError, listed, nearest
from undrift.losses import get_loss
from undrift.metrics import METRICS, get_metrics
from undrift.metrics.classes import ConfusionMatrix
from undrift.tools.compare import choose_metric, require_direction, validation_name
from undrift.tools.config import Document, checked, put
from undrift.tools.experiment import about, loaded, refuse_undecided, understood
from undrift.tools.live_table import LiveTable
from undrift.tools.parallel import MOST, Parallel, Point, run_in_table, unique_names, word
from undrift.tools.plugins import import_plugins
from undrift.tools.run_folders import FINAL, TUNING, Label, RunFolder, main_figure, write_labels
from undrift.tools.statistics import mean
from undrift.tools.study.file import Cell, Study
from undrift.tools.study.search import Search, Values, new_search
from undrift.tools.tables import setting_text

if TYPE_CHECKING:
    from rich.table import Table

Figure = tuple[str, float]
"""The name of a run's figure, and its value; NaN if the run was lost."""


@dataclass(eq=False)
class Outcome:
    """The progress and the results of a cell."""

    cell: Cell
    tried: list[tuple[Values, list[Figure]]] = field(default_factory=list)
    """The settings tried, and the validation figure of each tuning seed."""
    chosen: Values | None = None
    why: str | None = None
    """Why there is no chosen setting, or not every run."""
    runs: list[RunFolder] = field(default_factory=list)
    """Those on fresh seeds."""
    left: int = 0
    """How many runs of the current phase have not ended."""


Runner = Callable[[Sequence[Point], Path, Callable[[Point], None]], dict[str, RunFolder]]
"""Runs points in a folder, and calls a function with each that is done. Returns the runs that finished or stopped, by
the points' names. `TableRunner` is one."""


# ---- before the first run -------------------------------------------------------------------------------------------


def prepare(study: Study, where: str) -> Study:
    """Check the settings that the study will run; of a range, those that are tried first.

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
    words = [label_word(label) for label in (cell.partition, cell.method) if label]
    choices = {key: value for key, value in values.items() if key not in cell.fixed} | {"seed": seed}
    name = ",".join([*words, *(f"{key}={word(value)}" for key, value in choices.items())])
    return Point(name, cell.chosen(values, seed, where))


def label_word(label: str) -> str:
    """A label as it appears in a folder's name; with a digest, if it has letters that the name cannot have."""
    plain = word(label)
    lost = not re.fullmatch(r"[\x20-\x7e]*", label)
    return f"{plain}-{hashlib.sha256(label.encode()).hexdigest()[:6]}" if lost else plain


CLIENTS = ("client_", "tuned_")
"""Prefixes of columns that are measured on clients' own data."""


def with_metric(study: Study, where: str) -> Study:
    """The study, with its metric added to the `metrics` of every run that would not measure it.

    Raises:
        UndriftError: If settings are to be tuned by something that is not measured on validation data.
    """
    metric = study.plan.metric
    if metric is None:
        return study
    if study.tuned and metric.startswith(CLIENTS):
        raise UndriftError(f"{where}: {_not_validated(metric)}")
    bare = metric.removeprefix("validation_")
    if metric.startswith(CLIENTS):
        bare = re.sub(r"_(worst|std)$", "", metric.partition("_")[2])
    if isinstance(METRICS.get(bare), ConfusionMatrix):
        raise UndriftError(f"{where}: study.metric is {metric!r}, which is not a number; choose another metric.")
    if bare == "loss":
        return study
    defaults: dict[str, list[str]] = {}
    return replace(study, cells=[_measuring(cell, study, bare, defaults, where) for cell in study.cells])


def _not_validated(metric: str) -> str:
    return (
        f"The study's metric is {metric!r}, which is not measured on validation data, so it cannot be used to choose "
        "settings; choose another, such as accuracy or loss."
    )


def _measuring(cell: Cell, study: Study, bare: str, defaults: dict[str, list[str]], where: str) -> Cell:
    """The cell with settings that measure the metric. `defaults` keeps the default metrics of each data set."""
    if "metrics" in cell.choices:
        return cell
    given = cell.settings.get("metrics")
    if given is None:
        key = str(cell.settings.get("data"))
        if key not in defaults:
            defaults[key] = _default(cell, study, where)
        names = defaults[key]
    else:
        names = given if isinstance(given, list) else [given]
    if bare in names:
        return cell
    if bare in METRICS and all(name in METRICS for name in names):
        return replace(cell, settings=put(cell.settings, "metrics", [*names, bare], where))
    if not study.tuned:  # it may be a column that a part adds to the history
        return cell
    known = [*names, *METRICS, "loss"]
    close = nearest(bare, known)
    hint = f"Did you mean {close!r}?" if close else f"Known: {listed(dict.fromkeys(known), 40)}."
    raise UndriftError(
        f"{where}: study.metric is {study.plan.metric!r}, which is not among the metrics of the runs. {hint}"
    )


def _default(cell: Cell, study: Study, where: str) -> list[str]:
    """The metrics of the cell's data, which are measured if the file names none."""
    values = {key: own[0] if isinstance(own, list) else own.low for key, own in cell.choices.items()}
    settings: Document = cell.chosen(values, study.plan.seeds[0], where)
    with about(where):
        experiment = checked(settings, where)
        import_plugins(experiment.imports)
        task = loaded(experiment).task
        return list(get_metrics(task.metrics, get_loss(task.loss if experiment.loss is None else experiment.loss)))


# ---- both phases ----------------------------------------------------------------------------------------------------


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
    ended: dict[Outcome, list[RunFolder]] = {outcome: [] for outcome in outcomes}
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
            each = iter([validation_figure(runs[point], plan.metric, plan.last) for point in points[o]])
            tried = [(values, [next(each) for _ in plan.tuning_seeds]) for values in own]
            o.tried += tried
            lower = lower_of(o, ended[o])
            searches[o].tell([quality(figures, lower) for _, figures in tried])
    for o in outcomes:
        lower = lower_of(o, ended[o])
        qualities = [quality(figures, lower) for _, figures in o.tried]
        if o.why is None and not any(map(math.isfinite, qualities)):
            o.why = "no setting was chosen: each diverged on a tuning seed"
        if o.why is None:
            o.chosen = o.tried[max(range(len(qualities)), key=lambda i: qualities[i])][0]


def validation_figure(run: RunFolder, metric: str | None, last: int) -> Figure:
    """A run's figure on validation data."""
    if run.lost or not any(main_figure(row) for row in run.rows):
        return "", math.nan
    name = choose_metric([run], metric)
    validated = validation_name(name)
    if not any(validated in row for row in run.rows):
        raise UndriftError(_not_validated(name))
    return validated, run.last(validated, last)


def lower_of(outcome: Outcome, runs: list[RunFolder]) -> bool:
    """Whether lower values of the figure that a cell is tuned by are better. Raises unless its runs agree on it."""
    return require_direction(runs, next((name for _, figures in outcome.tried for name, _ in figures if name), ""))


def quality(figures: list[Figure], lower: bool) -> float:
    """The mean over seeds, negated where lower is better; minus infinity if a run was lost."""
    if not all(math.isfinite(value) for _, value in figures):
        return -math.inf
    return (-1 if lower else 1) * mean([value for _, value in figures])


def _run(points: dict[Outcome, list[Point]], out: Path, run: Runner) -> dict[Point, RunFolder]:
    """Run the points of some cells; those with the same settings are one run. Returns what each point's run is."""
    same: dict[str, Point] = {}
    keys = {point: json.dumps(point.settings, sort_keys=True, default=str) for own in points.values() for point in own}
    for point, key in keys.items():
        same.setdefault(key, point)
    renamed = dict(zip(same, unique_names(list(same.values())), strict=True))
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
    write_labels(out, {name: _label([outcome.cell for outcome in own]) for name, own in owners.items()})
    runs = run(list(renamed.values()), out, ended)
    return {point: runs[renamed[key].name] for point, key in keys.items() if renamed[key].name in runs}


def _label(cells: list[Cell]) -> Label:
    """The label of a run that these cells share."""
    partitions, methods = (
        dict.fromkeys(names) for names in zip(*((c.partition, c.method) for c in cells), strict=True)
    )
    return Label(" = ".join(partitions), " = ".join(methods))


# ---- progress -------------------------------------------------------------------------------------------------------


def progress_table(outcomes: list[Outcome]) -> Table:
    """Methods by partitions, with how far each is."""
    from rich.table import Table

    partitions = list(dict.fromkeys(outcome.cell.partition for outcome in outcomes))
    cells = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", *partitions):
        cells.add_column(name)
    for method in dict.fromkeys(outcome.cell.method for outcome in outcomes):
        own = {outcome.cell.partition: outcome for outcome in outcomes if outcome.cell.method == method}
        cells.add_row(method, *(_state(own[name]) for name in partitions))
    return cells


def _state(outcome: Outcome) -> str:
    """What a cell is doing."""
    left = f"{outcome.left} run{'s' if outcome.left > 1 else ''} left" if outcome.left else ""
    if outcome.why:
        return outcome.why
    if outcome.chosen is None:
        tried = f"{len(outcome.tried)} tried" if outcome.tried else ""
        return ", ".join(filter(None, ("tuning", tried, left))) if outcome.cell.tuned else "waiting"
    return ", ".join(filter(None, (setting_text(outcome.chosen), left or "done")))


class TableRunner:
    """Runs the points of a study, and shows them in its live table."""

    def __init__(self, table: LiveTable, where: str, how: Parallel) -> None:
        self.table, self.where, self.how = table, where, how

    def __call__(self, points: Sequence[Point], folder: Path, ended: Callable[[Point], None]) -> dict[str, RunFolder]:
        if not self.table.console.is_terminal:
            what = "to choose settings" if folder.name == TUNING else "with the chosen settings, on fresh seeds"
            self.table.say(f"{len(points)} runs {what}")
        runs, _ = run_in_table(self.table, points, folder, self.where, self.how, ended, "study")
        return {run.folder.name: run for run in runs}
