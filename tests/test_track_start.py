"""Trackers that cannot start: the run's folder is as it was before, and trackers that had started are ended."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import undrift as ud
from tests.experiments import GOOD, StopError, stop_after, toml, undrift
from tests.problems import net
from tests.test_track import DATA, METHOD, OPTIONS, needs_database, needs_tensorboard, of_others, quiet_mlflow  # noqa: F401
from undrift.tools.cli import app
from undrift.training import track


class Own:
    """A tracker of a user, which writes files and a link, and may fail then."""

    hint = "check the user's tracker"
    files = ("own", "own.txt", "latest")
    error: BaseException | None = None
    calls: list[str]

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def begin(self, config, rounds):
        self.calls.append(f"begin {len(rounds)}")
        if self.folder:
            sessions = self.folder / "own" / "sessions"
            sessions.mkdir(parents=True, exist_ok=True)
            name = f"{len(list(sessions.iterdir()))}"
            (sessions / name).write_text("a session")
            (self.folder / "own.txt").write_text(f"session {name}")
            (self.folder / "latest").unlink(missing_ok=True)
            (self.folder / "latest").symlink_to(f"own/sessions/{name}")
        if self.error:
            raise self.error

    def add(self, rounds):
        self.calls.append(f"add {len(rounds)}")

    def end(self, status):
        self.calls.append(f"end {status}")
        if self.folder:
            (self.folder / "own" / "ended").write_text(status)


@pytest.fixture
def own(monkeypatch):
    """Registers trackers by name. Returns a function that makes one, with the error that its start raises."""

    def make(name: str, error: BaseException | None = None, **more) -> list[str]:
        kind = type("Tracker", (Own,), {"error": error, "calls": [], **more})
        monkeypatch.setattr(track, "KNOWN", (*track.KNOWN, name))
        monkeypatch.setitem(sys.modules, f"undrift.training.track.{name}", SimpleNamespace(Tracker=kind))
        return kind.calls

    return make


FAILS = OSError("the disk is on fire")


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Everything in a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def fails(out: Path, error=ud.UndriftError, **options) -> None:
    with pytest.raises(error, match="cannot start" if error is ud.UndriftError else None):
        ud.train(net(), DATA, METHOD, out=out, **{**OPTIONS, **options})


def test_a_new_folder_is_gone_and_the_next_try_takes_its_place(tmp_path, own):
    assert own("bad", FAILS) == []
    fails(tmp_path / "runs/deep/r", track="bad")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/other").write_text("not ours")
    fails(tmp_path / "runs/deep/r", track="bad")
    assert contents(tmp_path) == {"runs": None, "runs/other": b"not ours"}
    again = ud.train(net(), DATA, METHOD, out=tmp_path / "runs/deep/r", **OPTIONS)
    assert len(again.history) == 6 and (tmp_path / "runs/deep/r/model.safetensors").exists()


def test_a_folder_that_was_there_stays_as_it_was(tmp_path, own):
    own("bad", FAILS)
    (tmp_path / "r").mkdir()
    fails(tmp_path / "r", track="bad")
    assert contents(tmp_path) == {"r": None}
    (tmp_path / "r/run.json").write_text("of a run that failed at once")
    fails(tmp_path / "r", track="bad")
    assert contents(tmp_path / "r") == {"run.json": b"of a run that failed at once"}


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (FAILS, ud.UndriftError, "FAILED"),
        (KeyboardInterrupt(), KeyboardInterrupt, "KILLED"),
        (SystemExit(3), SystemExit, "KILLED"),
    ],
)
def test_trackers_that_had_started_are_ended(tmp_path, own, error, raised, status):
    good, bad, late = own("good"), own("bad", error), own("late")
    fails(tmp_path / "r", raised, track=["good", "bad", "late"])
    assert (good, bad, late) == (["begin 0", f"end {status}"], ["begin 0"], [])
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_a_tracker_starts(tmp_path, own):
    """It goes on in its thread, and is ended once it has started."""

    def begin(self, config, rounds):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        Own.begin(self, config, rounds)

    calls = own("slow", begin=begin)
    fails(tmp_path / "r", KeyboardInterrupt, track="slow")
    assert calls == ["begin 0", "end KILLED"] and list(tmp_path.iterdir()) == []


def test_a_run_that_ends_well_ends_its_trackers_once(tmp_path, own):
    calls = own("good")
    ud.train(net(), DATA, METHOD, out=tmp_path / "r", track="good", **OPTIONS)
    assert calls[0] == "begin 0" and calls[-1] == "end FINISHED" and sum(call.startswith("end") for call in calls) == 1


@needs_tensorboard
@pytest.mark.parametrize("order", [["tensorboard", "bad"], ["bad", "tensorboard"]])
def test_tensorboard_leaves_no_events(tmp_path, own, order):
    own("bad", FAILS)
    fails(tmp_path / "r", track=order)
    assert list(tmp_path.iterdir()) == []


@needs_tensorboard
def test_a_resumed_run_is_as_it_was(tmp_path, own):
    """One without a checkpoint, whose trackers must start, and one that is interrupted."""
    folder, options = tmp_path / "r", {"track": ["tensorboard", "good"], "resume": True}
    calls = own("good")
    own("bad", FAILS)
    own("stopped", KeyboardInterrupt())
    started = {**OPTIONS, "on_round": stop_after(3), "track": options["track"]}
    with pytest.raises(StopError):
        ud.train(net(), DATA, METHOD, out=folder, **started)
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    assert before["latest"] == "own/sessions/0" and before["own.txt"] == b"session 0"
    fails(folder, KeyboardInterrupt, **{**options, "track": [*options["track"], "stopped"]})
    assert contents(folder) == before and calls[-2:] == ["begin 3", "end KILLED"]
    shutil.rmtree(folder / "checkpoint")
    before = contents(folder)
    fails(folder, **{**options, "track": [*options["track"], "bad"]})
    assert contents(folder) == before and calls[-2:] == ["begin 0", "end FAILED"]
    result = ud.train(net(), DATA, METHOD, out=folder, **OPTIONS, **options)
    assert len(result.history) == 6 and (folder / "latest").readlink() == Path("own/sessions/1")


def test_what_others_write_meanwhile_stays(tmp_path, own):
    def begin(self, config, rounds):
        (self.folder / "run.log").write_text("before and after")
        raise FAILS

    own("bad", begin=begin)
    with pytest.raises(StopError):
        ud.train(net(), DATA, METHOD, out=tmp_path / "r", on_round=stop_after(1), **OPTIONS)
    shutil.rmtree(tmp_path / "r/checkpoint")
    (tmp_path / "r/run.log").write_text("before")
    fails(tmp_path / "r", track="bad", resume=True)
    assert (tmp_path / "r/run.log").read_text() == "before and after"


def test_a_run_is_not_replaced(tmp_path, own, monkeypatch, one_core):
    monkeypatch.chdir(tmp_path)
    own("bad", FAILS)
    own("good")
    Path("e.toml").write_text(toml(GOOD))
    undrift("run", "e.toml", "--out", "r")
    before = contents(Path("r"))
    force = ["run", "e.toml", "--force", "--out", "r", "--set", "seed=5", "--set"]
    done = CliRunner().invoke(app, [*force, "track=bad"])
    assert done.exit_code == 1 and "track='bad' cannot start (the disk is on fire)" in str(done.exception)
    assert contents(Path("r")) == before
    undrift(*force, "track=good")
    assert "seed = 5" in Path("r/config.toml").read_text() and Path("r/own/ended").read_text() == "FINISHED"
    new = CliRunner().invoke(app, ["run", "e.toml", "--out", "new", "--set", "track=bad"])
    assert new.exit_code == 1 and not Path("new").exists()
    undrift("run", "e.toml", "--out", "new")


def test_other_errors_before_the_first_file_leave_no_folder(tmp_path, monkeypatch):
    from undrift.training.run import Run

    def start(run):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Run, "start", start)
    with pytest.raises(RuntimeError, match="no memory"):
        ud.train(net(), DATA, out=tmp_path / "a/r", **OPTIONS)
    assert list(tmp_path.iterdir()) == []


@needs_database
@needs_tensorboard
@of_others
def test_mlflow_without_its_server(tmp_path, quiet_mlflow, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    fails(tmp_path / "r", track=["tensorboard", "mlflow"])
    assert not (tmp_path / "r").exists()


@pytest.mark.long
@needs_database
@of_others
def test_mlflow_that_refuses_the_settings(tmp_path, quiet_mlflow):  # noqa: F811
    """The run that it has by then is not left as one that is running."""
    from mlflow.tracking import MlflowClient

    fails(tmp_path / "r", track="mlflow", notes={"x" * 300: 1})
    client = MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("undrift").experiment_id])
    assert found.info.status == "FAILED" and not (tmp_path / "r").exists()
