"""A small problem in float64 for tests of federations: a model, data, and a method with a personal head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import undrift as ud


@dataclass(frozen=True)
class PersonalHead(ud.Part):
    personal: tuple[str, ...] = ("3.*",)


def net64(classes: int, shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, classes)).double()


def norm64(classes: int, shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, classes)).double()


def blobs64() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    y = torch.randint(0, 4, (160,), generator=draw)
    x = torch.randn(160, 6, generator=draw, dtype=torch.float64) + y[:, None]
    return (x[:120], y[:120]), (x[120:], y[120:])


ud.register_model("net64", net64)
ud.register_model("norm64", norm64)
ud.register_data("blobs64", blobs64)
