"""Where the clients' data are during training: on the device, in host memory, or on disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.data.cache import is_mapped
from undrift.data.samples import Store
from undrift.errors import UndriftError

DEVICE_SHARE = 0.5
"""The share of a GPU's free memory that data may take; weights, gradients and activations need the rest."""


@dataclass(frozen=True)
class Placement:
    """Decides where each store is. The results of a run do not depend on it.

    Args:
        device: Where the training runs.
        asked: "device" or "host", for all stores; "auto" decides by their size.
    """

    device: torch.device
    asked: str

    def stays(self, store: Store) -> bool:
        """Return whether the store stays on the host, where batches are gathered."""
        return self.reason(store)[0] != "device"

    def reason(self, store: Store) -> tuple[str, str]:
        """Return where a store is, "device", "host" or "disk", and why."""
        if not all(isinstance(t, Tensor) for t in store.values()):
            if self.asked == "device":
                raise UndriftError(
                    'data_on="device" reads all data into memory, but these are loaded with lazy=True; leave one out.'
                )
            return "disk", "loaded with lazy=True"
        here = "disk" if any(map(is_mapped, store.values())) else "host"
        if self.asked != "auto":
            return ("device" if self.asked == "device" else here), "asked for"
        if self.device.type != "cuda":
            return "device", "the device computes in the host's memory"
        taken, free = store_bytes(store), torch.cuda.mem_get_info(self.device)[0]
        if taken <= DEVICE_SHARE * free:
            return "device", "they fit"
        return here, f"{taken / 1e9:,.1f} GB are more than half of the GPU's free memory, {free / 1e9:,.1f} GB"


def store_bytes(store: Store) -> int:
    """Return the memory of a store's tensors, some of which may be views of the same."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in store.values()}.values())
