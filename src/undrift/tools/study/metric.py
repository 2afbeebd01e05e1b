"""The metric that a study tunes and reports by: whether its runs will measure it, checked before the first one."""

from __future__ import annotations

import re
from dataclasses import replace

from undrift.errors import UndriftError, listed, nearest
from undrift.losses import get_loss
from undrift.metrics import METRICS, get_metrics
from undrift.metrics.classes import ConfusionMatrix
from undrift.tools.config import Document, checked, put
from undrift.tools.experiment import about, loaded
from undrift.tools.plugins import import_plugins
from undrift.tools.study.file import Cell, Study

CLIENTS = ("client_", "tuned_")
"""Prefixes of columns that are measured on clients' own data."""


def with_metric(study: Study, where: str) -> Study:
    """The study, with its metric added to `metrics` of every run that would not measure it.

    Raises:
        UndriftError: If settings are to be tuned by something that is not measured on validation data.
    """
    metric = study.plan.metric
    if metric is None:
        return study
    if study.tuned and metric.startswith(CLIENTS):
        raise UndriftError(f"{where}: {not_validated(metric)}")
    bare = metric.removeprefix("validation_")
    if metric.startswith(CLIENTS):
        bare = re.sub(r"_(worst|std)$", "", metric.partition("_")[2])
    if isinstance(METRICS.get(bare), ConfusionMatrix):
        raise UndriftError(f"{where}: study.metric is {metric!r}, which is not a number; choose another metric.")
    if bare == "loss":
        return study
    defaults: dict[str, list[str]] = {}
    return replace(study, cells=[_measuring(cell, study, bare, defaults, where) for cell in study.cells])


def not_validated(metric: str) -> str:
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
