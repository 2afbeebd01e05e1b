"""What hooks are given: the round's plan, a batch, a client, the server, and the totals over a cohort."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.random import Key
from undrift.tree import Tree, tree_map

if TYPE_CHECKING:
    from undrift.functional.model import Model
    from undrift.method.faults import Fates


@dataclass(frozen=True)
class Plan:
    """One round's work, settled before it starts. A `plan` hook returns a changed copy (`dataclasses.replace`)."""

    round: int
    """From 0."""
    clients: np.ndarray
    """The cohort's ids, ascending. A `plan` hook may choose others; an empty cohort is allowed."""
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
    """In `objective`, after augmentation."""
    y: Tensor
    mask: Tensor
    find_features: Callable[[], Tensor] | None = field(default=None, repr=False)

    @property
    def features(self) -> Tensor:
        """In `objective`: the input of the model's last layer in this very forward pass, samples × features."""
        if self.find_features is None:
            raise UndriftError(
                "batch.features is there in `objective` only; elsewhere use client.model.features(params, batch.x)."
            )
        return self.find_features()


class Gradients(Protocol):
    """Computes the gradients of a local step's loss: what `client.gradient` and `client.gradients` call."""

    def gradient(self, weights: Tree, batch: int) -> Tree: ...

    def per_sample(self, weights: Tree, batch: int) -> Tree: ...


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
    """The weights it received, with its own values where parameters are personal."""
    begun: Tree
    """The weights that local training starts from: `start`, unless a part's `begin` returned others."""
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
    step: Tensor | None = None
    """In hooks of a local step: its index, from 0."""
    carry: Tree = None
    """This part's carry: in `rate`, `project`, `update` and `upload`, as its `step` left it."""
    rates: Tree = None
    """In `project`: the learning rates of this step, by parameter (each a number, or a tensor of its shape)."""
    rate_sum: Tree = None
    """After training: the sum over steps of the rates used, by parameter (each a number, or a tensor of its shape)."""
    work: Tree = None
    """After training: FedNova's `a`, the sum of rate multipliers × v with v ← ρv + 1, by parameter."""
    final: Tree = None
    """After training: the weights it ends with."""
    buffers: Tree = None
    """After training: the buffers that training changes, such as running statistics."""
    personal: frozenset[str] = frozenset()
    """The names of the parameters and buffers that are the client's own and never sent."""
    decay: Mapping[str, float] = field(default_factory=dict)
    """By parameter, the factor of `Local`'s parameter groups for its weight decay; 1 where it is not named."""
    gradients_of: Gradients | None = field(default=None, repr=False)

    def gradient(self, weights: Tree, batch: int = 0) -> Tree:
        """Compute the gradient of this step's mean loss at other weights, in `gradient` and `step` only.

        The loss is the step's own: the same batch, the same draws, and all parts' `logits` and `objective` hooks, but
        no weight decay and no `gradient` or `step` hook. Running statistics do not change. At the weights that the
        hook was given it costs nothing.

        Args:
            weights: A dict like the parameters.
            batch: Which of the step's batches, from 0, where a part asks for several (`batches = 2`).
        """
        return self._gradients().gradient(weights, batch)

    def gradients(self, weights: Tree, batch: int = 0) -> Tree:
        """Compute each sample's own gradient along a first axis, as `gradient` does; 0 where a row is padding.

        Every sample is a batch of its own here, so a term that couples samples sees one at a time.
        """
        return self._gradients().per_sample(weights, batch)

    def _gradients(self) -> Gradients:
        if self.gradients_of is None:
            raise UndriftError("client.gradient and client.gradients may be called in `gradient` and `step` only.")
        return self.gradients_of

    def shared(self, tree: Tree) -> Tree:
        """Return a dict like the parameters with zeros where they are personal; itself if none are."""
        if not self.personal:
            return tree
        return {n: tree_map(torch.zeros_like, t) if n in self.personal else t for n, t in tree.items()}


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
    params: Tree
    """The weights sent to the clients in this round."""
    population: int
    """N: how many clients have data at all."""
    augment: Callable[[Tensor, Key], Tensor] | None = None
    """`data.augment`: what changes a batch before a step."""
    # The next three are None where there are none yet. Their types leave that out, so that hooks need not ask.
    cohort: np.ndarray = field(default=None)  # type: ignore[arg-type]
    """The ids of this round's clients, ascending; None in `plan`, which chooses them, and in `finish`."""
    client_weights: Tensor = field(default=None)  # type: ignore[assignment]
    """Their weights in the mean, before normalisation, in the order of `cohort`."""
    totals: Totals = field(default=None)  # type: ignore[assignment]
    """Sums over the cohort; None before training, except for a part with `measures = "cohort"`."""


@dataclass(frozen=True)
class Totals:
    """Sums over the cohort."""

    sums: Any
    """This part's own sums, from `upload`; from `measure` in `finish`, and in the `broadcast` of a part with
    `measures = "cohort"`."""
    size: Tensor
    """How many clients count, without those that dropped out or were left out: a float64 scalar on the device."""
    weight: Tensor
    """The sum of their weights; 0 where nobody counts."""
    update: Tree
    """The aggregated update, before any part's `transform`; None where clients have not trained."""
