"""How a sample becomes the arguments of `forward`, and which of its results is the output for the loss.

A sample is a tensor, a tuple or a dict of tensors: one argument, several, or keyword arguments. What of a dict names no
parameters of `forward` is one argument, a dict.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undrift.errors import UndriftError, listed
from undrift.tree import Tree, tree_leaves, tree_map

WHOLE = "all"
"""The name that selects everything a model returns."""
POSITIONAL = "*"
"""In a dict of arguments, the name of what is not a keyword argument."""
LABELS = "labels"
"""The argument of models that compute their own loss."""


def arguments(module: nn.Module, x: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of a module's `forward` for a batch."""
    if isinstance(x, Mapping):
        rest = dict(x)
        if POSITIONAL in rest:
            return arguments(module, rest.pop(POSITIONAL))[0], rest
        return _given(module, rest)
    return (tuple(x), {}) if isinstance(x, tuple | list) else ((x,), {})


def _given(module: nn.Module, x: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for several inputs: all by keyword, or those that name no parameter as one dict.

    The latter only if the inputs cannot be keyword arguments and a dict can be meant: `forward(self, batch)`, or
    `forward(self, batch, labels=None)`. One that requires several arguments has misspelt names instead.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # of a function without one
        return (), x
    named = {name: value for name, value in x.items() if name in signature.parameters}
    rest = {name: value for name, value in x.items() if name not in named}
    if not rest or _binds(signature, **x) or not _binds(signature, rest, **named):
        return (), x
    first, *others = signature.parameters.values()
    required = [p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if named and (first.default is not first.empty or set(required) - {LABELS}):
        return (), x
    return (rest,), named


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def batch_size(x: Tree) -> int:
    """Return the number of samples in a batch."""
    return len(tree_leaves(x)[0])


def floats_to(tree: Tree, dtype: torch.dtype) -> Tree:
    """Return the tree with its floating-point tensors in `dtype`. Integers are indices and stay unchanged."""

    def cast(t: Any) -> Any:
        return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t

    return tree_map(cast, tree)


def selected(output: Any, which: str | None) -> Tree:
    """Return the output that losses, metrics and hooks get.

    If the model returns a tensor, it is that. If it returns several, it is the one that `which` names; by default the
    one called `logits`, as in Hugging Face's models, or the only tensor. Otherwise it is all of them, as a dict or a
    tuple. A dataclass and a named tuple count as dicts.
    """
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "_asdict"):
        output = output._asdict()
    elif not isinstance(output, Mapping) and dataclasses.is_dataclass(output):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    if not isinstance(output, Mapping | tuple | list):
        raise UndriftError(
            f"The model returns {type(output).__name__}; it must return a tensor, or several in a dict, a tuple or a "
            "dataclass."
        )
    named = dict(output) if isinstance(output, Mapping) else {str(i): t for i, t in enumerate(output)}
    if which is not None and which != WHOLE:
        if which not in named:
            raise UndriftError(f"The model has no output {which!r}; its outputs are {listed(named)}.")
        return named[which]
    tensors = [t for t in named.values() if isinstance(t, Tensor)]
    if which is None and "logits" in named:
        return named["logits"]
    if which is None and len(tensors) == 1:
        return tensors[0]
    return named if isinstance(output, Mapping) else tuple(output)
