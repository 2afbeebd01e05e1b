"""Trials of the samples and labels: what a run would train on without an error, and learn little or nothing from.

Each warns only where the data show it: digits that the model's precision does not have, pixels that nobody scales, test
samples that clients train on or of classes that none of them has, numbers taken for classes.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.labels import MANY_CLASSES as MANY
from undrift.data.labels import labels_are_sparse
from undrift.data.normalize import loses_precision, rounding_example
from undrift.data.samples import Samples, Store, to_store
from undrift.errors import listed, quoted
from undrift.functional.arguments import floats_to
from undrift.functional.draws import fixed_key
from undrift.functional.model import Model
from undrift.losses import CLASSES, Loss
from undrift.training.model_rehearsal import relative_distance
from undrift.tree import Tree, tree_leaves, tree_map

log = logging.getLogger("undrift")

FEW, SOME = 8, 1000
"""The number of samples on which the model is tried, and of those whose values are looked at."""
READ = 0.01
"""By how much outputs must differ if the model reads a digit that its precision does not have."""

SEEN = 64
"""The number of samples that are looked at for pixels."""
SMALLEST, WHITE, DARK = 49, 200, 16
"""Of images: the fewest values, the least largest value, and the mean of those above 0 from which they are not dark."""
LARGER = 10
"""By how much larger the outputs for unscaled pixels must be than those for scaled ones."""
UNKNOWN = 0.01
"""The share of test samples of classes that no client has from which these matter."""
VALUES, PER_CLASS, FULL = 100, 10, 0.95
"""Labels that are numbers: at least so many different ones, fewer samples of each, and gaps between them."""
DISTINCT = 0.99
"""The share of test samples that must be among the clients', and that must differ from one another."""
COLUMNS, LOOKED_AT = 64, 1 << 28
"""The number of values by which a sample is found again, and the bytes of a tensor beyond which none is searched."""


def spread_samples(rows: Rows, count: int) -> Samples:
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
    x = spread_samples(rows, FEW)
    low, other = floats_to(x, dtype), tree_map(lambda t: round_the_other_way(t, dtype), x)
    if all(torch.equal(a, b) for a, b in zip(tree_leaves(low), tree_leaves(other), strict=True)):
        return
    reads = False
    with torch.no_grad(), contextlib.suppress(Exception):  # other checks report what the model does not take
        outputs = [model(model.perturbed(), tree_map(lambda t: t.to(device), each)) for each in (low, other)]
        reads = relative_distance(*outputs) > READ
    numbers = [
        t.flatten(1) for t in tree_leaves(spread_samples(rows, SOME)) if t.is_floating_point() and t.dtype != dtype
    ]
    columns = [t.double().numpy() for t in numbers if t.shape[1]]
    lost = [t[:, own] for t in columns if (own := loses_precision(t)).any()]
    if reads or lost:
        log.warning(
            "The clients' samples have more digits than %s, the model's precision%s, and %s. Give identifiers as "
            "integers (samples may be tuples or dicts of tensors), subtract an offset from times and amounts, or train "
            "a model in float64 (model.double()).",
            str(dtype).removeprefix("torch."),
            f" ({rounding_example((lost or columns)[0])})" if lost or columns else "",
            "the model's outputs depend on them" if reads else "they are what tells samples apart",
        )  # fmt: skip


def warn_of_pixels(model: Model, rows: Rows, device: torch.device) -> None:
    """Warn if samples are pixels from 0 to 255 as floats, unless the model scales them itself or has norms that do."""
    x = spread_samples(rows, SEEN)
    if not isinstance(x, Tensor) or not looks_like_pixels(x):
        return
    few, key = (
        tree_map(lambda t: t.to(device), floats_to(spread_samples(rows, FEW), model.compute_dtype)),
        fixed_key(device),
    )
    with torch.no_grad(), contextlib.suppress(Exception):  # other checks report what the model does not take
        large, small = (output_norm(model.train(model.perturbed(), each, key)) for each in (few, few / 255))
        if large > LARGER * small:
            log.warning(
                "The clients' samples look like pixels from 0 to 255, as floats, and the model does not scale them, so "
                "it may learn nothing. Divide them by 255; images given as uint8 are scaled."
            )


def looks_like_pixels(x: Tensor) -> bool:
    """Return whether these are images, perhaps flattened, whose values are whole numbers from 0 to 255."""
    if not x.is_floating_point() or x.dim() < 2 or x[0].numel() < SMALLEST:
        return False
    areas = [x[0].numel() / channels for channels in (1, 3)]
    if not (min(x.shape[-2:]) > 1 if x.dim() > 2 else any(area == math.isqrt(int(area)) ** 2 for area in areas)):
        return False
    whole, largest = bool((x == x.round()).all() and x.min() >= 0), float(x.max())
    return whole and WHITE <= largest <= 255 and bool(x[x > 0].double().mean() >= DARK)


def output_norm(outputs: Tree) -> float:
    return sum(float(t.double().norm()) for t in tree_leaves(outputs) if t.is_floating_point())


def warn_of_labels(data: FederatedDataset, loss: Loss, default: bool) -> None:
    """Warn of labels that are numbers to predict, and of classes that only test samples have.

    `default`: whether the loss was chosen by what labels look like.
    """
    unknown = data.labels is not None and len(data.labels) == 1 < len(data.index)  # they are on a federation's nodes
    if data.labels is None or unknown or loss not in CLASSES:
        return
    own = class_counts(data.labels, data.index)
    used, samples = int((own > 0).sum()), int(own.sum())
    numbered = default and data.names is None and data.task.classes is None
    known = data.classes > MANY and labels_are_sparse(used, data.classes)  # which has a warning of its own
    few, gaps = samples < PER_CLASS * used, used < FULL * data.classes
    if numbered and not known and used >= VALUES and few and gaps:
        log.warning(
            "The labels have %d different values up to %d, with %.1f samples each, and are taken for classes. If they "
            "are numbers to predict, give them as floats, and loss='mse'.", used, len(own) - 1, samples / used,
        )  # fmt: skip
    elif data.test_rows:
        warn_of_unknown_classes(own, class_counts(data.test_rows.store["y"], data.test_rows.index), data.names)


def warn_of_unknown_classes(own: Tensor, test: Tensor, names: Sequence[str] | None) -> None:
    """Warn of classes that no client has, given the numbers of samples of each class."""
    missing = [c for c in test.nonzero().flatten().tolist() if c >= len(own) or not own[c]]
    share = int(test[missing].sum()) / max(1, int(test.sum()))
    if not missing or share < UNKNOWN:
        return
    mine, theirs = (set(t.nonzero().flatten().tolist()) for t in (own, test))
    off_by_one = any(theirs == {c + by for c in mine} for by in (-1, 1))
    log.warning(
        "No client has samples of class %s, of which %.0f%% of the test samples are. %s",
        listed([quoted(names[c]) if names and c < len(names) else str(c) for c in missing], 10),
        100 * share,
        f"The clients' labels begin at {min(mine)}, and those of the test data at {min(theirs)}: count both from 0."
        if off_by_one
        else "The model cannot learn what is in none of the clients' samples; check the labels, and how the data were "
        "split.",
    )


def class_counts(labels: Tensor, index: Tensor) -> Tensor:
    """Return the number of samples per class, without those that have no label."""
    found = torch.zeros(0, dtype=torch.int64)
    for piece in index.split(1 << 22):
        own = labels[piece]
        more = torch.bincount(own[own >= 0].long(), minlength=len(found))
        found = torch.cat([found, torch.zeros(len(more) - len(found), dtype=torch.int64)]) + more
    return found


def warn_of_trained_test(data: FederatedDataset) -> None:
    """Warn if the test samples are among those that clients train on. Samples that repeat anyway do not count."""
    test = data.test_rows
    if test is None or not (searchable(data.store) and searchable(test.store)):
        return
    names = [name for name in to_store(spread_samples(test, 1)) if name in data.store and data.store[name].dim() > 1]
    if not names or any(data.store[n].shape[1:] != test.store[n].shape[1:] for n in names):
        return
    chosen = test.index[np.linspace(0, len(test) - 1, min(SOME, len(test))).astype(np.int64)]
    keys = sample_keys(test.store, chosen, names)
    if len(keys.unique()) < DISTINCT * len(keys):
        return
    own, order = sample_keys(data.store, data.index, names).sort()
    places = torch.searchsorted(own, keys).clamp(max=len(own) - 1)
    found = (own[places] == keys).nonzero().flatten()
    mine = data.index[order[places[found]]]
    alike = [(data.store[n][mine] == test.store[n][chosen[found]]).flatten(1).all(1) for n in names]
    if int(torch.stack(alike).all(0).sum()) >= DISTINCT * len(keys):
        log.warning(
            "The test samples are also the clients', so the figures on test data are those of training data. Hold "
            "samples out instead, as with ud.load(…, test_fraction=0.2)."
        )


def searchable(store: Store) -> bool:
    """Return whether a store is small enough to look at whole, and is not read from files sample by sample."""
    return all(isinstance(t, Tensor) and t.numel() * t.element_size() <= LOOKED_AT for t in store.values())


def sample_keys(store: Store, index: Tensor, names: list[str]) -> Tensor:
    """Return one number per sample, from some of its values: the same for the same samples, whatever else is there."""
    total = torch.zeros(len(index), dtype=torch.float64)
    for name in names:
        flat = store[name].reshape(len(store[name]), -1)
        for i, column in enumerate(np.linspace(0, flat.shape[1] - 1, min(COLUMNS, flat.shape[1])).astype(np.int64)):
            total = total * 0.7310585 + flat[:, column][index].double() * (i + 1.618034)
    return total


def round_the_other_way(t: Tensor, dtype: torch.dtype) -> Tensor:
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
