"""Commands in several processes: `torchrun -m undrift`, Ctrl-C, and the script for SLURM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.experiments import GOOD, toml
from tests.pages import DOCS, blocks
from tests.processes import ROOT, nodes, torchrun
from undrift.errors import UndriftError
from undrift.tools.cli import app
from undrift.tools.parallel import parse_parallel


def rows(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def close(one: list[dict], other: list[dict]) -> bool:
    assert len(one) == len(other)
    return all(
        a["clients"] == b["clients"] and a["samples"] == b["samples"] and abs(a["loss"] - b["loss"]) < 1e-4
        for a, b in zip(one, other, strict=True)
    )


def test_devices_of_a_sweep():
    assert parse_parallel(None, "cpu, cpu", None).devices == ["cpu", "cpu"]
    with pytest.raises(UndriftError, match="use only one of them"):
        parse_parallel(2, "cpu,cpu", None)
    for wrong in ("cpu,", "cuda:99", "nothing"):
        with pytest.raises(UndriftError, match="is not available"):
            parse_parallel(None, wrong, None)


def test_commands_that_start_processes_of_their_own_are_refused(monkeypatch):
    from typer.testing import CliRunner

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    for command in (["sweep", "e.toml"], ["compare", "e.toml"]):
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, UndriftError) and "start it without torchrun" in str(done.exception)


@pytest.mark.long
def test_a_command_says_everything_once_and_stops_after_a_round(tmp_path):
    settings = GOOD | {"method": "Scaffold()", "rounds": 10**6, "checkpoint_every": "9999s", "evaluate_every": 1}
    (tmp_path / "e.toml").write_text(toml(settings))
    command = torchrun("-m", "undrift", "run", "e.toml", "--out", "run", options=nodes(2)[0], cwd=tmp_path)
    while len(rows(tmp_path / "run")) < 5 and command.poll() is None:
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=120)
    assert err.count("stopped; resume with: undrift resume run") == 1, out + err
    done = len(rows(tmp_path / "run"))
    assert done >= 5 and (tmp_path / "run" / "checkpoint" / f"round-{done}.json").exists()
    args = ("-m", "undrift", "resume", "run", "--rounds", done + 3)
    out, err = torchrun(*args, options=nodes(3)[0], cwd=tmp_path).communicate(timeout=120)
    assert out.count("rounds, in run") == 1, out + err
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    alone = ["undrift", "run", "e.toml", "--out", "alone", "--set", f"rounds={done + 3}"]
    subprocess.run(["python3", "-m", *alone], cwd=tmp_path, env=env | {"PATH": path()}, check=True, capture_output=True)
    assert close(rows(tmp_path / "run"), rows(tmp_path / "alone"))
    bad = torchrun("-m", "undrift", "run", "e.toml", "--out", "run", options=nodes(2)[0], cwd=tmp_path)
    out, err = bad.communicate(timeout=120)
    assert err.count("error: ") == 1 and "run already contains a run. Choose another folder" in err, err


def path() -> str:
    import sys

    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.long
def test_the_script_for_slurm_runs_and_resumes(tmp_path):
    """With stand-ins for SLURM's commands: two nodes, which are this machine."""
    for block in blocks(DOCS / "how-to/clusters.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.code)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/bash\necho localhost; echo localhost\n")
    (tools / "srun").write_text(
        '#!/bin/bash\n"$1" --local-addr localhost "${@:2}" & "$1" --local-addr localhost "${@:2}" & wait\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    slurm = {"SLURM_JOB_NODELIST": "a,b", "SLURM_NNODES": "2", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "job"}
    env = {
        **os.environ, **slurm, "PROCESSES": "1", "PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"), "PATH": f"{tools}{os.pathsep}{path()}",
    }  # fmt: skip
    for said in ("accuracy", "is finished"):
        done = subprocess.run(
            ["bash", "train.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert said in done.stdout and "runs/job" in done.stdout, done.stdout + done.stderr
    assert len(rows(tmp_path / "runs" / "job")) == 4
