"""Metrics of predicted classes, from counts: F1, balanced accuracy and the confusion matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.losses import IGNORED, binary, class_axis
from undrift.metrics.base import Metric, counted

MOST_CONFUSED = 200
"""The most classes of a confusion matrix: every evaluated round has one in the history."""


class Predictions(NamedTuple):
    """True and predicted classes, in the shape of the targets."""

    true: Tensor
    predicted: Tensor
    labelled: Tensor
    """Whether there is a label at all."""
    classes: int


def several(output: Tensor, target: Tensor) -> bool:
    """Whether a sample may have several classes, marked by 0s and 1s: one output and one label per class."""
    return output.shape == target.shape and not binary(output, target)


def predictions(output: Tensor, target: Tensor) -> Predictions:
    """The classes with the highest outputs; with one output, class 1 if it is above 0."""
    if several(output, target):
        raise ValueError("it needs one class per sample, not several that are marked by 0s and 1s")
    axis = None if binary(output, target) else class_axis(output, target)
    if axis is None or output.shape[axis] == 1:
        scores = output if axis is None else output.squeeze(axis)
        return Predictions((target > 0).long(), (scores > 0).long(), target != IGNORED, 2)
    return Predictions(target.long(), output.argmax(axis), target >= 0, output.shape[axis])


def class_counts(output: Tensor, target: Tensor, owner: Tensor | None, owners: int) -> Tensor:
    """By class: how often it was predicted rightly, predicted, true, and a candidate for either.

    Where a sample may have several classes, each is a candidate in every sample; otherwise those that are true or
    predicted are. So classes that no sample has anything to do with can be left out, as scikit-learn does.
    """
    if several(output, target):
        true, predicted = (t.flatten(1) > 0 for t in (target, output))
        labelled = target.flatten(1) != IGNORED
        size = true.shape[1]
        place = torch.arange(size, device=target.device).expand_as(true)
        places, weights = [place] * 4, [true & predicted & labelled, predicted & labelled, true & labelled, labelled]
    else:
        y, z, labelled, size = predictions(output, target)
        known, true = labelled & (y < size), y.clamp(0, size - 1)
        places = [true, z, true, torch.stack([true, z], 1)]
        weights = [known & (y == z), labelled, known, torch.stack([known, labelled], 1)]
    pairs = zip(places, weights, strict=True)
    return torch.cat([counted(place, weight, size, owner, owners) for place, weight in pairs])


@dataclass(frozen=True)
class MacroF1(Metric):
    """F1, the harmonic mean of precision and recall, per class; then the mean over classes.

    A class that is never predicted rightly has 0. One that is neither true nor predicted is left out, unless a sample
    may have several classes: then it has 0, as with scikit-learn's `zero_division=0`.
    """

    def sums(self, output: Tensor, target: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
        return class_counts(output, target, owner, owners)

    def value(self, sums: Tensor) -> Tensor:
        right, predicted, true, candidate = sums.unflatten(0, (4, -1))
        by_class = 2 * right / (predicted + true).clamp(min=1)
        return self.average(by_class, true, candidate)

    def average(self, by_class: Tensor, true: Tensor, candidate: Tensor) -> Tensor:
        there = candidate > 0
        return (by_class * there).sum(0) / there.sum(0)


@dataclass(frozen=True)
class WeightedF1(MacroF1):
    """F1 per class, averaged with each class's share of the labels as its weight."""

    def average(self, by_class: Tensor, true: Tensor, candidate: Tensor) -> Tensor:
        return (by_class * true).sum(0) / true.sum(0)


@dataclass(frozen=True)
class BalancedAccuracy(Metric):
    """The mean over classes of the share of a class's samples that are predicted rightly, without absent classes."""

    def sums(self, output: Tensor, target: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
        y, z, labelled, size = predictions(output, target)
        known, true = labelled & (y < size), y.clamp(0, size - 1)
        return torch.cat([counted(true, weight, size, owner, owners) for weight in (known & (y == z), known)])

    def value(self, sums: Tensor) -> Tensor:
        right, true = sums.unflatten(0, (2, -1))
        return (right / true.clamp(min=1)).sum(0) / (true > 0).sum(0)


@dataclass(frozen=True)
class ConfusionMatrix(Metric):
    """How often each class (rows) was predicted as each class (columns), as a list of lists."""

    scalar = False

    def sums(self, output: Tensor, target: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
        y, z, labelled, size = predictions(output, target)
        if size > MOST_CONFUSED:
            raise ValueError(f"{size:,} × {size:,} counts per round are too many; the limit is {MOST_CONFUSED} classes")
        return counted(y.clamp(0, size - 1) * size + z, labelled & (y < size), size * size, owner, owners)

    def value(self, sums: Tensor) -> Tensor:
        size = round(len(sums) ** 0.5)
        return sums.unflatten(0, (size, size)).long()
