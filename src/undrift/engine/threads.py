"""Clients on the threads of a CPU: each thread trains one client at a time, on its share of the cores.

If a model is large enough to train one client at a time, one core per client is faster than all cores on each operation
of one client. What a thread runs must be traced, since two threads must not call a module at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from undrift.engine.base import Outcome, RoundInputs, Visit
from undrift.engine.client import Program
from undrift.engine.lanes import LanesEngine
from undrift.engine.packing import busy, pack
from undrift.engine.sums import Sums
from undrift.tree import Tree

THREADS_BUSY = 0.9
"""The share of the time that threads must be busy; below it, one client at a time gets all cores."""


class ThreadedEngine:
    """A lanes engine of one lane on several threads. Sums are added in the order that the packing fixes."""

    def __init__(self, engine: LanesEngine, threads: int) -> None:
        self.engine, self.threads, self.width = engine, threads, engine.width

    @property
    def program(self) -> Program:
        return self.engine.program

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        steps = inputs.filled.steps
        queues = pack(steps, min(self.threads, len(steps)))
        if busy(steps, queues) < THREADS_BUSY:
            return self.engine.run(inputs, visit, skip)
        total = Sums(self.program, inputs)
        for sums in at_once(lambda queue: self.engine.train([queue], inputs, visit, skip), queues):
            total.join(sums)
        return total.outcome()

    def measure_all(self, inputs: RoundInputs, when: str) -> list[Tree]:
        return self.engine.measure_all(inputs, when)


def at_once(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Return the function's results in the order of the items, with one thread per item."""
    threads = torch.get_num_threads()

    def alone(item: Any) -> Any:
        torch.set_num_threads(max(1, threads // len(items)))
        return function(item)

    try:
        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(alone, items))
    finally:
        torch.set_num_threads(threads)
