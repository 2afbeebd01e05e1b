"""The process's random generators, borrowed for a while: seeded from a key, and restored afterwards.

Some draws cannot come from a key: those of operations that only torch's dispatcher sees (`torch.poisson`), those of
Python's `random` and of `numpy.random`, and those that torch itself repeats from the generators' states
(checkpointing). A model with such draws trains on the plain engine, inside `seeded`.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.random import Key, philox

SEED = 1
"""The last word of the counter that a seed comes from. Keyed draws have 0 there, so they are independent of it."""

_borrowing = threading.RLock()  # generators belong to the process, so two threads cannot use them at the same time
_current = threading.local()


@contextmanager
def seeded(key: Key, row: Tensor | None = None) -> Iterator[None]:
    """Inside it, global generators start from a seed of the key; afterwards they are as before, whatever happens.

    These are torch's on the CPU and on the key's GPU, Python's and numpy's. Inside the context of the same key it does
    nothing, so that the passes of one step draw one after another.

    Args:
        key: The key. On a GPU, reading it waits for the device.
        row: The position of a sample in its batch, where every sample is to have draws of its own.
    """
    outer = _sources()
    again = bool(outer) and outer[-1][0] is key and outer[-1][1] is row
    _current.sources = [*outer, (key, row)]
    try:
        with contextlib.nullcontext() if again else _borrowed(key, row):
            yield
    finally:
        _current.sources = outer


def seeded_depth() -> int:
    """Return the number of `seeded` contexts that this thread is in."""
    return len(_sources())


def _sources() -> list[tuple[Key, Tensor | None]]:
    return getattr(_current, "sources", [])


@contextmanager
def _borrowed(key: Key, row: Tensor | None) -> Iterator[None]:
    with _borrowing:
        before = _states(key.words.device)
        try:
            _seed(key, row)
            yield
        finally:
            _put_back(before)


def seed_of(key: Key, row: int = 0) -> tuple[int, int]:
    """Two 32-bit words that depend on all of the key, and on the row."""
    words, step = [int(word) for word in key.words.tolist()], int(key.step)
    low, high, _, _ = philox((row, key.stream, step, SEED), (words[0], words[1]))
    return low, high


def host_states() -> tuple[Any, Any]:
    """Return the states of Python's and of numpy's generator, each comparable with itself."""
    return random.getstate(), repr(sorted(_flat(np.random.get_state(legacy=False))))


def host_positions() -> tuple[Any, ...]:
    """Return what changes with every draw from Python's and numpy's generators, at a fraction of the cost."""
    python, found = random.getstate(), np.random.get_state(legacy=False)
    state = found["state"]
    if "pos" not in state:  # another bit generator than numpy's usual one
        return python, repr(state)
    return python, state["pos"], state["key"].tobytes(), found["has_gauss"]


def torch_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's generators on the CPU and on the device."""
    return [generator.get_state() for generator in _torch_generators(device)]


def _flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value.tobytes() if isinstance(value, np.ndarray) else value


def _torch_generators(device: torch.device) -> list[torch.Generator]:
    found = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


def _states(device: torch.device) -> tuple[list[tuple[torch.Generator, Tensor]], Any, Any]:
    torchs = [(generator, generator.get_state()) for generator in _torch_generators(device)]
    return torchs, random.getstate(), np.random.get_state(legacy=False)


def _seed(key: Key, row: Tensor | None) -> None:
    low, high = seed_of(key, 0 if row is None else int(row) + 1)
    for generator in _torch_generators(key.words.device):
        generator.manual_seed((low | high << 32) & 0x7FFFFFFFFFFFFFFF)
    random.seed(low | high << 32)
    np.random.seed([low, high])


def _put_back(states: tuple[list[tuple[torch.Generator, Tensor]], Any, Any]) -> None:
    torchs, python, numpys = states
    for generator, state in torchs:
        generator.set_state(state)
    random.setstate(python)
    np.random.set_state(numpys)
