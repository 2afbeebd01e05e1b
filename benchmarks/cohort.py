"""The papers' models on a GPU: a round of a cohort beside what one would write by hand.

    python -m benchmarks.cohort [--json FILE] [--no-compile] [CASE …]

For each model, thousand samples a second of
  loop      one client after another, eager PyTorch, `torch.optim.SGD`
  replayed  the same with the step captured as a CUDA graph: the strongest way to go one by one
  central   one model trained on as many samples a step as the cohort has, captured as a graph
  ours      `ud.train`, whole rounds;  compiled: with compile=True
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import undrift as ud


@dataclass(frozen=True)
class Case:
    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    batch: int
    steps: int = 20
    tokens: int | None = None


CASES = {
    "FEMNIST CNN, 10 × 32": Case("cnn_femnist", (1, 28, 28), 62, 10, 32),
    "LeNet-5, 12 × 100": Case("lenet5", (3, 32, 32), 10, 12, 100),
    "VGG-9, 8 × 64": Case("vgg9(dropout=False)", (3, 32, 32), 10, 8, 64),
    "ResNet-20, 2 × 256": Case("resnet20", (3, 32, 32), 10, 2, 256, steps=10),
    "GRU, 10 × 32 × 80": Case("gru", (80,), 80, 10, 32, steps=5, tokens=80),
}


def make(case: Case) -> nn.Module:
    from undrift.registry import parse_model

    name, options = parse_model(case.model)
    return ud.models.get(name, classes=case.classes, shape=case.shape, vocabulary=case.tokens, **options)


def samples(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator, n = torch.Generator().manual_seed(0), case.clients * case.batch * case.steps
    if case.tokens:
        x = torch.randint(0, case.tokens, (n, *case.shape), generator=generator)
    else:
        x = torch.rand(n, *case.shape, generator=generator)
    return x, torch.randint(0, case.classes, (n,), generator=generator)


def by_hand(case: Case, low: bool, batch: int, steps: int, graph: bool) -> float:
    """Seconds that `steps` steps of one model take."""
    x, y = (t.cuda() for t in samples(case))
    model = make(case).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randperm(len(x), device="cuda")[:batch]

    def step() -> None:
        optimizer.zero_grad(set_to_none=not graph)
        with torch.autocast("cuda", torch.bfloat16, enabled=low, cache_enabled=not graph):
            loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    run = step
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        run = captured.replay
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def ours(case: Case, precision: str, compile: bool) -> float:
    x, y = samples(case)
    n = case.batch * case.steps
    shares = list(zip(x.split(n), y.split(n), strict=True))
    data = ud.FederatedDataset.from_clients(shares)
    local = ud.Local(epochs=1, batch_size=case.batch, lr=0.1)
    run = ud.train(
        make(case), data, rounds=12, local=local, precision=precision, compile=compile, engine="lanes",
        lanes=case.clients, evaluate_every=100,
    )  # fmt: skip
    return statistics.median(row["seconds"] for row in run.history[4:])


def kept(file: Path | None, head: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """What the file has of other cases, from the same hardware and versions."""
    found = json.loads(file.read_text()) if file and file.exists() else {}
    same = all(found.get(name) == value for name, value in head.items())
    return [row for row in found.get("rows", ()) if row["case"] not in names] if same else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of: {'; '.join(CASES)}")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; thousand samples a second")
    sides = ("loop", "replayed", "central", "ours", "compiled")
    print(f"{'':30}{''.join(f'{side:>10}' for side in sides)}   best ÷ loop  ÷ replayed  ÷ central")
    head = {"benchmark": "cohort", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    names = arguments.cases or list(CASES)
    rows: list[dict[str, Any]] = kept(arguments.json, head, names)
    for name in names:
        case = CASES[name]
        for precision in ("tf32", "bfloat16"):
            low, total = precision == "bfloat16", case.clients * case.batch * case.steps
            seconds = {
                "loop": case.clients * by_hand(case, low, case.batch, case.steps, graph=False),
                "replayed": case.clients * by_hand(case, low, case.batch, case.steps, graph=True),
                "central": by_hand(case, low, case.clients * case.batch, case.steps, graph=True),
                "ours": ours(case, precision, False),
            }
            if not arguments.no_compile:
                seconds["compiled"] = ours(case, precision, True)
            speed = {side: total / s / 1e3 for side, s in seconds.items()}
            best = max(speed["ours"], speed.get("compiled", 0))
            cells = "".join(f"{speed[side]:10.1f}" if side in speed else f"{'–':>10}" for side in sides)
            over = "".join(f"{best / speed[side]:11.2f}×" for side in ("loop", "replayed", "central"))
            print(f"{name + ', ' + precision:30}{cells}  {over}", flush=True)
            rows.append({"case": name, "precision": precision, "thousand_samples_a_second": speed, "best": best})
            if arguments.json:  # after each, so that a run that is cut short leaves what it has
                rows.sort(key=lambda row: list(CASES).index(row["case"]))
                arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
