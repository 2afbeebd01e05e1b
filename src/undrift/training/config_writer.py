"""A run as the file that repeats it: every setting, every default, and what was chosen automatically.

Versions, dates, commits and the reasons for choices are in `run.json`, so two runs of the same settings have the same
file.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from typing import Any

from undrift.losses import name_of
from undrift.method.groups import Group
from undrift.method.optimizers import Optimizer
from undrift.method.part import Method, Part
from undrift.metrics import METRICS
from undrift.metrics.base import streams
from undrift.schedule import StepSchedule, decay, inverse
from undrift.training.early_stopping import EarlyStopping
from undrift.training.identity import describe_deeply, repr_without_addresses
from undrift.training.run import Run
from undrift.training.settings import ROLES, Settings

OF_PYTHON = "of Python, so this file alone does not repeat the run"


def repeats(config: str) -> bool:
    """Return whether a run can be repeated from its `config.toml` alone."""
    return OF_PYTHON not in config


LINES = [name for name, role in ROLES.items() if role.form not in (None, "section", "modules")]
"""The settings above the file's sections, in order. Modules to import stand below them, among the caller's notes."""


def config_toml(run: Run, given: Settings) -> str:
    """Return the settings of the run as TOML, with what was left to undrift filled in."""
    chosen = {name: run.choices[name] for name in ("engine", "lanes", "compile", "device", "threads")}
    if given.engine == "auto" and chosen["engine"] == "lanes":
        chosen["engine"] = "auto"  # which continues if lanes fail
    if run.ranks.group is not None and str(given.device) in ("auto", "cuda"):
        chosen["device"] = run.device.type  # each process determines its own
    settings = {**vars(given), **chosen, "method": run.method}
    settings["loss"] = name_of(run.loss) or run.loss
    named = all(_named(name, metric) for name, metric in run.metrics.items())
    settings["metrics"] = list(run.metrics) if named else run.metrics
    lines = [
        "# A run of undrift, complete: `undrift run` with this file repeats it.",
        *(toml_line(name, settings[name]) for name in LINES),
        *(toml_line(name, value) for name, value in (given.notes or {}).items() if value),
    ]
    if run.data.origin is None:
        lines += ["", f"# data: {OF_PYTHON}"]
    else:
        lines += ["", "[data]", *(toml_line(name, value) for name, value in run.data.origin.items())]
    local = {field.name: getattr(run.local, field.name) for field in fields(run.local)}
    lines += ["", "[local]", *(toml_line(name, value) for name, value in local.items())]
    if faults := run.conditions.faults:
        asked = [f.name for f in fields(faults) if getattr(faults, f.name) != f.default]
        lines += ["", "[faults]", *(toml_line(name, getattr(faults, name)) for name in asked)]
    return "\n".join(lines) + "\n"


def _named(name: str, metric: Any) -> bool:
    """Return whether a file means this metric by the name. Those that see every batch are copied for each run."""
    known = METRICS.get(name)
    return known is metric or (streams(known) and describe_deeply(known) == describe_deeply(metric))


def toml_line(name: str, value: Any) -> str:
    """Return `name = value`, or a comment if there is no value that a file can hold."""
    if value is None:
        return f"# {name}: not set"
    try:
        return f"{name} = {toml_literal(value)}"
    except TypeError:
        return f"# {name}: {repr_without_addresses(value)[:80].splitlines()[0]}, {OF_PYTHON}"


def toml_literal(value: Any) -> str:
    """Return a TOML value. Schedules, methods and optimizers are strings that `undrift run` parses."""
    if isinstance(value, bool | str | int):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return str(value) if not math.isnan(value) else "nan"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_literal(item) for item in value)}]"
    if isinstance(value, Group):
        return toml_literal(vars(value))
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        bare = {key: key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_literal(key) for key in value}
        return f"{{ {', '.join(f'{bare[key]} = {toml_literal(item)}' for key, item in value.items())} }}"
    if hasattr(value, "tolist"):
        return toml_literal(value.tolist())
    if isinstance(value, decay | inverse | StepSchedule | Method | Part | Optimizer | EarlyStopping):
        text = re.sub(r"np\.\w+\(([^()]*)\)", r"\1", repr_without_addresses(value))  # numpy's numbers say what they are
        if "<" not in text:  # a function or another Python object
            return json.dumps(text, ensure_ascii=False)
    raise TypeError(f"no TOML for {value!r}")


def flatten(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `{"local": {"lr": 0.1}}` as `{"local.lr": 0.1}`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
