"""Cheap techniques for non-IID clients: sign agreement, projection, noise and training at the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.functional.model import ordinary_gradient
from undrift.method.context import Client, Server, Totals
from undrift.method.part import Part
from undrift.random import Key, bits, normal
from undrift.schedule import Number
from undrift.tree import Tree, tree_map


@dataclass(frozen=True)
class SignAgreement(Part):
    """A coordinate is updated only if `|Σᵢ sgn(Δᵢ)| ≥ θ`; elsewhere the update is zero. `threshold=0` is off.

    It masks the update at its place in `+`: after `ServerSGD(momentum=…)` the velocity still gathers all updates.
    The votes are an upload of their own.
    """

    threshold: Number

    reads_rates: ClassVar[bool] = False

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return tree_map(torch.sign, delta), client.kept

    def transform(self, update: Tree, totals: Totals, state: Tree) -> tuple[Tree, Tree]:
        return tree_map(lambda d, votes: torch.where(votes.abs() >= self.threshold, d, 0.0), update, totals.sums), state


@dataclass(frozen=True)
class Projection(Part):
    """After every local step, if `‖w‖₂ > M` (all parameters as one vector): `w ← w·M/‖w‖₂`. `radius=inf` is off.

    `center="global"` keeps `w − w₀` in the ball instead, w₀ the weights received.
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
    """Each local step adds `N(0, σ²)` to the gradient, drawn from the client's key. `std=0` is off."""

    std: Number

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        drawn = {n: normal(client.key.stream_at(i), w.shape, w.dtype) for i, (n, w) in enumerate(params.items())}
        return tree_map(lambda g, z: g + self.std * z, g, drawn)


@dataclass(frozen=True)
class ServerTraining(Part):
    """After aggregation the server trains `epochs` epochs of SGD on its own data (`data.server`)."""

    lr: Number
    epochs: int = 1
    batch_size: int | None = 64
    weight_decay: Number = 0.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            count = getattr(self, name)
            if not (isinstance(count, int) and count >= 1) and not (name == "batch_size" and count is None):
                raise UndriftError(f"ServerTraining({name}) must be a whole number from 1, not {count!r}.")

    def check(self, local: Any, data: Any) -> None:
        if data.server_rows is None:
            raise UndriftError("ServerTraining needs data at the server: load with server_fraction=0.05, say.")

    def refine(self, params: Tree, server: Server) -> Tree:
        assert server.data is not None
        x, y = server.data
        statistics = tree_map(torch.clone, server.model.tracked)
        for epoch in range(self.epochs):
            # Fresh permutations, like a client's. Of this part's streams the first half is the model's (dropout), the
            # second shuffles, the last changes batches.
            order = torch.argsort(bits(server.key.stream_at((1 << 15) + epoch), len(x)), stable=True)
            for step, rows in enumerate(order.split(self.batch_size or len(x))):
                key = replace(server.key, step=torch.full_like(server.key.step, epoch * len(order) + step))

                batch = server.augment(x[rows], key.stream_at((1 << 16) - 1)) if server.augment else x[rows]

                def loss(params: Tree, batch: Tensor = batch, rows: Tensor = rows, key: Key = key) -> Tensor:
                    return server.loss(server.model.train(params, batch, key, statistics), y[rows]).mean()

                g = ordinary_gradient(loss, params)
                params = tree_map(lambda w, g: w - self.lr * (g + self.weight_decay * w), params, g)
        server.model.track(statistics)
        return params
