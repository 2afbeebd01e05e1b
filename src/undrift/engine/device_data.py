"""The clients' data on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.method.context import Batch
from undrift.tree import tree_map

MEASURE_BATCH = 256
"""The most samples of a client in one batch of a pass without training."""


class DeviceData:
    """The clients' samples on the device, from which batches are gathered by index: only indices travel."""

    def __init__(self, data: FederatedDataset, device: torch.device, dtype: torch.dtype) -> None:
        self.data, self.device, self.dtype = data, device, dtype
        self.store = {name: tensor.to(device) for name, tensor in data.store.items()}
        self.index = data.index.numpy()
        most = max(1, data.largest)
        self.measure_width = -(-most // -(-most // MEASURE_BATCH))  # the largest client in equal batches

    def place(self, samples: Rows) -> Rows:
        """These samples on the device; those of the clients' own store are there already."""
        if samples.store is not self.data.store:
            return samples.to(self.device)
        return Rows(self.store, samples.index.to(self.device), samples.take)

    def indices(self, clients: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Indices into the store, from positions within each client's data (clients along the first axis)."""
        offsets = self.data.offsets[clients].reshape(-1, *[1] * (positions.ndim - 1))
        return self.index[offsets + positions]

    def batch(self, indices: Tensor, mask: Tensor) -> Batch:
        """The samples at `indices`, which may have any number of axes."""
        x, y = self.data.take(self.store, indices.reshape(-1))
        x, y = tree_map(lambda t: t.reshape(*indices.shape, *t.shape[1:]), (x, y))
        return Batch(x, y, mask.to(self.dtype))
