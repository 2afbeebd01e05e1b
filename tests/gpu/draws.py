"""(d) Cohorts, step counts, numbers of lanes and methods from a seeded generator: lanes against plain.

`tests/test_graph_rounds.py` does the same on a CPU, by hypothesis and with a stand-in for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import undrift as ud
from tests.gpu.checks import Check, Finding
from tests.gpu.cohorts import Cohort, scheduled
from tests.gpu.engines import METHODS, compare

COUNT = 60
NAMES = ["FedAvg", *METHODS]
MODELS = ["linear", "convolution, padded", "convolution, strided", "GRU"]


def draw(seed: int) -> tuple[str, torch.dtype, str, Cohort]:
    """Three to eight clients of 1 to 60 samples, with epochs, or steps by round or by client."""
    rng = np.random.default_rng(seed)
    clients, rounds = int(rng.integers(3, 9)), int(rng.integers(1, 4))
    method = NAMES[rng.integers(len(NAMES))]

    def some(count: int, low: int, high: int) -> list[int]:
        return rng.integers(low, high + 1, count).tolist()

    work: dict[str, Any] = {
        0: {"epochs": scheduled(*some(rounds, 1, 2))},
        1: {"steps": scheduled(*some(rounds, 1, 15))},
        2: {"steps": some(clients, 1, 20)},
    }[int(rng.integers(3))]
    batch = [None, 1, 3, 8, 16][rng.integers(5)]
    # Of an update that is small beside the weights, float32's rounding of these is a large share.
    rate = {"lr": 0.01, "momentum": 0.9} if method == "momentum" else {"lr": 0.05}
    local = ud.Local(**work, batch_size=batch, **rate)
    cohort = Cohort(tuple(some(clients, 1, 60)), local, int(rng.integers(1, clients + 1)), rounds)
    return MODELS[rng.integers(len(MODELS))], [torch.float64, torch.float32][seed % 2], method, cohort


def agrees(seed: int, device: str) -> Finding:
    model, dtype, method, cohort = draw(seed)
    return compare(model, dtype, cohort, device, METHODS.get(method, ud.FedAvg()))


def checks() -> Iterator[Check]:
    for seed in range(COUNT):
        model, dtype, method, cohort = draw(seed)
        work = "epochs" if cohort.local.steps is None else "steps per client" if cohort.local.per_client else "steps"
        who = f"{len(cohort.sizes)} clients, {cohort.lanes} lanes"
        yield Check(
            "d",
            f"draw {seed}: {model}, {str(dtype)[6:]}, {method}, {who}, {work}",
            partial(agrees, seed),
            seconds=6.0,
            full=True,
        )
