"""Small problems and comparisons that many tests share."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch

import undrift as ud


def make_clients(sizes: list[int], dtype: torch.dtype = torch.float64, classes: int = 4) -> ud.FederatedDataset:
    """Clients of these sizes, whose inputs and labels differ from client to client. Samples have 6 features."""
    rng = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(sizes):
        x = torch.tensor(rng.normal(loc=0.3 * (i % 3), size=(n, 6)), dtype=dtype)
        mix = np.roll(np.linspace(1, 10, classes), i)
        clients.append((x, torch.tensor(rng.choice(classes, size=n, p=mix / mix.sum()))))
    test = (torch.tensor(rng.normal(size=(40, 6)), dtype=dtype), torch.tensor(rng.integers(0, classes, 40)))
    return ud.FederatedDataset.from_clients(clients, test=test, server=test)


def net(dtype: torch.dtype = torch.float64, dropout: float = 0.0, classes: int = 4) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, classes)]
    return torch.nn.Sequential(*layers).to(dtype)


class Point(torch.nn.Module):
    """One parameter vector, whatever the input: clients with targets (a, b) have the loss ½·a·(w − b)²."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((1,), start, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w.expand(len(x), 1)


def quadratic(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.5 * y[:, 0] * (z[:, 0] - y[:, 1]) ** 2


def quadratics(pairs: list[tuple[float, float]], sizes: list[int] | None = None) -> ud.FederatedDataset:
    """One client per pair (a, b), which holds it `sizes` times."""
    counts = sizes or [1] * len(pairs)
    clients = [
        (torch.zeros(n, 1), torch.tensor([pair] * n, dtype=torch.float64))
        for pair, n in zip(pairs, counts, strict=True)
    ]
    return ud.FederatedDataset.from_clients(clients, task=ud.Task(loss=quadratic))


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all parameters as one vector."""
    flat = [torch.cat([tree[name].detach().double().flatten() for name in b]) for tree in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


MILLION = """
import resource, torch, undrift as ud
import sys
clients = int(sys.argv[1])
x, y = torch.randn(2 * clients, 64), torch.arange(2 * clients) % 10
data = ud.FederatedDataset.from_clients(list(zip(x.view(clients, 2, 64), y.view(clients, 2))))
model = torch.nn.Sequential(torch.nn.Linear(64, 13_400), torch.nn.ReLU(), torch.nn.Linear(13_400, 10))
assert sum(p.numel() for p in model.parameters()) > 1_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = ud.train(model, data, rounds=1, local=ud.Local(steps=1, lr=0.1), engine="lanes")
assert len(run.history[0]["clients"]) == clients
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 4e6, run.choices["lanes"])
"""


def copies_of_a_million(clients: int) -> tuple[float, float]:
    """What a run adds to the process's memory, counted in copies of the weights, and its lanes."""
    done = subprocess.run([sys.executable, "-c", MILLION, str(clients)], capture_output=True, text=True, check=True)
    copies, lanes = (float(word) for word in done.stdout.split())
    return copies, lanes


def split(sizes: tuple[int, ...] = (12, 7, 0, 20, 9), tests: tuple[int, ...] = (5, 3, 4, 0, 11)) -> ud.FederatedDataset:
    rng = np.random.default_rng(3)

    def pairs(counts):
        return [
            (torch.tensor(rng.normal(size=(n, 6)) + i), torch.tensor(rng.integers(0, 4, n)))
            for i, n in enumerate(counts)
        ]

    both = ud.FederatedDataset.from_clients(
        [
            (torch.cat(a), torch.cat(b))
            for a, b in (zip(*p, strict=True) for p in zip(pairs(sizes), pairs(tests), strict=True))
        ]
    )
    # The first rows of each client are for training, the others its own test.
    owner = np.repeat(np.arange(len(sizes)), both.sizes)
    held = np.concatenate([np.r_[np.zeros(n, bool), np.ones(m, bool)] for n, m in zip(sizes, tests, strict=True)])
    rows = np.arange(len(owner))
    own = ud.FederatedDataset.from_owners(both.store, rows[held], owner[held], len(sizes))
    return ud.FederatedDataset.from_owners(both.store, rows[~held], owner[~held], len(sizes), client_test=own)
