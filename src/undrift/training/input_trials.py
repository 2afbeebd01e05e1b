"""Trials of the clients' samples: whether the model's precision has their digits, and whether they look unscaled."""

from __future__ import annotations

import contextlib
import logging

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import Rows
from undrift.data.rounding import example, loses
from undrift.data.samples import Samples
from undrift.functional.arguments import floats_to
from undrift.functional.model import Model
from undrift.training.model_rehearsal import apart
from undrift.tree import tree_leaves, tree_map

log = logging.getLogger("undrift")

FEW, SOME = 8, 1000
"""The number of samples on which the model is tried, and of those whose values are looked at."""
READ = 0.01
"""By how much outputs must differ if the model reads a digit that its precision does not have."""


def spread_out(rows: Rows, count: int) -> Samples:
    """Return this many samples from all over the data, in host memory."""
    chosen = rows.index[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)]
    return rows.take(rows.store, chosen)[0]


def warn_of_rounding(model: Model, rows: Rows, device: torch.device) -> None:
    """Warn if samples have digits that the model's precision has not, and these matter.

    They do if the model reads them, as it does those of an identifier among floats, or if they are what tells one
    sample from another, as in times in seconds since 1970 of the same minute.
    """
    dtype = model.compute_dtype
    if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:  # which rounds all but the first two or three digits
        return
    x = spread_out(rows, FEW)
    low, other = floats_to(x, dtype), tree_map(lambda t: other_rounding(t, dtype), x)
    if all(torch.equal(a, b) for a, b in zip(tree_leaves(low), tree_leaves(other), strict=True)):
        return
    reads = False
    with torch.no_grad(), contextlib.suppress(Exception):  # other checks report what the model does not take
        outputs = [model(model.perturbed(), tree_map(lambda t: t.to(device), each)) for each in (low, other)]
        reads = apart(*outputs) > READ
    numbers = [t.flatten(1) for t in tree_leaves(spread_out(rows, SOME)) if t.is_floating_point() and t.dtype != dtype]
    columns = [t.double().numpy() for t in numbers if t.shape[1]]
    lost = [t[:, own] for t in columns if (own := loses(t)).any()]
    if reads or lost:
        log.warning(
            "The clients' samples have more digits than %s, the model's precision%s, and %s. Give identifiers as "
            "integers (samples may be tuples or dicts of tensors), subtract an offset from times and amounts, or train "
            "a model in float64 (model.double()).",
            str(dtype).removeprefix("torch."),
            f" ({example((lost or columns)[0])})" if lost or columns else "",
            "the model's outputs depend on them" if reads else "they are what tells samples apart",
        )  # fmt: skip


def other_rounding(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floats rounded to `dtype` in the other direction; unchanged where they are not rounded.

    What has been rounded already goes to the next float, if it is so large that not every whole number is one.
    """
    if not t.is_floating_point():
        return t
    low = t.to(dtype)
    up = torch.tensor(torch.inf, dtype=dtype)
    if t.dtype == dtype:
        return torch.where(low.abs() >= 2 / torch.finfo(dtype).eps, torch.nextafter(low, up), low)
    above = torch.where(low.to(t.dtype) < t, torch.nextafter(low, up), torch.nextafter(low, -up))
    return torch.where(low.to(t.dtype) == t, low, above)
