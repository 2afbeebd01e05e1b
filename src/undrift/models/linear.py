"""Models of linear layers."""

from __future__ import annotations

import math

from torch import nn


def mlp(classes: int, shape: tuple[int, ...], hidden: int = 64) -> nn.Module:
    """One hidden layer with ReLU, of 64 units by default."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))


def logistic(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Logistic regression: one linear layer; train it with cross-entropy, or binary cross-entropy for many labels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def svm(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """A linear support vector machine: the same layer as `logistic`; train it with `loss="squared_hinge"`."""
    return logistic(classes, shape)
