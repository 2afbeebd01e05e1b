"""Each method's round beside FedAvg's, on VGG-9 with a cohort of 8 and batches of 64, on a GPU.

    python -m benchmarks.methods [--compile] [--json FILE] [METHOD …]

A round is one local epoch, so FedAvg's is also what a pass over the data without training is measured against (FedNLR's
activations, FedCurv's and FedCL's Fisher information), which is counted apart. A compiler takes half a minute for each
method; `--warm` lets it do so for several at once, before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import undrift as ud
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
    "ServerAdam": ud.ServerAdam(0.01),
}
CLIENTS, BATCH, STEPS, ROUNDS, WARM = 8, 64, 10, 9, 4
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


def milliseconds(
    method: ud.Part | ud.Method, data: ud.FederatedDataset, compile: bool, deterministic: bool
) -> tuple[float, float]:
    """A round's milliseconds without passes over the data, and those of the passes."""
    model = ud.models.get("vgg9", classes=10, shape=(3, 32, 32), dropout=False)
    with watched(LanesEngine, "measure") as clients, watched(ud.FedCL, "broadcast") as server:
        run = ud.train(
            model, data, method, rounds=ROUNDS, local=ud.Local(steps=STEPS, batch_size=BATCH, lr=0.01),
            precision="tf32", compile=compile, deterministic=deterministic, evaluate_every=100, engine="lanes",
            lanes=CLIENTS,
        )  # fmt: skip
        apart = by_round(clients()) + (by_round(server()) if server() else 0.0)
    return 1e3 * statistics.median(row["seconds"] for row in run.history[WARM:]) - apart, apart


def samples() -> ud.FederatedDataset:
    generator, n = torch.Generator().manual_seed(0), BATCH * STEPS
    x = torch.randint(0, 256, (CLIENTS * n, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (CLIENTS * n,), generator=generator)
    return ud.FederatedDataset.from_clients(list(zip(x.split(n), y.split(n), strict=True)), server=(x[:500], y[:500]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"any of: {'; '.join(METHODS)}")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="compile N methods at a time beforehand")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.methods or list(METHODS)
    shares = [names[i :: arguments.warm] for i in range(arguments.warm)] if arguments.compile else []
    command = [sys.executable, "-m", "benchmarks.methods", "--compile"]
    for process in [subprocess.Popen([*command, *share], stdout=subprocess.DEVNULL) for share in shares if share]:
        process.wait()
    data = samples()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, compiled: {arguments.compile}")
    print(f"{'':28}{'ms a round':>12}{'÷ FedAvg':>10}{'passes':>10}{'÷ an epoch':>12}")
    rows, first = [], None
    for name in names:
        took, apart = milliseconds(METHODS[name], data, arguments.compile, name == PRICE)
        first = first or took
        passes = f"{apart:10.1f}{apart / first:11.2f}×" if apart > PASS else ""
        print(f"{name:28}{took:12.1f}{took / first:9.2f}×{passes}", flush=True)
        rows.append({"method": name, "ms": took, "over_fedavg": took / first, "passes_ms": apart if passes else None})
        if arguments.json:
            head = {"benchmark": "methods", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            arguments.json.write_text(json.dumps({**head, "compile": arguments.compile, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
