"""`undrift flower up`: a federation on this machine in one command. Needs Flower; `make flower` has it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import pytest

from tests.federated import BASE, FOUR
from tests.flower_runs import LONG, PROBLEM, assert_all_ended, problem, rows, until
from undrift.files import write_text
from undrift.flower.new import as_toml
from undrift.flower.up import Grounds

__all__ = ["problem"]


def words(folder, changes, nodes):
    """The command, with the folder in the environment of all that it starts."""
    shutil.copy(PROBLEM, folder)
    write_text(folder / "e.toml", as_toml(BASE | changes | {"imports": ["flower_problem"]}))
    command = [sys.executable, "-m", "undrift", "flower", "up", "e.toml", "--nodes", str(nodes)]
    return [*command, "--out", str(folder / "here")]


def up(folder, changes, nodes):
    command = words(folder, changes, nodes)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONG, check=False)


def test_the_command_runs_an_experiment_and_leaves_nothing_running(tmp_path):
    done = up(tmp_path, FOUR["feddyn"] | {"rounds": 1}, nodes=2)
    assert done.returncode == 0, done.stderr
    assert "round 1 of 1  loss " in done.stdout and (tmp_path / "here/federation/run/model.safetensors").exists()
    assert_all_ended(tmp_path)


def test_a_run_that_fails_is_a_failed_command(tmp_path):
    """Flower calls a run whose app raised a success; here the exit status and the last line say what happened."""
    done = up(tmp_path, {"min_clients": 100}, nodes=1)
    assert done.returncode == 2 and "The run failed: min_clients is 100" in done.stderr
    assert_all_ended(tmp_path)


@pytest.mark.parametrize(
    ("how", "when"),
    [
        (signal.SIGTERM, "it starts"),
        (signal.SIGHUP, "it starts"),
        (signal.SIGINT, "it starts"),
        (signal.SIGTERM, "it trains"),
    ],
)
def test_signals_end_the_federation_too(tmp_path, how, when):
    command = words(tmp_path, {"rounds": 100_000, "evaluate_every": 10**6}, nodes=2)
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        if when == "it trains":
            until(lambda: len(rows(tmp_path / "here/federation")) > 1 or process.poll() is not None)
        else:
            until(lambda: (tmp_path / "here/logs/node-0.log").exists() or process.poll() is not None)
        process.send_signal(how)
        _, said = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == (130 if how == signal.SIGINT else 128 + how), said
    assert "Traceback" not in said and "to continue, repeat the command with --out" in said
    assert_all_ended(tmp_path)


def test_signals_wait_while_a_process_starts(tmp_path):
    """One that arrived before the process is noted would leave it behind."""
    grounds = Grounds(tmp_path / "g", secure=False)

    def start():
        with grounds, grounds.signals.held():
            signal.raise_signal(signal.SIGTERM)
            grounds.start("child", ["sleep", "60"])
            assert grounds.processes

    with pytest.raises(SystemExit, match="143"):
        start()
    assert not grounds.processes
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert_all_ended(tmp_path)


def test_signals_that_are_ignored_stay_ignored(tmp_path):
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Grounds(tmp_path / "g", secure=False):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
