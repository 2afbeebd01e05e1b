"""The payload: everything that the page and the figures show, as JSON that is small enough to embed.

Runs that differ only in their seed form a group, with curves of mean and standard deviation. Details of a single run
(accuracy per class and round, clients, partition) are listed by run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from undrift import __version__
from undrift.columns import COLUMNS
from undrift.errors import UndriftError
from undrift.files import parse_json, read_text
from undrift.tools.compare import group_runs
from undrift.tools.report import summary
from undrift.tools.report.curves import (
    AXES,
    POINTS,
    SHORT,
    SOURCES,
    curves,
    even_positions,
    longest_updates,
    records,
    round_digits,
)
from undrift.tools.run_folders import RunFolder, read_runs, reporting_damage
from undrift.training.history import number
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


def gather(paths: Sequence[Path], labels: Mapping[Path, str] | None = None) -> dict[str, Any]:
    """The payload of the runs in these folders; `left_out` lists problems of runs that cannot be read.

    With `labels`, runs of one label form a group of that name.
    """
    runs, problems = read_runs(paths, unfinished=True)
    partitions: list[Any] = []
    shown: dict[Path, dict[str, Any]] = {}
    for run in runs:
        try:
            with reporting_damage(run.folder, "its history or partition.json"):
                shown[run.folder] = details(run, partitions)
        except UndriftError as error:
            problems.append(str(error))
    runs = [run for run in runs if run.folder in shown]
    if not runs:
        raise UndriftError(problems[0])
    grouped = summary.name_groups(group_runs(runs)) if labels is None else group_by_label(runs, labels)
    metrics = sorted({name for run in runs for name in metric_names(run)}, key=lambda name: (name == "loss", name))
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
        "shared": summary.shared_settings(runs),
        "partitions": partitions,
        "left_out": problems,
    }
    for name, own in grouped.items():
        members = range(len(payload["runs"]), len(payload["runs"]) + len(own))
        payload["groups"].append(
            {"name": name, "runs": list(members), "cells": summary.cells(own, metrics), **curves(own, metrics)}
            | {
                "figures": summary.figures(own, metrics),
                "settings": summary.differing_settings(own[0], payload["shared"]),
            }
        )
        payload["runs"] += [shown[run.folder] | {"records": records(run, metrics)} for run in own]
    payload["downsampled"] = max(len(run.rows) for run in runs) > POINTS
    return payload


def group_by_label(runs: Sequence[RunFolder], labels: Mapping[Path, str]) -> dict[str, list[RunFolder]]:
    by_label: dict[str, list[RunFolder]] = {}
    for run in runs:
        by_label.setdefault(labels[run.folder], []).append(run)
    return by_label


def metric_names(run: RunFolder) -> set[str]:
    """The names of all metrics evaluated, without the prefix of the data that they were evaluated on."""
    keys = {key for row in run.rows for key, value in row.items() if number(value)}
    named = {"loss", *run.metrics}
    named |= {key.removeprefix(p) for p in ("validation_", "client_") for key in keys if key.startswith(p)}
    return {name for name in named if any(form.format(name) in keys for form in SOURCES.values())} - {
        name for name in named if name.endswith(("_std", "_worst"))
    }


def details(run: RunFolder, partitions: list[Any]) -> dict[str, Any]:
    """The details of one run."""
    content: dict[str, Any] = {
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
    content["layers"], content["axes"] = layers(run)
    by_class = [row for row in run.rows if "class_accuracy" in row]
    if by_class:
        shown = [by_class[i] for i in even_positions(len(by_class), PLACES)]
        content["classes"] = {
            "axes": axes(run, shown),
            "accuracy": [round_digits(row["class_accuracy"], 3) for row in shown],
        }
    clients = next((row["by_client"] for row in reversed(run.rows) if "by_client" in row), None)
    if clients:
        content["clients"] = by_client(clients)
    file = run.folder / "partition.json"
    if file.exists():
        partition = parse_json(read_text(file), parse_constant=_no_number)
        if not isinstance(partition, dict) or is_incomplete(partition):
            raise ValueError("partition.json does not describe a partition")
        if partition not in partitions:
            partitions.append(partition)
        content["partition"] = partitions.index(partition)
    if norms := longest_updates(run, names_of(clients, partitions, content.get("partition"))):
        content["norms"] = norms
    return content


def names_of(clients: dict[str, list[Any]] | None, partitions: list[Any], own: int | None) -> dict[str, str]:
    """Clients' names by id, as far as the history or the partition has them."""
    partition = partitions[own] if own is not None else {}
    names = dict(zip(partition.get("listed", ()), partition.get("names", ()), strict=False))
    if clients and "name" in clients:
        names |= dict(zip(clients["client"], clients["name"], strict=False))
    return {str(client): str(name) for client, name in names.items()}


def _no_number(name: str) -> None:
    raise ValueError(f"partition.json has {name}")


def is_incomplete(partition: dict[str, Any]) -> bool:
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
        chosen = np.argsort(values, kind="stable")[even_positions(len(values), CLIENTS)]
    shown: dict[str, Any] = {"metric": name, "of": len(values), "values": round_digits(values[chosen], 4)}
    who = row.get("name") or [str(c) for c in row["client"]]
    return shown | {"who": [who[i] for i in chosen]}


def layers(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """What parts record by layer or local step, such as FedNLR's ratios, or the rates of the first steps; and axes."""
    named: dict[str, list[str]] = {}
    for row in run.rows:
        for key, value in row.items():
            by_name = dict(enumerate(value)) if isinstance(value, list) else value
            if key in SHOWN_OTHERWISE or not isinstance(by_name, dict) or not 0 < len(by_name) <= MAPS.get(key, LINES):
                continue
            if all(map(number, by_name.values())):
                named.setdefault(key, [str(name) for name in by_name])
    shown = [run.rows[i] for i in even_positions(len(run.rows), SHORT)] if named else []
    by_key = {}
    for key, lines in named.items():
        none = [None] * len(lines)
        by_round = [row.get(key, none) for row in shown]
        values = [list(value.values()) if isinstance(value, dict) else value for value in by_round]
        values = [value if len(value) == len(lines) else none for value in values]
        by_key[key] = {"lines": lines, "values": [round_digits(line) for line in zip(*values, strict=True)]}
    return by_key, axes(run, shown)


def axes(run: RunFolder, shown: list[Row]) -> dict[str, Any]:
    """The x axes for the curves of one run, at these rows."""
    seconds = dict(zip((row["round"] for row in run.rows), np.cumsum([r["seconds"] for r in run.rows]), strict=True))
    by_axis = {name: round_digits([row[key] for row in shown]) for name, key in AXES.items() if name != "seconds"}
    return by_axis | {"seconds": round_digits([seconds[row["round"]] for row in shown])}
