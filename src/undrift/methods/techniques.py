"""Techniques for non-IID clients: sign agreement, projection with gradient noise, and server training.

Ozdayi, Kantarcioglu and Iyer, *Improving Accuracy of Federated Learning in Non-IID Settings* (2020). The fourth
technique of the paper, momentum on the server, is `ServerSGD`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.method.context import Client, Server
from undrift.method.local import ADDED
from undrift.method.optimizers import clip_by_norm
from undrift.method.part import Part
from undrift.random import Key, bits, normal_like
from undrift.schedule import Number
from undrift.tree import Tree, tree_map, tree_zeros


@dataclass(frozen=True)
class SignAgreement(Part):
    """Update only the coordinates on whose sign enough clients agree. `threshold=0` is FedAvg.

    Ozdayi, Kantarcioglu and Iyer, *Improving Accuracy of Federated Learning in Non-IID Settings* (2020). Where
    `|Σᵢ sgn(Δᵢ)| < θ`, the update is set to 0. The mask applies to the update at this part's place in the sum: in
    `ServerSGD(momentum=0.9) + SignAgreement(2)`, as in the paper, the velocity accumulates all updates. Clients send
    their signs in addition to their updates.

    Weighting: every client has one vote, whatever its weight in the mean.

    Cannot be combined with a part that overrides `aggregate`.

    Example:
        >>> import undrift as ud
        >>> method = ud.ServerSGD(momentum=0.9) + ud.SignAgreement(threshold=2)

    Args:
        threshold: The threshold θ, a number of clients.
    """

    threshold: Number

    reads_rates: ClassVar[bool] = False

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return tree_map(torch.sign, delta), client.kept

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        votes = server.totals.sums
        return tree_map(lambda d, v: torch.where(v.abs() >= self.threshold, d, 0.0), update, votes), state


@dataclass(frozen=True)
class Projection(Part):
    """Project the weights onto a ball after every local step. `radius=inf` is FedAvg.

    Ozdayi, Kantarcioglu and Iyer, *Improving Accuracy of Federated Learning in Non-IID Settings* (2020). If `‖w‖₂ > M`,
    where w is the vector of all parameters, `w ← w·M/‖w‖₂`.

    Example:
        >>> import undrift as ud
        >>> method = ud.Projection(radius=3.0, center="global")

    Args:
        radius: The radius M.
        center: `"origin"`, or `"global"` for a ball around the weights received, w₀, which bounds `‖w − w₀‖₂`.
    """

    radius: Number
    center: str = "origin"

    ranges: ClassVar[dict[str, str]] = {"radius": "(0, inf]"}

    def __post_init__(self) -> None:
        if self.center not in ("origin", "global"):
            raise UndriftError(f'Projection(center) must be "origin" or "global", not {self.center!r}.')

    def project(self, params: Tree, client: Client) -> Tree:
        around = client.start if self.center == "global" else tree_map(torch.zeros_like, params)
        length = torch.sqrt(sum((w - c).square().sum() for w, c in zip(params.values(), around.values(), strict=True)))
        outside, shrink = length > self.radius, self.radius / length
        return tree_map(lambda w, c: torch.where(outside, c + (w - c) * shrink, w), params, around)


@dataclass(frozen=True)
class GradientNoise(Part):
    """Add Gaussian noise to the gradient of every local step. `std=0` is FedAvg.

    Ozdayi, Kantarcioglu and Iyer, *Improving Accuracy of Federated Learning in Non-IID Settings* (2020). The gradient
    becomes `g + z` with `z ~ N(0, σ²)`, drawn from the client's key. In the paper, the noise is a regularizer that is
    combined with `Projection`. It gives no privacy guarantee.

    Example:
        >>> import undrift as ud
        >>> method = ud.Projection(radius=3.0) + ud.GradientNoise(std=1e-4)

    Args:
        std: The standard deviation σ.
    """

    std: Number

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        return tree_map(lambda g, z: g + self.std * z, g, normal_like(client.key, params))


@dataclass(frozen=True)
class ServerTraining(Part):
    """Train on the server after aggregation, with SGD on the server's own data (`data.server`).

    Ozdayi, Kantarcioglu and Iyer, *Improving Accuracy of Federated Learning in Non-IID Settings* (2020). The paper
    holds out a class-balanced 5% of the training data for the server, and trains on it for one epoch per round.

    Needs data at the server: `ud.load(…, server_fraction=0.05)`.

    Example:
        >>> import undrift as ud
        >>> method = ud.ServerTraining(lr=0.01)

    Args:
        lr: The learning rate on the server.
        epochs: The number of epochs per round.
        batch_size: The batch size; None for all data at once.
        weight_decay: The weight decay.
        clip_norm: The largest norm of the gradient with the weight decay, over all parameters together, as in `Local`;
            None for no limit.
        momentum: The momentum of SGD: `v ← m·v + g`, `w ← w − η·v`. It starts at zero in every round, as on clients.
    """

    lr: Number
    epochs: int = 1
    batch_size: int | None = 64
    weight_decay: Number = 0.0
    clip_norm: Number | None = field(default=None, metadata=ADDED)
    momentum: Number = field(default=0.0, metadata=ADDED)

    ranges: ClassVar[dict[str, str]] = {"clip_norm": "(0, inf]", "momentum": "[0, 1)"}

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            count = getattr(self, name)
            if not (isinstance(count, int) and count >= 1) and not (name == "batch_size" and count is None):
                raise UndriftError(f"ServerTraining({name}) must be a whole number from 1, not {count!r}.")

    def check(self, local: Any, data: Any) -> None:
        if data.server_rows is None:
            raise UndriftError("ServerTraining needs data at the server; load with server_fraction=0.05, for example.")

    def refine(self, params: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        assert server.data is not None
        x, y = server.data
        statistics, velocity = tree_map(torch.clone, server.model.tracked), tree_zeros(params)
        for epoch in range(self.epochs):
            # A new permutation per epoch, as on a client. Of this part's random streams, the first half is for the
            # model (dropout), the second for shuffling, and the very last for augmentation.
            order = torch.argsort(bits(server.key.stream_at((1 << 15) + epoch), len(y)), stable=True)
            for step, chosen in enumerate(order.split(self.batch_size or len(y))):
                key = replace(server.key, step=torch.full_like(server.key.step, epoch * len(order) + step))
                batch = tree_map(lambda t, chosen=chosen: t[chosen], x)
                batch = server.augment(batch, key.stream_at((1 << 16) - 1)) if server.augment else batch

                def loss(params: Tree, batch: Tree = batch, chosen: Tensor = chosen, key: Key = key) -> Tensor:
                    return server.loss(server.model.train(params, batch, key, statistics), y[chosen]).mean()

                with server.model.seeding(key):
                    g = server.model.gradient(loss, params)
                g = tree_map(lambda w, g: g + self.weight_decay * w, params, g)
                g = g if self.clip_norm is None else clip_by_norm(g, self.clip_norm)
                velocity = tree_map(lambda v, g: self.momentum * v + g, velocity, g)
                params = tree_map(lambda w, v: w - self.lr * v, params, velocity)
        server.model.track(statistics)
        return params, state
