"""Samples that stay in the host's memory or on disk, of which batches are sent to the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import Rows
from undrift.data.samples import Samples, Store, Take
from undrift.engine.feed import Feed, pinned
from undrift.tree import Tree, to_device, tree_bytes, tree_leaves, tree_map


class HostSamples:
    """A store on the host, from which samples are gathered there and completed on the device.

    A `take` in two halves (`declare_halves`) gathers on the host in the dtypes of the store, so that images travel as
    bytes, and computes the rest on the device. Any other `take` runs on the host as a whole.
    """

    def __init__(self, store: Store, take: Take, device: torch.device) -> None:
        self.store, self.whole, self.device = store, take, device
        self.gather: Any = getattr(take, "gather", None)
        self.rest: Store = {}
        """What the second half of `take` reads in addition to the rows, such as means; on the device."""
        if self.gather is not None:
            rows = self.gather(store, torch.zeros(1, dtype=torch.int64))
            self.rest = {name: t.to(device) for name, t in store.items() if name not in rows}

    @cached_property
    def sample_bytes(self) -> int:
        """The size of one sample in transfer, in bytes."""
        return tree_bytes(self.on_host(np.zeros(1, np.int64)))

    def on_host(self, indices: np.ndarray) -> Tree:
        """Return the rows at `indices`, of any number of axes, from which the device makes samples."""
        flat = torch.from_numpy(np.ascontiguousarray(indices).reshape(-1))
        if self.gather is not None:
            rows = self.gather(self.store, flat, self._pick)
        else:
            rows = tree_map(self._pinned, dict(zip("xy", self.whole(self.store, flat), strict=True)))
        return tree_map(lambda t: t.reshape(*indices.shape, *t.shape[1:]), rows)

    def rows(self, indices: np.ndarray) -> Tree:
        """Return the same, on the device."""
        return tree_map(lambda t: to_device(t, self.device), self.on_host(indices))

    def finish(self, rows: Tree, axes: int = 1) -> tuple[Samples, Tensor]:
        """Return the samples, from rows on the device; `axes` is the number of axes of the indices."""
        shape = tree_leaves(rows)[0].shape[:axes]
        flat = tree_map(lambda t: t.reshape(-1, *t.shape[axes:]), rows)
        take: Any = self.whole
        x, y = take.finish(flat, self.rest) if self.gather is not None else (flat["x"], flat["y"])
        found: tuple[Samples, Tensor] = tree_map(lambda t: t.reshape(*shape, *t.shape[1:]), (x, y))
        return found

    def _pick(self, tensor: Tensor, indices: Tensor) -> Tensor:
        out = pinned((indices.numel(), *tensor.shape[1:]), tensor.dtype, self.device)
        torch.index_select(tensor, 0, indices.reshape(-1), out=out)
        return out.reshape(*indices.shape, *tensor.shape[1:])

    def _pinned(self, tensor: Tensor) -> Tensor:
        return pinned(tuple(tensor.shape), tensor.dtype, self.device).copy_(tensor)


@dataclass(frozen=True)
class HostRows(Rows):
    """A subset of a store that stays on the host, in batches on the device."""

    samples: HostSamples | None = None

    def batches(self, size: int) -> Iterator[tuple[Samples, Tensor]]:
        samples, index = self.samples, self.index.numpy()
        assert samples
        if len(index) <= size:  # no batch to read ahead
            yield from [samples.finish(samples.rows(index))] if len(index) else []
            return
        items = ((index[begin : begin + size][None],) for begin in range(0, len(index), size))
        with Feed(items, samples.on_host, samples.sample_bytes, samples.device) as fed:
            for pieces in fed:
                for (rows,) in pieces:
                    yield samples.finish(tree_map(lambda t: t[0], rows))
