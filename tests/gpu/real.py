"""(f) Short training runs of the papers' models on real data, in lanes, against the plain engine with the same seed.

    python -m tests.gpu.real --reference --out tests/gpu/reference.json

runs the plain engine once and stores what it reached. `python -m tests.gpu.prepare` makes the data.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import undrift as ud
from tests.gpu.checks import Absent, Check, Finding
from tests.gpu.runner import ROOT
from undrift.data.dataset import Rows, Take, Task
from undrift.data.images import standardised
from undrift.data.text import Bags, sequences

DATA, REFERENCE = ROOT / "carry" / "real", ROOT / "tests" / "gpu" / "reference.json"
LOSS, ACCURACY = 0.02, 0.015
"""How far the final loss may be from the plain engine's, relative to it, and the accuracy, in absolute terms."""


@dataclass(frozen=True)
class Run:
    data: str
    model: str
    local: ud.Local
    rounds: int
    participation: int
    loss: float
    """What the final loss must be below, …"""
    accuracy: float
    """… and the accuracy above, to be far from chance."""
    method: Any = ud.FedAvg()  # noqa: RUF009 - parts are frozen
    objective: str | None = None
    metric: str = "accuracy"


def local(lr: Any, batch_size: int, steps: Any = None, epochs: Any = None, **rest: Any) -> ud.Local:
    return ud.Local(lr=lr, batch_size=batch_size, steps=steps, epochs=epochs, **rest)


TE = ud.TemporalEnsemble(beta=0.4)
RUNS = {
    "svm": Run("mnist", "svm", local(0.006, 32, epochs=2), 30, 12, 0.35, 0.6, objective="squared_hinge"),
    "mlp": Run("fashion_mnist", "mlp", local(0.05, 50, epochs=1), 20, 10, 0.9, 0.6),
    "logistic, tags": Run(
        "stackoverflow_tags", "logistic", local(1.0, 32, steps=10), 30, 10, 0.09, 0.3,
        ud.ServerAdam(lr=0.1), metric="recall_at_5",
    ),
    "cnn_femnist, K decays": Run("mnist", "cnn_femnist", local(0.04, 32, steps=ud.decay(10, 0.97)), 20, 10, 0.7, 0.75),
    "cnn_fedavg": Run("fashion_mnist", "cnn_fedavg", local(0.05, 50, epochs=2), 12, 10, 0.9, 0.65),
    "cnn_temporal, FedProx-TE": Run(
        "cifar10", "cnn_temporal", local(0.05, 50, epochs=3), 25, 8, 1.9, 0.3, ud.FedProx(mu=0.8, target=TE)
    ),
    "lenet5": Run("cifar10", "lenet5", local(0.05, 50, steps=10), 40, 12, 1.9, 0.27),
    "vgg9, FedNLR": Run("cifar10", "vgg9(dropout=False)", local(0.02, 64, epochs=4), 25, 8, 1.95, 0.27, ud.FedNLR()),
    "resnet20, server momentum": Run(
        "cifar10", "resnet20", local(0.05, 64, epochs=3), 25, 8, 2.1, 0.2, ud.ServerSGD(momentum=0.5)
    ),
    "gru, Shakespeare": Run("shakespeare_roles", "gru", local(1.0, 32, steps=10), 25, 10, 3.3, 0.18),
    "lstm, words": Run("ag_news", "lstm", local(0.2, 50, epochs=3, momentum=0.9), 8, 12, 1.2, 0.5),
    "lstm, sound": Run("audiomnist", "lstm", local(0.04, 32, epochs=2, momentum=0.9), 15, 12, 1.7, 0.4),
}  # fmt: skip


@cache
def federated(name: str) -> ud.FederatedDataset:
    path = DATA / f"{name}.npz"
    if not path.exists():
        raise Absent(f"{path.relative_to(ROOT)} is missing; `python -m tests.gpu.prepare` makes it")
    file = dict(np.load(path))
    how: Take = standardised
    if "tags" in file:
        how = Bags(int(file["words"]), int(file["tags"]))
        task = Task("binary_cross_entropy", {"recall_at_5": "recall_at_5"}, classes=int(file["classes"]))
    else:
        how = sequences if file["x"].ndim == 2 else standardised
        task = Task(classes=int(file["classes"]), vocabulary=int(file["vocabulary"]) or None)

    def store(which: str) -> dict[str, torch.Tensor]:
        x, y = torch.from_numpy(file[f"{which}x"]), torch.from_numpy(file[f"{which}y"])
        found = {"x": x, "y": y if y.dim() > 1 else y.long()}
        if how is standardised:
            pixels = file["x"].astype(np.float64) / 255
            for name, moment in (("mean", np.mean), ("std", np.std)):
                found[name] = torch.tensor(moment(pixels, (0, 2, 3))[:, None, None], dtype=torch.float32)
        return found

    held = store("test_")
    test = Rows(held, torch.arange(len(held["y"])), how)
    return ud.FederatedDataset(store(""), torch.arange(len(file["x"])), file["offsets"], how, test, task=task)


def trained(name: str, engine: str, device: str) -> dict[str, float]:
    run, began = RUNS[name], time.perf_counter()
    result = ud.train(
        run.model, federated(run.data), run.method, rounds=run.rounds, local=run.local, loss=run.objective,
        participation=run.participation, evaluate_every=run.rounds, engine=engine, device=device,
    )  # fmt: skip
    assert result.choices["engine"] == engine
    row = result.history[-1]
    return {"loss": row["loss"], "accuracy": row[run.metric], "seconds": round(time.perf_counter() - began, 1)}


def matches(name: str, device: str) -> Finding:
    if not REFERENCE.exists():
        raise Absent(f"{REFERENCE.relative_to(ROOT)} is missing; `python -m tests.gpu.real --reference` makes it")
    known = json.loads(REFERENCE.read_text())["runs"]
    if name not in known:
        raise Absent(f"{REFERENCE.relative_to(ROOT)} has no such run; make it again")
    return judged(trained(name, "lanes", device), known[name], RUNS[name])


def judged(found: dict[str, float], plain: dict[str, float], run: Run) -> Finding:
    off = abs(found["loss"] / plain["loss"] - 1), abs(found["accuracy"] - plain["accuracy"])
    close = off[0] <= LOSS and off[1] <= ACCURACY
    far = all(each["loss"] < run.loss and each["accuracy"] > run.accuracy for each in (found, plain))
    says = f"loss {found['loss']:.4f} ({100 * off[0]:.2f}% off), {run.metric} {found['accuracy']:.3f} "
    says += f"({100 * off[1]:.1f} points off)" + ("" if far else f"; not below {run.loss} and above {run.accuracy}")
    return Finding("ok" if close and far and math.isfinite(sum(found.values())) else "FAIL", says)


def checks() -> Iterator[Check]:
    for name in RUNS:
        yield Check("f", name, partial(matches, name), seconds=30.0, full=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", action="store_true", help="store what the plain engine reaches")
    parser.add_argument("--name", default="", help="only runs whose name contains this; compares the two engines")
    parser.add_argument("--out", type=Path, default=REFERENCE)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="what to note as the commit; by default git is asked")
    asked = parser.parse_args()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    commit = asked.commit or head.stdout.strip()
    if asked.reference and not commit:
        raise SystemExit("git knows no commit here; give --commit.")
    runs = {}
    for name in (name for name in RUNS if asked.name in name):
        runs[name] = trained(name, "plain", asked.device)
        print(name, runs[name], flush=True)
        if not asked.reference:
            found = trained(name, "lanes", asked.device)
            print("   ", judged(found, runs[name], RUNS[name]), f"{found['seconds']} s", flush=True)
    if asked.reference:
        gpu = torch.cuda.get_device_name() if asked.device.startswith("cuda") else asked.device
        where = {"commit": commit, "torch": torch.__version__, "device": gpu}
        asked.out.write_text(json.dumps({**where, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
