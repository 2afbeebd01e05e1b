"""Trials of a model with norms: whether lanes match torch, and whether it can train on one sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from undrift.errors import first_line
from undrift.functional.batch_norm import NORMS, release_norms
from undrift.functional.copying import deep_copy
from undrift.functional.draws import fixed_key
from undrift.tree import tree_leaves, tree_map

if TYPE_CHECKING:
    from undrift.functional.model import Model

REAL, PADDED = [0, 1, 2], [0, 1, 2, 2, 2]
"""The rows of a trial batch, and the same batch padded as lanes do it."""


def has_norms(model: Model) -> bool:
    """Return whether a trial is needed: the model has norms, or changes its buffers."""
    return bool(model.tracked) or any(isinstance(layer, NORMS) for layer in model.module.modules())


def find_norm_obstacle(model: Model) -> str | None:
    """Return why lanes cannot train a model that has norms or changes its buffers; None if they can.

    Three samples by torch's own norms and the same three, padded, by those of lanes must give the same outputs and
    buffers. This finds norms whose input does not have the samples in order along its first axis, and buffers that
    are changed by anything else.
    """
    for layer in model.module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            name = type(layer).__name__
            return f"{name} without running statistics looks across the rows of a batch, in evaluation too"
    if not has_norms(model):
        return None
    # In float64, where a norm over few values does not magnify rounding into a difference; a module that insists on
    # its own precision, in that.
    found = None
    for dtype, bound in ((torch.float64, 1e-6), (model.dtype, 1e-2)):
        try:
            return _difference(_with_dtype(model, dtype), bound)
        except Exception as error:  # whatever a user's module may raise
            found = f"its norms do not run in lanes ({first_line(error)[:200]})"
    return found


def refuses_single(model: Model) -> bool:
    """Return whether the model cannot train on a batch of one sample, for lack of a second value per channel."""
    x = tree_map(lambda t: t[:1], model.sample)
    try:
        with torch.no_grad():
            model.train(tree_map(torch.clone, model.start), x, fixed_key(tree_leaves(x)[0].device))
    except Exception as error:  # whatever a user's module may raise
        return "more than 1 value per channel" in str(error)
    return False


def _difference(model: Model, bound: float) -> str | None:
    """Return how lanes would differ from torch on a padded batch; None if they do not."""
    rows = tree_map(_three, model.sample)
    key, mask = (
        fixed_key(tree_leaves(rows)[0].device),
        torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], device=tree_leaves(rows)[0].device),
    )
    found = []
    for index, which, vectorized in ((REAL, None, False), (PADDED, mask, True)):
        module = deep_copy(model.module, {})
        if not vectorized:
            release_norms(module)
        one = model._with(module=module, vectorized=vectorized)
        statistics = {name: value.clone() for name, value in model.tracked.items()}
        given = dict(statistics)
        with torch.no_grad():
            output = one.train(model.perturbed(), tree_map(lambda t, i=index: t[i], rows), key, statistics, which)
        for name in given if vectorized else ():
            if statistics[name] is given[name]:  # only a norm has changed it, in place
                return f"training changes its buffer {name!r}"
        found.append((output, statistics))
    (wanted, before), (output, after) = found
    pairs = [pair for pair in zip(tree_leaves(output), tree_leaves(wanted), strict=True) if isinstance(pair[0], Tensor)]
    for a, b in pairs:
        if a.shape[:1] != (len(PADDED),) or not _close(a[: len(REAL)], b, bound):
            return "the rows of a batch see one another in training"
    for name in before:
        if not _close(after[name], before[name], bound):
            return f"its buffer {name!r} depends on padding"
    return None


def _with_dtype(model: Model, dtype: torch.dtype) -> Model:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    changes: dict[str, Any] = {"dtype": dtype, "accum_dtype": torch.promote_types(dtype, torch.float32)}
    changes |= {"compute_dtype": dtype, "input_dtype": dtype, "low": False}
    changes |= {"start": tree_map(cast, model.start), "tracked": tree_map(cast, model.tracked)}
    return model._with(module=deep_copy(model.module, {}).to(dtype), **changes)


def _three(x: Tensor) -> Tensor:
    """Three samples that differ, made of one, with no value that it could not have had: tokens stay tokens."""
    x = x[:1]
    flipped = x.flatten(1).flip(1).view_as(x) if x.dim() > 1 else x
    third = x * 0.5 if x.is_floating_point() else x.flatten(1).roll(1, 1).view_as(x) if x.dim() > 1 else x
    return torch.cat([x, flipped, third])


def _close(a: Tensor, b: Tensor, bound: float) -> bool:
    if a.shape != b.shape:
        return False
    a, b = (t.nan_to_num().double() for t in (a, b))
    return bool((a - b).norm() <= bound * (b.norm() + torch.finfo(torch.float32).tiny))
