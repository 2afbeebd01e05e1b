"""Collect everything that the page and the figures show, as JSON that is small enough to embed: the payload.

Runs that differ only in their seed form a group, with curves of mean and standard deviation. Details of a single run
(accuracy per class and round, clients, partition) are listed by run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from undrift import __version__
from undrift.columns import COLUMNS
from undrift.errors import UndriftError
from undrift.files import parse_json, read_text
from undrift.tools.compare import Run, damage, groups, read_runs
from undrift.tools.display import number
from undrift.tools.report import summary
from undrift.tools.report.curves import AXES, POINTS, SHORT, SOURCES, curves
from undrift.tools.report.downsample import even, rounded
from undrift.tools.report.names import named
from undrift.tools.report.records import longest_updates, records
from undrift.tools.study.paths import runs_in
from undrift.training.run_folder import finished
from undrift.training.track import BY_CLIENT

Row = dict[str, Any]

PLACES = 100
"""The most columns of a heat map by round."""
CLIENTS = 200
LINES = 60
"""The most lines in one chart, for example one per layer: more could not be told apart."""
MAPS = {"layer_agreement": 200}
"""Columns by layer that are drawn as a map, with the most layers of each."""
LABELS = {name: column.label for name, column in COLUMNS.items() if column.label}
"""What charts call columns of the history, if not by their names."""
SHOWN_OTHERWISE = {*BY_CLIENT, "local_steps", "class_accuracy"}


def folders(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs: each path itself or, for the folder of a sweep or a study, those in it."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UndriftError(f"{path} is not a run. Name a folder that undrift run or ud.train(out=…) has written.")
        inside = runs_in(path)
        if not inside:
            raise UndriftError(f"{path} is not a run: neither it nor a folder in it has a config.toml.")
        found += inside
    return found


def gather(paths: Sequence[Path], labels: Mapping[Path, str] | None = None) -> dict[str, Any]:
    """The payload of the runs in these folders; `left_out` lists problems of runs that cannot be read.

    With `labels`, runs of one label form a group of that name.
    """
    runs, problems = read_runs(paths, unfinished=True)
    partitions: list[Any] = []
    shown: dict[Path, dict[str, Any]] = {}
    for run in runs:
        try:
            with damage(run.folder, "its history or partition.json"):
                shown[run.folder] = details(run, partitions)
        except UndriftError as error:
            problems.append(str(error))
    runs = [run for run in runs if run.folder in shown]
    if not runs:
        raise UndriftError(problems[0])
    grouped = named(groups(runs)) if labels is None else labelled(runs, labels)
    metrics = sorted({name for run in runs for name in measured(run)}, key=lambda name: (name == "loss", name))
    payload: dict[str, Any] = {
        "version": __version__,
        "made": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        "title": summary.title(runs, grouped),
        "subtitle": summary.subtitle(runs),
        "metrics": metrics,
        "labels": LABELS,
        "drift": any(run.settings.get("drift") for run in runs),
        "groups": [],
        "runs": [],
        "shared": summary.shared(runs),
        "partitions": partitions,
        "left_out": problems,
    }
    for name, own in grouped.items():
        members = range(len(payload["runs"]), len(payload["runs"]) + len(own))
        payload["groups"].append(
            {"name": name, "runs": list(members), "cells": summary.cells(own, metrics), **curves(own, metrics)}
            | {"figures": summary.figures(own, metrics), "settings": summary.differing(own[0], payload["shared"])}
        )
        payload["runs"] += [shown[run.folder] | {"records": records(run, metrics)} for run in own]
    payload["downsampled"] = max(len(run.rows) for run in runs) > POINTS
    return payload


def labelled(runs: Sequence[Run], labels: Mapping[Path, str]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(labels[run.folder], []).append(run)
    return found


def measured(run: Run) -> set[str]:
    """The names of all metrics evaluated, without the prefix of the data that they were evaluated on."""
    keys = {key for row in run.rows for key, value in row.items() if number(value)}
    named = {"loss", *run.metrics}
    named |= {key.removeprefix(p) for p in ("validation_", "client_") for key in keys if key.startswith(p)}
    return {name for name in named if any(form.format(name) in keys for form in SOURCES.values())} - {
        name for name in named if name.endswith(("_std", "_worst"))
    }


def details(run: Run, partitions: list[Any]) -> dict[str, Any]:
    """The details of one run."""
    found: dict[str, Any] = {
        "folder": run.folder.name or run.folder.resolve().name,
        "seed": run.settings.get("seed"),
        "state": summary.state([run]),
        "finished": finished(run.folder),
        "rounds": len(run.rows),
        "planned": run.settings.get("rounds"),
        "mark": run.mark,
        "nonfinite": run.nonfinite,
        "diverged": run.diverged.what if run.diverged else None,
        "stopped": run.stopped,
        "config": read_text(run.folder / "config.toml"),
    }
    found["layers"], found["axes"] = layers(run)
    by_class = [row for row in run.rows if "class_accuracy" in row]
    if by_class:
        shown = [by_class[i] for i in even(len(by_class), PLACES)]
        found["classes"] = {
            "axes": axes(run, shown),
            "accuracy": [rounded(row["class_accuracy"], 3) for row in shown],
        }
    clients = next((row["by_client"] for row in reversed(run.rows) if "by_client" in row), None)
    if clients:
        found["clients"] = by_client(clients)
    file = run.folder / "partition.json"
    if file.exists():
        partition = parse_json(read_text(file), parse_constant=_no_number)
        if not isinstance(partition, dict) or missing(partition):
            raise ValueError("partition.json does not describe a partition")
        if partition not in partitions:
            partitions.append(partition)
        found["partition"] = partitions.index(partition)
    if norms := longest_updates(run, names_of(clients, partitions, found.get("partition"))):
        found["norms"] = norms
    return found


def names_of(clients: dict[str, list[Any]] | None, partitions: list[Any], own: int | None) -> dict[str, str]:
    """Clients' names by id, as far as the history or the partition has them."""
    partition = partitions[own] if own is not None else {}
    found = dict(zip(partition.get("listed", ()), partition.get("names", ()), strict=False))
    if clients and "name" in clients:
        found |= dict(zip(clients["client"], clients["name"], strict=False))
    return {str(client): str(name) for client, name in found.items()}


def _no_number(name: str) -> None:
    raise ValueError(f"partition.json has {name}")


def missing(partition: dict[str, Any]) -> bool:
    """Whether a partition lacks something that is shown."""
    counts = ("clients", "empty", "samples", "smallest", "median", "largest")
    lists = ("listed", "sizes", *(("classes", "counts") if "counts" in partition else ()))
    return not (
        all(number(partition.get(key)) for key in counts)
        and all(isinstance(partition.get(key), list) for key in lists)
        and len(partition["listed"]) == len(partition["sizes"])
        and np.isfinite(np.array(partition["sizes"], float)).all()
        and ("counts" not in partition or np.array(partition["counts"], float).ndim == 2)
    )


def by_client(row: dict[str, list[Any]]) -> dict[str, Any]:
    """A metric by client; of more than `CLIENTS`, at evenly spaced ranks from worst to best."""
    name = next((name for name in row if name not in ("client", "name", "loss")), "loss")
    values = np.array(row[name], float)
    chosen = np.arange(len(values))
    if len(values) > CLIENTS:
        chosen = np.argsort(values, kind="stable")[even(len(values), CLIENTS)]
    found: dict[str, Any] = {"metric": name, "of": len(values), "values": rounded(values[chosen], 4)}
    who = row.get("name") or [str(c) for c in row["client"]]
    return found | {"who": [who[i] for i in chosen]}


def layers(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """What parts record by layer or local step, such as FedNLR's ratios, or the rates of the first steps; and axes."""
    named: dict[str, list[str]] = {}
    for row in run.rows:
        for key, value in row.items():
            by_name = dict(enumerate(value)) if isinstance(value, list) else value
            if key in SHOWN_OTHERWISE or not isinstance(by_name, dict) or not 0 < len(by_name) <= MAPS.get(key, LINES):
                continue
            if all(map(number, by_name.values())):
                named.setdefault(key, [str(name) for name in by_name])
    shown = [run.rows[i] for i in even(len(run.rows), SHORT)] if named else []
    found = {}
    for key, lines in named.items():
        none = [None] * len(lines)
        by_round = [row.get(key, none) for row in shown]
        values = [list(value.values()) if isinstance(value, dict) else value for value in by_round]
        values = [value if len(value) == len(lines) else none for value in values]
        found[key] = {"lines": lines, "values": [rounded(line) for line in zip(*values, strict=True)]}
    return found, axes(run, shown)


def axes(run: Run, shown: list[Row]) -> dict[str, Any]:
    """The x axes for the curves of one run, at these rows."""
    seconds = dict(zip((row["round"] for row in run.rows), np.cumsum([r["seconds"] for r in run.rows]), strict=True))
    found = {name: rounded([row[key] for row in shown]) for name, key in AXES.items() if name != "seconds"}
    return found | {"seconds": rounded([seconds[row["round"]] for row in shown])}
