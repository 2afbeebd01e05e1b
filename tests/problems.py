"""Small problems and comparisons that many tests share."""

from __future__ import annotations

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


def quadratics(pairs: list[tuple[float, float]]) -> ud.FederatedDataset:
    clients = [(torch.zeros(1, 1), torch.tensor([pair], dtype=torch.float64)) for pair in pairs]
    return ud.FederatedDataset.from_clients(clients, task=ud.Task(loss=quadratic))


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """‖a − b‖ / ‖b‖ over all parameters as one vector."""
    flat = [torch.cat([tree[name].detach().double().flatten() for name in b]) for tree in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
