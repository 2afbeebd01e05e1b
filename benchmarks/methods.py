"""Each method's round beside FedAvg's, on VGG-9 with a cohort of 8 and batches of 64, on a GPU.

python -m benchmarks.methods [--compile] [--json FILE] [METHOD …]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

import undrift as ud

METHODS = {
    "FedAvg": ud.FedAvg(),
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
CLIENTS, BATCH, STEPS, ROUNDS = 8, 64, 10, 8


def seconds(method: ud.Part | ud.Method, data: ud.FederatedDataset, compile: bool) -> float:
    model = ud.models.get("vgg9", classes=10, shape=(3, 32, 32), dropout=False)
    local = ud.Local(steps=STEPS, batch_size=BATCH, lr=0.01)
    options = {"precision": "tf32", "compile": compile, "evaluate_every": 100, "engine": "lanes", "lanes": CLIENTS}
    run = ud.train(model, data, method, rounds=ROUNDS, local=local, **options)  # type: ignore[arg-type]
    return statistics.median(row["seconds"] for row in run.history[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"any of: {'; '.join(METHODS)}")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    generator, n = torch.Generator().manual_seed(0), BATCH * STEPS
    x = torch.randint(0, 256, (CLIENTS * n, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (CLIENTS * n,), generator=generator)
    clients = list(zip(x.split(n), y.split(n), strict=True))
    data = ud.FederatedDataset.from_clients(clients, server=(x[:500], y[:500]))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, compiled: {arguments.compile}")
    rows, first = [], None
    for name in arguments.methods or METHODS:
        took = seconds(METHODS[name], data, arguments.compile)
        first = first or took
        print(f"{name:28}{1e3 * took:10.1f} ms a round{took / first:8.2f}×", flush=True)
        rows.append({"method": name, "ms": 1e3 * took, "over_fedavg": took / first})
        if arguments.json:
            head = {"benchmark": "methods", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
            arguments.json.write_text(json.dumps({**head, "compile": arguments.compile, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
