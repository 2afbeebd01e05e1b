"""`undrift flower up`: a federation on this machine in one command. Needs Flower; `make flower` has it."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.federated import BASE, FOUR
from tests.flower_runs import LONG, PROBLEM, assert_all_ended, problem
from undrift.files import write_text
from undrift.flower.new import as_toml

__all__ = ["problem"]


def up(folder, changes, nodes):
    """The command, with the folder in the environment of all that it starts."""
    shutil.copy(PROBLEM, folder)
    write_text(folder / "e.toml", as_toml(BASE | changes | {"imports": ["flower_problem"]}))
    words = [sys.executable, "-m", "undrift", "flower", "up", "e.toml", "--nodes", str(nodes)]
    words += ["--out", str(folder / "here")]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LONG, check=False)


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
