"""(b) Batch norm in lanes on the device, as traced and compiled, against torch's own on a CPU in float64.

The running statistics are compared as well as the weights: they are part of the state that a captured graph changes in
place. Last batches are short, so that padding would show.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import undrift as ud
from tests.gpu.checks import Check, Finding, counted_replays, flat, within
from undrift.engine import graph

LOCAL, ROUNDS, SIZES = ud.Local(epochs=2, batch_size=8, lr=0.05), 3, (19, 30, 8, 45, 12)
BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Of all weights and running statistics as one vector, relative to how far they moved."""
METHODS: dict[str, Any] = {"FedAvg": ud.FedAvg(), "FedDyn + FedNLR": ud.FedDyn(alpha=0.1) + ud.FedNLR()}


class Residual(nn.Module):
    """A small residual network: norms over positions and, at its end, over samples alone. One counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=None)
        self.middle, self.third = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.stem(x)))
        h = torch.tanh(self.second(self.conv(h)) + h).mean((2, 3))
        return self.head(self.dropout(torch.tanh(self.third(self.middle(h)))))


def problem(dtype: torch.dtype) -> tuple[nn.Module, ud.FederatedDataset]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = Residual().to(dtype)
    generator, clients = torch.Generator().manual_seed(2), []
    for i, n in enumerate(SIZES):
        x = torch.randn(n, 3, 6, 6, generator=generator, dtype=torch.float64) + 0.3 * i
        clients.append((x, torch.randint(0, 4, (n,), generator=generator)))
    return model, ud.FederatedDataset.from_clients(clients)


def follows(method: str, dtype: torch.dtype, compiled: bool, device: str) -> Finding:
    (exact, data), (model, _) = problem(torch.float64), problem(dtype)
    settings: dict[str, Any] = {"rounds": ROUNDS, "local": LOCAL, "seed": 5}
    wanted = ud.train(exact, data, METHODS[method], engine="plain", device="cpu", **settings).model.state_dict()
    captured = graph.captures(torch.device(device))
    with counted_replays() as replays:
        run = ud.train(
            model, data, METHODS[method], engine="lanes", lanes=2, device=device, compile=compiled and captured,
            **settings,
        )  # fmt: skip
    assert run.choices["engine"] == "lanes" and run.choices["compile"] == (compiled and captured)
    if captured and not replays[0]:
        return Finding("FAIL", "no captured graph was replayed")
    found, names = run.model.state_dict(), [n for n, w in wanted.items() if w.is_floating_point()]
    if any(not torch.equal(found[n].cpu(), w) for n, w in wanted.items() if not w.is_floating_point()):
        return Finding("FAIL", "a norm has counted its batches wrongly")
    a, b, start = (flat(values, names) for values in (found, wanted, exact.state_dict()))
    return within(float((a - b).norm() / (b - start).norm()), BOUNDS[dtype])


def checks() -> Iterator[Check]:
    for method in METHODS:
        for dtype, kind in {"float64": torch.float64, "float32": torch.float32}.items():
            for compiled in (False, True):
                name = f"batch norm, {dtype}, {method}{', compiled' if compiled else ''}"
                yield Check("b", name, partial(follows, method, kind, compiled), seconds=40.0 if compiled else 5.0)
