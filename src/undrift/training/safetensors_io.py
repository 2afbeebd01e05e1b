"""Files of safetensors: trees of tensors, and a trained module with its weights and buffers (`model.safetensors`).

`model.safetensors` is what `safetensors.torch.save_model` writes, for every module that this can write. Other entries
of a module's `state_dict` (complex and sparse tensors, the extra state of `get_extra_state`) are tensors of other
names, which a note in the file describes.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save, save_file, save_model
from torch import Tensor, nn

from undrift.errors import UndriftError, first_line, listed
from undrift.files import digest, replacing
from undrift.functional.layouts import COMPRESSED, components, is_expanded
from undrift.tree import Tree

# ---- trees ---------------------------------------------------------------------------------------------------------


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


# ---- modules -------------------------------------------------------------------------------------------------------

log = logging.getLogger("undrift")
NOTE = "undrift"
"""The note in the file about entries that are no tensors of safetensors, as `pack` describes them."""


def check_savable(module: nn.Module) -> None:
    """Reject a module of which not everything can be written, before it is trained."""
    try:
        state = module.state_dict()
    except Exception as error:  # a user's own may raise anything
        raise UndriftError(
            f"The model's state_dict() fails ({first_line(error)}), so the trained model could not be saved. Correct "
            "it, or train without out=."
        ) from error
    left_out = _Packed(state).left_out
    if left_out:
        name, why = next(iter(left_out.items()))
        raise UndriftError(
            f"The model's state_dict has {name!r}, which cannot be saved: {why}. Let it be a tensor, or numbers, text, "
            "lists and dicts of these (get_extra_state); or train without out=."
        )


def write_model(module: nn.Module, file: Path) -> None:
    packed = _Packed(module.state_dict())
    for name, why in packed.left_out.items():  # which a trained module may have and an untrained one not
        log.warning("%r of the trained module's state_dict is not saved: %s", name, why)
    notes = {NOTE: json.dumps([packed.others, list(packed.tensors)])} if packed.others else None
    save_model(_State(_separate(packed.plain) | packed.tensors), str(file), notes)


def read_model(module: nn.Module, file: Path) -> None:
    """Put what is in the file into the module. Raises a `RuntimeError` unless it has the same entries."""
    with safe_open(file, framework="pt") as opened:
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        notes = opened.metadata() or {}
    others, names = json.loads(notes.get(NOTE, "[{}, []]"))
    tensors = own_memory({name: state.pop(name) for name in names})
    for b in module.buffers():
        if is_expanded(b):  # which cannot be written to
            b.data = b.data.clone()
    state |= {name: unpack(packed, tensors) for name, packed in others.items()}
    mismatch = module.load_state_dict(state, strict=False)
    own = module.state_dict()
    missing = [name for name in mismatch.missing_keys if not _within(own, name, notes.get(name))]
    unexpected = [name for name in mismatch.unexpected_keys if name not in others]
    if missing:
        raise RuntimeError(f"the file lacks {listed(missing)}")
    if unexpected:
        raise RuntimeError(f"the module has no {listed(unexpected)}")


class _Packed:
    """A module's state as tensors of safetensors: those that are some already, and what represents the others."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.plain: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.others: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        """By name: why an entry cannot be stored."""
        for name, x in state.items():
            if isinstance(x, Tensor) and x.layout is torch.strided and storable(x.dtype):
                self.plain[name] = x
                continue
            try:
                self.others[name] = pack(x, name, self.tensors, values=True)
                json.dumps(self.others[name])
            except (UndriftError, TypeError, ValueError) as error:
                self.left_out[name] = first_line(error)
                self.others.pop(name, None)


class _State(nn.Module):
    """A module for `save_model`, which asks it for nothing but its state."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(self.state)


def _separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state with memory of their own for parts of tensors that are not in it as a whole.

    Safetensors refuse them: slices, what `expand` returns, or the weights of cuDNN's recurrent layers, which are in one
    buffer. Several names of one tensor remain so.
    """
    whole = {_storage(t) for t in state.values() if t.is_contiguous() and t.nbytes == t.untyped_storage().nbytes()}
    copies: dict[Any, Tensor] = {}

    def own(t: Tensor) -> Tensor:
        if t.is_contiguous() and _storage(t) in whole:
            return t
        key = _storage(t), t.data_ptr(), t.dtype, t.shape, t.stride()
        return copies.setdefault(key, t.clone(memory_format=torch.contiguous_format))

    return {name: own(t) for name, t in state.items()}


def _storage(t: Tensor) -> tuple[str, int]:
    return str(t.device), t.untyped_storage().data_ptr()


def _within(state: dict[str, Any], name: str, kept: str | None) -> bool:
    """Return whether an entry shares the memory of another, under whose name alone the file has both."""
    a, b = state.get(name), state.get(kept or "")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and _storage(a) == _storage(b)
