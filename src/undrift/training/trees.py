"""Trees of tensors in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from undrift.files import digest, replacing
from undrift.tree import Tree


def pack(tree: Tree, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the tree as JSON, its tensors put aside by name."""
    if isinstance(tree, dict):
        return {"dict": [[key, pack(branch, f"{name}.{key}", tensors)] for key, branch in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [pack(branch, f"{name}.{i}", tensors) for i, branch in enumerate(tree)]}
    leaf = torch.as_tensor(tree, dtype=torch.float64 if isinstance(tree, float) else None)
    name = f"{name} #{len(tensors)}"  # the paths of two branches may be spelled alike
    tensors[name] = leaf.detach().cpu().contiguous().clone()  # a clone, since two names may share one tensor
    return {"tensor": name}


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Tree:
    ((kind, inside),) = packed.items()
    if kind == "dict":
        return {key: unpack(branch, tensors) for key, branch in inside}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(unpack(branch, tensors) for branch in inside)
    return tensors[inside]


def write_tensors(file: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> str:
    """Write a safetensors file; returns its checksum."""
    with replacing(file) as partial:
        save_file(tensors, partial, notes)
        return digest(partial)


def own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors out of a memory-mapped file.

    There, they may not be aligned like torch's own memory, so that a matrix product might round differently and a
    resumed run would not give the bits of an uninterrupted one.
    """
    return {name: tensor.clone() for name, tensor in tensors.items()}
