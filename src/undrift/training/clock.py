"""A round's duration and the columns that are read from the device, without making the host wait in every round.

The GPU works asynchronously while the host prepares the next round. So a round is timed between two CUDA events, and
values on the GPU are read once all that the round has launched, evaluation included, is done. They are read on a
separate stream, which does not queue behind later rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

Row = dict[str, Any]

AHEAD = 1
"""The number of rounds that may wait for the device. One keeps it busy; each more keeps another state in memory."""


@cache
def _reading_stream(device: torch.device) -> Any:
    """Return the stream for reading from this device, which runs side by side share."""
    return torch.cuda.Stream(device)


class Clock:
    """Measures the times of rounds.

    Args:
        device: Where they are trained.
        alone: Whether rows may be passed on as soon as the device is done with them. Several processes must pass on the
            same rows at the same points, so there a row waits for the next round's.
    """

    def __init__(self, device: torch.device, alone: bool = True) -> None:
        self.on_gpu, self.alone = device.type == "cuda", alone
        self.reading = torch.cuda.stream(_reading_stream(device)) if self.on_gpu else nullcontext()
        self.began: Any = None
        self.ended: Any = None
        self.waiting: list[tuple[Row, Callable[[], Row], Any, Any, Any]] = []

    def start(self) -> None:
        self.began = self._now()

    def stop(self) -> None:
        self.ended = self._now()

    def add(self, row: Row, rest: Callable[[], Row]) -> None:
        """Note that all of this round has been launched. `settled` will add its seconds and the result of `rest`."""
        self.waiting.append((row, rest, self.began, self.ended, self._now()))

    def settled(self, wait: bool) -> Iterator[Row]:
        """Yield the completed rows of rounds that the device has finished, in order; with `wait`, of all rounds."""
        while self.waiting and (wait or len(self.waiting) > AHEAD or self._passed(self.waiting[0][-1])):
            row, rest, began, ended, launched = self.waiting.pop(0)
            if self.on_gpu:
                launched.synchronize()
            row["seconds"] = began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
            with self.reading:
                row |= rest()
            yield row

    def _passed(self, moment: Any) -> bool:
        return not self.on_gpu or (self.alone and bool(moment.query()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
