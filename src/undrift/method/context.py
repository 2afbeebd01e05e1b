"""What hooks are given: the round's plan, a batch, a client, the server, and the totals over a cohort."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from undrift.random import Key
from undrift.tree import Tree

if TYPE_CHECKING:
    from undrift.functional.model import Model
    from undrift.method.faults import Fates


@dataclass(frozen=True)
class Plan:
    """One round's work, settled before it starts. A `plan` hook returns a changed copy (`dataclasses.replace`)."""

    round: int
    """From 0."""
    clients: np.ndarray
    """The cohort's ids, ascending."""
    steps: np.ndarray
    """How many local steps each of them takes."""
    lr: float
    momentum: float
    weight_decay: float
    fates: Fates | None = None
    """Their simulated faults, if any; drawn after the `plan` hooks."""

    @property
    def span(self) -> dict[str, float]:
        """The cohort's step counts in three numbers, for the history."""
        steps = self.steps if len(self.steps) else np.zeros(1, np.int64)
        return {"fewest": int(steps.min()), "mean": float(steps.mean()), "most": int(steps.max())}


@dataclass(frozen=True)
class Batch:
    """Samples of one client. `mask` is 1.0, or 0.0 where a row is padding and must count for nothing."""

    x: Tensor
    y: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Client:
    """One client as a hook sees it. Under lanes every tensor here is one lane's, so hooks read as if for one client."""

    id: Tensor
    round: Tensor
    n: Tensor
    """How many samples it has."""
    weight: Tensor
    """Its weight in the mean, before normalisation: its samples, or 1."""
    label_counts: Tensor
    """Samples of each of the model's outputs; empty where targets are not classes."""
    steps: Tensor
    """Its number of local steps in this round."""
    lr: Tensor
    """This round's learning rate, before any part's `rate`."""
    start: Tree
    """The weights it received."""
    key: Key
    """For this part's draws. Hooks of one local step share it; `key.stream_at(i)` separates their draws."""
    model: Model
    """`client.model(params, x)`: the outputs, in evaluation mode."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """`client.loss(output, target)`: one loss per sample."""
    received: Tree = None
    """The tree that this part's `broadcast` returned."""
    kept: Tree = None
    """This part's state of this client, kept between rounds."""
    measured: Tree = None
    """The sums of this part's `measure` over the client's data."""
    prepared: Tree = None
    """The tree that this part's `prepare` returned."""
    rate_sum: Tree = None
    """After training: the sum over steps of the rates used, by parameter (each a number, or a tensor of its shape)."""
    work: Tree = None
    """After training: FedNova's `a`, the sum of rate multipliers × v with v ← ρv + 1, by parameter."""


@dataclass(frozen=True)
class Server:
    """The server as a hook sees it."""

    model: Model
    loss: Callable[[Tensor, Tensor], Tensor]
    data: tuple[Tensor, Tensor] | None
    """`data.server`, on the device."""
    round: int
    key: Key
    """For this part's draws in this hook and round."""
    augment: Callable[[Tensor, Key], Tensor] | None = None
    """`data.augment`: what changes a batch before a step."""


@dataclass(frozen=True)
class Totals:
    """Sums over the cohort."""

    sums: Any
    """This part's own sums from `upload` (or from `measure`, in `finish`)."""
    size: Tensor
    """How many clients count, without those that dropped out or were left out: a float64 scalar on the device."""
    weight: Tensor
    """The sum of their weights."""
    population: int
    """N: how many clients have data at all."""
    update: Tree
    """The aggregated update, before any part's `transform`."""
