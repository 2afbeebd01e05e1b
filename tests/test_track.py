"""Trackers, seen through their own readers: TensorBoard's event files, a real MLflow server and a local database."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import undrift as ud
from tests.problems import make_clients, net, same_bits
from undrift.tools import config, experiment
from undrift.tools.compare import group_runs
from undrift.tools.run_folders import RunFolder
from undrift.training import config_writer
from undrift.training.track import scalars


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


needs_tensorboard = needs("tensorboard")
needs_database = needs("mlflow", "sqlalchemy", "alembic")
needs_server = needs("mlflow", "sqlalchemy", "alembic", "flask", "flask_cors", "graphene", "aiohttp")
of_others = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""MLflow calls what the newest SQLAlchemy would rather it did not."""

DATA = make_clients([23, 5, 0, 41, 10])
OPTIONS = {"rounds": 6, "local": ud.Local(epochs=1, batch_size=8, lr=0.1), "engine": "plain"}
METHOD = ud.FedNLR() + ud.ServerSGD(momentum=0.5)


class StopError(Exception):
    pass


def stop_after(rounds: int, error: type[BaseException] = StopError):
    def on_round(row):
        if row["round"] == rounds:
            raise error

    return on_round


def forget_checkpoint(folder: Path, number: int) -> None:
    """As if the run had been killed before it could write this one."""
    (folder / "checkpoint" / f"round-{number}.json").unlink()


def curves(history: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """What a tracker must show of it, seconds aside: by name, round and value."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        for name, value in scalars(row).items():
            if name not in ("round", "seconds"):
                found.setdefault(name, []).append((row["round"], value))
    return found


def test_the_numbers_of_a_row():
    row = {
        "round": 3,
        "clients": [4, 7],
        "by_client": {"client": [4], "loss": [0.5]},
        "loss": torch.tensor(0.25),
        "class_accuracy": [0.5, None, 1.0],
        "temperature": {"0": 2.0, "2": {"deep": 1}},
        "name": "no number",
    }
    assert scalars(row) == {
        "round": 3.0,
        "loss": 0.25,
        "class_accuracy/0": 0.5,
        "class_accuracy/2": 1.0,
        "temperature/0": 2.0,
        "temperature/2/deep": 1.0,
    }


@pytest.mark.parametrize(
    ("track", "sentence"),
    [
        ("tensorbord", "There is no tracker called 'tensorbord'. Did you mean 'tensorboard'?"),
        (["mlflow", 3], "track must be 'mlflow', 'tensorboard', 'wandb', or a list of them, not"),
        (True, "track must be 'mlflow', 'tensorboard', 'wandb', or a list of them, not True"),
    ],
)
def test_what_is_no_tracker_is_refused(tmp_path, track, sentence):
    with pytest.raises(ud.UndriftError, match=sentence[:40]) as refused:
        ud.train(net(), DATA, out=tmp_path / "r", track=track, **OPTIONS)
    assert str(refused.value).startswith(sentence)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")])
def test_what_is_not_installed_is_said_before_anything_runs(tmp_path, monkeypatch, name, package):
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, f"undrift.training.track.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises
    with pytest.raises(ud.UndriftError, match=r"pip install 'undrift\[track\]'"):
        ud.train(net(), DATA, out=tmp_path / "r", track=name, **OPTIONS)
    assert not (tmp_path / "r").exists()


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


@needs_tensorboard
def test_tensorboard_has_every_round_once_after_a_resume(tmp_path):
    folder, options = tmp_path / "r", {**OPTIONS, "checkpoint_every": 2, "track": "tensorboard"}
    with pytest.raises(StopError):
        ud.train(net(), DATA, METHOD, out=folder, on_round=stop_after(5), **options)
    assert [point.step for point in events(folder).Scalars("loss")] == [1, 2, 3, 4, 5]
    forget_checkpoint(folder, 5)
    history = ud.train(net(), DATA, METHOD, out=folder, resume=True, **options).history
    shown = events(folder)
    drawn = {name: [(e.step, e.value) for e in shown.Scalars(name)] for name in shown.Tags()["scalars"]}
    assert [step for step, _ in drawn.pop("seconds")] == [1, 2, 3, 4, 5, 6]
    single = {name: [(step, pytest.approx(x, rel=1e-6)) for step, x in own] for name, own in curves(history).items()}
    assert drawn == single
    assert {"class_accuracy/3", "loss"} <= drawn.keys() and not {"round", "clients/0"} & drawn.keys()
    (text,) = shown.Tensors("config.toml/text_summary")
    assert 'track = "tensorboard"' in text.tensor_proto.string_val[0].decode()


@needs_tensorboard
def test_tensorboard_added_to_a_run_that_is_resumed_gets_what_it_missed(tmp_path):
    with pytest.raises(StopError):
        ud.train(net(), DATA, out=tmp_path / "r", on_round=stop_after(3), **OPTIONS)
    ud.train(net(), DATA, out=tmp_path / "r", resume=True, track=["tensorboard"], **OPTIONS)
    assert [point.step for point in events(tmp_path / "r").Scalars("loss")] == [1, 2, 3, 4, 5, 6]


@needs_tensorboard
def test_tensorboard_needs_a_folder_that_it_can_write_to(tmp_path, caplog):
    with pytest.raises(ud.UndriftError, match="writes to the run's folder; pass out="):
        ud.train(net(), DATA, track="tensorboard", **OPTIONS)
    folder = tmp_path / "r"
    with pytest.raises(StopError):
        ud.train(net(), DATA, out=folder, on_round=stop_after(3), **OPTIONS)
    (folder / "tensorboard").write_text("in the way")
    result = ud.train(net(), DATA, out=folder, resume=True, track="tensorboard", **OPTIONS)
    assert len(result.history) == 6, "a run in the middle goes on without its tracker"
    assert [r.levelname for r in caplog.records if "no longer tracks this run" in r.message] == ["WARNING"]


@needs_tensorboard
def test_an_experiment_file_tracks_and_tracking_tells_no_runs_apart(tmp_path):
    settings = {
        "model": "logistic",
        "rounds": 2,
        "data": {"name": "digits", "clients": 4},
        "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
    }
    for name, changes in {"plain": [], "tracked": ["track=tensorboard"]}.items():
        asked = config.checked(config.override(settings, changes), "here")
        experiment.run(asked, tmp_path / name)
    assert [point.step for point in events(tmp_path / "tracked").Scalars("accuracy")] == [1, 2]
    assert config.read(tmp_path / "tracked")["track"] == "tensorboard"
    runs = [RunFolder.read(tmp_path / name) for name in ("plain", "tracked")]
    assert len(group_runs(runs)) == 1
    with pytest.raises(ud.UndriftError, match=r"track: There is no tracker called 'mlfow'\. Did you mean 'mlflow'"):
        experiment.understood(config.checked({**settings, "track": ["mlfow"]}, "here"))


@pytest.fixture
def quiet_mlflow(tmp_path, monkeypatch):
    """MLflow that tells nobody, gives up soon, and by default keeps its database here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


RACER = """
from undrift.training.track import Trackers
with Trackers("mlflow", None) as trackers:
    trackers.begin("seed = 3", [])
    trackers.row({"round": 1, "accuracy": 0.5})
"""


@pytest.mark.long
@needs_database
@of_others
def test_mlflow_without_a_server_or_a_folder(tmp_path, quiet_mlflow, monkeypatch):
    """MLflow's own default, a database in the working directory, which two runs at once must not both make."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    racers = [subprocess.Popen([sys.executable, "-c", RACER]) for _ in range(2)]
    assert [racer.wait() for racer in racers] == [0, 0]
    assert (tmp_path / "mlflow.db").exists()
    last = ud.train(net(), DATA, track="mlflow", **OPTIONS).history[-1]
    client = MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert [run.info.status for run in found] == ["FINISHED"] * 3
    assert [run.data.metrics["accuracy"] for run in found] == [last["accuracy"], 0.5, 0.5], "the newest comes first"
    assert [run.data.params.get("seed") for run in found] == ["0", "3", "3"]


class Server:
    """An MLflow server on a port of this machine, its database and its artifacts in `where`."""

    def __init__(self, where: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.uri, self.log = f"http://127.0.0.1:{port}", where / "server.log"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{where / 'server.db'}"]
        command += ["--artifacts-destination", str(where / "artifacts")]
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=where, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def kill(self) -> None:
        """With the worker that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()


@pytest.mark.long
@needs_server
@of_others
def test_mlflow_at_a_server_that_dies_in_the_end(tmp_path, quiet_mlflow, monkeypatch, caplog):
    """One server, as it takes seconds to start: a run is stopped and goes on; one fails; one outlives the server."""
    from mlflow.tracking import MlflowClient

    server = Server(tmp_path)
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        folder, options = tmp_path / "first", {**OPTIONS, "checkpoint_every": 2, "track": "mlflow"}
        whole = ud.train(net(), DATA, METHOD, **OPTIONS)
        server.wait()
        client = MlflowClient()

        def only(name: str):
            where = client.get_experiment_by_name("undrift").experiment_id
            (run,) = [run for run in client.search_runs([where]) if run.info.run_name == name]
            return run

        def points(run, name: str) -> list[tuple[int, float]]:
            return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]

        with pytest.raises(KeyboardInterrupt):
            ud.train(net(), DATA, METHOD, out=folder, on_round=stop_after(5, KeyboardInterrupt), **options)
        assert only("first").info.status == "KILLED"
        forget_checkpoint(folder, 5)
        history = ud.train(net(), DATA, METHOD, out=folder, resume=True, **options).history
        run = only("first")
        assert run.info.status == "FINISHED"
        drawn = {name: points(run, name) for name in run.data.metrics}
        assert [step for step, _ in drawn.pop("seconds")] == [1, 2, 3, 4, 5, 6]
        assert drawn.pop("round") == [(n, n) for n in range(1, 7)]
        assert drawn == curves(history)
        written = config_writer.flatten(config.read(folder))
        assert run.data.params == {name: str(value) for name, value in written.items()}
        assert run.data.params["local.lr"] == "0.1"
        files = {file.path for file in client.list_artifacts(run.info.run_id)}
        assert files == {"config.toml", "metrics.jsonl", "model.safetensors"}

        folder, statuses = tmp_path / "second", set()
        with pytest.raises(StopError):
            ud.train(net(), DATA, METHOD, out=folder, on_round=stop_after(2), **options)
        assert only("second").info.status == "FAILED"
        with pytest.raises(StopError):  # two rounds that MLflow does not see
            ud.train(net(), DATA, METHOD, out=folder, resume=True, on_round=stop_after(4), **{**options, "track": None})
        seen = {"on_round": lambda row: statuses.add(only("second").info.status)}
        history = ud.train(net(), DATA, METHOD, out=folder, resume=True, **seen, **options).history
        assert statuses == {"RUNNING"} and only("second").info.status == "FINISHED"
        assert points(only("second"), "loss") == curves(history)["loss"], "it got what it missed"

        deaths = {2: server.kill}
        result = ud.train(
            net(), DATA, METHOD, out=tmp_path / "third", on_round=lambda row: deaths.get(row["round"], int)(), **options
        )
        assert same_bits(result.params, whole.params) and len(result.history) == 6
        said = [record for record in caplog.records if record.name == "undrift"]
        assert [r.levelno for r in said] == [logging.WARNING] and "no longer tracks this run" in said[0].message

        with pytest.raises(ud.UndriftError, match=r"track='mlflow' cannot start .*check MLFLOW_TRACKING_URI"):
            ud.train(net(), DATA, out=tmp_path / "fourth", **options)
        assert not (tmp_path / "fourth" / "config.toml").exists()
    finally:
        server.kill()
