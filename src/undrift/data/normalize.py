"""Feature scales: means and standard deviations over the training split, `normalize=True`, and warnings about them.

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

from undrift.data.dataset import Scales
from undrift.data.images import channel_entries, standardised, with_image_statistics
from undrift.data.samples import Store, take
from undrift.data.source import Source
from undrift.errors import UndriftError, quoted

MOST_RATIO = 100
"""Features whose standard deviations differ by a larger factor get a warning."""
CHUNK = 1 << 22
"""How many values are converted to float64 at a time."""
LOST = 0.01
"""The share of a column's standard deviation above which rounding loses some of its differences."""
NOISE = 1e-11
"""The standard deviation, as a share of the largest number, below which differences are rounding errors."""


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


def pooled_scales(each: Iterable[Scales]) -> Scales:
    """Return the scales of several data sets taken together: those that `normalize=True` gives for all their rows."""
    moments = Moments()
    for one in each:
        moments.merge(one.count, one.mean, np.square(one.std) * one.count)
    return Scales(moments.mean, np.sqrt(moments.squares / moments.count), moments.count)


def scales_warning(scales: Scales | None) -> str | None:
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


def normalize_source(source: Source) -> Source:
    """Return the source with its images or features minus their mean, divided by their standard deviation."""
    source = with_image_statistics(source)
    if source.take is not take or "mean" not in source.store:
        source = _with_column_scales(source)
    test = replace(source.test, take=standardised) if source.test else None
    return replace(source, take=standardised, test=test)


def store_entries(scales: Scales, x: Tensor) -> Store:
    """Return the entries of a store by which `standardised` normalizes x: rows of features, or images.

    The standard deviation of a column with none is 1, so that it is only centred.
    """
    if x.dim() != 2:
        return {name: torch.from_numpy(values) for name, values in channel_entries(scales).items()}
    mean, std = (torch.from_numpy(values).to(x.dtype) for values in (scales.mean, scales.std))
    return {"mean": mean, "std": torch.where(std > 0, std, torch.ones_like(std))}


def with_own_scales(source: Source) -> Source:
    """Return a table with the mean and the standard deviation of its own training samples, if it has any at all."""
    x: Any = source.store.get("x")
    if source.scales is None or not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        return source
    own = _column_scales(source, x)
    return replace(source, scales=replace(source.scales, mean=own.mean, std=own.std, count=own.count))


def _column_scales(source: Source, x: Tensor) -> Scales:
    moments = Moments()
    for chunk in _chunks(x, source.indices):
        moments.add(chunk)
    return moments.scales()


def _with_column_scales(source: Source) -> Source:
    """Return the source with the mean and the standard deviation of each column."""
    x: Any = source.store.get("x")
    if source.take is not take or not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        raise UndriftError(
            "normalize is for images that are read from files, and for tables and arrays with one row of floats per "
            "sample; leave it out."
        )
    scales = source.scales or _column_scales(source, x)
    return replace(source.with_entries(store_entries(scales, x)), scales=scales)


def _chunks(x: Tensor, indices: np.ndarray | None) -> Iterator[np.ndarray]:
    size = max(1, CHUNK // max(1, x.shape[1]))
    for begin in range(0, len(x) if indices is None else len(indices), size):
        part = slice(begin, begin + size)
        yield x[part if indices is None else torch.from_numpy(indices[part])].double().numpy()


def loses_precision(exact: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """Return, per column of rows × columns of float64, whether rounding to `dtype` loses some of its differences."""
    if not len(exact):
        return np.zeros(exact.shape[1], bool)
    error = np.sqrt(np.square(exact - exact.astype(dtype)).mean(0))
    spread = exact.std(0)
    lost: np.ndarray = (error > LOST * spread) & (spread > NOISE * np.abs(exact).max(0))
    return lost


def rounding_example(exact: np.ndarray, dtype: type = np.float32) -> str:
    """Return one of the numbers that are rounded, and what becomes of it."""
    value = exact[exact != exact.astype(dtype)][0]
    return f"{value:.17g} becomes {float(value.astype(dtype)):.17g}"
