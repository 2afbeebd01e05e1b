"""Rounds in several processes that torchrun starts, beside the same rounds in one process.

    UNDRIFT_DATA=folder python -m benchmarks.scale.ranks [--processes 1 2] [--rounds 6] [--repeats 3]
                                                         [--json benchmarks/results/ranks.json]

On a CPU every process has one thread, and trains McMahan's CNN on Fashion-MNIST: 400 clients by Dirichlet(0.5), ten in
a round, one epoch in batches of 32. With GPUs it is the CNN and the cohort of `cifar10.py`, on random samples. "alone"
is a process without torchrun, "1" one that torchrun has started, which speaks to itself by gloo or NCCL.

Every measurement starts its processes anew, and sides take turns. A round's time is the wall clock's, from the end of
an early round to the end of the last but one, so that nothing between rounds is left out; of several measurements, the
median. `cpu_ms` is the time that the busiest process computes in a round, which others on the machine change less. A
side counts only if its update is that of "alone", up to round-off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import undrift as ud
from benchmarks import agree, cifar10, record

GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Ticks(ud.Part):
    """Notes when the host is told of each round, which costs nothing: the row is read then anyway."""

    def history(self, state: Any) -> dict[str, float]:
        return {"clock": time.perf_counter(), "cpu": time.process_time()}


def measure(file: Path, rounds: int) -> None:
    """One process's part in a measurement; the first one leaves the figures, and its update, in `file`."""
    if GPU:
        given = cifar10.problem(dropout=False)
        data, local, model = given.data, given.local, given.model
        options: dict[str, Any] = {"participation": cifar10.COHORT, "compile": False}
    else:
        torch.set_num_threads(1)
        data = ud.load("fashion_mnist", ud.Dirichlet(0.5), clients=400)
        local, model = (
            ud.Local(epochs=1, batch_size=32, lr=0.01),
            ud.models.get("cnn_fedavg", classes=10, shape=(1, 28, 28)),
        )
        options = {"participation": 10}
    start = {name: w.detach().clone() for name, w in model.named_parameters()}
    run = ud.train(model, data, ud.FedAvg() + Ticks(), rounds=rounds, local=local, evaluate_every=rounds, **options)
    agree.ended("a side", run, rounds)
    rows = run.history[rounds // 5 : -1]
    seconds, cpu = ((rows[-1][name] - rows[0][name]) / (len(rows) - 1) for name in ("clock", "cpu"))
    rank = os.environ.get("RANK", "0")
    file.with_suffix(f".{rank}").write_text(str(1000 * cpu))
    if rank == "0":
        samples = statistics.mean(row["samples"] for row in rows[1:])
        update = {name: w.cpu() - start[name].cpu() for name, w in run.params.items()}
        torch.save(
            {"ms": 1000 * seconds, "samples_per_s": samples / seconds, "choices": run.choices, "update": update}, file
        )


def measured(processes: int | None, rounds: int, folder: Path) -> dict[str, Any]:
    """The figures of one measurement, in processes of their own."""
    file = folder / "figures.pt"
    file.unlink(missing_ok=True)
    how = [] if processes is None else ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    command = [sys.executable, "-m", *how, "benchmarks.scale.ranks", "--child", str(file), "--rounds", str(rounds)]
    env = {**os.environ} if GPU else {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True)
    found: dict[str, Any] = torch.load(file, weights_only=False)
    cpu = [float(file.with_suffix(f".{rank}").read_text()) for rank in range(processes or 1)]
    return found | {"cpu_ms": max(cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1] if GPU else [1, 2])
    parser.add_argument("--rounds", type=int, default=200 if GPU else 6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        measure(asked.child, asked.rounds)
        return
    sides = {"alone": None} | {str(n): n for n in asked.processes}
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(asked.repeats):
            for side, processes in sides.items():
                found[side].append(measured(processes, asked.rounds, Path(folder)))
                print(f"{side}: {found[side][-1]['ms']:.1f} ms", flush=True)
    head = record.head("ranks", rounds=asked.rounds, repeats=asked.repeats, cores=os.cpu_count())
    table = record.Table(asked.json, head, "processes")
    first = found["alone"]
    base = statistics.median(one["ms"] for one in first)
    for side, own in found.items():
        ms = statistics.median(one["ms"] for one in own)
        apart = agree.check(side, own[0]["update"], first[0]["update"], "float32")
        row = {
            "processes": side, "ms": ms, "times": base / ms, "all_ms": [one["ms"] for one in own], "agrees": apart,
            "samples_per_s": statistics.median(one["samples_per_s"] for one in own),
            "cpu_ms": statistics.median(one["cpu_ms"] for one in own),
            "lanes": own[0]["choices"]["lanes"], "device": own[0]["choices"]["device"],
        }  # fmt: skip
        table.add(row)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
