"""Sweeps whose runs fail, diverge or are killed: the others go on, and only what is sound is the best."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.experiments import GOOD, changed, toml, undrift
from undrift.errors import UndriftError
from undrift.tools.cli import app
from undrift.tools.parallel import Point, alone_in, unique_names
from undrift.tools.run_folders import RunFolder
from undrift.tools.sweep import summary

FAILS = '''
import os, signal
from dataclasses import dataclass
import undrift as ud

@dataclass(frozen=True)
class Fails(ud.Part):
    """Raises, or ends its process, in its first round."""

    how: str

    def broadcast(self, params, state, server):
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "disk":
            raise OSError(28, "No space left on device")
        raise {"memory": MemoryError, "exit": SystemExit, "bug": ZeroDivisionError}[self.how]("of this test")
'''


@pytest.fixture
def here(tmp_path, monkeypatch, one_core):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("e.toml").write_text(toml(changed("data.validation_fraction", 0.2)))
    Path("fails.py").write_text(FAILS)
    return tmp_path


def sweep(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["sweep", "e.toml", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output


# ---- what is the best --------------------------------------------------------------------------------------------


def row(accuracy: float, loss: float | None = 1.0, t: int = 0, **more: object) -> dict:
    return {
        "round": t + 1,
        "clients": [0, 1],
        "validation_accuracy": accuracy,
        "accuracy": accuracy,
        "loss": loss,
        **more,
    }


def run(lr: float, *rows: dict, seed: int = 0, stopped: str | None = None) -> RunFolder:
    return RunFolder(Path(f"lr{lr}-{seed}"), {"method": "FedAvg()", "local.lr": lr, "seed": seed}, list(rows), stopped)


@pytest.mark.parametrize(
    "lost",
    [
        [run(9.0, row(0.9, None))],  # null is how metrics.jsonl writes NaN
        [run(9.0, row(0.9, math.nan))],
        [run(9.0, row(0.9, math.inf))],
        [run(9.0, row(0.9) | {"validation_loss": None})],
        [run(9.0, row(0.9), stopped="Round 2: …")],
        [run(9.0, row(0.9, skipped=[1, 0]))],  # every client of the last round was left out
        [run(9.0, row(0.9, seed=0)), run(9.0, row(0.9, math.nan), seed=1)],  # one seed of two
        [run(9.0, row(0.9, seed=0)), run(9.0, row(0.9), seed=1, stopped="Round 2: …")],
        [run(9.0, row(math.inf))],
        [run(9.0, {"round": 1, "accuracy": 0.9, "loss": 1.0})],  # never evaluated on validation data
    ],
)
def test_a_run_that_diverged_is_never_the_best(tmp_path, lost):
    found = summary([*lost, run(0.1, row(0.2)), run(0.1, row(0.3), seed=1)], tmp_path)
    assert found["best"] == "local.lr=0.1"
    assert summary(lost, tmp_path)["best"] is None


def test_settings_as_good_as_the_best_are_mentioned(here, tmp_path):
    """To the digits shown, whichever way is better."""
    found = summary(
        [run(0.1, row(0.2)), run(0.2, row(0.50004)), run(0.3, row(0.50001)), run(0.4, row(0.5001))], tmp_path
    )
    assert (found["best"], found["tied"]) == ("local.lr=0.4", [])
    found = summary([run(0.1, row(0.2)), run(0.2, row(0.50001)), run(0.3, row(0.50004)), run(0.4, row(0.4))], tmp_path)
    assert (found["best"], found["tied"]) == ("local.lr=0.3", ["local.lr=0.2"])
    losses = [run(lr, {"round": 1, "loss": x, "validation_loss": x}) for lr, x in ((0.1, 2.0), (0.2, 1.0), (0.3, 1.0))]
    found = summary(losses, tmp_path)
    assert (found["best"], found["tied"]) == ("local.lr=0.2", ["local.lr=0.3"])
    Path("e.toml").write_text(toml(changed("data.validation_fraction", 0.2)))
    said = sweep("--grid", "local.lr=[1e-9, 2e-9]", "--workers", 1, "--out", "s")
    assert "best by validation accuracy: local.lr=1e-09 (tied with local.lr=2e-09)" in said


def test_all_clients_left_out_is_no_result(here):
    """With "skip" the weights stay as they were at the start, whose accuracy must not count."""
    Path("e.toml").write_text(toml(changed("data.validation_fraction", 0.2) | {"on_nonfinite": "skip"}))
    said = sweep("--grid", "local.lr=[1e38, 1e-9]", "--workers", 1, "--out", "s")
    assert "best by validation accuracy: local.lr=1e-09" in said
    said = sweep("--grid", "local.lr=[1e38, 2e38]", "--workers", 1, "--out", "t")
    assert "no best setting: every setting has a run that stopped or diverged" in said


@pytest.mark.parametrize("metric", ["accuracy", "recall_at_5", "loss"])
def test_the_keys_of_the_summary_have_one_order(tmp_path, metric):
    """A set of strings has another order in each process."""
    found = summary([run(0.1, {"round": 1, metric: 1.0, f"validation_{metric}": 1.0})], tmp_path)
    assert list(found["settings"][0])[-2:] == [f"validation_{metric}", metric]


# ---- what fails --------------------------------------------------------------------------------------------------


def test_an_exception_in_one_run_does_not_end_the_sweep(here):
    kinds = ["bug", "memory", "disk", "exit"]
    methods = [f"Fails('{kind}')" for kind in kinds] + ["FedAvg()"]
    said = sweep(
        "--grid", f"method={json.dumps(methods)}", "--import", "fails", "--workers", 1, "--out", "s", status=1
    )  # fmt: skip
    assert "error: method=Fails_bug,seed=0: Fails." in said and "fails.py:17): ZeroDivisionError: of this test." in said
    assert "error: method=Fails_memory,seed=0: Out of memory (of this test); use a smaller model" in said
    assert "error: method=Fails_disk,seed=0: 's/method=Fails_disk,seed=0': No space left on device." in said
    assert "error: method=Fails_exit,seed=0: SystemExit: of this test" in said
    assert "4 of 5 runs failed" in said and "Traceback" not in said
    found = json.loads(Path("s/sweep.json").read_text())
    assert [row["name"] for row in found["settings"]] == ["FedAvg()"]
    assert list(found["failed"]) == [f"method=Fails_{kind},seed=0" for kind in kinds]


def test_a_sweep_of_which_nothing_is_left_says_so(here):
    sweep("--grid", "method=[\"Fails('bug')\"]", "--import", "fails", "--workers", 1, "--out", "s", status=1)
    found = json.loads(Path("s/sweep.json").read_text())
    assert (found["metric"], found["best"], found["settings"]) == (None, None, []) and len(found["failed"]) == 1


def test_a_worker_that_is_killed_costs_its_run_alone(here):
    """The others, in processes of their own, give what they give alone."""
    methods = ["Fails('killed')", "Fails('bug')", "FedAvg()", "FedProx(mu=0.1)"]
    said = sweep(
        "--grid", f"method={json.dumps(methods)}", "--import", "fails", "--devices", "cpu,cpu", "--out", "s", status=1
    )  # fmt: skip
    assert "error: method=Fails_killed,seed=0: its process was killed by SIGKILL, perhaps for lack of memory" in said
    assert "error: method=Fails_bug,seed=0: Fails." in said and "fails.py:17): ZeroDivisionError: of this test." in said
    found = json.loads(Path("s/sweep.json").read_text())
    assert {row["name"] for row in found["settings"]} == {"FedAvg()", "FedProx(mu=0.1)"} and len(found["failed"]) == 2
    undrift(
        "run", "e.toml", "--set", "method=FedProx(mu=0.1)", "--set", "seed=0", "--set", "threads=1", "--out", "alone"
    )
    (beside,) = Path("s").glob("method=FedProx*/model.safetensors")
    assert beside.read_bytes() == Path("alone/model.safetensors").read_bytes()


# ---- two at once -------------------------------------------------------------------------------------------------


STUDY = """
[study]
tuning_seeds = [100]
seeds = [0]
[study.tune]
local.lr = [0.1, 0.2]
[study.methods]
FedAvg = "FedAvg()"
"""


def test_two_sweeps_or_studies_do_not_share_a_folder(here):
    Path("study.toml").write_text(Path("e.toml").read_text() + STUDY)
    sweep("--seeds", 2, "--workers", 1, "--out", "s")
    before = Path("s/sweep.json").read_bytes()
    with alone_in(Path("s")):
        for command in (("sweep", "e.toml", "--seeds", 3), ("study", "study.toml")):
            with pytest.raises(UndriftError, match=f"Another process, number {os.getpid()}, uses s; wait for it, or"):
                undrift(*command, "--workers", 1, "--out", "s")
        undrift("compare", "s")
        undrift("report", "s", "--out", "report.html")
    assert Path("s/sweep.json").read_bytes() == before
    assert not list(Path("s").glob("*seed=2*")) and not Path("s/tuning").exists() and not Path("s/.in-use").exists()
    sweep("--seeds", 3, "--workers", 1, "--out", "s")
    undrift("study", "study.toml", "--workers", 1, "--out", "t")
    with alone_in(Path("t")):
        undrift("compare", "t")
    assert not Path("t/.in-use").exists()


def test_a_folder_is_free_again_when_its_process_was_killed(here):
    code = "import sys, time; from pathlib import Path; from undrift.tools.parallel import alone_in; "
    code += "lock = alone_in(Path('s')); lock.__enter__(); print('locked', flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(UndriftError, match=f"Another process, number {other.pid}, uses s"):
            sweep("--workers", 1, "--out", "s")
    finally:
        end(other)
    assert Path("s/.in-use").exists()
    sweep("--workers", 1, "--out", "s")
    assert Path("s/sweep.json").exists() and not Path("s/.in-use").exists()


def test_a_folder_that_nothing_is_written_to_is_not_left_behind(here):
    with pytest.raises(UndriftError), alone_in(Path("new/s")):
        raise UndriftError("of this test")
    assert not Path("new").exists()


# ---- signals -----------------------------------------------------------------------------------------------------


def start(where: Path) -> subprocess.Popen:
    """A sweep of two runs in two processes, with so many rounds that it does not end by itself."""
    settings = GOOD | {"rounds": 10**6, "participation": 1.0, "checkpoint_every": "9999s", "evaluate_every": 10**6}
    (where / "e.toml").write_text(toml(settings))
    command = [sys.executable, "-m", "undrift", "sweep", "e.toml", "--seeds", "2", "--workers", "2", "--out", "s"]
    return subprocess.Popen(
        command, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(parent: subprocess.Popen) -> None:
    """The parent and all that it started, whatever became of the test."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(parent.pid, signal.SIGKILL)
    parent.communicate()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """A zombie is not: whoever adopted it may not have looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(happened, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def rounds(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


@linux
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, number):
    parent = start(tmp_path)
    folders = [tmp_path / "s" / f"seed={seed}" for seed in (0, 1)]
    try:
        until(lambda: all(rounds(folder) > 2 for folder in folders))
        workers = children(parent.pid)
        assert len(workers) >= 2
        parent.send_signal(number)  # to the parent alone, as a scheduler does
        _, said = parent.communicate(timeout=300)
        until(lambda: not any(map(alive, workers)), 60)
        for folder in folders:  # they finished their round and left a checkpoint of it
            (newest,) = (folder / "checkpoint").glob("round-*.json")
            assert int(newest.stem.removeprefix("round-")) == rounds(folder)
        if number == signal.SIGTERM:
            assert parent.returncode == 130 and said.count("stopping after this round") == 1, said
            assert said.endswith("stopped; to continue, repeat the command with --out s\n") and "Traceback" not in said
    finally:
        end(parent)


@linux
def test_ctrl_c_five_times_while_workers_start_shows_no_traceback(tmp_path):
    parent = start(tmp_path)
    try:
        until(lambda: len(children(parent.pid)) >= 2)  # the first of them and multiprocessing's own
        for _ in range(5):
            os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
            time.sleep(0.02)
        _, said = parent.communicate(timeout=300)
        assert parent.returncode in (130, -signal.SIGINT) and "Traceback" not in said, said
    finally:
        end(parent)


# ---- sizes and names ---------------------------------------------------------------------------------------------


def test_a_sweep_of_too_many_runs_is_refused(here):
    done = CliRunner().invoke(app, ["sweep", "e.toml", "--seeds", "1000000000"])
    assert done.exit_code == 2 and "10000" in done.output
    grid = [f"{key}=[{', '.join(['0.1'] * 200)}]" for key in ("local.lr", "local.momentum", "local.weight_decay")]
    done = CliRunner().invoke(app, ["sweep", "e.toml", *(word for one in grid for word in ("--grid", one))])
    assert "the grid has 8,000,000 combinations; a sweep runs at most 10,000." in str(done.exception)


def test_names_of_folders_are_not_too_long():
    long = [Point(f"a=1,{'é' * 300},seed={seed}", {}) for seed in (0, 1)]
    names = [point.name for point in unique_names(long)]
    assert all(len(os.fsencode(name)) <= 200 for name in names) and len(set(names)) == 2


def test_values_that_json_does_not_have(here):
    done = CliRunner().invoke(app, ["sweep", "e.toml", "--grid", "local.lr=[2020-01-01]"])
    assert "The key 'local.lr' must be" in str(done.exception)
    done = CliRunner().invoke(app, ["sweep", "e.toml", "--grid", "local.lr=[nan, 0.1]", "--out", "s", "--workers", "1"])
    assert "Local(lr) is nan" in str(done.exception) or "Local(lr) is nan" in done.output


@pytest.mark.parametrize(
    "grid", ["seed=[0, 0, 0]", "seed=[0, 1, 0]", "local.lr=[0.1, 1, 1.0]", 'method=["A()", "A()"]']
)
def test_a_value_that_a_grid_lists_twice_is_refused(tmp_path, monkeypatch, grid):
    """Runs that are one would be counted as several, with a deviation of 0."""
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(toml(GOOD))
    done = CliRunner().invoke(app, ["sweep", "e.toml", "--grid", grid])
    key = grid.partition("=")[0]
    assert isinstance(done.exception, UndriftError) and f"twice for {key}; list every value once" in str(done.exception)
    Path("e.toml").write_text(toml(GOOD) + "\n[sweep]\n" + grid)
    assert "list every value once" in str(CliRunner().invoke(app, ["sweep", "e.toml"]).exception)
    assert [path.name for path in tmp_path.iterdir()] == ["e.toml"]
