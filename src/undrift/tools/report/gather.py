"""Runs as plain numbers: all that the page and the figures show, small enough to embed.

Runs that differ in their seed alone are a group, with curves of mean and deviation. What only one run can show (its
classes round by round, its clients, its partition) is kept by run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from undrift import __version__
from undrift.errors import UndriftError
from undrift.tools.compare import Run, damage, groups, read_runs
from undrift.tools.display import number
from undrift.tools.report import words
from undrift.tools.report.curves import AXES, POINTS, SHORT, SOURCES, curves
from undrift.tools.report.thin import even, plain
from undrift.training.result import finished
from undrift.training.track import BY_CLIENT

Row = dict[str, Any]

COLUMNS = 100
"""A map by round has at most so many columns."""
CLIENTS = 200
LINES = 60
"""More lines than that, one a layer say, nobody could tell apart."""
SHOWN_OTHERWISE = {*BY_CLIENT, "local_steps", "class_accuracy"}


def folders(paths: Iterable[Path]) -> list[Path]:
    """The runs meant: each path's own, or those in it, if it is a sweep's folder."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UndriftError(f"{path} is no run: name the folder that undrift run or ud.train(out=…) wrote.")
        inside = [path] if (path / "config.toml").exists() else sorted(f.parent for f in path.glob("*/config.toml"))
        if not inside:
            raise UndriftError(f"{path} is no run: neither it nor a folder in it has a config.toml.")
        found += inside
    return found


def gather(paths: Sequence[Path]) -> dict[str, Any]:
    """All that is shown of the runs in these folders. `left_out` says what is wrong with those that cannot be read."""
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
    grouped = groups(runs)
    metrics = sorted({name for run in runs for name in measured(run)}, key=lambda name: (name == "loss", name))
    told: dict[str, Any] = {
        "version": __version__,
        "made": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        "title": words.title(runs, grouped),
        "subtitle": words.subtitle(runs),
        "metrics": metrics,
        "groups": [],
        "runs": [],
        "shared": words.shared(runs),
        "partitions": partitions,
        "left_out": problems,
    }
    for name, own in grouped.items():
        members = range(len(told["runs"]), len(told["runs"]) + len(own))
        told["groups"].append(
            {"name": name, "runs": list(members), "cells": words.cells(own, metrics), **curves(own, metrics)}
            | {"settings": words.differing(own[0], told["shared"])}
        )
        told["runs"] += [shown[run.folder] for run in own]
    told["thinned"] = max(len(run.rows) for run in runs) > POINTS
    return told


def measured(run: Run) -> set[str]:
    """The names of what evaluations gave, without what they were taken on."""
    keys = {key for row in run.rows for key, value in row.items() if number(value)}
    listed = run.settings.get("metrics", [])
    named = {"loss", *([listed] if isinstance(listed, str) else listed)}
    named |= {key.removeprefix(p) for p in ("validation_", "client_") for key in keys if key.startswith(p)}
    return {name for name in named if any(form.format(name) in keys for form in SOURCES.values())} - {
        name for name in named if name.endswith(("_std", "_worst"))
    }


def details(run: Run, partitions: list[Any]) -> dict[str, Any]:
    """What is shown of one run at a time."""
    found: dict[str, Any] = {
        "folder": run.folder.name or run.folder.resolve().name,
        "seed": run.settings.get("seed"),
        "state": words.state([run]),
        "finished": finished(run.folder),
        "rounds": len(run.rows),
        "planned": run.settings.get("rounds"),
        "diverged": run.diverged,
        "stopped": run.stopped,
        "config": (run.folder / "config.toml").read_text(encoding="utf-8"),
    }
    found["layers"], found["axes"] = layers(run)
    by_class = [row for row in run.rows if "class_accuracy" in row]
    if by_class:
        shown = [by_class[i] for i in even(len(by_class), COLUMNS)]
        found["classes"] = {
            "axes": axes(run, shown),
            "accuracy": [plain(row["class_accuracy"], 3) for row in shown],
        }
    clients = next((row["by_client"] for row in reversed(run.rows) if "by_client" in row), None)
    if clients:
        found["clients"] = by_client(clients)
    file = run.folder / "partition.json"
    if file.exists():
        partition = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_number)
        if not isinstance(partition, dict) or missing(partition):
            raise ValueError("partition.json does not say who holds what")
        if partition not in partitions:
            partitions.append(partition)
        found["partition"] = partitions.index(partition)
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"partition.json has {name}")


def missing(partition: dict[str, Any]) -> bool:
    """Whether a partition lacks something that is shown of it."""
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
    """Metrics by client; of many clients as many as can be told apart, in even steps from worst to best."""
    name = next((name for name in row if name not in ("client", "name", "loss")), "loss")
    values = np.array(row[name], float)
    chosen = np.arange(len(values))
    if len(values) > CLIENTS:
        chosen = np.argsort(values, kind="stable")[even(len(values), CLIENTS)]
    found: dict[str, Any] = {"metric": name, "of": len(values), "values": plain(values[chosen], 4)}
    who = row.get("name") or [str(c) for c in row["client"]]
    return found | {"who": [who[i] for i in chosen]}


def layers(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """What parts tell by layer or by local step: FedNLR's ratios and temperatures, the rates of the first steps."""
    named: dict[str, list[str]] = {}
    for row in run.rows:
        for key, value in row.items():
            by_name = dict(enumerate(value)) if isinstance(value, list) else value
            if key in SHOWN_OTHERWISE or not isinstance(by_name, dict) or not 0 < len(by_name) <= LINES:
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
        found[key] = {"lines": lines, "values": [plain(line) for line in zip(*values, strict=True)]}
    return found, axes(run, shown)


def axes(run: Run, shown: list[Row]) -> dict[str, Any]:
    """What the curves of one run may be drawn over, at these rows."""
    seconds = dict(zip((row["round"] for row in run.rows), np.cumsum([r["seconds"] for r in run.rows]), strict=True))
    found = {name: plain([row[key] for row in shown]) for name, key in AXES.items() if name != "seconds"}
    return found | {"seconds": plain([seconds[row["round"]] for row in shown])}
