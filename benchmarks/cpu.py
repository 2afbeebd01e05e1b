"""Whole federated rounds on a CPU: undrift beside a plain PyTorch loop, in one process, on the same data.

    python -m benchmarks.cpu [--threads 2] [--repeats 5] [--json FILE] [CASE …]

The loop is what one would write by hand and as fast as it gets that way: one model, its weights copied in for each
client, `torch.optim.SGD`, batches gathered from tensors by index, a running weighted sum. "all lanes" is what `vmap`
over the whole cohort gives. All sides run warm and take turns; a figure is the median of the repeats, a ratio that of
the repeats' ratios. All of them take the same batches, and must agree with the plain engine after the first round, or
the benchmark fails. The constants of `undrift/engine/choose.py` come from this table.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import undrift as ud
from benchmarks import record
from benchmarks.agree import Problem, change, check, finite


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    batch: int
    steps: int = 7
    rounds: int = 6
    classes: int = 10
    tokens: int | None = None
    """How many different words the samples are made of, where they are text."""
    lr: float = 0.01
    """Small enough that steps on random labels do not multiply round-off, and large enough that what they change is not
    lost in the rounding of the weights, which the loop averages; no time depends on it."""


SIDES = {"auto": {}, "one lane": {"lanes": 1}, "all lanes": {"lanes": 10**6}, "plain": {"engine": "plain"}}


def mlp(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def paper(name: str, shape: tuple[int, ...], classes: int = 10, **options: object) -> nn.Module:
    return ud.models.get(name, classes=classes, shape=shape, **options)


CASES = {
    "digits MLP": Case(lambda: mlp(64, 64), (1, 8, 8), 20, 10, rounds=20),
    "MLP 784-200": Case(lambda: mlp(784, 200), (1, 28, 28), 20, 10),
    "MLP 784-1000": Case(lambda: mlp(784, 1000), (1, 28, 28), 20, 10, rounds=4),
    "MLP 784-1000, batch 64": Case(lambda: mlp(784, 1000), (1, 28, 28), 20, 64, rounds=4),
    "small CNN, 8×8": Case(lambda: paper("cnn", (1, 8, 8)), (1, 8, 8), 20, 10),
    "small CNN, 16×16": Case(lambda: paper("cnn", (1, 16, 16)), (1, 16, 16), 10, 20),
    "small CNN, 28×28": Case(lambda: paper("cnn", (1, 28, 28)), (1, 28, 28), 10, 32, steps=3, rounds=4),
    "small CNN, 3×32×32": Case(lambda: paper("cnn", (3, 32, 32)), (3, 32, 32), 10, 32, steps=3, rounds=3),
    "logistic 784": Case(lambda: paper("logistic", (1, 28, 28)), (1, 28, 28), 20, 10, rounds=20),
    "LeNet-5": Case(lambda: paper("lenet5", (3, 32, 32)), (3, 32, 32), 6, 100, steps=3, rounds=6),
    "CNN of FedAvg": Case(lambda: paper("cnn_fedavg", (1, 28, 28)), (1, 28, 28), 5, 32, steps=3, rounds=6),
    "FEMNIST CNN": Case(lambda: paper("cnn_femnist", (1, 28, 28), 62), (1, 28, 28), 5, 32, 3, 6, classes=62),
    "VGG-9": Case(lambda: paper("vgg9", (3, 32, 32), dropout=False), (3, 32, 32), 3, 64, steps=1, rounds=3),
    "ResNet-20": Case(lambda: paper("resnet20", (3, 32, 32)), (3, 32, 32), 2, 64, steps=1, rounds=6),
    "GRU": Case(lambda: paper("gru", (80,), 80, vocabulary=80), (80,), 4, 32, 1, 3, classes=80, tokens=80, lr=0.1),
}


def make_data(case: Case) -> ud.FederatedDataset:
    """Numbers only: what is timed does not depend on what the pictures show."""
    generator = torch.Generator().manual_seed(0)
    n = case.batch * case.steps
    size = (case.clients, n, *case.shape)
    words = torch.randint(0, case.tokens or 1, size, generator=generator)
    x = words if case.tokens else torch.rand(size, generator=generator)
    y = torch.randint(0, case.classes, (case.clients, n), generator=generator)
    return ud.FederatedDataset.from_clients(list(zip(x, y, strict=True)))


def make_problem(case: Case) -> Problem:
    local = ud.Local(epochs=1, batch_size=case.batch, lr=case.lr)
    return Problem(case.model(), make_data(case), local, options={"device": "cpu"})


def loop(case: Case, given: Problem) -> tuple[float, float]:
    """Seconds per round of the loop, every client in every round, and its distance from the plain engine."""
    data = given.data
    clients = [data[i] for i in range(len(data))]
    total = sum(len(x) for x, _ in clients)
    model = copy.deepcopy(given.model)
    start = before = copy.deepcopy(model.state_dict())
    times, apart = [], None
    for t in range(case.rounds):
        orders = [ud.batches(data, given.local, client=i, round=t, seed=0) for i in range(len(data))]
        began = time.perf_counter()
        sums = {name: torch.zeros_like(w) for name, w in start.items()}
        for (x, y), batches in zip(clients, orders, strict=True):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)
            for rows in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, w in model.state_dict().items():
                sums[name] += w * (len(x) / total)
        start = sums
        times.append(time.perf_counter() - began)
        if apart is None:
            apart = check("loop", change(start, before), given.reference, "float32")
    finite("loop", start)
    assert apart is not None
    return statistics.median(times[1:]), apart


def ours(side: str, case: Case, given: Problem) -> tuple[float, float, dict]:
    """Seconds per round, the distance from the plain engine, and what was chosen."""
    run, apart = given.train(side, case.rounds, **SIDES[side])
    return statistics.median(row["seconds"] for row in run.history[1:]), apart, run.choices  # the first one traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of: {', '.join(CASES)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{platform.machine()}, {arguments.threads} threads, torch {torch.__version__}")
    sides = "".join(f"{side:>10}" for side in ("loop", *SIDES))
    print(f"{'thousand samples per second':28}{sides}   auto ÷ loop   ÷ the better of loop and all lanes   chosen")
    table = record.Table(arguments.json, record.head("cpu", threads=arguments.threads), "case")
    for name in arguments.cases or CASES:
        case = CASES[name]
        given, chosen = make_problem(case), {}
        times, agrees = {side: [] for side in ("loop", *SIDES)}, {}
        for repeat in range(arguments.repeats):
            turns = list(times)
            for side in turns[repeat % len(turns) :] + turns[: repeat % len(turns)]:  # whoever comes first is slower
                if side == "loop":
                    seconds, agrees[side] = loop(case, given)
                else:
                    seconds, agrees[side], choices = ours(side, case, given)
                    chosen = choices if side == "auto" else chosen
                times[side].append(seconds)
        samples = case.clients * case.batch * case.steps
        speed = {side: samples / statistics.median(t) / 1000 for side, t in times.items()}
        ratio = statistics.median(a / b for a, b in zip(times["loop"], times["auto"], strict=True))
        better = min("loop", "all lanes", key=lambda side: statistics.median(times[side]))
        over = statistics.median(a / b for a, b in zip(times[better], times["auto"], strict=True))
        columns = "".join(f"{speed[side]:10.2f}" for side in times)
        how = f"{chosen['engine']}, {chosen['lanes']} lanes; agree to {max(agrees.values()):.0e}"
        print(f"{name:28}{columns}{ratio:12.2f}×{over:12.2f}×    {how}", flush=True)
        figures = {side: 1000 * v for side, v in speed.items()}
        ratios = {"auto_over_loop": ratio, "auto_over_better": over}
        table.add({"case": name, "samples_per_second": figures, **ratios, "agrees": agrees, **chosen})


if __name__ == "__main__":
    main()
