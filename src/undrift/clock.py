"""How long rounds take, without waiting for each of them.

A GPU works behind the host's back, and the host prepares the next round meanwhile. So the time of a round is taken
between two events on the GPU, and read when somebody wants to see it.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.began: Any = None
        self.waiting: list[tuple[dict[str, Any], Any, Any]] = []

    def start(self) -> None:
        self.began = self._now()

    def stop(self, row: dict[str, Any]) -> None:
        """The round whose history is `row` is over; its seconds are filled in by `settle`."""
        row["seconds"] = 0.0
        self.waiting.append((row, self.began, self._now()))

    def settle(self) -> None:
        """Wait for the device, and fill in what rounds took."""
        if self.on_gpu and self.waiting:
            self.waiting[-1][2].synchronize()
        for row, began, ended in self.waiting:
            row["seconds"] = began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
        self.waiting = []

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
