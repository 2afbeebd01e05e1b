"""Modules with state: buffers, running statistics, weights that the forward pass writes, modes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.compat.case import Cases, Made
from tests.compat.samples import tokens, vectors

CASES = Cases("odd")
add = CASES.add
ROWS = vectors(8)


def mlp(hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def parametrized(change: Any) -> nn.Sequential:
    """An MLP whose first layer is reparametrized."""
    module = mlp()
    module[0] = change(module[0])
    return module


# Weights that are computed from others.
add("weight_norm", lambda: parametrized(parametrizations.weight_norm), ROWS, quick=True)
add("orthogonal", lambda: parametrized(parametrizations.orthogonal), ROWS)
add("spectral_norm", lambda: parametrized(parametrizations.spectral_norm), ROWS)
add("spectral_norm, the older form", lambda: parametrized(nn.utils.spectral_norm), ROWS)
add("weight_norm, the older form", lambda: parametrized(nn.utils.weight_norm), ROWS, quick=True)
add("prune.l1_unstructured", lambda: parametrized(lambda m: prune.l1_unstructured(m, "weight", 0.3)), ROWS)


# Buffers.
def counted(m: Made, x: Tensor) -> Tensor:
    if m.training:
        m.n += 1
    return m.net(x) * (1 + 0.01 * m.n)


def averaged(m: Made, x: Tensor) -> Tensor:
    if m.training:
        m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return m.net(x - m.mean)


def replaced(m: Made, x: Tensor) -> Tensor:
    if m.training:
        m.n = m.n + 1
    return m.net(x) * (1 + 0.01 * m.n)


add("a constant buffer", lambda: Made(lambda m, x: m.net(x * m.scale), net=mlp(), scale=torch.rand(8)), ROWS)
add("a buffer that counts steps", lambda: Made(counted, net=mlp(), n=torch.zeros(())), ROWS, quick=True)
add("a buffer that is a moving average", lambda: Made(averaged, net=mlp(), mean=torch.zeros(8)), ROWS)
add(
    "a buffer that is replaced, not changed", lambda: Made(replaced, net=mlp(), n=torch.zeros(())), ROWS,
    quick=True,
)  # fmt: skip


# Batch norm, and the modes of submodules.
def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


class StaysInEval(nn.Sequential):
    """The usual recipe for fine-tuning: `train()` leaves batch norm in evaluation mode."""

    def train(self, mode: bool = True) -> StaysInEval:
        super().train(mode)
        for layer in self:
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()
        return self


class Louder(nn.Module):
    """Differs between the modes without drawing."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def one_in_eval(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), layer.eval(), nn.Tanh(), nn.Linear(16, 3))


def warmed(module: nn.Module) -> nn.Module:
    """With running statistics of some data, so that evaluation mode is not nearly training mode."""
    with torch.no_grad():
        for _ in range(5):
            module(3 * torch.randn(32, 8) + 1)
    return module


add("BatchNorm1d", normed, ROWS, quick=True)
add(
    "BatchNorm1d, a last batch of one", normed, ROWS, sizes=(12, 7, 5), refused="has one sample", quick=True,
    note="One value has no variance; torch refuses it too.",
)  # fmt: skip
add("BatchNorm1d, a last batch of one, drop_last", normed, ROWS, sizes=(12, 7, 5), local={"drop_last": True})
add(
    "BatchNorm1d kept in eval by train()", lambda: StaysInEval(*warmed(normed())), ROWS, review=("S5",), quick=True
)  # fmt: skip
add("a submodule set to eval by hand", lambda: one_in_eval(Louder()), ROWS, review=("S6",), quick=True)
add("BatchNorm1d set to eval by hand", lambda: one_in_eval(nn.BatchNorm1d(16)), ROWS, review=("S6",))
add("a dropout set to eval by hand", lambda: one_in_eval(nn.Dropout(0.5)), ROWS, review=("S6",))
add("InstanceNorm1d with statistics", lambda: nn.Sequential(
    nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(24, 3)
), vectors(2, 8))  # fmt: skip
add("BatchNorm without statistics", lambda: nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 3)
), ROWS)  # fmt: skip


# Weights that the forward pass writes. Evaluation writes them too, in torch as well: these have no test data.
def teaches(m: Made, x: Tensor) -> Tensor:
    """A mean teacher: 0.1·w of the student is added to 0.9·w of the teacher in every step."""
    if m.training:
        with torch.no_grad():
            for t, s in zip(m.teacher.parameters(), m.student.parameters(), strict=True):
                t.mul_(0.9).add_(s, alpha=0.1)
    return m.student(x) + m.teacher(x)


class Rebinds(nn.Module):
    """Normalises its weights by rebinding `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(16, 8)), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.w.data = self.w.data / self.w.data.norm(dim=1, keepdim=True)
        return self.head(torch.tanh(x @ self.w.T))


def normalised(m: Made, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.w.copy_(m.w / m.w.norm(dim=1, keepdim=True))
    return m.head(torch.tanh(x @ m.w.T))


def clamped(m: Made, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.head.weight.clamp_(-0.1, 0.1)
    return m.head(x)


def weights() -> dict[str, Any]:
    return {"w": nn.Parameter(torch.randn(16, 8)), "head": nn.Linear(16, 3)}


add("an EMA teacher with frozen parameters", lambda: Made(
    teaches, student=mlp(), teacher=mlp().requires_grad_(False)
), ROWS, review=("S4",), quick=True)  # fmt: skip
add("Embedding(max_norm)", lambda: nn.Sequential(
    nn.Embedding(40, 6, max_norm=1.0), nn.Flatten(), nn.Linear(60, 3)
), tokens(), review=("S10",), test=0, quick=True)  # fmt: skip
add(
    "weights normalised in forward, .data =",
    Rebinds,
    ROWS,
    review=("S11",),
    test=0,
    quick=True,
)
add("weights normalised in forward, copy_", lambda: Made(normalised, **weights()), ROWS, test=0)
add("weights clamped in forward", lambda: Made(clamped, head=nn.Linear(8, 3)), ROWS, test=0)


# State outside of tensors.
class Counter(nn.Module):
    """Counts its calls in a Python attribute, and depends on the count."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.net(x) * (1 + 0.1 * self.calls)


add("Python's random in forward", lambda: Made(
    lambda m, x: m.net(x * (0.5 + random.random()) if m.training else x), net=mlp()
), ROWS, review=("S7",), draws=True, quick=True)  # fmt: skip
add("numpy's random in forward", lambda: Made(
    lambda m, x: m.net(x + float(np.random.randn()) if m.training else x), net=mlp()
), ROWS, review=("S7",), draws=True)  # fmt: skip
add(
    "a Python counter of calls", Counter, ROWS, review=("S7",), refused="counts its calls", quick=True,
    note="What a client computes would depend on who trained before it.",
)  # fmt: skip
