"""(h) Several processes against one: those of torchrun, with NCCL where each has a GPU, else through the host's memory.

With one GPU, one process speaks to itself by NCCL, and two share the GPU. All of them train what `tests/processes.py`
has, in float64 and float32; a distance is relative to the update.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.gpu.checks import Check, Finding, update_distance, within
from tests.processes import DEVICE, EXPERIMENTS, START, left, together

NAMES = [
    "FedAvg", "Scaffold, float32", "FedNLR", "every hook", "order", "personal head", "batch norm",
    "one client that keeps", "faults", "lanes fail",
]  # fmt: skip


def processes(number: int, device: str) -> list[Finding]:
    """Each experiment in so many processes, beside the same in this one."""
    with tempfile.TemporaryDirectory() as folder:
        found, said = together(Path(folder) / "runs", NAMES, number, **{DEVICE: device})
    os.environ[DEVICE] = device
    findings = []
    for name in NAMES:
        line = f"{number} in all, {name}"
        if name not in found:
            findings.append(Finding("FAIL", "a process ended before its time", line, detail=said[-4000:]))
            continue
        wanted = left(EXPERIMENTS[name]())["params"]
        figure = max(update_distance(one["params"], wanted, START[name]) for one in found[name])
        finding = within(figure, 1e-5 if "float32" in name else 1e-10)
        findings.append(Finding(finding.status, finding.says, line))
    return findings


def checks() -> Iterator[Check]:
    for number in (1, 2):
        yield Check("i", f"{number} in all", partial(processes, number), seconds=60.0)
