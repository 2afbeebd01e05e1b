"""Models by name: `ud.models.get("mlp", classes=10, shape=(1, 8, 8))`. Any `nn.Module` serves instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from undrift.errors import unknown
from undrift.models.cnn import cnn
from undrift.models.linear import mlp
from undrift.random import torch_seed

MODELS: dict[str, Callable[[int, tuple[int, ...]], nn.Module]] = {"mlp": mlp, "cnn": cnn}


def get(name: str, *, classes: int, shape: Sequence[int], seed: int = 0) -> nn.Module:
    """A fresh model for samples of `shape` (no batch axis) with `classes` outputs; `seed` decides its weights."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):  # layers initialise themselves from torch's global generator
        torch.manual_seed(torch_seed(seed, "model"))
        return MODELS[name](classes, tuple(shape))
