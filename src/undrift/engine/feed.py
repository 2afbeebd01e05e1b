"""Data that are not on the device: read ahead in a thread, and sent there while the device computes.

A feed gets what will be needed, in order. It cuts that into pieces of several steps, gathers each piece in the
background, starts its transfer on a separate stream, and returns it when training gets there. It stays a few pieces
ahead of the device rather than of the host, which runs far ahead of a GPU. So memory is bounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch

from undrift.engine.graph import CAPTURING, piece_steps
from undrift.tree import Tree, to_device, tree_leaves, tree_map

AHEAD = 4
"""The number of pieces that may be read, in transfer, or not yet used by the device."""
CPU_AHEAD = 2
"""The same without a GPU, where nothing is in transfer."""
CPU_PIECE_BYTES = 2**22
"""The size of a piece there. On a GPU, it is that of a graph's buffers."""

Arrays = tuple[np.ndarray, ...]
"""Indices of samples, and whatever goes with them, with steps along the first axis."""


class Feed:
    """The pieces of `items`, in order: iterating gives one iterator of pieces per item.

    Args:
        items: Evaluated in the background, so it must not touch the device.
        gather: From indices to a tree of tensors in the host's memory; called in the background.
        sample_bytes: How many bytes `gather` makes of one index.
        device: Where the pieces go.
    """

    def __init__(
        self, items: Iterable[Arrays], gather: Callable[[np.ndarray], Tree], sample_bytes: int, device: torch.device
    ) -> None:
        self.items, self.gather, self.sample_bytes, self.device = items, gather, sample_bytes, device
        self.stream = _side_stream(device) if device.type == "cuda" else None
        self.ready: SimpleQueue[Any] = SimpleQueue()
        self.free: SimpleQueue[Any] = SimpleQueue()
        self.stopped, self.most = False, CPU_PIECE_BYTES if self.stream is None else None
        self.thread = Thread(target=self._fill, name="undrift data", daemon=True)

    def __enter__(self) -> Iterator[Iterator[Any]]:
        for _ in range(AHEAD if self.stream is not None else CPU_AHEAD):
            self.free.put(None)
        self.thread.start()
        return self._items()

    def __exit__(self, *failure: object) -> None:
        self.stopped = True
        self.free.put(None)
        self.thread.join()

    def _items(self) -> Iterator[Iterator[Any]]:
        while self._next() is not None:
            yield self._pieces()

    def _pieces(self) -> Iterator[Any]:
        """Yield the pieces of the current item."""
        while (found := self._next()) is not None:
            piece, sent = found
            if sent is not None:
                now = torch.cuda.current_stream(self.device)
                now.wait_event(sent)
                for tensor in tree_leaves(piece):
                    tensor.record_stream(now)  # its memory is not reused before this stream has reached this point
            yield piece
            del piece, found
            self.free.put(torch.cuda.current_stream(self.device).record_event() if sent is not None else None)

    def _next(self) -> Any:
        found = self.ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _fill(self) -> None:
        """In the background, put a mark, the pieces and None into the queue for each item, and None at the end."""
        try:
            with torch.no_grad(), self._on_side_stream():
                for arrays in self.items:
                    self.ready.put("an item")
                    steps = piece_steps(self.sample_bytes * arrays[0][:1].size, self.most)
                    for begin in range(0, len(arrays[0]), steps):
                        self._wait()
                        if self.stopped:
                            return
                        self.ready.put(self._piece([array[begin : begin + steps] for array in arrays]))
                    self.ready.put(None)
            self.ready.put(None)
        except BaseException as error:  # raised where the data are needed
            mark_as_of_data(error)
            self.ready.put(error)

    def _wait(self) -> None:
        """Wait until the device is done with an earlier piece."""
        used = self.free.get()
        if used is not None and not self.stopped:
            with CAPTURING:
                used.synchronize()

    def _piece(self, arrays: list[np.ndarray]) -> Any:
        """Return the samples and their other arrays, on the device."""
        rows = self.gather(arrays[0])
        with CAPTURING:
            piece = tree_map(lambda t: to_device(t, self.device), (rows, *map(torch.from_numpy, arrays[1:])))
            del rows  # pinned memory, whose release also depends on events
            return piece, self.stream.record_event() if self.stream is not None else None

    def _on_side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to launch transfers; a thread has its own current device."""
        if self.stream is None:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self.stream))
        return stack


def mark_as_of_data(error: BaseException) -> None:
    vars(error)["of_data"] = True


def of_data(error: BaseException) -> bool:
    """Return whether an error comes from reading data, so that another engine would not help."""
    return "of_data" in vars(error)


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory to gather into: for a GPU, pinned memory, which it reads without the host's help."""
    if device.type != "cuda":
        return torch.empty(shape, dtype=dtype)
    with CAPTURING:
        return torch.empty(shape, dtype=dtype, pin_memory=True)


_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    """Return one stream per device for all transfers."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
