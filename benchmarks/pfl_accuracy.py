"""pfl-research's CIFAR-10 benchmark on CIFAR-10 itself: the final test accuracy, and how long undrift takes for it.

    python -m benchmarks.pfl_accuracy --data FILE.npz [--seeds 3] [--rounds 1500] [--precision tf32] [--json FILE]

FILE comes from `benchmarks.arrays`. As in pfl's `image_classification/configs/baseline.yaml`: `cifar10_iid`, a random
1,000 users of 50 samples, 50 of them per round with uniform weights, one epoch of batches of 10 with lr 0.1. Pictures
are less the training set's mean by channel over its standard deviation, as there, or with `--raw` pixels from 0 to 1:
with the former, lr 0.1 is at the edge of stability, and the first seed diverged after 1,457 of 1,500 rounds. A seed
decides the partition, the starting weights and every draw.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import undrift as ud
from benchmarks import arrays, record
from benchmarks.agree import ended, finite
from benchmarks.cifar10 import BATCH, CNN, COHORT, DEVICE, EACH
from benchmarks.warm import Job

LR = 0.1


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator, keys: np.ndarray | None) -> np.ndarray:
    """pfl's partition: a random order, cut into equal pieces. `ud.IID()` gives all users the same mix of classes."""
    owner = np.empty(len(labels), np.int64)
    owner[rng.permutation(len(labels))] = np.arange(len(labels)) * clients // len(labels)
    return owner


def run(name: str, seed: int, rounds: int, precision: str, normalize: bool, **options: Any) -> dict[str, Any]:
    """One seed's row."""
    began = time.perf_counter()
    users = ud.load(name, iid, 50_000 // EACH, seed=seed, normalize=normalize)
    trained = ud.train(
        CNN(seed), users, ud.FedAvg(weighting="uniform"), rounds=rounds, participation=COHORT, seed=seed,
        local=ud.Local(epochs=1, batch_size=BATCH, lr=LR), precision=precision, device=DEVICE, evaluate_every=500,
        **options,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    ended(f"seed {seed}", trained, rounds)
    last = trained.history[-1]
    finite(f"seed {seed}", {"test loss": torch.tensor(last["loss"])})
    rounds_ms = 1e3 * sum(row["seconds"] for row in trained.history) / rounds
    return {"seed": seed, "accuracy": last["accuracy"], "seconds": seconds, "ms_per_round": rounds_ms}


def jobs(data: Path, precision: str) -> list[Job]:
    """What compiles the step ahead of time."""
    return [["benchmarks.pfl_accuracy", "--compile-only", "--data", str(data), "--precision", precision]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--precision", default="tf32" if DEVICE == "cuda" else "auto")
    parser.add_argument("--raw", action="store_true", help="pixels from 0 to 1, not normalised by channel")
    parser.add_argument("--compile-only", action="store_true", help="compile and print no figures")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    name, compile = arrays.register(chosen.data), DEVICE == "cuda"
    if chosen.compile_only:
        run(name, 0, 1, chosen.precision, not chosen.raw, compile=compile)
        return
    head = record.head("pfl_accuracy", rounds=chosen.rounds, precision=chosen.precision, raw=chosen.raw)
    print(f"{head['gpu']}, torch {torch.__version__}, {chosen.precision}, {chosen.rounds} rounds")
    table = record.Table(chosen.json, head, "seed")
    for seed in range(chosen.seeds):
        with table.attempt():
            row = run(name, seed, chosen.rounds, chosen.precision, not chosen.raw, compile=compile)
            figures = f"{row['seconds']:.1f} s, of it {row['ms_per_round']:.2f} ms per round"
            print(f"seed {seed}: test accuracy {100 * row['accuracy']:.1f}, {figures}", flush=True)
            table.add(row)
    table.end()


if __name__ == "__main__":
    main()
