"""FedAvg as anyone would write it in PyTorch, for any module: the reference for models that undrift did not make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import undrift as ud


def take(x: Any, rows: Tensor) -> Any:
    if isinstance(x, dict):
        return {name: t[rows] for name, t in x.items()}
    return tuple(t[rows] for t in x) if isinstance(x, tuple) else x[rows]


def called(module: nn.Module, x: Any) -> Any:
    return module(**x) if isinstance(x, dict) else module(*x) if isinstance(x, tuple) else module(x)


def hand_loop(
    module: nn.Module,
    data: ud.FederatedDataset,
    local: ud.Local,
    rounds: int,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The weights, frozen ones and buffers included, after some rounds with every client and seed 0.

    `loss` gives the loss of a batch, by default cross-entropy.
    """
    criterion = loss or nn.functional.cross_entropy
    module = copied(module)
    weights = torch.tensor(data.sizes / data.sizes.sum(), dtype=torch.float64)
    for t in range(rounds):
        trained = []
        for c in range(len(data)):
            own = copied(module)
            own.train()
            x, y = data[c]
            optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=local.lr)
            for rows in ud.batches(data, local, client=c, round=t, seed=0):
                optimizer.zero_grad()
                criterion(called(own, take(x, rows)), y[rows]).backward()
                optimizer.step()
            trained.append(everything(own))
        for name, t_ in everything(module).items():
            mean = sum(w * own[name].double() for w, own in zip(weights, trained, strict=True))
            t_.copy_(mean if t_.is_floating_point() else mean.round())
    return everything(module)


def copied(module: nn.Module) -> nn.Module:
    """A copy, also of a module that keeps what it computed in an attribute, as the older weight norm does."""
    for layer in module.modules():
        for name, t in list(vars(layer).items()):
            if isinstance(t, Tensor):
                setattr(layer, name, t.detach())
    return copy.deepcopy(module)


def everything(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in module.state_dict(keep_vars=True).items()}
