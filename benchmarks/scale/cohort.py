"""One cohort of 10,000 clients beside 200 cohorts of 50, with pfl-research's network: time and memory.

    python -m benchmarks.scale.cohort [--users 10000] [--cohorts 10000 50] [--lanes 0 200] [--method "FedAvg()"]
                                      [--precision auto] [--json benchmarks/results/cohort_scale.json]

10,000 users of 50 random samples, batches of 10, one local epoch (`benchmarks/cifar10.py`). A round of N clients is
timed as the least of `--repeats` rounds after the first; of smaller cohorts, as many rounds in a row as train as many
clients. `--lanes 0` leaves the number of lanes to undrift. Each measurement is a process of its own. Memory: the most
that tensors took on the GPU, of which the samples take 1.5 GB, and the most resident on the host.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import undrift as ud
from benchmarks import record
from benchmarks.cifar10 import BATCH, CNN, DEVICE, EACH, LR
from benchmarks.scale.memory import used


def measure(users: int, cohort: int, lanes: int, method: str, precision: str, repeats: int) -> dict[str, Any]:
    """One process's figures."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (users * EACH, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    owner = np.repeat(np.arange(users), EACH)
    data = ud.FederatedDataset.from_owners({"x": x, "y": y}, np.arange(len(y)), owner, users)
    rounds = users // cohort  # that train as many clients as there are
    result = ud.train(
        CNN(), data, method, rounds=1 + repeats * rounds, local=ud.Local(epochs=1, batch_size=BATCH, lr=LR),
        participation=cohort, device=DEVICE, lanes=lanes or None, engine="lanes", precision=precision,
    )  # fmt: skip
    seconds = [row["seconds"] for row in result.history[1:]]
    spans = [sum(seconds[begin : begin + rounds]) for begin in range(0, len(seconds), rounds)]
    gpu = DEVICE == "cuda"
    return {
        "cohort": cohort, "lanes": result.choices["lanes"], "asked": lanes, "method": method, "precision": precision,
        "rounds": rounds, "s": min(spans), "samples_per_s": users * EACH / min(spans),
        "gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if gpu else None,
        "host_gb": used("peak") / 1e3, "compile": result.choices["compile"], "kept": result.choices.get("kept"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--cohorts", nargs="+", type=int, default=[10_000, 50])
    parser.add_argument("--lanes", nargs="+", type=int, default=[0])
    parser.add_argument("--method", default="FedAvg()")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        users, cohort, lanes, method, precision, repeats = given.one
        print(json.dumps(measure(int(users), int(cohort), int(lanes), method, precision, int(repeats))))
        return
    head = record.head("cohort_scale", users=given.users, repeats=given.repeats)
    table = record.Table(given.json, head, "cohort", "asked", "method", "precision")
    for cohort in given.cohorts:
        for lanes in given.lanes:
            asked = [given.users, cohort, lanes, given.method, given.precision, given.repeats]
            command = [sys.executable, "-m", "benchmarks.scale.cohort", "--one", *map(str, asked)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{cohort} clients, {lanes} lanes: failed\n{done.stderr[-1500:]}", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            table.add(row)
            memory = f"{row['gpu_gb']:.1f} GB on the GPU, " if row["gpu_gb"] is not None else ""
            print(
                f"{row['rounds']:>4} × {cohort:>6,} clients, {row['lanes']:>5,} lanes: {row['s']:>7.2f} s, "
                f"{row['samples_per_s']:>9,.0f} samples/s, {memory}{row['host_gb']:.1f} GB on the host", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
