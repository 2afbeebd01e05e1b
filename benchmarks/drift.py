"""What the figures of client drift cost: rounds with and without them, by turns in one process.

    PYTHONPATH=src python -m benchmarks.drift [digits | vgg9 | pfl] [--rounds 30] [--repeats 5] [--json FILE]

- `digits`: a small network on digits by Dirichlet(0.3), 8 of 20 clients per round, two epochs (a CPU);
- `vgg9`: paper 4's VGG-9 on made-up pictures, 8 of 20 uneven clients (a GPU);
- `pfl`: the CNN and the cohort of pfl-research's CIFAR-10 benchmark, on random samples (a GPU).

A repeat is a run of its own, of which the first fifth is left out; the figure is the median of the repeats' mean times
per round. On a CPU the time is that of the process, which others on the machine change less. Both sides must end with
the same weights: to the bit on a CPU, up to rounding on a GPU, where a compiled step may be another program.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import undrift as ud
from benchmarks import cifar10
from benchmarks.agree import distance
from benchmarks.record import Table, head
from benchmarks.scale import stacked

GPU = torch.cuda.is_available()
RESULTS = Path(__file__).parent / "results" / ("drift.json" if GPU else "drift_cpu.json")


def digits(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    data = ud.load("digits", ud.Dirichlet(0.3), clients=20)
    local = ud.Local(epochs=2, batch_size=32, lr=0.1)
    return {"model": "mlp", "data": data, "local": local, "participation": 8, "evaluate_every": rounds}


def vgg9(rounds: int) -> dict[str, Any]:
    problem = stacked.paper4()
    return {
        "model": problem.model, "data": problem.data(0), "local": problem.local, "precision": problem.precision,
        "evaluate_every": rounds, **problem.options,
    }  # fmt: skip


def pfl(rounds: int) -> dict[str, Any]:
    given = cifar10.problem(dropout=False)
    return {
        "model": given.model, "data": given.data, "local": given.local, "participation": cifar10.COHORT,
        "precision": "tf32", "evaluate_every": rounds,
    }  # fmt: skip


PROBLEMS = {"digits": digits, "vgg9": vgg9, "pfl": pfl}


def timed(given: dict[str, Any], rounds: int, drift: bool, compile: bool) -> tuple[float, ud.Result]:
    """Milliseconds per round, and the run."""
    clock = time.perf_counter if GPU else time.process_time
    times: list[float] = []

    def stamp(row: dict[str, Any]) -> None:
        times.append(clock())

    options = {"compile": compile} if GPU else {}
    run = ud.train(**given, rounds=rounds, drift=drift, on_round=stamp, **options)
    first = rounds // 5
    return 1000 * (times[-2] - times[first]) / (rounds - 2 - first), run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", choices=PROBLEMS, nargs="?", default="digits")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    given = PROBLEMS[asked.problem](asked.rounds)
    measure = partial(timed, given, asked.rounds, compile=asked.compile)
    measure(drift=False), measure(drift=True)  # warm
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(asked.repeats):
        (off, plain), (on, figures) = measure(drift=False), measure(drift=True)
        times[False].append(off)
        times[True].append(on)
        apart = distance(figures.params, plain.params)
        assert apart <= (1e-3 if GPU else 0), f"the figures change the weights, by {apart}"
    off, on = (statistics.median(times[drift]) for drift in (False, True))
    pairs = [b / a for a, b in zip(times[False], times[True], strict=True)]
    row = {
        "problem": asked.problem, "compile": asked.compile, "rounds": asked.rounds, "repeats": asked.repeats,
        "ms per round": off, "with drift": on, "ratio": statistics.median(pairs), "lowest": min(pairs),
        "highest": max(pairs),
    }  # fmt: skip
    row = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
    print(row)
    Table(asked.json, head("figures of client drift"), "problem", "compile").add(row)


if __name__ == "__main__":
    main()
