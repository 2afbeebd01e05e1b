"""A round with 100 of very many clients beside one with 100 of a thousand.

    python -m benchmarks.scale.population [--clients 1000 100000 15000000] [--rounds 300] [--repeats 3]
                                          [--json benchmarks/results/population.json]
    python -m benchmarks.scale.population --partitions      how long partitions of 15 million clients take

Every client has two samples of eight numbers; the cohort is 100, the model an MLP. Each measurement is a process of its
own, and populations take turns. A round's time is the median of a process; of several processes, the least. Where
others use the machine too, CPU time tells more than wall time. Ratios are to the first population. The first column of
memory is what the samples and the index take, the second the largest resident memory of the whole of `ud.train` beyond
that: its checks, its choices and its rounds, with torch itself. `--out` also writes a run's folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
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
from benchmarks.scale.memory import forget_peak, used

COHORT, EACH, INPUTS, CLASSES = 100, 2, 8, 10
PARTITIONS = (
    "IID()", "Dirichlet(0.3)", "DirichletPrior(1.0)", "Shards(2)", "ClassesPerClient(2)", "SortedShards(2)",
    "QuantitySkew(0.5)", "ByKey()",
)  # fmt: skip


def samples(clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EACH * clients, INPUTS, generator=generator)
    return x, torch.randint(CLASSES, (len(x),), generator=generator)


def measure(clients: int, rounds: int, out: str | None) -> dict[str, Any]:
    """One process's figures."""
    x, y = samples(clients)
    began = time.perf_counter()
    owner = np.repeat(np.arange(clients), EACH)
    data = ud.FederatedDataset.from_owners({"x": x, "y": y}, np.arange(len(x)), owner, clients)
    built = time.perf_counter() - began
    held = sum(t.numel() * t.element_size() for t in (x, y, data.index)) + data.offsets.nbytes
    del owner
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    forget_peak()
    began, rows, spent = time.perf_counter(), [], []

    def on_round(row: dict[str, Any]) -> None:
        rows.append(row)
        spent.append(time.process_time())

    local = ud.Local(epochs=1, batch_size=EACH, lr=0.1)
    ud.train(model, data, rounds=rounds, local=local, participation=COHORT, out=out, on_round=on_round, device="cpu")
    whole = time.perf_counter() - began
    seconds = statistics.median(row["seconds"] for row in rows[rounds // 10 :])
    cpu = statistics.median(b - a for a, b in itertools.pairwise(spent[rounds // 10 :]))
    return {
        "clients": clients, "build_s": built, "ms": 1000 * seconds, "cpu_ms": 1000 * cpu,
        "other_s": whole - sum(row["seconds"] for row in rows),
        "data_mb": held / 1e6, "beyond_mb": used("peak") - held / 1e6,
    }  # fmt: skip


def partition(name: str, clients: int) -> dict[str, Any]:
    x, y = samples(clients)
    keys = np.arange(len(y)) // EACH
    began = time.perf_counter()
    if name == "ByKey()":
        owner = ud.ByKey()(y.numpy(), 0, np.random.default_rng(0), keys)
        data = ud.FederatedDataset.from_owners({"x": x, "y": y}, np.arange(len(y)), owner, clients)
    else:
        data = ud.load((x, y), name, clients=clients)
    seconds = time.perf_counter() - began
    return {"partition": name, "clients": len(data), "largest": data.largest, "s": seconds, "peak_mb": used("peak")}


def apart(*arguments: str) -> dict[str, Any]:
    """A measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale.population", "--one", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(clients: list[int], rounds: int, repeats: int, file: Path | None, folder: bool) -> None:
    settings = {"cohort": COHORT, "rounds": rounds, "repeats": repeats, "folder": folder}
    table = record.Table(file, record.head("population", **settings), "clients")
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in clients}
    for _ in range(repeats):
        for count in clients:
            found[count].append(apart("train", str(count), str(rounds), *(["out"] if folder else [])))
    heads = {"clients": 12, "built s": 9, "round ms": 10, "ratio": 7, "CPU ms": 8, "CPU ratio": 11}
    heads |= {"index and samples MB": 22, "beyond MB": 11}
    print("".join(f"{name:>{width}}" for name, width in heads.items()))
    least = {name: min(row[name] for row in found[clients[0]]) for name in ("ms", "cpu_ms")}
    for count in clients:
        row = min(found[count], key=lambda one: float(one["ms"]))
        row["cpu_ms"] = min(one["cpu_ms"] for one in found[count])
        row |= {"ratio": row["ms"] / least["ms"], "cpu_ratio": row["cpu_ms"] / least["cpu_ms"]}
        row |= {"beyond_mb": max(one["beyond_mb"] for one in found[count])}
        table.add(row)
        cells = f"{row['build_s']:>9.1f}{row['ms']:>10.2f}{row['ratio']:>7.3f}{row['cpu_ms']:>8.2f}"
        cells += f"{row['cpu_ratio']:>11.3f}{row['data_mb']:>22.0f}"
        print(f"{count:>12,}{cells}{row['beyond_mb']:>11.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[1000, 100_000, 15_000_000])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", action="store_true", help="write a run's folder too")
    parser.add_argument("--partitions", action="store_true")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one and given.one[0] == "train":
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "run") if "out" in given.one else None
            print(json.dumps(measure(int(given.one[1]), int(given.one[2]), out)))
    elif given.one:
        print(json.dumps(partition(given.one[1], int(given.one[2]))))
    elif given.partitions:
        table = record.Table(given.json, record.head("partitions"), "partition", "clients")
        for name in PARTITIONS:
            row = apart("partition", name, str(given.clients[-1]))
            table.add(row)
            print(f"{row['clients']:>12,} {name:<22}{row['s']:>7.1f} s{row['peak_mb']:>8.0f} MB", flush=True)
    else:
        compare(given.clients, given.rounds, given.repeats, given.json, given.out)


if __name__ == "__main__":
    main()
