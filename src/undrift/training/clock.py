"""What a round took and what its method says of it, without the host's waiting for each of them.

A GPU works behind the host's back, and the host prepares the next round meanwhile. So the time of a round is taken
between two events on the GPU, and what must be read from there is read once they have passed, on a stream of its own,
which does not queue behind the rounds that have begun since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

Row = dict[str, Any]

AHEAD = 1
"""How many rounds' rows may wait for the device. One keeps it busy; more would keep as many rounds' states alive."""


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.reading = torch.cuda.stream(torch.cuda.Stream(device)) if self.on_gpu else nullcontext()
        self.began: Any = None
        self.waiting: list[tuple[Row, Callable[[], Row], Any, Any]] = []

    def start(self) -> None:
        self.began = self._now()

    def stop(self, row: Row, rest: Callable[[], Row]) -> None:
        """The round whose history is `row` is over; its seconds and the `rest` are filled in by `settled`."""
        row["seconds"] = 0.0
        self.waiting.append((row, rest, self.began, self._now()))

    def settled(self, wait: bool) -> Iterator[Row]:
        """Rows of rounds that the device is done with, complete and in order. `wait`: of all that have been stopped."""
        while self.waiting and (wait or len(self.waiting) > AHEAD or self._passed(self.waiting[0][-1])):
            row, rest, began, ended = self.waiting.pop(0)
            if self.on_gpu:
                ended.synchronize()
            row["seconds"] = began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
            with self.reading:
                row |= rest()
            yield row

    def _passed(self, moment: Any) -> bool:
        return not self.on_gpu or bool(moment.query())

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
