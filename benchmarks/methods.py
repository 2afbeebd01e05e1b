"""Each method's round beside FedAvg's, on VGG-9 with a cohort of 8 and batches of 64, on a GPU.

    python -m benchmarks.methods [--compile] [--json FILE] [--warm N] [METHOD …]

A round is one local epoch, so FedAvg's is also what a pass over the data without training is measured against (FedNLR's
activations, FedCurv's and FedCL's Fisher information), which is counted apart. A compiler takes half a minute for each
method; `--warm` lets it do so for several at once, before anything is timed. Each method must agree with the plain
engine after two rounds (in the first, Scaffold and others have nothing to correct by), or the benchmark fails.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import undrift as ud
from benchmarks import record
from benchmarks.agree import Problem
from benchmarks.warm import Job, warm
from undrift.engine.lanes import LanesEngine

PRICE = "FedAvg, deterministic=True"
METHODS = {
    "FedAvg": ud.FedAvg(),
    PRICE: ud.FedAvg(),
    "FedProx": ud.FedProx(0.01),
    "FedProx, temporal target": ud.FedProx(0.01, target=ud.TemporalEnsemble(0.2)),
    "Scaffold": ud.Scaffold(),
    "FedNova": ud.FedNova(),
    "FedDyn": ud.FedDyn(0.1),
    "FedRS": ud.FedRS(0.5),
    "FedLC": ud.FedLC(1.0),
    "FedNLR": ud.FedNLR(),
    "FedDyn + FedNLR": ud.FedDyn(0.1) + ud.FedNLR(),
    "TwoDLRD": ud.TwoDLRD(100),
    "FedCurv": ud.FedCurv(0.1),
    "FedCL": ud.FedCL(0.1),
    "SignAgreement": ud.SignAgreement(4),
    "Projection": ud.Projection(100.0),
    "GradientNoise": ud.GradientNoise(1e-4),
    "ServerSGD": ud.ServerSGD(momentum=0.9),
    # Reddi et al.'s ε. With one far below the updates a step is nearly their sign, which round-off decides near 0.
    "ServerAdam": ud.ServerAdam(0.01, eps=1e-3),
}
CLIENTS, BATCH, STEPS, ROUNDS, WARM = 8, 64, 10, 9, 4
LR = 1e-4
"""Small enough that steps on random labels do not multiply round-off; no time depends on it."""
PASS = 0.5
"""Milliseconds below which no pass was made: what it takes to find that there is nothing to measure."""


@contextmanager
def watched(owner: Any, name: str) -> Iterator[Callable[[], list[float]]]:
    """Inside it, the GPU's milliseconds in each call of a function are noted."""
    plain, events = getattr(owner, name), []

    def timed(*args: Any, **kwargs: Any) -> Any:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        found = plain(*args, **kwargs)
        pair[1].record()
        events.append(pair)
        return found

    def read() -> list[float]:
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    setattr(owner, name, timed)
    try:
        yield read
    finally:
        setattr(owner, name, plain)


def by_round(times: list[float]) -> float:
    """The median over warm rounds of what the calls of a round take together."""
    each = len(times) // ROUNDS
    return statistics.median(sum(times[i * each : (i + 1) * each]) for i in range(WARM, ROUNDS))


def problem(name: str, data: ud.FederatedDataset) -> Problem:
    model = ud.models.get("vgg9", classes=10, shape=(3, 32, 32), dropout=False)
    local = ud.Local(steps=STEPS, batch_size=BATCH, lr=LR)
    return Problem(model, data, local, METHODS[name], rounds=2)


def settings(name: str, compile: bool) -> dict[str, Any]:
    """How a method is timed."""
    how = {"compile": compile, "deterministic": name == PRICE, "engine": "lanes", "lanes": CLIENTS}
    return {"precision": "tf32", "evaluate_every": 100, **how}


def milliseconds(name: str, data: ud.FederatedDataset, compile: bool) -> tuple[float, float, float]:
    """A round's milliseconds without passes over the data, those of the passes, the distance from the plain engine."""
    given = problem(name, data)
    given.plain  # noqa: B018 - computed here, so that nothing of it is watched below
    with watched(LanesEngine, "measure") as clients, watched(ud.FedCL, "broadcast") as server:
        run, apart = given.train(name, ROUNDS, **settings(name, compile))
        passes = by_round(clients()) + (by_round(server()) if server() else 0.0)
    return 1e3 * statistics.median(row["seconds"] for row in run.history[WARM:]) - passes, passes, apart


def samples() -> ud.FederatedDataset:
    generator, n = torch.Generator().manual_seed(0), BATCH * STEPS
    x = torch.randint(0, 256, (CLIENTS * n, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (CLIENTS * n,), generator=generator)
    return ud.FederatedDataset.from_clients(list(zip(x.split(n), y.split(n), strict=True)), server=(x[:500], y[:500]))


def jobs(names: list[str] | None = None) -> list[Job]:
    """What compiles each method ahead of time."""
    return [["benchmarks.methods", "--compile", "--compile-only", name] for name in names or METHODS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"any of: {'; '.join(METHODS)}")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compile-only", action="store_true", help="print no figures")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile N methods at a time beforehand")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.methods or list(METHODS)
    data = samples()
    if arguments.compile_only:
        for name in names:
            problem(name, data).run(2, **settings(name, True))
        return
    if arguments.warm and arguments.compile:
        warm(jobs(names), arguments.warm)
    head = record.head("methods", compile=arguments.compile)
    print(f"{head['gpu']}, torch {torch.__version__}, compiled: {arguments.compile}")
    print(f"{'':28}{'ms per round':>14}{'÷ FedAvg':>10}{'agrees to':>11}{'passes':>10}{'÷ an epoch':>12}")
    table, first = record.Table(arguments.json, head, "method"), None
    for name in names:
        with table.attempt():
            took, apart, agrees = milliseconds(name, data, arguments.compile)
            if name == "FedAvg":
                first = took
            ratio = f"{took / first:9.2f}×" if first else f"{'–':>10}"
            passes = apart > PASS
            cells = f"{apart:10.1f}" + (f"{apart / first:11.2f}×" if first else "") if passes else ""
            print(f"{name:28}{took:14.1f}{ratio}{agrees:11.1e}{cells}", flush=True)
            table.add({"method": name, "ms": took, "passes_ms": apart if passes else None, "agrees": agrees})
    table.end()


if __name__ == "__main__":
    main()
