"""Local training as parts: what `Local` adds to plain SGD, and personal parameters, at the end of the chain.

A local step is a chain of `gradient` and `step` hooks. Clipping, momentum and the local optimizer are its last links,
rates by step and by parameter group its last `rate` hook, so engines know nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.functional.model import as_buffer
from undrift.method.calls import aligned, call, name, pair, unchanged_form
from undrift.method.context import Client, Server
from undrift.method.local import Local
from undrift.method.optimizers import Optimizer, clip_by_norm, is_sgd
from undrift.method.part import Method, Part
from undrift.schedule import Number
from undrift.tree import Tree, tree_map, tree_scaled, tree_zeros


def with_local_work(
    method: Method, local: Local, rates: dict[str, float], buffers: Tree, personal: frozenset[str]
) -> Method:
    """Return the method that the engine runs: with parts for the settings of `Local` and for personal parameters.

    Args:
        method: The method as the user wrote it.
        local: The local work.
        rates: The factors of parameter groups for the learning rate, by parameter.
        buffers: The buffers that training changes.
        personal: The names of the parameters and buffers that are each client's own.
    """
    _check_compatible(method, local, personal)
    parts: list[Part] = []
    if local.step_schedule is not None or rates:
        parts.append(LocalRates(local.step_schedule, rates))
    if local.clip_norm is not None:
        parts.append(ClipNorm(local.clip_norm))
    if callable(local.momentum) or local.momentum:
        parts.append(Momentum(local.momentum))
    if local.optimizer is not None:
        parts.append(KINDS[local.optimizer_state](local.optimizer))
    if personal:
        parts.append(PersonalState({n: t for n, t in buffers.items() if n in personal}, personal))
    return method.followed_by(parts)


def _check_compatible(method: Method, local: Local, personal: frozenset[str]) -> None:
    """Raise `UndriftError` if the settings of `Local` and the method's parts contradict each other."""
    replacing = [part for part in method.parts if part.replaces_gradient]
    if replacing and (callable(local.weight_decay) or local.weight_decay):
        raise UndriftError(
            f"{name(replacing[0])} replaces the gradient, so Local(weight_decay), which comes before it, would be "
            "lost; write Local(optimizer=ud.SGD(weight_decay=…))."
        )
    if local.optimizer_state != "average":
        return
    if personal:
        raise UndriftError(
            'Local(optimizer_state="average") would average the state of personal parameters, which are not sent; '
            'write optimizer_state="keep".'
        )
    for _, part in method.overriding("aggregate"):
        raise UndriftError(
            f"{name(part)} may reject a client's update, whose optimizer's state would stay in the mean of "
            'Local(optimizer_state="average"); write optimizer_state="keep".'
        )


@dataclass(frozen=True)
class LocalRates(Part):
    """Rates by local step and by parameter group."""

    by_step: Any
    by_name: dict[str, float]

    def rate(self, k: Tensor, client: Client) -> Tree:
        factor: Any = 1.0 if self.by_step is None else self.by_step(k, client.steps)
        factor = torch.as_tensor(factor, dtype=torch.float64, device=k.device)
        if not self.by_name:
            return factor
        return {n: factor * self.by_name.get(n, 1.0) for n in client.start}


@dataclass(frozen=True)
class ClipNorm(Part):
    """Clips the norm of the gradient to `max_norm`, as `torch.nn.utils.clip_grad_norm_`."""

    max_norm: Number

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        return clip_by_norm(g, self.max_norm)


@dataclass(frozen=True)
class Momentum(Part):
    """The short form of SGD: `v ← ρv + g`. The round's ρ is the plan's, which parts may change."""

    momentum: Number

    def carry(self, params: Tree, client: Client) -> Tree:
        return tree_zeros(params)

    def step(self, g: Tree, carry: Tree, params: Tree, client: Client) -> tuple[Tree, Tree]:
        velocity = tree_map(lambda v, g: self.momentum * v + g, carry, g)
        velocity = {n: v.to(params[n].dtype) for n, v in velocity.items()}
        return velocity, velocity


@dataclass(frozen=True)
class Optimize(Part):
    """The local optimizer, whose state is reset in every round."""

    optimizer: Optimizer

    reads_rates: ClassVar[bool] = False

    def carry(self, params: Tree, client: Client) -> Tree:
        return call(self.optimizer, "carry", params, client)

    def step(self, g: Tree, carry: Tree, params: Tree, client: Client) -> tuple[Tree, Tree]:
        found = call(self.optimizer, "step", g, carry, params, client)
        direction, new = pair(found, self.optimizer, "step", "direction", "carry")
        direction = aligned(direction, params, self.optimizer, "step")
        return direction, unchanged_form(new, carry, self.optimizer, "step", "carry", "carry")


@dataclass(frozen=True)
class OptimizeKept(Optimize):
    """The local optimizer, whose state each client keeps between rounds."""

    def keep(self, params: Tree, client: Client) -> Tree:
        return call(self.optimizer, "carry", params, None)

    def carry(self, params: Tree, client: Client) -> Tree:
        return client.kept

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return (), client.carry


@dataclass(frozen=True)
class OptimizeAveraged(Optimize):
    """The local optimizer, whose state is averaged over the cohort like the weights, and sent to the next."""

    def start(self, params: Tree, server: Server) -> Tree:
        return call(self.optimizer, "carry", params, None)

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        return state

    def carry(self, params: Tree, client: Client) -> Tree:
        return client.received

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return tree_scaled(client.carry, client.weight), client.kept

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        weight = server.totals.weight
        whole = torch.where(weight > 0, weight, 1.0)

        def mean(total: Tensor, old: Tensor) -> Tensor:  # if no client has trained, the state does not change
            return torch.where(weight > 0, as_buffer(total / whole, old), old)

        return update, tree_map(mean, server.totals.sums, state)


KINDS = {"reset": Optimize, "keep": OptimizeKept, "average": OptimizeAveraged}


@dataclass(frozen=True)
class PersonalState(Part):
    """The values of personal parameters and buffers, which each client keeps."""

    buffers: dict[str, Tensor]
    """The personal buffers before a client's first round."""
    names: frozenset[str]

    reads_rates: ClassVar[bool] = False

    def keep(self, params: Tree, client: Client) -> Tree:
        return {n: w for n, w in params.items() if n in self.names} | self.buffers

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        trained = {**client.final, **client.buffers}
        return (), {n: trained[n].to(old.dtype) for n, old in client.kept.items()}


def momentum_of(parts: list[Part], short: Tensor) -> Tensor:
    """Return the momentum ρ of a step, for `client.work`: that of the optimizer, or `short`, that of the short form."""
    optimizers = [part.optimizer for part in parts if isinstance(part, Optimize)]
    return optimizers[0].momentum if optimizers and is_sgd(optimizers[0]) else short
