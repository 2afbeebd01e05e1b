"""Runs that are killed and resumed, as processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from undrift import files

EXPERIMENT = """
model = "mlp"
method = "{method}"
rounds = {rounds}
participation = 0.4
checkpoint_every = 2

[data]
name = "digits"
partition = "Dirichlet(0.3)"
clients = 20

[local]
epochs = 2
batch_size = 16
lr = 0.1
"""


def undrift(*arguments: object, cwd: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "undrift", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def what_it_left(folder: Path) -> tuple[str, list[dict]]:
    """The model's bits, and the history but for seconds."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    bits = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return bits, [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def kill_and_resume(where: Path, method: str, rounds: int, kills: int, seed: int) -> int:
    """Kill a run at random moments, resume it each time, and compare it with one that was left alone.

    Gives how many kills met the run in its rounds.
    """
    (where / "e.toml").write_text(EXPERIMENT.format(method=method, rounds=rounds))
    whole, broken = where / "whole", where / "broken"
    finish(undrift("run", "e.toml", "--out", whole, cwd=where))
    span = sum(row["seconds"] for row in map(json.loads, (whole / "metrics.jsonl").read_text().splitlines()))
    chance, met = random.Random(seed), 0
    for life in range(kills):
        started = (broken / "config.toml").exists()
        process = undrift(*(("resume", broken) if started else ("run", "e.toml", "--out", broken)), cwd=where)
        before = count(broken)
        while process.poll() is None and count(broken) == before:  # its imports are over when rounds come
            time.sleep(0.002)
        time.sleep(chance.random() * span / (kills + 1))  # so that the run outlives even the last of them
        met += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert life or met, "the first life must be cut short"
    finish(undrift("resume", broken, cwd=where))
    assert what_it_left(broken) == what_it_left(whole)
    return met


def count(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def sigkilled(module: str, function: str, folder: Path) -> None:
    """Call a function of a test module, which kills its own process, with this folder, in a process of its own."""
    command = [sys.executable, "-c", f"from {module} import {function}; {function}({str(folder)!r})"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def left_by(result: Any) -> list[dict]:
    """The history but for seconds, as files have it."""
    rows = json.loads(json.dumps(result.history))
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file in the folder, by its path."""
    return {str(f.relative_to(folder)): files.digest(f) for f in sorted(folder.rglob("*")) if f.is_file()}


class Dead(BaseException):
    """What a power cut looks like from inside."""


class DiesAtWrite:
    """Raises `Dead` at the `left`-th file that is written from now on, just before its rename or just after."""

    def __init__(self, monkeypatch: Any, before: bool) -> None:
        self.left, self.before, self.replace = 0, before, files.atomic_replace
        monkeypatch.setattr(files, "atomic_replace", self)

    def __call__(self, partial: Any, file: Any) -> None:
        self.left -= 1
        if self.before and self.left == 0:
            raise Dead
        self.replace(partial, file)
        if not self.before and self.left == 0:
            raise Dead
