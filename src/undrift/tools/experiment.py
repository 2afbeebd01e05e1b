"""From an experiment file to a run: the objects that its settings describe, training, and resuming."""

from __future__ import annotations

import logging
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from undrift import models
from undrift.columns import direction, directions
from undrift.data.dataset import FederatedDataset
from undrift.data.load import load
from undrift.data.partition import parse_partition
from undrift.errors import UndriftError, first_line, listed, quoted
from undrift.expressions import parse_number
from undrift.files import read_text
from undrift.method.faults import Faults
from undrift.method.local import Local
from undrift.method.parse import parse_local, parse_method
from undrift.method.part import Method
from undrift.metrics import METRICS
from undrift.metrics.classes import ConfusionMatrix
from undrift.models import parse_model
from undrift.tools.config import Document, Experiment, Section, checked, override, read
from undrift.tools.plugins import import_plugins
from undrift.training import nonfinite
from undrift.training.checkpoint import parse_interval
from undrift.training.config_writer import flatten
from undrift.training.early_stopping import as_rule
from undrift.training.loop import train_with
from undrift.training.result import Result
from undrift.training.run_folder import RUN, recorded
from undrift.training.settings import KEYS, ROLES, Settings
from undrift.training.track import find

T = TypeVar("T")
log = logging.getLogger("undrift")


def run(
    experiment: Experiment,
    out: str | Path | None,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    allow_version_change: bool = False,
    progress: bool = False,
    force: bool = False,
) -> Result:
    """Load the data, train, and write the run's folder. With `force`, a run that is there is replaced."""
    given = arguments(experiment)
    given |= {"allow_version_change": allow_version_change, "on_round": on_round, "progress": progress}
    try:
        return train_with(Settings(**given, out=out, resume=resume, replace=force))
    except OSError as error:  # a full disk is found out while writing, when Python no longer names the file
        if error.errno is not None and error.filename is None and out is not None:
            error.filename = str(out)
        raise
    except SafetensorError as error:
        raise OSError(None, f"a file of the run cannot be read or written ({first_line(error)})", str(out)) from error


def understood(experiment: Experiment) -> tuple[Method, Local, Faults | None]:
    """Parse the settings' strings, before any data are loaded. Raises `UndriftError` that names the key."""
    import_plugins(experiment.imports)
    with about("method"):
        method = parse_method(experiment.method)
    with about("data.partition"):
        parse_partition(experiment.data.partition)
    with about("model"):
        models.known(parse_model(experiment.model)[0])
    with about("checkpoint_every"):
        parse_interval(experiment.checkpoint_every)
    with about("on_nonfinite"):
        nonfinite.check_on_nonfinite(experiment.on_nonfinite)
    with about("stop_when"):
        as_rule(experiment.stop_when)
    with about("track"):
        find(experiment.track)
    local = build_section(Local, "local", experiment.local, parse_local)
    return method, local, build_section(Faults, "faults", experiment.faults, parse_fault) if experiment.faults else None


def parse_fault(key: str, value: Any) -> Any:
    return parse_number(value) if isinstance(value, str) else value


def build_section(kind: Callable[..., T], name: str, section: Section, parsed: Callable[[str, Any], Any]) -> T:
    """The object that a section describes; `parsed` turns a key's value into an argument."""
    values: dict[str, Any] = {}
    for key, value in section.model_dump().items():
        with about(f"{name}.{key}"):
            values[key] = parsed(key, value)
    with about(name):
        return kind(**values)


def arguments(experiment: Experiment, data: FederatedDataset | None = None) -> dict[str, Any]:
    """What `ud.train` is given; `data` take the place of those that the file names."""
    method, local, faults = understood(experiment)
    data = loaded(experiment) if data is None else data
    made = {"data": data, "local": local, "method": method, "faults": faults}
    rest = {name: value for name, value in experiment if ROLES[name].argument and name not in made}
    return {**rest, **made, "notes": {"imports": experiment.imports}}


def refuse_undecided(experiment: Experiment, where: str, metric: str | None = None) -> None:
    """Raise if settings are to be chosen by a metric of which nothing says whether lower or higher values are better.

    Without a `metric`, they are chosen by the first of the experiment's that is a number.
    """
    listed = experiment.metrics or ()
    names = [listed] if isinstance(listed, str) else [str(name) for name in listed]
    by = metric or next((name for name in names if not isinstance(METRICS.get(name), ConfusionMatrix)), "loss")
    if direction(by, directions(METRICS)) is None and (bare := by.removeprefix("validation_")) in METRICS:
        raise UndriftError(
            f"{where}: settings are chosen by {quoted(by)}, and nothing says whether lower or higher values of it are "
            f"better. Set the attribute higher_is_better of what is registered as {quoted(bare)} to True or False."
        )


def loaded(experiment: Experiment, **other: Any) -> FederatedDataset:
    """The data that the file names, with `other` values of keys of its section."""
    asked = experiment.data.model_dump() | other
    if "partition" not in experiment.data.model_fields_set | other.keys():
        asked["partition"] = None  # so that data that are split into clients already keep them
    with about("data"):
        return load(**{**asked, "seed": experiment.seed if asked["seed"] is None else asked["seed"]})


FREE = {key for key, role in KEYS.items() if role.resume in ("free", "length")}
"""What may be changed in the `config.toml` of a run that is to be resumed. `ud.train` refuses too few rounds."""
DIGITS = {key for key, role in KEYS.items() if role.resume == "digits"}
"""What may change a run's last digits, and nothing more."""


def settings_to_resume(folder: Path, allow_version_change: bool = False) -> tuple[Document, str]:
    """The settings to resume a run with, and its `config.toml`, of which `run.json` has a copy.

    Raises `UndriftError` if a setting that decides the result has been changed in the file.
    """
    file, known = folder / "config.toml", recorded(folder) if (folder / RUN).exists() else None
    copy = known.get("config") if known else None
    if copy is None:
        return read(folder), read_text(file, "utf-8-sig")
    before = flatten(tomllib.loads(copy))
    try:
        given = read(folder)
        if missing := before.keys() - flatten(given).keys() - {"stop_when"}:
            raise UndriftError(f"{file} lacks the key {min(missing)!r}.")
    except UndriftError as error:
        log.warning("%s The copy in %s is used instead.", error, RUN)
        return tomllib.loads(copy), copy
    now = flatten(given)
    for key in _changed_fixed_keys(before, now, allow_version_change):
        raise UndriftError(
            f"{file}: {key} was {quoted(before.get(key))} when the run started, and is {quoted(now.get(key))} now. "
            "Change it back, or start another run."
        )
    return given, copy


def _changed_fixed_keys(before: Document, now: Document, allow_version_change: bool) -> list[str]:
    """The keys that differ although a resumed run must not change them."""
    free = FREE | (DIGITS if allow_version_change else set())
    return [key for key in before | now if before.get(key) != now.get(key) and key not in free]


def override_for_resume(settings: Document, assignments: list[str], allow_version_change: bool) -> Document:
    """The settings of a run, with each `key=value` put in. Raises `UndriftError` for what a resumed run must keep."""
    changed = override(settings, assignments)
    checked(changed, "--set")
    for key in _changed_fixed_keys(flatten(settings), flatten(changed), allow_version_change):
        if key in DIGITS:
            why = "may change the last digits of the result; to change it anyway, add --allow-version-change."
        else:
            why = f"decides the result, so a resumed run must keep it. It may change {listed(sorted(FREE), len(FREE))}."
        raise UndriftError(f"--set: {key} {why}")
    return changed


def same_length(settings: Document, config: str) -> bool:
    """Whether a run with these settings ends where the one with this `config.toml` does."""
    before = tomllib.loads(config)
    return all(settings.get(key) == before.get(key) for key in ("rounds", "stop_when"))


def without_effect(settings: Document, config: str) -> str:
    """A sentence about settings that differ from a finished run's `config.toml`; empty if there are none."""
    before, now = flatten(tomllib.loads(config)), flatten(settings)
    names = [key for key in before | now if before.get(key) != now.get(key)]
    return (
        f" Without more rounds, the new {listed(names)} {'has' if len(names) == 1 else 'have'} no effect."
        if names
        else ""
    )


@contextmanager
def about(key: str) -> Iterator[None]:
    """A context whose errors begin with the key that they are about."""
    try:
        yield
    except UndriftError as error:
        raise UndriftError(f"{key}: {error}") from error


def title(experiment: Experiment) -> str:
    """The name of a run's folder, after its data and its method."""
    words = f"{Path(experiment.data.name).stem} {re.sub(r'[(][^)]*[)]', '', experiment.method)}"
    return re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-")[:100]


def new_folder(name: str) -> Path:
    """A new folder in `runs`, also if two runs start in the same second."""
    return Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{name}-{secrets.token_hex(2)}"
