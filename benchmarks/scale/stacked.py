"""Runs side by side in one program, against the same runs one after another.

`PYTHONPATH=src python -m benchmarks.scale.stacked digits` (a CPU), `… paper5 --data DIR` and `… paper4` (a GPU). Each
prints a row and adds it to `benchmarks/results/stacked.json`, or on a CPU to `stacked_cpu.json`:

- `digits`: eight seeds of a small network on digits, Dirichlet(0.5), 5 of 20 clients per round; with `--processes 2`
  four of them in each of two processes, as `undrift sweep --workers 2 --together 4` trains them;
- `paper5`: eight seeds of paper 5's CNN on Fashion-MNIST, two clients per round, as in its Figure 2;
- `paper4`: four seeds of paper 4's VGG-9 with Dirichlet(0.1), on made-up pictures, which take as long.

Each way is timed from the end of a round by which everything has been traced, captured and compiled. The runs are the
same up to rounding: that is checked after three rounds in float32, relative to what training changed, and by the
accuracies at the end. With `--compile`, two runs alone are timed and not all of them: compiling each takes longer than
its rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import undrift as ud
from benchmarks.agree import distance
from benchmarks.record import Table, head
from undrift.models import parse_model
from undrift.training.side_by_side import side_by_side

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parents[1] / "results" / ("stacked.json" if DEVICE == "cuda" else "stacked_cpu.json")


class Stamps:
    """The times at which rounds' training had been launched. Runs with other times are alike all the same."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def __repr__(self) -> str:
        return "Stamps"


@dataclass(frozen=True)
class Stamp(ud.Part):
    """Notes the time of each round: evaluation after it waits for the device, so the next one's comes after both."""

    stamps: Any = None

    def observe(self, params: Any, state: Any, server: Any) -> Any:
        self.stamps.times.append(time.perf_counter())
        return state


@dataclass(frozen=True)
class Problem:
    data: Callable[[int], ud.FederatedDataset]
    """By seed."""
    model: str
    local: ud.Local
    runs: int
    warm: int
    """After how many rounds the clock starts."""
    rounds: int
    precision: str = "auto"
    compile: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def train(self, seed: int, rounds: int, precision: str, stamps: list[float] | None = None) -> ud.Result:
        compiled = {"compile": self.compile and rounds > 3} if DEVICE == "cuda" else {}
        method = ud.FedAvg() if stamps is None else Stamp(Stamps(stamps))
        return ud.train(
            self.model, self.data(seed), method, rounds=rounds, local=self.local, seed=seed, device=DEVICE,
            precision=precision, **compiled, **self.options,
        )  # fmt: skip

    def per_round(self, stamps: list[float]) -> float:
        """The seconds per round, from the times of all rounds."""
        return (stamps[-1] - stamps[self.warm]) / (self.rounds - 1 - self.warm)

    def start(self, seed: int) -> dict[str, torch.Tensor]:
        x, _ = self.data(seed)[0]
        assert isinstance(x, torch.Tensor)
        name, options = parse_model(self.model)
        module = ud.models.get(name, classes=10, shape=x.shape[1:], seed=seed, **options)
        return {name: w.detach() for name, w in module.named_parameters()}


def digits() -> Problem:
    load = partial(ud.load, "digits", partition=ud.Dirichlet(0.5), clients=20)
    local, options = ud.Local(epochs=1, batch_size=10, lr=0.1), {"participation": 5, "evaluate_every": 10}
    return Problem(lambda seed: load(seed=seed), "mlp(hidden=16)", local, 8, 20, 220, options=options)


def paper5() -> Problem:
    load = partial(
        ud.load, "fashion_mnist", partition=ud.DirichletPrior(1), clients=10, normalize=True, server_fraction=0.01
    )
    local = ud.Local(epochs=2, batch_size=50, lr=ud.decay(0.005, 0.99))
    return Problem(lambda seed: load(seed=seed), "cnn_temporal", local, 8, 5, 30, "tf32", options={"participation": 2})


def paper4() -> Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (50_000, 3, 32, 32), generator=generator, dtype=torch.uint8).float() / 255
    y = torch.randint(0, 10, (50_000,), generator=generator)
    load = partial(ud.load, (x, y), partition=ud.Dirichlet(0.1), clients=20, augment=ud.CropFlip())
    local = ud.Local(epochs=2, batch_size=64, lr=0.01)
    return Problem(lambda seed: load(seed=seed), "vgg9", local, 4, 3, 8, "bfloat16", options={"participation": 8})


Stamped = list[list[float]]


def alone(problem: Problem, rounds: int, precision: str, stamps: Stamped | None = None) -> list[ud.Result]:
    each = stamps or [None] * problem.runs  # type: ignore[list-item]
    return [problem.train(seed, rounds, precision, own) for seed, own in enumerate(each)]


def together(
    problem: Problem, rounds: int, precision: str, stamps: Stamped | None = None, seeds: list[int] | None = None
) -> list[ud.Result]:
    chosen = list(range(problem.runs)) if seeds is None else seeds
    each = stamps or [None] * len(chosen)  # type: ignore[list-item]
    found: list[ud.Result] = []
    tasks = [partial(problem.train, seed, rounds, precision, own) for seed, own in zip(chosen, each, strict=True)]
    for result in side_by_side(tasks):
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def in_processes(name: str, problem: Problem, processes: int) -> tuple[float, list[Any]]:
    """The seconds per round of the slowest process's runs, all processes at once, and all runs' final accuracies."""
    context = get_context("spawn")
    barrier, answers = context.Barrier(processes), context.SimpleQueue()
    seeds = [list(range(problem.runs))[i::processes] for i in range(processes)]
    started = [context.Process(target=_share, args=(name, own, barrier, answers)) for own in seeds]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0, "a process failed"
    found = [answers.get() for _ in started]
    accuracies = dict(chain.from_iterable(own for _, own in found))
    return max(seconds for seconds, _ in found), [accuracies[seed] for seed in range(problem.runs)]


def _share(name: str, seeds: list[int], barrier: Any, answers: Any) -> None:
    """In a process of its own: train the runs with these seeds side by side, once for warming up."""
    problem = PROBLEMS[name]()
    stamps: Stamped = [[] for _ in seeds]
    together(problem, 3, problem.precision, seeds=seeds)
    barrier.wait(timeout=120)
    many = together(problem, problem.rounds, problem.precision, stamps, seeds)
    accuracies = [(seed, run.history[-1]["accuracy"]) for seed, run in zip(seeds, many, strict=True)]
    answers.put((problem.per_round(stamps[-1]), accuracies))


def apart(problem: Problem) -> float:
    """How far the runs are from the same ones alone, after three rounds in float32, at most."""
    found = []
    for seed, (one, other) in enumerate(zip(alone(problem, 3, "auto"), together(problem, 3, "auto"), strict=True)):
        start = problem.start(seed)
        reference, update = ({n: run.params[n].cpu() - w for n, w in start.items()} for run in (one, other))
        found.append(distance(update, reference))
    return max(found)


def measured(name: str, problem: Problem, check: bool, processes: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "problem": name, "compile": problem.compile, "processes": processes, "runs": problem.runs,
        "rounds": problem.rounds,
    }  # fmt: skip
    if check:
        row["apart after 3 rounds"] = apart(problem)
    lonely: Stamped = [[] for _ in range(2 if problem.compile else problem.runs)]
    one = alone(problem, problem.rounds, problem.precision, lonely)
    row["runs timed alone"] = len(one)
    lone = row["alone, s per round"] = sum(map(problem.per_round, lonely)) / len(one)
    if processes > 1:
        seconds, accuracies = in_processes(name, problem, processes)
    else:
        beside: Stamped = [[] for _ in range(problem.runs)]
        begun = time.perf_counter()
        many = together(problem, problem.rounds, problem.precision, beside)
        row["together, whole, s"] = time.perf_counter() - begun
        seconds, accuracies = problem.per_round(beside[-1]), [run.history[-1].get("accuracy") for run in many]
        rounds = slice(problem.warm, -1)
        samples = [statistics.fmean(row["samples"] for row in run.history[rounds]) for run in many]
        row["alone, samples/s"] = statistics.fmean(samples[: len(one)]) / lone
        row["together, samples/s"] = sum(samples) / seconds
    row["together, s per round of all"] = seconds
    row["times as fast"] = lone * problem.runs / seconds
    pairs = [(run.history[-1].get("accuracy"), other) for run, other in zip(one, accuracies, strict=False)]
    if pairs[0][0] is not None:
        row["accuracies apart, points"] = max(100 * abs(a - b) for a, b in pairs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs side by side against one after another.")
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--data", type=Path, help="arrays that `undrift reproduce --prepare` wrote")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--processes", type=int, default=1, help="side by side in each of these (a CPU)")
    parser.add_argument("--repeats", type=int, default=1, help="by turns; the row is the one with the median speed-up")
    parser.add_argument("--unchecked", action="store_true", help="leave out the comparison after three rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.processes > 1 and (asked.compile or asked.data):
        parser.error("--processes is for digits on a CPU")
    if asked.data:
        from papers.arrays import use

        use(asked.data)
    problem = replace(PROBLEMS[asked.problem](), compile=asked.compile)
    check = not asked.unchecked
    rows = [measured(asked.problem, problem, check and not i, asked.processes) for i in range(asked.repeats)]
    rows.sort(key=lambda row: row["times as fast"])
    lowest, highest = rows[0]["times as fast"], rows[-1]["times as fast"]
    row = rows[len(rows) // 2] | {"repeats": len(rows), "lowest": lowest, "highest": highest}
    row = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
    print(row)
    Table(asked.out, head("runs side by side"), "problem", "compile", "processes").add(row)


PROBLEMS = {"digits": digits, "paper5": paper5, "paper4": paper4}

if __name__ == "__main__":
    main()
