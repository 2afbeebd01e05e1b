"""Metrics of how outputs rank the samples. They need all scores at once: objects with `update` and `compute`."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from undrift.losses import IGNORED, binary, class_axis
from undrift.metrics.classes import several


class Ranking(ABC):
    """The mean over classes of a figure of scores and of which samples are of the class."""

    higher_is_better = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.scores: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        """Keep the scores of a batch, samples × classes, and its labels."""
        if several(output, target):
            self.scores.append(output.flatten(1).double())
            self.labels.append(target.flatten(1))
            return
        axis = None if binary(output, target) else class_axis(output, target)
        if axis is None or output.shape[axis] == 1:
            self.scores.append(output.reshape(-1, 1).double())
        else:
            # Logits of one class are comparable between samples only once they are normalized. The logarithm keeps
            # apart what rounds to a probability of 1.
            normalized = torch.log_softmax(output.double(), axis).movedim(axis, -1)
            # Rounded as the outputs are, so that samples which are tied stay tied.
            self.scores.append(
                normalized.reshape(-1, output.shape[axis]).to(torch.promote_types(output.dtype, torch.float32))
            )
        self.labels.append(target.reshape(-1))

    def compute(self) -> float:
        """The mean over classes for which the figure is defined; NaN if there is none."""
        scores, labels = torch.cat(self.scores), torch.cat(self.labels)
        if bool(scores.isnan().any()):
            return float("nan")
        found = [self.figure(*pair) for pair in self.by_class(scores, labels)]
        defined = [value for value in found if value is not None]
        return sum(defined) / len(defined) if defined else float("nan")

    def by_class(self, scores: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each class its scores, and whether samples are of it. Two classes are one question: is it class 1?"""
        if labels.dim() > 1:
            return [(s[y != IGNORED], y[y != IGNORED] > 0) for s, y in zip(scores.T, labels.T, strict=True)]
        if scores.shape[1] == 1:
            known = labels != IGNORED
            return [(scores[known, 0], labels[known] > 0)]
        known = labels >= 0
        scores, labels = scores[known], labels[known]
        classes = range(scores.shape[1]) if scores.shape[1] > 2 else [1]
        return [(scores[:, c], labels == c) for c in classes]

    @abstractmethod
    def figure(self, scores: Tensor, positive: Tensor) -> float | None:
        """The figure of one class; None if it is undefined."""


class AUROC(Ranking):
    """The area under the ROC curve; with more than two classes, the mean over classes of one against the rest.

    Ties count half. Classes that no sample has, or all have, are left out.
    """

    def figure(self, scores: Tensor, positive: Tensor) -> float | None:
        ones = int(positive.sum())
        zeros = len(positive) - ones
        if not ones or not zeros:
            return None
        _, place, counts = scores.unique(return_inverse=True, return_counts=True)
        last = counts.cumsum(0).double()
        ranks = last - (counts - 1) / 2  # of tied scores, the mean of their ranks
        return float((ranks[place[positive]].sum() - ones * (ones + 1) / 2) / (ones * zeros))


class AveragePrecision(Ranking):
    """Average precision: the mean of the precision at each sample of the class, from the highest score down.

    Tied scores are one threshold. With more than two classes, the mean over the classes that some sample has.
    """

    def figure(self, scores: Tensor, positive: Tensor) -> float | None:
        ones = int(positive.sum())
        if not ones:
            return None
        _, place, counts = (-scores).unique(return_inverse=True, return_counts=True)
        hits = torch.zeros(len(counts), dtype=torch.float64, device=scores.device)
        hits.index_add_(0, place, positive.double())
        precision = hits.cumsum(0) / counts.cumsum(0)
        return float((hits * precision).sum() / ones)
