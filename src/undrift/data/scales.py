"""The scales of features: each column's mean and standard deviation over the training split, and `normalize=True`.

The training split counts as a whole, as it does for images: also rows that are later held out for testing, for
validation or for the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.images import standardised, statistics
from undrift.data.lazy_images import with_statistics
from undrift.data.samples import Store, take
from undrift.data.source import Scales, Source
from undrift.errors import UndriftError, quoted

MOST_RATIO = 100
"""Features whose standard deviations differ by a larger factor get a warning."""
CHUNK = 1 << 22
"""How many values are converted to float64 at a time."""


@dataclass
class Moments:
    """Sums over the rows of a table, batch by batch."""

    count: int = 0
    mean: Any = 0.0
    squares: Any = 0.0
    """The sum of the squared deviations from the mean."""
    low: Any = np.inf
    high: Any = -np.inf

    def add(self, x: np.ndarray) -> None:
        """Add rows × columns of finite numbers."""
        if not len(x):
            return
        x = x.astype(np.float64)
        mean = x.mean(0)
        self.merge(len(x), mean, np.square(x - mean).sum(0))
        self.low, self.high = np.minimum(self.low, x.min(0)), np.maximum(self.high, x.max(0))

    def merge(self, count: int, mean: np.ndarray, squares: np.ndarray) -> None:
        """Add the sums over other rows."""
        both, shift = self.count + count, mean - self.mean
        # Sums of squares are merged through the deviations, as they cancel if the mean is far from 0.
        self.squares = self.squares + squares + shift**2 * (self.count * count / both)
        self.mean = self.mean + shift * (count / both)
        self.count = both

    def scales(self) -> Scales:
        constant = self.low == self.high  # rounding may have moved the mean away from its value
        mean = np.where(constant, self.low, self.mean)
        return Scales(mean, np.where(constant, 0.0, np.sqrt(self.squares / self.count)), self.count)


def pooled(each: Iterable[Scales]) -> Scales:
    """Return the scales of several data sets taken together: those that `normalize=True` gives for all their rows."""
    moments = Moments()
    for one in each:
        moments.merge(one.count, one.mean, np.square(one.std) * one.count)
    return Scales(moments.mean, np.sqrt(moments.squares / moments.count), moments.count)


def warning(scales: Scales | None) -> str | None:
    """Return what to say about features whose scales differ too much to train on, if so. Constant ones do not count."""
    if scales is None or scales.columns is None or not scales.std.any():
        return None
    least = int(np.where(scales.std > 0, scales.std, np.inf).argmin())
    most = int(scales.std.argmax())
    if scales.std[most] <= MOST_RATIO * scales.std[least]:
        return None
    sizes = [f"{quoted(scales.columns[i])} has a standard deviation of {_short(scales.std[i])}" for i in (most, least)]
    return (
        f"The columns of {scales.table} have very different scales: {sizes[0]}, {sizes[1]}. A model may then learn no "
        "more than the most frequent class. Write normalize=True, in an experiment file normalize = true under [data]."
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if 100 <= number < 1e9 else f"{number:.3g}"


def normalised(source: Source) -> Source:
    """Return the source with its images or features minus their mean, divided by their standard deviation."""
    source = with_statistics(source)
    if source.take is not take or "mean" not in source.store:
        source = _of_features(source)
    test = replace(source.test, take=standardised) if source.test else None
    return replace(source, take=standardised, test=test)


def entries(scales: Scales, x: Tensor) -> Store:
    """Return the entries of a store by which `standardised` normalizes x: rows of features, or images.

    The standard deviation of a column with none is 1, so that it is only centred.
    """
    if x.dim() != 2:
        return {name: torch.from_numpy(values) for name, values in statistics(scales).items()}
    mean, std = (torch.from_numpy(values).to(x.dtype) for values in (scales.mean, scales.std))
    return {"mean": mean, "std": torch.where(std > 0, std, torch.ones_like(std))}


def _of_features(source: Source) -> Source:
    """Return the source with the mean and the standard deviation of each column."""
    x: Any = source.store.get("x")
    if source.take is not take or not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        raise UndriftError(
            "normalize is for images that are read from files, and for tables and arrays with one row of floats per "
            "sample; leave it out."
        )
    found = source.scales
    if found is None:
        moments = Moments()
        for chunk in _chunks(x, source.indices):
            moments.add(chunk)
        found = moments.scales()
    added = entries(found, x)
    test = replace(source.test, store=source.test.store | added) if source.test else None
    return replace(source, store=source.store | added, test=test, scales=found)


def _chunks(x: Tensor, indices: np.ndarray | None) -> Iterator[np.ndarray]:
    size = max(1, CHUNK // max(1, x.shape[1]))
    for begin in range(0, len(x) if indices is None else len(indices), size):
        part = slice(begin, begin + size)
        yield x[part if indices is None else torch.from_numpy(indices[part])].double().numpy()
