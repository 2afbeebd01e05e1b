"""A copy of the caller's module, which training may change."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from undrift.errors import UndriftError, first_line


def copy_of(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module on `device`, with weights of its own, without wrappers for several GPUs or for compiling.

    Frozen parameters that are on `device` already are shared with the caller, so that a large backbone is not copied.
    """
    module = _unwrapped(module)
    _check_values(module)
    memo = {id(p): p for p in module.parameters() if not p.requires_grad and p.device == device}
    return deep_copy(module, memo).to(device)


def _unwrapped(module: nn.Module) -> nn.Module:
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(module, wrappers) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, wrappers) else module._orig_mod  # type: ignore[assignment]
    if isinstance(module, torch.jit.ScriptModule):
        raise UndriftError(
            "The model is a TorchScript module, whose weights cannot be replaced; give the Python module that it was "
            "made from."
        )
    return module


def _check_values(module: nn.Module) -> None:
    """Reject parameters and buffers that have no values yet, or complex ones."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise UndriftError(
                f"The model's {name!r} has no shape yet (a lazy layer); call the model once on a batch before training."
            )
        if tensor.is_meta:
            raise UndriftError(
                f"The model's {name!r} is on the meta device and has no values; make the model on the CPU instead."
            )
        if tensor.is_complex() and tensor.requires_grad:
            raise UndriftError(
                f"The model's weights {name!r} are complex; keep them as real numbers (torch.view_as_real) and combine "
                "them in forward (torch.view_as_complex)."
            )


def deep_copy(module: nn.Module, memo: Mapping[int, object]) -> nn.Module:
    """Return `copy.deepcopy` with this memo, or raise an error that explains why it fails."""
    # Older forms of weight norm and pruning keep a weight that they computed as an attribute. Autograd's tensors cannot
    # be copied, and the next forward pass computes these anew.
    known = dict(memo)
    for layer in module.modules():
        made = [t for t in vars(layer).values() if isinstance(t, Tensor) and t.grad_fn is not None]
        known |= {id(t): t.detach().clone() for t in made}
    try:
        return copy.deepcopy(module, known)
    except Exception as error:  # a user's attribute may raise anything
        raise UndriftError(
            f"The model cannot be copied ({first_line(error)}). undrift trains a copy, so that yours stays as it is: "
            "keep locks, open files and generators out of the module, or give it a __deepcopy__."
        ) from error
