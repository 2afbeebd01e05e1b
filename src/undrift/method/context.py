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
    """Who trains in a round, and how much, fixed before it starts. Change it with `dataclasses.replace`."""

    round: int
    """The round, counted from 0."""
    clients: np.ndarray
    """The cohort's ids, ascending. A `plan` hook may choose others; an empty cohort is allowed."""
    steps: np.ndarray
    """The number of local steps of each of them, in the order of `clients`."""
    lr: float
    """The learning rate of local steps."""
    momentum: float
    """The momentum, from `Local(momentum)`."""
    weight_decay: float
    """The weight decay, from `Local(weight_decay)`."""
    fates: Fates | None = None
    """Which of them fail, if faults are simulated. Drawn after the `plan` hooks."""
    tuning: bool = False
    """Whether they train for the history's `tuned_*` columns alone: `client.tuning`."""

    @property
    def span(self) -> dict[str, float]:
        """The smallest, mean and largest number of steps in the cohort, for the history."""
        steps = self.steps if len(self.steps) else np.zeros(1, np.int64)
        return {"fewest": int(steps.min()), "mean": float(steps.mean()), "most": int(steps.max())}


@dataclass(frozen=True)
class Batch:
    """A batch of one client's samples. Short batches are padded; `mask` says which samples are real."""

    x: Tree
    """The inputs, after augmentation in `objective`: a tensor, or a tuple or dict of tensors."""
    y: Tensor
    """The targets."""
    mask: Tensor
    """Per sample: 1.0, or 0.0 for padding. Multiply by it whatever you sum over a batch."""
    find_features: Callable[[], Tensor] | None = field(default=None, repr=False)
    output: Tree = None
    """In `measure` with `measures = "training"`: the model's output in this forward pass, after all `logits` hooks."""
    losses: Tensor = field(default=None)  # type: ignore[assignment]
    """There too: the loss of each sample, after all `objective` hooks."""

    @property
    def features(self) -> Tensor:
        """The input of the model's last linear or convolution layer in this forward pass: samples × features.

        Only in `objective`, where gradients flow through it, and in `measure` with `measures = "training"`.
        """
        if self.find_features is None:
            raise UndriftError(
                'batch.features is there in `objective`, and in `measure` with measures = "training"; elsewhere use '
                "client.model.features(params, batch.x)."
            )
        return self.find_features()


class Gradients(Protocol):
    """Computes the gradients of a local step's loss: what `client.gradient` and `client.gradients` call."""

    def gradient(self, weights: Tree, batch: int) -> Tree: ...

    def gradient_and_buffers(self, weights: Tree, buffers: Tree, batch: int) -> tuple[Tree, Tree]: ...

    def per_sample(self, weights: Tree, batch: int) -> Tree: ...


@dataclass(frozen=True)
class Client:
    """A client, as passed to a hook. Hooks are written for one client; under `vmap`, every tensor is that of one lane.

    Fields that are not known yet when a hook is called are None; docs/hooks.md lists what is available where.
    """

    id: Tensor
    """The client's index in the data, from 0."""
    round: Tensor
    """The round, counted from 0."""
    n: Tensor
    """The number of its samples."""
    weight: Tensor
    """Its weight in the mean, before normalisation: its number of samples, or 1 if the mean is uniform."""
    label_counts: Tensor
    """The number of its samples per class, one entry per output of the model. Empty if targets are not classes."""
    steps: Tensor
    """Its number of local steps in this round."""
    lr: Tensor
    """This round's learning rate, without the factors of `rate` hooks, step schedules and parameter groups."""
    start: Tree
    """The weights it received, with its own values where parameters are personal."""
    begun: Tree
    """The weights that local training starts from: `start`, unless a part's `begin` returned others."""
    key: Key
    """The key of this part's random draws. Hooks of one local step have the same key, and so have `update` and
    `upload`; `key.stream_at(i)` gives keys whose draws are independent."""
    model: Model
    """The model as a function. `client.model(params, x)` returns its output in evaluation mode,
    `client.model.features(params, x)` the input of its last layer, and `client.model.activations(params, x)` the
    activations of each layer, by name."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """The loss function: `client.loss(output, target)` returns one loss per sample."""
    received: Tree = None
    """The tree that this part's `broadcast` returned."""
    kept: Tree = None
    """The client's state for this part, kept between rounds: from `keep` at first, then from `upload`."""
    measured: Tree = None
    """The sums that this part's `measure` returned, added up over the client's data."""
    prepared: Tree = None
    """The tree that this part's `prepare` returned."""
    step: Tensor | None = None
    """The index of the local step, from 0, in `logits`, `objective`, `gradient`, `step`, `rate` and `project`."""
    carry: Tree = None
    """In `rate`, `project`, `update` and `upload`: the carry that this part's `step` returned last."""
    rate_sum: Tree = None
    """In `update` and `upload`: the sum over local steps of the learning rates, by parameter, as in `rates`."""
    work: Tree = None
    """In `update` and `upload`: FedNova's `a`, by parameter. It is the sum over local steps of the rate's factor times
    v, where `v ← ρ·v + 1` in every step, from 0, with the momentum ρ."""
    final: Tree = None
    """In `update` and `upload`: the weights after training."""
    from_update: Tree = None
    """In `upload`: what this part's `update` returned beside the update; None if it returned the update alone."""
    buffers: Tree = None
    """The buffers that training changes (running statistics), by name: as sent to the client, in a local step as they
    are before it, and in `update` and `upload` after training."""
    tuning: Tensor | None = None
    """Whether the client trains for the history's `tuned_*` columns, which nothing is sent of: a boolean scalar."""
    personal: frozenset[str] = frozenset()
    """The names of the parameters and buffers that are the client's own and never sent."""
    decay: Mapping[str, float] = field(default_factory=dict)
    """The factors of weight decay from `Local(groups)`, by parameter; those that are not listed have the factor 1."""
    gradients_of: Gradients | None = field(default=None, repr=False)
    find_rates: Callable[[], Tree] | None = field(default=None, repr=False)

    @property
    def rates(self) -> Tree:
        """The learning rates of this step, by parameter: scalars, or tensors that broadcast to its shape.

        In `gradient`, `step` and `project`; None elsewhere. In `gradient` and `step`, a `rate` hook that reads
        `client.carry` is given the carry from before the step.
        """
        return self.find_rates() if self.find_rates else None

    def gradient(self, weights: Tree, batch: int = 0) -> Tree:
        """Compute the gradient of this step's mean loss at other weights. Only in `gradient` and `step`.

        The loss is that of the step: on the same batch, with the same random draws, and through all parts' `logits` and
        `objective` hooks. Weight decay, `gradient` and `step` hooks are not applied, and running statistics do not
        change. At the weights that the hook was given, this returns the gradient that has already been computed. Do
        not differentiate through the result.

        Args:
            weights: A dict with the names and shapes of the parameters.
            batch: The index of one of the step's batches, if a part asks for several (`batches = 2`).

        Returns:
            A dict with the names and shapes of the parameters.

        Raises:
            UndriftError: If called in another hook, with other names, or for a batch that the step does not have.
        """
        return self._gradients().gradient(weights, batch)

    def gradient_and_buffers(self, weights: Tree, buffers: Tree, batch: int = 0) -> tuple[Tree, Tree]:
        """Compute the same in a forward pass with these buffers, and return the buffers after it, too.

        For second models with running statistics of their own, which start from `client.buffers` in `keep` or `carry`.

        Args:
            weights: A dict with the names and shapes of the parameters.
            buffers: A dict with the names and shapes of `client.buffers`.
            batch: The index of one of the step's batches.

        Returns:
            The gradient, and the buffers as the forward pass leaves them.

        Raises:
            UndriftError: As `gradient`.
        """
        return self._gradients().gradient_and_buffers(weights, buffers, batch)

    def gradients(self, weights: Tree, batch: int = 0) -> Tree:
        """Compute the gradient of each sample's loss at `weights`. Only in `gradient` and `step`.

        As `gradient`, but per sample. Each sample is passed through the model and the hooks as a batch of one, with the
        random draws that it has in the whole batch; so a term of `objective` that couples samples sees one of them.

        Args:
            weights: A dict with the names and shapes of the parameters.
            batch: The index of one of the step's batches.

        Returns:
            A dict like the parameters, with the samples along a first axis; zeros for padding.

        Raises:
            UndriftError: As `gradient`.
        """
        return self._gradients().per_sample(weights, batch)

    def _gradients(self) -> Gradients:
        if self.gradients_of is None:
            raise UndriftError("client.gradient and client.gradients may be called in `gradient` and `step` only.")
        return self.gradients_of

    def shared(self, tree: Tree) -> Tree:
        """Return a dict like the parameters, with the entries of personal ones set to zero.

        Args:
            tree: A dict by parameter of trees of tensors.

        Returns:
            A dict of the same structure.
        """
        if not self.personal:
            return tree
        return {n: tree_map(torch.zeros_like, t) if n in self.personal else t for n, t in tree.items()}


@dataclass(frozen=True)
class Server:
    """The server, as passed to a hook."""

    model: Model
    """The model as a function: `server.model(params, x)` returns its output in evaluation mode."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """The loss function: `server.loss(output, target)` returns one loss per sample."""
    data: tuple[Tensor, Tensor] | None
    """The server's own samples and targets (`data.server`), on the device; None if it has none."""
    round: int
    """The round, counted from 0."""
    key: Key
    """The key of this part's random draws in this hook and round."""
    params: Tree
    """The weights sent to the clients in this round."""
    population: int
    """N, the number of clients with data, whether or not they take part in this round."""
    total_weight: float
    """The sum of all clients' weights in the mean, before normalisation, whether or not they take part in this round:
    the number of all samples, or N if the mean is uniform."""
    having_data: Callable[[], np.ndarray] = field(default=lambda: np.empty(0, np.int64), repr=False)
    """Finds `clients`, an array over all clients, which is created only for hooks that ask for it."""
    steps: Callable[[np.ndarray], np.ndarray] = field(default=np.ones_like, repr=False)
    """`server.steps(clients)` returns the number of local steps per client in this round, according to `Local`."""
    augment: Callable[[Tensor, Key], Tensor] | None = None
    """`data.augment`, the function that augments a batch before a local step, or None."""
    # The next three may be None early in a round. Their types leave that out, so that hooks need not check.
    cohort: np.ndarray = field(default=None)  # type: ignore[arg-type]
    """The ids of this round's clients, ascending; in `aggregate`, of those that count. None in `plan` and `finish`."""
    client_weights: Tensor = field(default=None)  # type: ignore[assignment]
    """Their weights in the mean, before normalisation, in the order of `cohort`."""
    totals: Totals = field(default=None)  # type: ignore[assignment]
    """Sums over the cohort, once clients have trained. None in `plan` and `aggregate`, and in `broadcast` unless the
    part has `measures = "cohort"`."""

    @property
    def clients(self) -> np.ndarray:
        """The ids of all clients that have data, ascending."""
        return self.having_data()


@dataclass(frozen=True)
class Totals:
    """Sums over the cohort."""

    sums: Any
    """The sum of what this part's `upload` returned; in `broadcast` and `finish`, of what its `measure` returned."""
    size: Tensor
    """The number of clients that count, without those that dropped out or were left out: a float64 scalar."""
    weight: Tensor
    """The sum of their weights; 0 if no client counts."""
    update: Tree
    """The aggregated update, before any part's `transform`; None in `broadcast` and `finish`."""
    measured: Any = ()
    """For a part with `measures = "cohort"`: what was measured before training, in all hooks from `broadcast` on."""
