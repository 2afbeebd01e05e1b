"""Examine a model by a few passes on samples, without changing it: which buffers it changes, whether it vmaps."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from undrift.errors import UndriftError
from undrift.functional.draws import KeyedDraws, RefuseDraws
from undrift.functional.norm_trials import find_norm_obstacle
from undrift.functional.recurrent.layers import THEIRS
from undrift.random import Key
from undrift.tree import tree_expand

if TYPE_CHECKING:
    from undrift.functional.model import Model, Params


def examine(model: Model, x: Tensor) -> tuple[Tensor, list[str]]:
    """Run a copy of the model on `x` in each mode: the output in evaluation mode, and which buffers training changes.

    Raises `UndriftError` for draws that no key governs.
    """
    twin = copy.copy(model)
    twin.module = copy.deepcopy(model.module, {id(p): p for p in model.module.parameters()})
    before = dict(twin.module.named_buffers())
    values = {name: b.clone() for name, b in before.items()}
    key = _any_key(x.device)
    given = x.to(model.dtype) if x.is_floating_point() else x
    changed = []
    with torch.no_grad(), RefuseDraws():
        output = twin(twin.start, x)
        twin.module.train()
        with KeyedDraws(key):
            first = twin.module(given)
        for name, after in twin.module.named_buffers():
            if before[name] is not after:
                raise UndriftError(
                    f"The model replaces its buffer {name!r}; change it in place instead ({name}.copy_(…))."
                )
            if not torch.equal(values[name], after):
                changed.append(name)
                after.copy_(values[name])
        with KeyedDraws(key):
            second = twin.module(given)
    if isinstance(first, Tensor) and not _alike(first, second):
        raise UndriftError(
            "The model gives different outputs for the same samples and the same draws, so runs would not repeat: "
            "its forward pass draws from Python's or numpy's generator, or counts its calls. Use torch.rand or "
            "torch.randn, which undrift draws from the client's key, and buffers for what must change."
        )
    return output, changed


def find_obstacle(model: Model) -> str | None:
    """Why a model cannot run under vmap: by its layers, or by trying. None if it can."""
    for layer in model.module.modules():
        name = type(layer).__name__
        if isinstance(layer, nn.RNNBase) and type(layer) not in THEIRS:
            return f"nn.{name} has no vmap rule, unless it is a GRU or LSTM with biases, one direction and no dropout"
    return find_norm_obstacle(model) or _vmap_failure(model)


def _vmap_failure(model: Model) -> str | None:
    """Why vmap refuses the model, from a tiny step of two lanes, or None."""
    assert model.sample is not None
    key, x = _any_key(model.sample.device), model.sample.expand(2, *model.sample.shape)

    def output(params: Params, x: Tensor) -> Tensor:
        return model.train(params, x, key, mask=torch.ones(len(x), device=x.device)).sum()

    try:
        torch.func.vmap(torch.func.grad(output))(tree_expand(model.start, 2), x)
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's forward pass may raise under vmap
        return f"the model does not run under vmap ({(str(error).splitlines() or [type(error).__name__])[0][:200]})"
    return None


def _any_key(device: torch.device) -> Key:
    words = torch.zeros(2, dtype=torch.int64, device=device)
    return Key(words, words[0])


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are the same up to rounding; a GPU may add up in another order."""
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    gap, size = (a - b).nan_to_num().double().norm(), a.nan_to_num().double().norm()
    return bool(gap <= 100 * torch.finfo(a.dtype).eps * size)
