"""Checks of replies before they are added: names, shapes, dtypes, size, and whether all numbers are finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undrift.flower.messages import RefusedError
from undrift.tree import Tree, tree_finite


def check_form(tree: Tree, form: Tree, where: str = "the reply") -> None:
    """Raise `RefusedError` unless the tree has the names, kinds, shapes and types of `form`."""
    if isinstance(form, Tensor):
        if not isinstance(tree, Tensor):
            raise RefusedError(f"{where} has no tensor")
        if tree.shape != form.shape or tree.dtype != form.dtype:
            raise RefusedError(f"{where} is {_kind(tree)}, not {_kind(form)}")
        return
    if type(tree) is not type(form):
        raise RefusedError(f"{where} is a {type(tree).__name__}, not a {type(form).__name__}")
    names = list(form) if isinstance(form, dict) else range(len(form))
    given = list(tree) if isinstance(form, dict) else range(len(tree))
    for name in names:
        if name not in given:
            raise RefusedError(f"{where} lacks {name!r}")
    for name in given:
        if name not in names:
            raise RefusedError(f"{where} has {name!r}, which was not asked for")
    for name in names:
        check_form(tree[name], form[name], f"{where}, {name}" if isinstance(name, str) else where)


def check_finite(tree: Tree, what: str = "the reply") -> None:
    """Raise `RefusedError` if a number is NaN or infinite."""
    if not bool(tree_finite(tree)):
        raise RefusedError(f"{what} has NaN or infinity")


def reordered(tree: Tree, form: Tree) -> Tree:
    """Return the tree with its dicts in the order of `form`, since trees are added leaf by leaf."""
    if isinstance(form, dict):
        return {name: reordered(tree[name], branch) for name, branch in form.items()}
    if isinstance(form, list | tuple):
        return type(form)(reordered(*pair) for pair in zip(tree, form, strict=True))
    return tree


def as_ints(notes: dict[str, Any], name: str) -> list[int]:
    """Return a list of whole numbers from a message's notes."""
    found = notes.get(name)
    if not isinstance(found, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in found):
        raise RefusedError(f"its {name} are no list of whole numbers")
    return found


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def flags(tree: Tree, count: int) -> Tensor:
    """Return one truth value per client."""
    if not isinstance(tree, Tensor) or tree.dtype != torch.bool or tree.shape != (count,):
        raise RefusedError("it does not say of each client whether its numbers are finite")
    return tree
