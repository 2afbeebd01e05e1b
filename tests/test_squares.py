"""Squared per-sample gradients: one backward pass against sample by sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from undrift.functional.model import Model
from undrift.method.context import Batch
from undrift.methods.curvature import _one_by_one, _one_pass, _vmapped, squared_gradients

PICTURES, ROWS = (3, 12, 12), 7


class Positions(nn.Module):
    """A linear layer on each of a sample's positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).mean(1))


class Twice(Positions):
    """One weight, used twice: the square of a sum is no sum of squares."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(torch.tanh(self.first(x)[..., :5])))


class Flat(Positions):
    """Samples and positions along one axis: its rows are no samples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(0, 1))).unflatten(0, x.shape[:2]).mean(1))


class Beside(Positions):
    """A weight that something else reads too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.last.bias.square().sum()


def convolutions(*more: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *more, nn.ReLU(), nn.Conv2d(8, 5, (3, 2), stride=2, bias=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(150, 4),
    )  # fmt: skip


AT_ONCE = {"convolutions": (convolutions, PICTURES), "positions": (Positions, (9, 5))}
NOT = {
    "norm": (lambda: convolutions(nn.GroupNorm(2, 8)), PICTURES),
    "groups": (lambda: convolutions(nn.Conv2d(8, 8, 3, padding=1, groups=2)), PICTURES),
    "twice": (Twice, (5,)),
    "flat": (Flat, (9, 5)),
    "beside": (Beside, (9, 5)),
}


def loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def problem(make, shape) -> tuple[Model, Batch]:
    torch.manual_seed(0)
    x = torch.rand(ROWS, *shape, dtype=torch.float64)
    model, _ = Model(make().double(), torch.device("cpu")).examined(x[:2])
    return model, Batch(x, torch.arange(ROWS) % 4, torch.tensor([1.0] * (ROWS - 2) + [0.0] * 2).double())


def farthest(found, true) -> float:
    return max(float((found[n] - true[n]).abs().max() / true[n].abs().max()) for n in true)


@pytest.mark.parametrize(("make", "shape"), AT_ONCE.values(), ids=list(AT_ONCE))
def test_one_pass_gives_what_sample_by_sample_gives_also_in_lanes(make, shape):
    model, batch = problem(make, shape)
    assert model.squares is not None
    assert farthest(_one_pass(model, loss, model.start, batch), _one_by_one(model, loss, model.start, batch)) < 1e-14
    lanes = {n: torch.stack([w, w + 0.1 * torch.randn_like(w), -w]) for n, w in model.start.items()}
    found = vmap(lambda p: _one_pass(model, loss, p, batch))(lanes)
    for i in range(3):
        true = _one_by_one(model, loss, {n: w[i] for n, w in lanes.items()}, batch)
        assert farthest({n: f[i] for n, f in found.items()}, true) < 1e-14


@pytest.mark.parametrize(("make", "shape"), NOT.values(), ids=list(NOT))
def test_where_one_pass_would_be_wrong_each_row_has_its_own(make, shape):
    model, batch = problem(make, shape)
    assert model.squares is None
    true = _one_by_one(model, loss, model.start, batch)
    assert farthest(squared_gradients(model, loss, model.start, batch), true) < 1e-14


def test_chunks_add_up(monkeypatch):
    from undrift.methods import curvature

    model, batch = problem(*AT_ONCE["convolutions"])
    whole = squared_gradients(model, loss, model.start, batch)
    assert model.squares == max(w.numel() for w in model.start.values() if w.dim() == 4)
    monkeypatch.setattr(curvature, "ELEMENTS", 3 * model.squares)
    assert farthest(squared_gradients(model, loss, model.start, batch), whole) < 1e-14
    assert farthest(_vmapped(model, loss, model.start, batch), whole) < 1e-14
