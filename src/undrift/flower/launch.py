"""Runs of an experiment on nodes of this machine: real ones, or Flower's simulation of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from undrift.errors import UndriftError, first_line, require
from undrift.flower.new import write_app
from undrift.flower.server import described
from undrift.flower.up import QUIET, federation, standing
from undrift.tools import config
from undrift.tools.cli_helpers import read_settings
from undrift.tools.config import Experiment
from undrift.tools.experiment import new_folder, title

log = logging.getLogger("undrift")

Tell = Callable[[str], None]
LONG = 30 * 24 * 3600.0
"""Seconds that a run may take."""


def launch(
    file: Path,
    nodes: int,
    out: Path | None,
    deadline: float,
    tell: Tell,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Path:
    """Start a SuperLink and nodes with their own certificates and keys, run the experiment, and stop them all."""
    folder = _folder(file, out)
    app, place = folder / "app", folder / "federation"
    found = _app(app, file, nodes, deadline, imports, trust)
    progress = Progress(place, found.rounds, tell)
    try:
        with federation(folder, nodes) as grounds:
            tell(
                f"{nodes} nodes and a SuperLink on {grounds.address}, with TLS and keys; logs are in {folder / 'logs'}"
            )
            well, why = grounds.wait(grounds.submit(app, place, deadline=deadline), place, LONG, progress.show)
    except (KeyboardInterrupt, SystemExit):
        log.warning("stopped; to continue, repeat the command with --out %s", folder)
        raise
    if not well:
        raise UndriftError(f"The run failed: {why}")
    tell(f"in {place / 'run'}")
    return place / "run"


def simulated(
    file: Path,
    nodes: int,
    out: Path | None,
    deadline: float,
    tell: Tell,
    imports: Sequence[str] = (),
    trust: bool = False,
) -> Path:
    """Do the same with Flower's simulation engine: nodes are Ray actors, without TLS and keys."""
    os.environ |= QUIET | {"RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.simulation import run_simulation

    from undrift.flower.apps import client_app, server_app

    folder = _folder(file, out).resolve()
    app, place = folder / "app", folder / "federation"
    _app(app, file, nodes, deadline, imports, trust)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(app), os.environ.get("PYTHONPATH", "")])  # for Ray's actors
    experiment = app / "app" / "experiment.toml"
    terms = {"out": str(place), "min-nodes": nodes, "deadline": deadline}
    server, client = server_app(experiment, **terms), client_app(experiment, state=str(folder / "state"))
    try:
        run_simulation(server, client, nodes, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    finally:
        ended = standing(place)
    if ended.get("status") != "finished":
        raise UndriftError(f"The run failed: {ended.get('why', 'Flower does not say why')}")
    tell(f"in {place / 'run'}")
    return place / "run"


def _folder(file: Path, out: Path | None) -> Path:
    return out or new_folder(f"flower-{title(config.checked(_settings(file), str(file)))}")


def _settings(file: Path) -> config.Document:
    settings = config.read(file)
    settings.pop("sweep", None)
    return settings


def _app(app: Path, file: Path, nodes: int, deadline: float, imports: Sequence[str], trust: bool) -> Experiment:
    """Return the experiment as an app; one that is there already must be of the same experiment."""
    if not app.exists():
        return write_app(app, file, nodes=nodes, deadline=deadline, imports=imports, trust=trust)
    there, asked = config.read(app / "app" / "experiment.toml"), read_settings(file, None, list(imports), None, trust)
    asked.pop("sweep", None)
    changed = [key for key in there | asked if there.get(key) != asked.get(key)]
    require(not changed, f"{app} is of another experiment: {', '.join(changed)} differ; choose another --out.")
    return config.checked(there, str(file))


class Progress:
    """Shows the rows that a run's history gets."""

    def __init__(self, place: Path, rounds: int, tell: Tell) -> None:
        self.file, self.rounds, self.tell, self.shown = place / "run" / "metrics.jsonl", rounds, tell, 0

    def show(self) -> None:
        try:
            lines = self.file.read_text("utf-8").splitlines(keepends=True)
        except OSError:
            return
        for line in (line for line in lines[self.shown :] if line.endswith("\n")):
            self.shown += 1
            try:
                self.tell(described(json.loads(line), self.rounds))
            except OSError as error:  # a pipe that nobody reads any more
                log.warning("progress is no longer shown (%s), but training goes on", first_line(error))
