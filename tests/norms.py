"""Small models with norms, which tests and `tests/gpu/` share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Pictures(nn.Module):
    """Samples of 6 features as pictures of 2 × 3: a norm over positions, a norm over samples alone, and dropout."""

    def __init__(self, momentum: float | None = 0.1, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.conv, self.wide = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum)
            self.middle, self.flat = nn.Linear(24, 5), nn.BatchNorm1d(5, momentum=momentum)
            self.dropout, self.head = nn.Dropout(dropout), nn.Linear(5, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.wide(self.conv(x.view(len(x), 1, 2, 3))))
        return self.head(self.dropout(torch.tanh(self.flat(self.middle(h.flatten(1))))))


class Layers(nn.Module):
    """A forward pass that is given as a function of the layers and the input."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class KeptInEvaluation(nn.Module):
    """The usual recipe for fine-tuning: batch norm stays in evaluation mode whatever mode the rest is in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)
        self.norm.running_mean.fill_(0.3)
        self.norm.running_var.fill_(2.0)
        self.double().train()

    def train(self, mode: bool = True) -> KeptInEvaluation:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))
