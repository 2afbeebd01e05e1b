"""The problem that undrift and others are timed on: pfl-research's CIFAR-10 benchmark, and undrift's side of it.

1,000 users of 50 samples, a cohort of 50, batches of 10, one local epoch, its CNN of 1.6 million parameters: 250 client
steps a round. Samples are random bytes: what is timed does not depend on them.
"""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import torch
from torch import nn

import undrift as ud

USERS, EACH, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.1
STEPS = COHORT * EACH // BATCH
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class CNN(nn.Sequential):
    """The benchmark's network."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (USERS * EACH, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return x, torch.randint(0, 10, (USERS * EACH,), generator=generator)


def ours(rounds: int, precision: str, compile: bool | None = None) -> float:
    """Seconds a round takes undrift: the wall clock over all rounds but the first ones."""
    x, y = samples()
    owner = np.repeat(np.arange(USERS), EACH)
    data = ud.FederatedDataset.from_owners({"x": x, "y": y}, np.arange(len(y)), owner, USERS)
    local = ud.Local(epochs=1, batch_size=BATCH, lr=LR)
    run = ud.train(
        CNN(), data, rounds=rounds, local=local, participation=COHORT, precision=precision, compile=compile,
        evaluate_every=rounds,
    )  # fmt: skip
    return statistics.median(row["seconds"] for row in run.history[rounds // 5 :])


def between(ends: list[float], skip: int) -> float:
    """The median of the seconds between the ends of rounds, without the first ones."""
    return statistics.median(b - a for a, b in itertools.pairwise(ends[skip:]))
