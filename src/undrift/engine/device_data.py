"""The clients' data on the device, or on the host if they do not fit there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.samples import Samples, Store, Take
from undrift.engine.feed import Arrays, Feed
from undrift.engine.host_samples import HostRows, HostSamples
from undrift.method.context import Batch
from undrift.tree import Tree, to_device, tree_map

MEASURE_BATCH = 256
"""The most samples of a client in one batch of a pass without training."""


class DeviceData:
    """The clients' samples on the device, from which batches are gathered by index: only indices travel.

    Where the store stays on the host, gathered samples travel instead. `rows` stands for either: what `batch` makes a
    batch of, inside a traced step.

    Args:
        data: The clients' data.
        device: Where they are trained on.
        dtype: The type of masks.
        stays: Whether a store stays on the host; by default none does.
    """

    def __init__(
        self,
        data: FederatedDataset,
        device: torch.device,
        dtype: torch.dtype,
        stays: Callable[[Store], bool] = lambda store: False,
    ) -> None:
        self.data, self.device, self.dtype, self.stays = data, device, dtype, stays
        self.index = data.index.numpy()
        self.host = HostSamples(data.store, data.take, device) if self.stays(data.store) else None
        self.store = data.store if self.host else {name: tensor.to(device) for name, tensor in data.store.items()}
        most = max(1, data.largest)
        self.measure_width = -(-most // -(-most // MEASURE_BATCH))  # the largest client in equal batches

    def place(self, samples: Rows) -> Rows:
        """Return these samples placed for evaluation; those of the clients' own store are in place already."""
        own = samples.store is self.data.store
        if self.host if own else self.stays(samples.store):
            return HostRows(samples.store, samples.index, samples.take, self._host(samples.store, samples.take))
        return Rows(self.store, samples.index.to(self.device), samples.take) if own else samples.to(self.device)

    def _host(self, store: Store, take: Take) -> HostSamples:
        known = self.host is not None and store is self.data.store and take is self.data.take
        return self.host if known and self.host else HostSamples(store, take, self.device)

    @cached_property
    def sample(self) -> Samples:
        """One of them, to see its shape."""
        where = torch.device("cpu") if self.host else self.device
        return self.data.take(self.store, torch.zeros(1, dtype=torch.int64, device=where))[0]

    def indices(self, clients: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return indices into the store, from positions within each client's data (clients along the first axis)."""
        offsets = self.data.offsets[clients].reshape(-1, *[1] * (positions.ndim - 1))
        return self.index[offsets + positions]

    def rows(self, indices: np.ndarray) -> Tree:
        """Return, on the device, the rows from which the samples at `indices`, of any number of axes, are made."""
        return self.host.rows(indices) if self.host else to_device(torch.from_numpy(indices), self.device)

    def batch(self, rows: Tree, mask: Tensor) -> Batch:
        """Return the samples of `rows`, with the axes of `mask`."""
        if self.host:
            x, y = self.host.finish(rows, mask.dim())
        else:
            x, y = self.data.take(self.store, rows.reshape(-1))
            x, y = tree_map(lambda t: t.reshape(*rows.shape, *t.shape[1:]), (x, y))
        return Batch(x, y, mask.to(self.dtype))

    def feed(self, items: Iterable[Arrays]) -> contextlib.AbstractContextManager[Iterator[Iterable[Any]]]:
        """Yield each item's arrays on the device, in pieces along the first axis, with `rows` in place of indices."""
        if self.host:
            return Feed(items, self.host.on_host, self.host.sample_bytes, self.device)
        return contextlib.nullcontext([self._moved(arrays)] for arrays in items)

    def _moved(self, arrays: Arrays) -> tuple[Tensor, ...]:
        return tuple(to_device(torch.from_numpy(array), self.device) for array in arrays)
