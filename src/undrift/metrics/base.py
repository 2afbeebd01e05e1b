"""Metrics that are computed from sums over samples, and what evaluation adds up of any metric.

A metric is one of three things. A function of `(output, target)` returns one value per sample, to be averaged, or a
pair (numerators, denominators), whose sums are divided. A `Metric` computes its figure from other sums, such as counts
per class. Sums can be added up batch by batch, by several processes, and by the nodes of a federation. Whatever needs
all samples at once is an object with `update(output, target)` and `compute()`, like those of torchmetrics.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.columns import directions, lower_is_better
from undrift.errors import UndriftError
from undrift.loss_modules import PerSample


class Metric(ABC):
    """A figure that is a function of sums over samples."""

    higher_is_better: bool | None = True
    scalar: ClassVar[bool] = True
    """Whether the figure is one number, which has a mean over clients."""

    @abstractmethod
    def sums(self, output: Any, target: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
        """What a batch adds to the sums: a float64 vector; with `owner`, a matrix with a column per client.

        Args:
            output: The model's outputs.
            target: The samples' targets.
            owner: Each sample's client, as a number below `owners`, in the host's memory. So is the matrix, then.
            owners: How many clients there are.
        """

    @abstractmethod
    def value(self, sums: Tensor) -> Tensor:
        """The figure, or one per column of the sums; NaN where it is undefined."""


@dataclass(frozen=True)
class Ratio(Metric):
    """A function of `(output, target)`, as a metric: the sum of its numerators, divided by that of its denominators."""

    function: Callable[[Any, Tensor], Any]
    higher_is_better: bool | None = None
    """What the function says itself. If that is nothing, its name has to."""

    def sums(self, output: Any, target: Tensor, owner: Tensor | None = None, owners: int = 1) -> Tensor:
        return added(parts_of(self.function, output, target), owner, owners)

    def value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1]


def parts_of(function: Any, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """A function's numerators and denominators per sample; the denominators are 1 if it returns single values."""
    value = function.parts(output, target) if isinstance(function, PerSample) else function(output, target)
    top, bottom = value if isinstance(value, tuple) else (value, torch.ones_like(value, dtype=torch.float64))
    return top.double(), bottom.double()


def added(values: Sequence[Tensor] | Tensor, owner: Tensor | None, owners: int) -> Tensor:
    """The sum of each of these vectors, or rows of a matrix, of one value per sample; with `owner`, by client."""
    if owner is None:
        return values.sum(1) if isinstance(values, Tensor) else torch.stack([own.sum() for own in values])
    sums = torch.zeros(len(values), owners, dtype=torch.float64)
    return sums.index_add_(1, owner, (values if isinstance(values, Tensor) else torch.stack(list(values))).cpu())


def counted(bins: Tensor, weights: Tensor, size: int, owner: Tensor | None, owners: int) -> Tensor:
    """How often each of `size` bins occurs, from bins and weights of one shape, with the samples along the first axis.

    On a device, nothing waits for it: the size is known, and what does not count has the weight 0.
    """
    if owner is not None:
        bins, weights = bins.cpu(), weights.cpu()
        bins = bins * owners + owner.reshape(-1, *[1] * (bins.dim() - 1))
    sums = torch.zeros(size * owners, dtype=torch.float64, device=bins.device)
    sums.index_add_(0, bins.flatten(), weights.flatten().double())
    return sums if owner is None else sums.view(size, owners)


def streams(metric: Any) -> bool:
    """Return whether this is an object that sees every batch and computes its figure at the end."""
    has = callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))
    return has and not isinstance(metric, type)


def fresh(metric: Any, device: torch.device | None = None) -> Any:
    """Return a copy of such an object without data, on this device."""
    made = copy.deepcopy(metric)
    if callable(getattr(made, "reset", None)):
        made.reset()
    for switch in ("sync_on_compute", "_to_sync"):  # every process is shown all batches: there is nothing to exchange
        if hasattr(made, switch):
            setattr(made, switch, False)
    return made.to(device) if device is not None and callable(getattr(made, "to", None)) else made


def plain(value: Any) -> Any:
    """Return the result of an object's `compute` as a number or a list."""
    found = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(found, bool | int | float | list):
        return found
    raise UndriftError(
        f"A metric's compute() must return a number or a tensor, not {type(found).__name__}; give metrics one by one."
    )


class Tally:
    """What a pass over data adds up for each measure: sums, or objects that are shown every batch.

    Args:
        measures: The metrics by name.
        owners: How many clients to keep apart; None to take all samples together.
    """

    def __init__(self, measures: Mapping[str, Any], owners: int | None = None) -> None:
        self.measures, self.owners = measures, owners
        self.sums: dict[str, Tensor] = {}
        self.objects: dict[str, dict[int, Any]] = {name: {} for name, metric in measures.items() if streams(metric)}

    def add(self, output: Any, target: Tensor, owner: Tensor | None = None) -> None:
        """Add a batch; `owner` is each sample's client."""
        for name, metric in self.measures.items():
            if name not in self.objects:
                found = metric.sums(output, target, owner, self.owners or 1)
                self.sums[name] = self.sums[name] + found if name in self.sums else found
                continue
            for client, z, y in [(0, output, target)] if owner is None else by_owner(output, target, owner):
                if client not in self.objects[name]:
                    self.objects[name][client] = fresh(metric, target.device)
                self.objects[name][client].update(z, y)

    def cleared(self) -> Tally:
        """The same with sums of 0, in their form."""
        self.sums = {name: torch.zeros_like(own) for name, own in self.sums.items()}
        return self

    def figures(self) -> dict[str, Any]:
        """Each measure's value, as a number or a list."""
        return {
            name: plain(self.objects[name][0].compute()) if name in self.objects else valued(metric, self.sums[name])
            for name, metric in self.measures.items()
        }

    def by_client(self) -> dict[str, Tensor]:
        """Each measure that is one number, by client. NaN where it is undefined."""
        found: dict[str, Tensor] = {}
        for name, metric in self.measures.items():
            if name in self.objects:
                own = self.objects[name]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of classes that a client has not
                    values = [plain(own[c].compute()) if c in own else math.nan for c in range(self.owners or 1)]
                single = [math.nan if isinstance(value, list) else float(value) for value in values]
                found[name] = torch.tensor(single, dtype=torch.float64)
            elif metric.scalar:
                found[name] = valued_by_client(name, metric, self.sums[name])
        return found


def by_owner(output: Any, target: Tensor, owner: Tensor) -> list[tuple[int, Any, Tensor]]:
    """A batch in pieces, one per client."""
    pieces = [(int(c), torch.nonzero(owner == c).flatten().to(target.device)) for c in owner.unique()]
    return [(client, _chosen(output, at), target[at]) for client, at in pieces]


def _chosen(output: Any, at: Tensor) -> Any:
    if isinstance(output, Tensor):
        return output[at]
    if isinstance(output, Mapping):
        return {name: _chosen(part, at) for name, part in output.items()}
    return type(output)(_chosen(part, at) for part in output) if isinstance(output, tuple | list) else output


def valued(metric: Metric, sums: Tensor) -> Any:
    """A metric's value from sums, as a number or a list."""
    return metric.value(sums).tolist()


def valued_by_client(name: str, metric: Metric, sums: Tensor) -> Tensor:
    """Return the values by client. A figure of sums with NaN, from a loss that diverged, counts as the worst."""
    worst = math.inf if lower_is_better(name, directions({name: metric})) else -math.inf
    values = metric.value(sums)
    return torch.where(sums.isnan().any(0) & values.isnan(), worst, values)
