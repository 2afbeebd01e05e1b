"""What a comparison is given: folders of runs or of such folders, with or without a label, and experiment files."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from undrift.errors import UndriftError, listed, quoted
from undrift.tools.compare import Run, groups
from undrift.tools.study.run import FINAL
from undrift.training.run_folder import RUN, STOPPED, finished, recorded


@dataclass
class Given:
    """The arguments of `undrift compare`, understood."""

    folders: dict[Path, str | None] = field(default_factory=dict)
    """Runs, with the label of each, if it has one."""
    files: list[tuple[Path, str | None]] = field(default_factory=list)
    """Experiment files to run."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What is left out, and why."""


def understand(arguments: Sequence[str]) -> Given:
    """Find the runs and the experiment files among the arguments.

    Folders that are no run and contain none, unfinished runs and files that are no experiment files are skipped, as
    `runs/*` may name them, unless nothing else is left.

    Raises:
        UndriftError: If nothing is left, or if a path does not exist.
    """
    given = Given()
    for label, path in (pair for argument in arguments for pair in split(argument)):
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


def split(argument: str) -> list[tuple[str | None, Path]]:
    """The label and the paths of `FedAvg=runs/a*`. A path that exists is a path, whatever is in its name."""
    label, equals, path = argument.partition("=")
    if not (equals and label and path) or os.path.lexists(argument):
        return [(None, Path(argument))]
    found = [] if os.path.lexists(path) else sorted(glob.glob(path))  # shells expand patterns only without a label
    return [(label, Path(name)) for name in found or [path]]


def runs_in(path: Path) -> list[Path]:
    """The folder itself, if it is a run, or else the runs in it: those of a sweep, or of a study on fresh seeds."""
    if (path / "config.toml").exists() or (path / "metrics.jsonl").exists():
        return [path]
    found = path.glob("*/config.toml") if not (path / FINAL).is_dir() else path.glob(f"{FINAL}/*/config.toml")
    return sorted(file.parent for file in found)


def describe(skipped: Mapping[str, str]) -> str:
    """One line about everything that is left out."""
    by_reason: dict[str, list[str]] = {}
    for name, why in skipped.items():
        by_reason.setdefault(why, []).append(name)
    return "skipped: " + "; ".join(f"{listed(names, 3)} ({why})" for why, names in by_reason.items())


def grouped(runs: Sequence[Run], labels: Mapping[Path, str | None]) -> dict[str, list[Run]]:
    """Runs under their labels; those without one by what tells them apart.

    Raises:
        UndriftError: If runs under one label differ in more than their seeds.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        if label := labels.get(run.folder):
            found.setdefault(label, []).append(run)
    for label, own in found.items():
        if len(several := groups(own)) > 1:
            names = " and ".join(quoted(name) for name in list(several)[:2])
            raise UndriftError(
                f"The runs labelled {label!r} differ in more than their seeds: {names}. Give them different labels."
            )
    for name, own in groups([run for run in runs if not labels.get(run.folder)]).items():
        if name in found:
            raise UndriftError(f"The label {name!r} is also the name of runs without a label; choose another.")
        found[name] = own
    return found


def mismatches(by_name: Mapping[str, Sequence[Run]]) -> list[str]:
    """Sentences about what makes groups hard to compare: other seeds, a seed twice, other data."""
    said = []
    seeds = {name: sorted(run.seed for run in runs) for name, runs in by_name.items()}
    twice = [name for name, own in seeds.items() if len(set(own)) < len(own)]
    if twice:
        said.append(
            f"{listed(twice, 3)}: a seed occurs twice, so the standard deviation is over fewer seeds than runs."
        )
    if len({frozenset(own) for own in seeds.values()}) > 1:
        some = "; ".join(f"{name}: {', '.join(map(str, dict.fromkeys(own)))}" for name, own in list(seeds.items())[:3])
        said.append(f"the groups have different seeds ({some}), and so different partitions and random draws.")
    runs = [run for own in by_name.values() for run in own]
    keys = sorted({key for run in runs for key in run.settings if key.startswith("data.")} - ELSEWHERE)
    differing = [key for key in keys if _differ(runs, partial(_setting, key))]
    if differing:
        said.append(f"the groups differ in {listed(differing, 3)}, so their results are on different data.")
    elif _differ(runs, _digests):
        said.append("the groups were trained or tested on different data, although their settings are the same.")
    return said


ELSEWHERE = {"data.data_dir", "data.workers"}
"""Keys that say where data are, not what they are."""


def _differ(runs: Sequence[Run], value: Callable[[Run], str | None]) -> bool:
    """Whether runs with the same seed have different values. None is unknown."""
    found: dict[int, set[str]] = {}
    for run in runs:
        if (own := value(run)) is not None:
            found.setdefault(run.seed, set()).add(own)
    return any(len(own) > 1 for own in found.values())


def _setting(key: str, run: Run) -> str:
    return str(run.settings.get(key))


def _digests(run: Run) -> str | None:
    """The checksums of a run's data, from its `run.json`; None if they are not known."""
    known = recorded(run.folder) if (run.folder / RUN).exists() else None
    identity = known.get("identity", {}) if known else {}
    return str([identity.get(f"{kind} data") for kind in ("training", "test")]) if identity else None
