"""Messages between the server and the nodes: trees of tensors and notes in JSON as safetensors, never pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from undrift.errors import UndriftError, first_line
from undrift.training.safetensors_io import own_memory, pack, unpack
from undrift.tree import Tree

NOTES = "notes"
"""The entry that holds the JSON; tensors have names of other forms."""
SLACK = 1 << 16
"""How many bytes a message may have beyond its tensors and notes of the expected size."""

Notes = dict[str, Any]


class RefusedError(UndriftError):
    """Raised for a message that is invalid."""


def encode(tree: Tree, notes: Notes) -> bytes:
    """Return a message as bytes."""
    tensors: dict[str, Tensor] = {}
    packed = pack(tree, "tree", tensors)
    text = json.dumps({"tree": packed, "notes": notes}).encode()
    tensors[NOTES] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return save(tensors)


def decode(message: bytes, most: int | None = None) -> tuple[Tree, Notes]:
    """Return the tree and the notes of a message, up to this many bytes. Raises `RefusedError`."""
    if most is not None and len(message) > most:
        raise RefusedError(f"it has {len(message):,} bytes, where at most {most:,} are expected")
    try:
        tensors = own_memory(load(message))
        whole = json.loads(tensors.pop(NOTES).numpy().tobytes())
        tree, notes = unpack(whole["tree"], tensors), whole["notes"]
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RefusedError(f"it cannot be read ({type(error).__name__}: {first_line(error)})") from error
    if not isinstance(notes, dict):
        raise RefusedError("its notes are no dict")
    return tree, notes
