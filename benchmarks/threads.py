"""What one of torch's CPU threads is worth against all of them:  python -m benchmarks.threads [BUSY] [CASE …]

Each case is trained with one thread and with torch's default in turns, several times; the table has the median time of
a round, and what `training/threads.py` chooses. BUSY, a number, starts so many processes that keep a core busy each.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import undrift as ud

ROUNDS, TURNS = 6, 5
SPIN = "while True: pass"


def made_up(shape: tuple[int, ...], clients: int = 20, samples: int = 60) -> ud.FederatedDataset:
    draw = torch.Generator().manual_seed(0)
    each = [
        (torch.randn(samples, *shape, generator=draw), torch.randint(10, (samples,), generator=draw))
        for _ in range(clients)
    ]
    return ud.FederatedDataset.from_clients(each)


def digits() -> ud.FederatedDataset:
    return ud.load("digits", ud.Dirichlet(alpha=0.1), clients=20)


LOCAL = ud.Local(steps=10, batch_size=32, lr=0.05)
SHORT = ud.Local(steps=2, batch_size=32, lr=0.05)
CASES: dict[str, Callable[[], tuple[str, ud.FederatedDataset, ud.Local]]] = {
    "mlp on digits": lambda: ("mlp", digits(), LOCAL),
    "cnn on digits": lambda: ("cnn", digits(), LOCAL),
    "mlp(hidden=64), 784 inputs": lambda: ("mlp(hidden=64)", made_up((784,)), LOCAL),
    "mlp(hidden=256), 784 inputs": lambda: ("mlp(hidden=256)", made_up((784,)), LOCAL),
    "cnn, 28 × 28": lambda: ("cnn", made_up((1, 28, 28)), SHORT),
    "vgg9, 32 × 32": lambda: ("vgg9", made_up((3, 32, 32), 10), SHORT),
}


def seconds(model: str, data: ud.FederatedDataset, local: ud.Local, threads: int | None) -> tuple[float, Any]:
    """The median time of a round after the first, and what was chosen."""
    options: dict[str, Any] = {"rounds": ROUNDS, "participation": 0.4, "evaluate_every": ROUNDS, "device": "cpu"}
    result = ud.train(model, data, local=local, threads=threads, **options)
    return statistics.median(row["seconds"] for row in result.history[1:]), result.choices


def main() -> None:
    busy = int(sys.argv[1]) if sys.argv[1:2] and sys.argv[1].isdigit() else 0
    asked = [word for word in sys.argv[1:] if not word.isdigit()] or list(CASES)
    every = torch.get_num_threads()
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(busy)]
    try:
        print(f"milliseconds per round, torch {torch.__version__}, {busy} busy processes beside")
        print(f"{'':<30}{'1 thread':>10}{f'{every} threads':>12}{'ratio':>8}   the rule")
        for name in asked:
            model, data, local = CASES[name]()
            _, choices = seconds(model, data, local, None)
            times: dict[int, list[float]] = {1: [], every: []}
            for _ in range(TURNS):
                for threads, own in times.items():
                    own.append(seconds(model, data, local, threads)[0])
            one, many = (1000 * statistics.median(own) for own in times.values())
            chosen = f"{choices['threads']}: {choices['threads_why']}"
            print(f"{name:<30}{one:>10.1f}{many:>12.1f}{many / one:>8.2f}   {chosen}")
    finally:
        for process in spinning:
            process.kill()


if __name__ == "__main__":
    main()
