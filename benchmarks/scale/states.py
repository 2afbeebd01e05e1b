"""Scaffold with 100,000 clients of a model with a million parameters, whose states lie in files; killed and resumed.

    python -m benchmarks.scale.states [--rounds 60] [--clients 100000] [--kill 25 41] [--json FILE] [--folder DIR]

First the run is left alone, in a process of its own. Then it is killed (SIGKILL) after each of the rounds of `--kill`,
a moment into the next, and resumed; it must end with the same bits. Memory is looked at 20 times a second: `anonymous`
is the most that a process had of its own, `mapped` the most of mapped files, which the system takes back when it needs
room. A folder takes 4 MB for every client that has taken part, here 12 GB; the first is removed before the second.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import undrift as ud
from benchmarks import record
from undrift.files import digest
from undrift.training import build

INPUTS, WIDTH, CLASSES, EACH, COHORT = 64, 960, 10, 4, 50


def train(folder: str, clients: int, rounds: int, resume: bool) -> None:
    """One life of the run, in its process."""
    build.HOST_SHARE = 0.0  # a machine with more memory than states would keep them there
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EACH * clients, INPUTS, generator=generator)
    y = torch.randint(CLASSES, (len(x),), generator=generator)
    owner = np.repeat(np.arange(clients), EACH)
    data = ud.FederatedDataset.from_owners({"x": x, "y": y}, np.arange(len(x)), owner, clients)
    torch.manual_seed(0)
    hidden = [nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))
    local = ud.Local(epochs=1, batch_size=2, lr=0.01)
    result = ud.train(
        model, data, ud.Scaffold(), rounds=rounds, local=local, participation=COHORT, device="cpu", out=folder,
        resume=resume, checkpoint_every=5, on_round=lambda row: print(row["round"], flush=True),
    )  # fmt: skip
    print(json.dumps(result.choices), flush=True)


def memory(process: int) -> dict[str, float]:
    """What a process has now, in MB."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = dict(line.split(":", 1) for line in lines)
    names = {"anonymous": "RssAnon", "mapped": "RssFile"}
    return {name: int(found[entry].split()[0]) * 1024 / 1e6 for name, entry in names.items() if entry in found}


def life(folder: Path, given: argparse.Namespace, resume: bool, until: int | None) -> dict[str, Any]:
    """A process of the run, killed in the round after `until`; what it had of memory, and its last line."""
    arguments = [str(folder), str(given.clients), str(given.rounds), str(int(resume))]
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-m", "benchmarks.scale.states", "--one", *arguments]
        process = subprocess.Popen(command, stdout=out, text=True)
        most, began, last = {"anonymous": 0.0, "mapped": 0.0}, time.perf_counter(), ""
        while process.poll() is None:
            most = {name: max(most[name], now) for name, now in memory(process.pid).items()} or most
            out.seek(0)
            last = (out.read().splitlines() or [""])[-1]
            if until is not None and last.isdigit() and int(last) >= until:
                time.sleep(0.3)
                process.send_signal(signal.SIGKILL)
                process.wait()
            time.sleep(0.05)
        out.seek(0)
        last = (out.read().splitlines() or [""])[-1]
    expected = 0 if until is None else -signal.SIGKILL
    if process.returncode != expected:
        raise SystemExit(f"The run ended with {process.returncode}, not {expected}.")
    return {**most, "s": time.perf_counter() - began, "last": last}


def left(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The model's checksum, and the history but for seconds."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    history = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    return digest(folder / "model.safetensors"), history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--kill", nargs="+", type=int, default=[25, 41])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where to make the runs' folders; the system's temporary folder")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        train(given.one[0], int(given.one[1]), int(given.one[2]), given.one[3] == "1")
        return
    table = record.Table(given.json, record.head("states", cohort=COHORT, rounds=given.rounds), "run", "clients")
    with tempfile.TemporaryDirectory(dir=given.folder) as where:
        whole, broken, sums = Path(where) / "whole", Path(where) / "broken", {}
        for folder, ends in ((whole, [None]), (broken, [*given.kill, None])):
            lives = [life(folder, given, resume=i > 0, until=until) for i, until in enumerate(ends)]
            sums[folder], rows = left(folder), len(left(folder)[1])
            kept = sum(file.stat().st_blocks * 512 for file in (folder / "checkpoint").glob("kept-*.bin"))
            row = {
                "run": folder.name, "clients": given.clients, "rows": rows, "lives": len(lives),
                "anonymous_mb": max(one["anonymous"] for one in lives),
                "mapped_mb": max(one["mapped"] for one in lives),
                "kept_gb": kept / 1e9, "s": sum(one["s"] for one in lives), "choices": json.loads(lives[-1]["last"]),
            }  # fmt: skip
            table.add(row)
            print({name: round(x, 2) if isinstance(x, float) else x for name, x in row.items()}, flush=True)
            shutil.rmtree(folder)
        if sums[whole] != sums[broken]:
            raise SystemExit("The run that was killed ended with other bits.")
        print("the same bits")


if __name__ == "__main__":
    main()
