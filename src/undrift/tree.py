"""Trees of tensors: nested dicts, lists and tuples. State, updates and uploads are all trees.

These are the trees of `torch.utils._pytree`, and any other type is left to it. For the common types, its generality
took a fifth of a round of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from torch.utils import _pytree as pytree

Tree = Any
LEAVES = {torch.Tensor, torch.nn.Parameter, float, int, bool, str, type(None)}
"""The usual types of leaves."""


class Other:
    """Stands for types that are left to torch, in a structure."""


def tree_map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply a function to the leaves of one or several trees.

    Example:
        >>> tree_map(lambda a, b: a + b, {"w": 1}, {"w": 2})
        {'w': 3}

    Args:
        function: A function of as many leaves as there are trees.
        tree: A tree: nested dicts, lists and tuples.
        *rest: More trees of the same structure.

    Returns:
        A tree of the same structure, with the function's results as leaves.

    Raises:
        ValueError: If the structures of the trees differ.
    """
    kind = type(tree)
    if kind is dict:
        if all(type(other) is dict and other.keys() == tree.keys() for other in rest):
            return {key: tree_map(function, tree[key], *[other[key] for other in rest]) for key in tree}
    elif kind is list or kind is tuple or hasattr(kind, "_fields"):
        if all(type(other) is kind and len(other) == len(tree) for other in rest):
            return _made(kind, [tree_map(function, *children) for children in zip(tree, *rest, strict=True)])
    elif kind in LEAVES:
        return function(tree, *rest)
    return pytree.tree_map(function, tree, *rest)


def tree_leaves(tree: Tree) -> list[Any]:
    """Return the leaves of a tree, in order."""
    return tree_flatten(tree)[0]


def tree_structure(tree: Tree) -> Any:
    """Return the structure of a tree: something hashable, which is the same for trees of the same structure."""
    return tree_flatten(tree)[1]


def tree_flatten(tree: Tree) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Tree, leaves: list[Any]) -> Any:
    """Add the leaves of a tree. Returns its structure: None for a leaf, else (type, what to rebuild it from)."""
    kind = type(tree)
    if kind is dict:
        return dict, tuple(tree), tuple([_flatten(child, leaves) for child in tree.values()])
    if kind is list or kind is tuple or hasattr(kind, "_fields"):
        return kind, tuple([_flatten(child, leaves) for child in tree])
    if kind in LEAVES:
        leaves.append(tree)
        return None
    own, spec = pytree.tree_flatten(tree)
    leaves += own
    return None if spec.is_leaf() else (Other, spec)


def tree_unflatten(leaves: list[Any], structure: Any) -> Tree:
    """Return the tree that has these leaves and this structure."""
    rest = iter(leaves)
    try:
        tree = _unflatten(rest, structure)
    except StopIteration:
        raise ValueError(f"{len(leaves)} leaves are too few for this structure") from None
    if next(rest, Other) is not Other:
        raise ValueError(f"{len(leaves)} leaves are too many for this structure")
    return tree


def _unflatten(leaves: Iterator[Any], structure: Any) -> Tree:
    if structure is None:
        return next(leaves)
    kind, *inner = structure
    if kind is dict:
        return {key: _unflatten(leaves, child) for key, child in zip(*inner, strict=True)}
    if kind is Other:
        return pytree.tree_unflatten([next(leaves) for _ in range(inner[0].num_leaves)], inner[0])
    return _made(kind, [_unflatten(leaves, child) for child in inner[0]])


def _made(kind: Any, children: list[Any]) -> Any:
    """Return a list, a tuple or a named tuple of these."""
    return kind(*children) if hasattr(kind, "_fields") else kind(children)


def tree_to(tree: Tree, device: torch.device) -> Tree:
    """Return the tree as contiguous tensors on `device`. Python numbers become scalar tensors."""

    def leaf(x: Any) -> torch.Tensor:
        exact = torch.float64 if isinstance(x, float) else None
        return to_device(torch.as_tensor(x, dtype=exact), device).contiguous()

    return tree_map(leaf, tree)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device, without waiting for the device's pending work."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def tree_bytes(tree: Tree) -> int:
    """Return the size of the tree's tensors in bytes."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree))


def tree_add(a: Tree, b: Tree) -> Tree:
    return tree_map(torch.add, a, b)


def tree_add_(a: Tree, b: Tree) -> None:
    """Add `b` to `a` in place, all leaves of a dtype at once: one kernel launch on a GPU instead of one per leaf."""
    for ours, theirs in _by_type(a, b):
        torch._foreach_add_(ours, theirs)


def tree_copy_(a: Tree, b: Tree) -> None:
    """Copy `b` into `a`, all leaves of a dtype at once."""
    for ours, theirs in _by_type(a, b):
        torch._foreach_copy_(ours, theirs)


def tree_clone(tree: Tree) -> Tree:
    """Return a copy of the tree's tensors, copying all leaves of a dtype at once."""
    copy = tree_map(torch.empty_like, tree)
    tree_copy_(copy, tree)
    return copy


def _by_type(a: Tree, b: Tree) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    found: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for ours, theirs in zip(tree_leaves(a), tree_leaves(b), strict=True):
        pair = found.setdefault(ours.dtype, ([], []))
        pair[0].append(ours)
        pair[1].append(theirs)
    return list(found.values())


def tree_sub(a: Tree, b: Tree) -> Tree:
    return tree_map(torch.sub, a, b)


def tree_scaled(tree: Tree, factor: torch.Tensor) -> Tree:
    """Return the tree times a factor, in at least float32: a half-precision tree times many samples would overflow."""
    return tree_map(lambda t: t.to(torch.promote_types(t.dtype, torch.float32)) * factor, tree)


def tree_zeros(tree: Tree) -> Tree:
    return tree_map(torch.zeros_like, tree)


def tree_finite(tree: Tree) -> torch.Tensor:
    """Return whether all numbers in the tree are finite, as a scalar on the tensors' device, without synchronizing."""
    leaves = [t for t in tree_leaves(tree) if t.is_floating_point() and t.numel()]
    if not leaves:
        return torch.ones((), dtype=torch.bool)
    return get_total_norm(leaves, norm_type=torch.inf).isfinite()


def tree_where(condition: torch.Tensor, tree: Tree, other: Tree) -> Tree:
    """Return `tree` if a scalar condition holds, else `other`, in the dtypes of `tree`. Structures must be the same."""
    return tree_map(lambda a, b: torch.where(condition, a, b.to(a.dtype)), tree, other)


def tree_stack(trees: list[Tree]) -> Tree:
    """Stack trees of the same structure and shapes along a new first axis."""
    return tree_map(lambda *leaves: torch.stack(leaves), trees[0], *trees[1:])


def tree_unstack(tree: Tree) -> list[Tree]:
    """Return the trees that `tree_stack` stacked, as views."""
    return [tree_map(lambda t, i=i: t[i], tree) for i in range(len(tree_leaves(tree)[0]))]


def tree_expand(tree: Tree, count: int) -> Tree:
    """Repeat a tree `count` times along a new first axis, without copying."""
    return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), tree)
