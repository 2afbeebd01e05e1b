"""An experiment, run: what its settings stand for, and the folder its run goes to."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from undrift import models, nonfinite
from undrift.checkpoint import parse_interval
from undrift.config import Experiment
from undrift.data.load import load
from undrift.errors import UndriftError, first_line
from undrift.local import Local
from undrift.method import Method
from undrift.registry import import_plugins, parse_method, parse_model, parse_number, parse_partition
from undrift.result import Result
from undrift.track import find
from undrift.train import train


def run(
    experiment: Experiment,
    out: str | Path | None,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Load, train, and leave a folder behind."""
    if experiment.threads:
        torch.set_num_threads(experiment.threads)
    given = arguments(experiment)
    try:
        return train(**given, out=out, resume=resume, on_round=on_round)
    except OSError as error:  # a full disk is found out while writing, when Python no longer names the file
        if error.errno is not None and error.filename is None and out is not None:
            error.filename = str(out)
        raise
    except SafetensorError as error:
        raise OSError(None, f"a file of the run cannot be read or written ({first_line(error)})", str(out)) from error


def understood(experiment: Experiment) -> tuple[Method, Local]:
    """What the settings' strings stand for: refuses, with the key named, before any data are loaded."""
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
        nonfinite.check(experiment.on_nonfinite)
    with about("track"):
        find(experiment.track)
    work: dict[str, Any] = {}
    for name, value in experiment.local:
        with about(f"local.{name}"):
            work[name] = parse_number(value) if isinstance(value, str) else value
    with about("local"):
        return method, Local(**work)


def arguments(experiment: Experiment) -> dict[str, Any]:
    """What `ud.train` is given."""
    method, local = understood(experiment)
    asked = experiment.data.model_dump()
    with about("data"):
        data = load(**{**asked, "seed": experiment.seed if asked["seed"] is None else asked["seed"]})
    rest = {name: value for name, value in experiment if name not in ("data", "local", "method", "threads", "imports")}
    return {**rest, "data": data, "local": local, "method": method, "notes": {"imports": experiment.imports}}


@contextmanager
def about(key: str) -> Iterator[None]:
    """An error inside it says which key it is about."""
    try:
        yield
    except UndriftError as error:
        raise UndriftError(f"{key}: {error}") from error


def title(experiment: Experiment) -> str:
    """What a run's folder is called: after its data and its method."""
    words = f"{Path(experiment.data.name).stem} {re.sub(r'[(][^)]*[)]', '', experiment.method)}"
    return re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-")[:100]


def new_folder(name: str) -> Path:
    """A folder under `runs` that nobody has: two that start in one second are two."""
    return Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{name}-{secrets.token_hex(2)}"
