"""The papers' models on a GPU: a round of a cohort beside what one would write by hand.

    python -m benchmarks.cohort [--json FILE] [--no-compile] [--warm N] [CASE …]

For each model, thousand samples per second of
  loop      one client after another, eager PyTorch, `torch.optim.SGD`
  replayed  the same with the step captured as a CUDA graph: the strongest way to go one by one
  central   one model trained on as many samples per step as the cohort has, captured as a graph
  ours      `ud.train`, whole rounds;  compiled: with compile=True
Before a figure counts, the sides written by hand must agree with eager float32 steps from the same weights, and ours
with the plain engine. `--warm` compiles N variants at a time beforehand, each in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import undrift as ud
from benchmarks import record
from benchmarks.agree import Problem, change, check, finite
from benchmarks.cifar10 import DEVICE
from benchmarks.warm import Job, warm


@dataclass(frozen=True)
class Case:
    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    batch: int
    steps: int = 20
    tokens: int | None = None
    lr: float = 0.01
    """Small enough that steps on random labels do not multiply round-off; no time depends on it."""


CASES = {
    "FEMNIST CNN, 10 × 32": Case("cnn_femnist", (1, 28, 28), 62, 10, 32),
    "LeNet-5, 12 × 100": Case("lenet5", (3, 32, 32), 10, 12, 100),
    "VGG-9, 8 × 64": Case("vgg9(dropout=False)", (3, 32, 32), 10, 8, 64, lr=1e-4),
    "ResNet-20, 2 × 256": Case("resnet20", (3, 32, 32), 10, 2, 256, steps=10),
    "GRU, 10 × 32 × 80": Case("gru", (80,), 80, 10, 32, steps=5, tokens=80, lr=0.1),
}
PRECISIONS = ("tf32", "bfloat16")
SIDES = ("loop", "replayed", "central", "ours", "compiled")


def make(case: Case) -> nn.Module:
    from undrift.models import parse_model

    name, options = parse_model(case.model)
    return ud.models.get(name, classes=case.classes, shape=case.shape, vocabulary=case.tokens, **options)


def samples(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator, n = torch.Generator().manual_seed(0), case.clients * case.batch * case.steps
    if case.tokens:
        x = torch.randint(0, case.tokens, (n, *case.shape), generator=generator)
    else:
        x = torch.rand(n, *case.shape, generator=generator)
    return x, torch.randint(0, case.classes, (n,), generator=generator)


def stepping(case: Case, model: nn.Module, low: bool, batch: int, graph: bool) -> Callable[[], None]:
    """A function that takes one step of SGD with the model, always on the same batch."""
    x, y = (t.to(DEVICE) for t in samples(case))
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:batch].to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not graph)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=low, cache_enabled=not graph):
            loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()

    if not graph:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()

    def replay(keep: Any = (x, y, rows)) -> None:
        """A graph does not hold on to the tensors that it reads; this does."""
        captured.replay()

    return replay


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@cache
def eager(case: Case, batch: int) -> dict[str, torch.Tensor]:
    """The update of `case.steps` eager steps in float32: what every side written by hand must come out with."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = make(case).to(DEVICE)
    step = stepping(case, model, low=False, batch=batch, graph=False)
    for _ in range(case.steps):
        step()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    return change(dict(model.named_parameters()), dict(make(case).named_parameters()))


def by_hand(side: str, case: Case, precision: str, batch: int, graph: bool, repeats: int = 5) -> tuple[float, float]:
    """Seconds that `case.steps` steps of one model take, and their distance from eager float32."""
    model, start = make(case).to(DEVICE), make(case)
    weights = dict(model.named_parameters())
    run = stepping(case, model, precision == "bfloat16", batch, graph)
    run()
    with torch.no_grad():  # undo the steps that warmed it up, in place: a graph reads its weights where they lie
        for name, w in start.named_parameters():
            weights[name].copy_(w)
    times, apart = [], None
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        for _ in range(case.steps):
            run()
        wait()
        times.append(time.perf_counter() - began)
        if apart is None:
            update = change(weights, dict(start.named_parameters()))
            apart = check(side, update, eager(case, batch), precision, against="eager float32")
    finite(side, weights)
    assert apart is not None
    return statistics.median(times), apart


@cache
def problem(case: Case) -> Problem:
    x, y = samples(case)
    n = case.batch * case.steps
    data = ud.FederatedDataset.from_clients(list(zip(x.split(n), y.split(n), strict=True)))
    local = ud.Local(epochs=1, batch_size=case.batch, lr=case.lr)
    return Problem(make(case), data, local, options={"device": DEVICE})


def ours(side: str, case: Case, precision: str, compile: bool, rounds: int = 12) -> tuple[float, float]:
    """Seconds per round, and the distance from the plain engine after the first."""
    run, apart = problem(case).train(
        side, rounds, precision, compile=compile, engine="lanes", lanes=case.clients, evaluate_every=100
    )
    return statistics.median(row["seconds"] for row in run.history[rounds // 3 :]), apart


def compile_only(case: Case, precision: str) -> None:
    problem(case).run(1, precision=precision, compile=True, engine="lanes", lanes=case.clients)


def row(name: str, case: Case, precision: str, compile: bool = True) -> dict:
    """Every side of one case; raises `SystemExit` if one of them does not agree."""
    told = {side: f"{name}, {precision}, {side}" for side in SIDES}
    found = {
        "loop": by_hand(told["loop"], case, precision, case.batch, graph=False),
        "replayed": by_hand(told["replayed"], case, precision, case.batch, graph=True),
        "central": by_hand(told["central"], case, precision, case.clients * case.batch, graph=True),
        "ours": ours(told["ours"], case, precision, False),
    }
    if compile:
        found["compiled"] = ours(told["compiled"], case, precision, True)
    one_by_one = {"loop", "replayed"}
    total = case.clients * case.batch * case.steps
    speed = {s: total / t / 1e3 / (case.clients if s in one_by_one else 1) for s, (t, _) in found.items()}
    best = max(speed["ours"], speed.get("compiled", 0))
    agrees = {side: apart for side, (_, apart) in found.items()}
    return {"case": name, "precision": precision, "thousand_samples_a_second": speed, "best": best, "agrees": agrees}


def jobs(names: list[str] | None = None) -> list[Job]:
    """What compiles each variant ahead of time."""
    return [["benchmarks.cohort", "--compile-only", p, name] for name in names or CASES for p in PRECISIONS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of: {'; '.join(CASES)}")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile N variants at a time beforehand")
    parser.add_argument("--compile-only", choices=PRECISIONS, help="compile and print no figures")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.cases or list(CASES)
    if arguments.compile_only:
        for name in names:
            compile_only(CASES[name], arguments.compile_only)
        return
    if arguments.warm:
        warm(jobs(names), arguments.warm)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    head = record.head("cohort")
    print(f"{head['gpu']}, torch {torch.__version__}; thousand samples per second")
    over = ("loop", "replayed", "central")
    print(f"{'':30}{''.join(f'{s:>10}' for s in SIDES)}   best ÷ loop  ÷ replayed  ÷ central   ours agrees to")
    table = record.Table(arguments.json, head, "case", "precision")
    for name in names:
        for precision in PRECISIONS:
            with table.attempt():
                found = row(name, CASES[name], precision, not arguments.no_compile)
                speed = found["thousand_samples_a_second"]
                cells = "".join(f"{speed[side]:10.1f}" if side in speed else f"{'–':>10}" for side in SIDES)
                ratios = "".join(f"{found['best'] / speed[side]:11.2f}×" for side in over)
                apart = max(v for side, v in found["agrees"].items() if side not in over)
                print(f"{name + ', ' + precision:30}{cells}  {ratios}{apart:15.1e}", flush=True)
                table.add(found)
    table.end()


if __name__ == "__main__":
    main()
