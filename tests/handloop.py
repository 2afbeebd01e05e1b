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
    module = copied(module)
    for t in range(rounds):
        trained = []
        for c in range(len(data)):
            own = copied(module)
            train(own, data, local, c, t, loss)
            trained.append(everything(own))
        put(module, mean(trained, data))
    return everything(module)


def own_loop(
    module: nn.Module,
    data: ud.FederatedDataset,
    local: ud.Local,
    rounds: int,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The same for a module that no copy can stand for: it trains itself, with each client's weights written in."""
    for t in range(rounds):
        start, trained = {name: tensor.clone() for name, tensor in everything(module).items()}, []
        for c in range(len(data)):
            put(module, start)
            train(module, data, local, c, t, loss)
            trained.append({name: tensor.clone() for name, tensor in everything(module).items()})
        put(module, mean(trained, data))
    return everything(module)


def train(
    module: nn.Module,
    data: ud.FederatedDataset,
    local: ud.Local,
    client: int,
    t: int,
    loss: Callable[[Any, Tensor], Tensor] | None,
) -> None:
    """One client's local training in round `t`."""
    criterion = loss or nn.functional.cross_entropy
    module.train()
    x, y = data[client]
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=local.lr)
    for rows in ud.batches(data, local, client=client, round=t, seed=0):
        optimizer.zero_grad()
        criterion(called(module, take(x, rows)), y[rows]).backward()
        optimizer.step()


def mean(trained: list[dict[str, Tensor]], data: ud.FederatedDataset) -> dict[str, Tensor]:
    weights = (data.sizes / data.sizes.sum()).tolist()
    return {name: sum(w * own[name].double() for w, own in zip(weights, trained, strict=True)) for name in trained[0]}


def put(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, tensor in everything(module).items():
        tensor.copy_(values[name] if tensor.is_floating_point() else values[name].round())


def copied(module: nn.Module) -> nn.Module:
    """A copy, also of a module that keeps what it computed in an attribute, as the older weight norm does."""
    for layer in module.modules():
        for name, t in list(vars(layer).items()):
            if isinstance(t, Tensor):
                setattr(layer, name, t.detach())
    return copy.deepcopy(module)


def everything(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in module.state_dict(keep_vars=True).items()}
