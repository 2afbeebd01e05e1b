"""(e) The same training in two fresh processes gives the same bits.

    python -m tests.gpu.bits tf32 compiled --device cuda

prints the SHA-256 of all weights' bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import undrift as ud
from tests.gpu.checks import Check, Finding
from tests.gpu.models import data_for
from tests.gpu.runner import ROOT
from undrift.engine import graph

PRECISIONS = {"float32": "auto", "tf32": "tf32", "bfloat16": "bfloat16"}


def digest(precision: str, compiled: bool, device: str) -> str:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 4),
    )  # fmt: skip
    run = ud.train(
        model, data_for("convolution, padded", (41, 5, 23, 10, 17)), ud.FedProx(mu=0.1), rounds=4,
        local=ud.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.9), engine="lanes", lanes=3, device=device,
        precision=PRECISIONS[precision], compile=compiled and graph.captures(torch.device(device)),
    )  # fmt: skip
    assert all(bool(torch.isfinite(w).all()) for w in run.params.values())
    return hashlib.sha256(b"".join(w.cpu().numpy().tobytes() for w in run.params.values())).hexdigest()


def same(precision: str, compiled: bool, device: str) -> Finding:
    """Two processes at once, with caches of their own: each compiles for itself."""
    command = [sys.executable, "-m", "gpu.bits", precision, "compiled" if compiled else "traced", "--device", device]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        children = []
        for folder in (one, other):
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            children.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | caches, **pipes))
        ended = [child.communicate() for child in children]
    for child, (_, errors) in zip(children, ended, strict=True):
        if child.returncode:
            return Finding("FAIL", f"a process ended with status {child.returncode}: {errors.strip().splitlines()[-1]}")
    first, second = (out.strip().splitlines()[-1] for out, _ in ended)
    return Finding("ok" if first == second and len(first) == 64 else "FAIL", f"{first[:12]} and {second[:12]}")


def checks() -> Iterator[Check]:
    for compiled in (True, False):
        for precision in PRECISIONS:
            name = f"{precision}, {'compiled' if compiled else 'traced'}"
            yield Check("e", name, partial(same, precision, compiled), seconds=80.0 if compiled else 25.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("precision", choices=PRECISIONS)
    parser.add_argument("how", choices=["compiled", "traced"])
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(digest(asked.precision, asked.how == "compiled", asked.device))


if __name__ == "__main__":
    main()
