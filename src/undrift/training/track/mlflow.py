"""MLflow: a run at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME, by default "undrift".

MLflow cannot replace a point, so a resumed run must not send one twice. It finds its id in the run's folder, queries
the last round, and sends only what follows: rounds that are trained again have the same bits.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path

from filelock import FileLock  # a dependency of torch
from mlflow import get_tracking_uri
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from undrift.files import write_text
from undrift.training.config_writer import flatten
from undrift.training.track import Scalars

MOST = 1000
"""The most metrics that MLflow accepts at once."""
ID = "mlflow.txt"
"""The file with MLflow's id of the run."""
ARTIFACTS = ("config.toml", "metrics.jsonl", "model.safetensors")


def creation_lock() -> FileLock:
    """Several processes that find no database must not create it at the same time."""
    where = hashlib.sha256(f"{get_tracking_uri()} {os.getcwd()}".encode()).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"undrift-mlflow-{where}.lock")


class Tracker:
    hint = "check MLFLOW_TRACKING_URI"
    files = (ID,)

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def begin(self, config: str, rounds: list[Scalars]) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the default takes minutes to give up
        with creation_lock():
            self.client = MlflowClient()
            self.id, self.last = self._found() or (self._created(config), 0.0)
        self.add(rounds)

    def add(self, rounds: list[Scalars]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            Metric(re.sub(r"[^\w.\- :/]", "_", name), value, now, int(scalars["round"]))
            for scalars in rounds
            if scalars["round"] > self.last
            for name, value in sorted(scalars.items(), key=lambda item: item[0] == "round")  # marks a complete round
        ]
        for begin in range(0, len(metrics), MOST):
            self.client.log_batch(self.id, metrics[begin : begin + MOST])

    def end(self, status: str) -> None:
        if self.folder and status == "FINISHED":
            for name in ARTIFACTS:
                self.client.log_artifact(self.id, str(self.folder / name))
        self.client.set_terminated(self.id, status)

    def _found(self) -> tuple[str, float] | None:
        """The id of the run that the folder names, set to running again, and its last round; None if there is none."""
        file = self.folder / ID if self.folder else None
        if file is None or not file.exists():
            return None
        run = file.read_text(encoding="utf-8").strip()
        try:
            metrics = self.client.get_run(run).data.metrics
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # it was deleted, or this is another server
                return None
            raise
        self.client.update_run(run, status="RUNNING")
        return run, metrics.get("round", 0.0)

    def _created(self, config: str) -> str:
        name = self.folder.resolve().name if self.folder else None
        run = str(self.client.create_run(self._experiment(), run_name=name).info.run_id)
        settings = flatten(tomllib.loads(config))
        try:
            self.client.log_batch(run, params=[Param(key, str(value)) for key, value in settings.items()])
            if self.folder:
                write_text(self.folder / ID, run + "\n")
        except Exception:
            with suppress(Exception):
                self.client.set_terminated(run, "FAILED")
            raise
        return run

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "undrift")
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name))
            except MlflowException:  # a run on another machine has created it
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)
