"""Trees of tensors in files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from undrift.errors import UndriftError
from undrift.files import digest, replacing
from undrift.functional.layouts import COMPRESSED, components
from undrift.tree import Tree


def pack(tree: Tree, name: str, tensors: dict[str, Tensor], values: bool = False) -> Any:
    """Return the tree as JSON, its tensors put aside by name.

    With `values`, numbers and text stay as they are; otherwise numbers become tensors.
    """
    if isinstance(tree, dict):
        return {"dict": [[_key(key), pack(branch, f"{name}.{key}", tensors, values)] for key, branch in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [pack(branch, f"{name}.{i}", tensors, values) for i, branch in enumerate(tree)]}
    if values and (tree is None or type(tree) in (bool, int, float, str)):
        return {"value": tree}
    if values and not isinstance(tree, Tensor):
        raise UndriftError(f"a {type(tree).__name__} has no form in safetensors")
    leaf = torch.as_tensor(tree, dtype=torch.float64 if isinstance(tree, float) else None).detach()
    if leaf.layout is not torch.strided:
        parts = [pack(part, f"{name}.{i}", tensors) for i, part in enumerate(components(leaf))]
        return {"sparse": [str(leaf.layout), list(leaf.shape), parts]}
    if leaf.is_complex() and not storable(leaf.dtype):
        return {"complex": pack(torch.view_as_real(leaf.resolve_conj()), name, tensors)}
    if not storable(leaf.dtype):
        raise UndriftError(f"{leaf.dtype} is no dtype of safetensors")
    name = f"{name} #{len(tensors)}"  # the paths of two branches may be spelled alike
    tensors[name] = leaf.cpu().contiguous().clone()  # a clone, since two names may share one tensor
    return {"tensor": name}


def _key(key: Any) -> Any:
    """Return a key of a dict as JSON has it, in which a tuple is a list."""
    if isinstance(key, tuple):
        return [_key(part) for part in key]
    if key is None or isinstance(key, str | int | float):
        return key
    raise UndriftError(f"a dict with a key of type {type(key).__name__} has no form in safetensors")


def _as_key(key: Any) -> Any:
    return tuple(map(_as_key, key)) if isinstance(key, list) else key


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Tree:
    ((kind, inside),) = packed.items()
    if kind == "dict":
        return {_as_key(key): unpack(branch, tensors) for key, branch in inside}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(unpack(branch, tensors) for branch in inside)
    if kind == "value":
        return inside
    if kind == "complex":
        return torch.view_as_complex(unpack(inside, tensors).contiguous())
    if kind == "sparse":
        layout, shape, parts = inside
        return _sparse(layout, shape, [unpack(part, tensors) for part in parts])
    return tensors[inside]


def _sparse(layout: str, shape: list[int], parts: list[Tensor]) -> Tensor:
    if layout == str(torch.sparse_coo):
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
    kind = next(kind for kind in COMPRESSED if str(kind) == layout)
    rows, columns, values = parts
    return torch.sparse_compressed_tensor(rows, columns, values, shape, layout=kind, check_invariants=True)


@functools.cache
def storable(dtype: torch.dtype) -> bool:
    """Return whether safetensors have this dtype."""
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except Exception:  # it says so in several ways
        return False
    return True


def write_tensors(
    file: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None, secret: bool = False
) -> str:
    """Write a safetensors file, readable by its owner only if it is a secret; returns its checksum."""
    with replacing(file, secret) as partial:
        save_file(tensors, partial, notes)
        return digest(partial)


def own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors out of a memory-mapped file.

    There, they may not be aligned like torch's own memory, so that a matrix product might round differently and a
    resumed run would not give the bits of an uninterrupted one.
    """
    return {name: tensor.clone() for name, tensor in tensors.items()}
