"""A small problem in float64 for tests of federations: a model, data, a method with a personal head, a bad node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

import undrift as ud
from undrift.flower.messages import decode, encode


@dataclass(frozen=True)
class PersonalHead(ud.Part):
    personal: tuple[str, ...] = ("3.*",)


@dataclass(frozen=True)
class Absent(ud.Part):
    """Leaves clients with odd ids out of round `t`."""

    t: int = 1

    def plan(self, plan, state, server):
        here = plan.clients % 2 == 0 if plan.round == self.t else plan.clients >= 0
        return replace(plan, clients=plan.clients[here], steps=plan.steps[here]), state


@dataclass(frozen=True)
class Median(ud.Part):
    """The median of the clients' updates."""

    def aggregate(self, updates, state, server):
        return {name: update.median(0).values for name, update in updates.items()}, state


def net64(classes: int, shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, classes)).double()


def norm64(classes: int, shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, classes)).double()


class Linked(nn.Module):
    """Reaches a weight in another way than by its name."""

    def __init__(self, classes: int, inputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 8).double(), nn.Linear(8, classes).double()
        self.weights = [self.last.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.tanh(self.first(x)), self.weights[0])


def linked64(classes: int, shape: tuple[int, ...]) -> nn.Module:
    return Linked(classes, shape[0])


class Widened(nn.Module):
    """Tables have 32 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def wide64(classes: int, shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(Widened(), nn.Linear(shape[0], 8).double(), nn.Tanh(), nn.Linear(8, classes).double())


def blobs64() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    y = torch.randint(0, 4, (160,), generator=draw)
    x = torch.randn(160, 6, generator=draw, dtype=torch.float64) + y[:, None]
    return (x[:120], y[:120]), (x[120:], y[120:])


def spoiled(reply: bytes) -> bytes:
    """A reply as a broken or hostile node might send it: in the first three rounds, each time in another way."""
    sent, notes = decode(reply)
    update, rest = sent["total"][0], sent["total"][1:]
    name = next(iter(update))
    if notes["round"] == 0:
        update[name] = torch.full_like(update[name], torch.nan)
    elif notes["round"] == 1:
        update[name] = update[name][:1]
    elif notes["round"] == 2:
        del update[name]
    return encode({**sent, "total": (update, *rest)}, notes)


def register():
    ud.register_model("net64", net64)
    ud.register_model("norm64", norm64)
    ud.register_model("linked64", linked64)
    ud.register_model("wide64", wide64)
    ud.register_data("blobs64", blobs64)


if __name__ == "flower_problem":  # a node's process, which an experiment's `imports` brings here; tests forget it again
    register()
