"""The file with a trained module's weights and buffers, `model.safetensors`.

It is what `safetensors.torch.save_model` writes, for every module that this can write. Other entries of a module's
`state_dict` (complex and sparse tensors, the extra state of `get_extra_state`) are tensors of other names, which a note
in the file describes.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_model
from torch import Tensor, nn

from undrift.errors import UndriftError, first_line, listed
from undrift.functional.layouts import is_expanded
from undrift.training.trees import own_memory, pack, storable, unpack

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
    found = module.load_state_dict(state, strict=False)
    own = module.state_dict()
    missing = [name for name in found.missing_keys if not _within(own, name, notes.get(name))]
    unexpected = [name for name in found.unexpected_keys if name not in others]
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
