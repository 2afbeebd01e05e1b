"""Models of linear layers."""

from __future__ import annotations

import math

from torch import nn


def mlp(classes: int, shape: tuple[int, ...], hidden: int = 64) -> nn.Module:
    """One hidden layer of 64 ReLUs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))
