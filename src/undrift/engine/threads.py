"""Clients on the threads of a CPU: each trains one client, on its share of the cores.

Where a model is large enough for one client at a time, a core a client beats all cores on each operation of one. What
is run must be traced: modules are not to be called from two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def at_once(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """The function's results, in the order of the items, a thread an item."""
    threads = torch.get_num_threads()

    def alone(item: Any) -> Any:
        torch.set_num_threads(max(1, threads // len(items)))
        return function(item)

    try:
        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(alone, items))
    finally:
        torch.set_num_threads(threads)
