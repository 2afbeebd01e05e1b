"""FedNLR's paper on CIFAR-10 with `Dirichlet(0.1)`: the mean test accuracy of the last five rounds, and the wall time.

    python -m benchmarks.paper4 --data FILE.npz [--method 'FedNLR(depth=0.45, width=0.3)'] [--rounds 500] [--json FILE]

FILE comes from `benchmarks.arrays`. VGG-9 with its dropout, 20 clients of which 8 train per round, two local epochs of
batches of 64, lr 0.01, random crops and flips of normalised pictures, as in NIID-Bench's loader. Published: FedAvg
72.66, FedNLR 73.92, means of two seeds. `ud.train` evaluates every 25th round; the last five rounds' weights are kept
and evaluated afterwards.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import undrift as ud
from benchmarks import arrays, record
from benchmarks.agree import Watch, ended, finite
from benchmarks.cifar10 import DEVICE
from benchmarks.warm import Job
from undrift.method import as_method

METHODS = {"FedAvg()": 72.66, "FedNLR(depth=0.45, width=0.3)": 73.92}
"""What the paper reports."""
LAST = 5


@torch.no_grad()
def accuracy(model: torch.nn.Module, weights: dict[str, torch.Tensor], data: ud.FederatedDataset) -> float:
    """Of the model with these weights, on the test set, in float32."""
    assert data.test
    right, (x, y) = 0, data.test
    for rows in torch.arange(len(y)).split(1000):
        z = torch.func.functional_call(model, weights, x[rows].to(DEVICE))
        right += int((z.argmax(1) == y[rows].to(DEVICE)).sum())
    return right / len(y)


def run(name: str, method: str, rounds: int, precision: str, **options: Any) -> dict[str, Any]:
    data = ud.load(name, ud.Dirichlet(0.1), 20, normalize=True, augment=ud.CropFlip())
    model = ud.models.get("vgg9", classes=10, shape=(3, 32, 32))
    local, watch = ud.Local(epochs=2, batch_size=64, lr=0.01), Watch(range(rounds - LAST, rounds))
    began = time.perf_counter()
    trained = ud.train(
        model, data, as_method(method) + watch, rounds=rounds, local=local, participation=8, precision=precision,
        device=DEVICE, evaluate_every=25, **options,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    kept = [weights for weights in watch.weights if weights]
    ended(method, trained, rounds)
    for weights in kept:
        finite(method, weights)
    last = [accuracy(trained.model, weights, data) for weights in kept]
    curve = {row["round"]: row["accuracy"] for row in trained.history if "accuracy" in row}
    choices = {name: trained.choices[name] for name in ("engine", "lanes", "compile")}
    figures = {"accuracy": statistics.mean(last), "last": last, "seconds": seconds, "curve": curve}
    return {"method": method, **figures, "published": METHODS.get(method), **choices}


def jobs(data: Path, precision: str, methods: Iterable[str] = METHODS) -> list[Job]:
    """What compiles the steps ahead of time."""
    common = ["--compile-only", "--data", str(data), "--precision", precision]
    return [["benchmarks.paper4", "--method", method, *common] for method in methods]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--method", action="append", help=f"by default: {', '.join(METHODS)}")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--precision", default="tf32" if DEVICE == "cuda" else "auto")
    parser.add_argument("--compile-only", action="store_true", help="compile and print no figures")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    name, compile = arrays.register(chosen.data), DEVICE == "cuda"
    if chosen.compile_only:
        for method in chosen.method or METHODS:
            run(name, method, 1, chosen.precision, compile=compile)
        return
    head = record.head("paper4", rounds=chosen.rounds, precision=chosen.precision)
    print(f"{head['gpu']}, torch {torch.__version__}, {chosen.precision}, {chosen.rounds} rounds")
    table = record.Table(chosen.json, head, "method")
    for method in chosen.method or METHODS:
        row = run(name, method, chosen.rounds, chosen.precision, compile=compile)
        last = ", ".join(f"{100 * a:.1f}" for a in row["last"])
        print(f"{method}: {100 * row['accuracy']:.1f} (last {LAST}: {last}), {row['seconds']:.1f} s", flush=True)
        table.add(row)


if __name__ == "__main__":
    main()
