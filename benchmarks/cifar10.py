"""The problem that undrift and others are timed on: pfl-research's CIFAR-10 benchmark, and undrift's side of it.

1,000 users of 50 samples, a cohort of 50, batches of 10, one local epoch, its CNN of 1.6 million parameters: 250 client
steps per round. Samples are random bytes: what is timed does not depend on them. Everything is timed with dropout; a
peer's agreement with undrift is checked without, since no two systems draw the same masks.
"""

from __future__ import annotations

import itertools
import statistics
from functools import cache

import numpy as np
import torch
from torch import nn

import undrift as ud
from benchmarks.agree import Problem

USERS, EACH, COHORT, BATCH = 1000, 50, 50, 10
STEPS = COHORT * EACH // BATCH
LR = 1e-3
"""No time depends on it, and agreement does: on random labels every step with pfl's 0.1, or with 0.01, multiplies
round-off, so that after five of them float32 itself is off by 0.02. `pfl_accuracy.py` trains with 0.1."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class CNN(nn.Sequential):
    """The benchmark's network, pfl-research's `simple_cnn`.

    Its weights start Glorot-uniform; its biases as PyTorch starts them, which pfl's PyTorch benchmark leaves alone.
    """

    def __init__(self, seed: int = 0, dropout: bool = True) -> None:
        torch.manual_seed(seed)
        drop = nn.Dropout if dropout else nn.Identity  # which takes any argument, and keeps the layers' names
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), drop(0.25), nn.Flatten(),
            nn.Linear(12544, 128), nn.ReLU(), drop(0.5), nn.Linear(128, 10),
        )  # fmt: skip
        for layer in self:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (USERS * EACH, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return x, torch.randint(0, 10, (USERS * EACH,), generator=generator)


@cache
def problem(dropout: bool = True) -> Problem:
    x, y = samples()
    owner = np.repeat(np.arange(USERS), EACH)
    data = ud.FederatedDataset.from_owners({"x": x, "y": y}, np.arange(len(y)), owner, USERS)
    local = ud.Local(epochs=1, batch_size=BATCH, lr=LR)
    return Problem(CNN(dropout=dropout), data, local, options={"participation": COHORT, "device": DEVICE})


def ours(side: str, rounds: int, precision: str, compile: bool | None = None) -> tuple[float, float]:
    """Seconds per round, the median of all but the first ones, and the distance from the plain engine."""
    run, apart = problem().train(side, rounds, precision, compile=compile, evaluate_every=rounds)
    return statistics.median(row["seconds"] for row in run.history[rounds // 5 :]), apart


@cache
def first_round() -> dict[int, torch.Tensor]:
    """The users of undrift's first round, each with its samples (rows of `samples()`) in the order of its batches."""
    given = problem(dropout=False)
    users = given.plain[0].history[0]["clients"]
    orders = {i: torch.cat(ud.batches(given.data, given.local, client=i, round=0, seed=0)) for i in users}
    return {i: i * EACH + order for i, order in orders.items()}


def between(ends: list[float], skip: int) -> float:
    """The median of the seconds between the ends of rounds, without the first ones."""
    return statistics.median(b - a for a, b in itertools.pairwise(ends[skip:]))
