"""Randomness is data: every draw is a function of a key, never of global state.

The generator is Philox4x32-10 (Salmon et al., 2011), a keyed bijection of a counter. It is written in
integer operations alone, so one definition serves Python's integers, numpy arrays and torch tensors, on
every device, inside `vmap` and inside a CUDA graph, and gives the same words everywhere.

A key is derived from (seed, purpose, round, client). Where a draw happens inside local training the
counter is (block, stream, step, 0): `step` is the local step, `stream` tells apart the draws of one step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.errors import UndriftError, whole

MASK = 0xFFFFFFFF
Words = tuple[Any, Any, Any, Any]


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Four 32-bit words from a counter of four and a key of two, as integers, int64 arrays or int64 tensors.

    A product of two 32-bit words needs 64 bits and may wrap to a negative int64; the masks undo that.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c0, c1, c2, c3


def fold(key: tuple[Any, Any], word: Any) -> tuple[Any, Any]:
    """The key of a branch: `word` is an integer or an int64 array (then so are the key's words)."""
    return philox((word & MASK, word >> 32 & MASK, 0, 0), key)[:2]


def derive(seed: int, purpose: str, *words: Any) -> tuple[Any, Any]:
    """The key of (seed, purpose, words…). The last word may be an array: one key for each of its entries."""
    if not whole(seed) or not 0 <= seed < 2**64:
        raise UndriftError(f"seed must be a whole number from 0 to 2**64 - 1, not {seed!r}.")
    key: tuple[Any, Any] = fold((int(seed) & MASK, int(seed) >> 32 & MASK), zlib.crc32(purpose.encode()))
    for word in words:
        key = fold(key, word)
    return key


def host_generator(seed: int, purpose: str, *words: int) -> np.random.Generator:
    """A numpy generator for work done once on the host, such as a partition's Dirichlet draws."""
    return np.random.Generator(np.random.Philox(key=list(derive(seed, purpose, *words))))


def torch_seed(seed: int, purpose: str, *words: int) -> int:
    """A seed for a generator of torch, such as the one that initializes a model."""
    low, high = derive(seed, purpose, *words)
    return int(low | high << 32) & 0x7FFFFFFFFFFFFFFF


def choose(key: tuple[int, int], population: int, count: int) -> np.ndarray:
    """`count` distinct numbers below `population`, ascending. Costs in `count` alone, not in `population`.

    A large share is the head of a random order; a small one is drawn with the duplicates left out.
    """
    if 2 * count >= population:
        words = philox((np.arange(population), 0, 0, 0), key)[0]
        return np.sort(np.argsort(words, kind="stable")[:count])
    chosen = np.empty(0, np.int64)
    while len(chosen) < count:
        block = np.arange(len(chosen), len(chosen) + 2 * count)
        high, low, _, _ = philox((block, 1, len(chosen), 0), key)
        drawn = np.concatenate([chosen, ((high << 32 | low) & (2**63 - 1)) % population])
        _, first = np.unique(drawn, return_index=True)
        chosen = drawn[np.sort(first)][:count]
    return np.sort(chosen)


@dataclass(frozen=True)
class Key:
    """A key inside local training: the client's two words, the local step, and a stream of that step's draws.

    A part gets its own in `client.key`; `key.stream_at(i)` gives the i-th independent one.
    """

    words: Tensor
    step: Tensor
    stream: int = 0

    def stream_at(self, i: int) -> Key:
        return replace(self, stream=self.stream + i)


def bits(key: Key, count: int) -> Tensor:
    """`count` random 32-bit words as int64."""
    # As data, not as a mere index: compilers take the latter for 32 bits, and the generator's products need 64.
    blocks = torch.arange((count + 3) // 4, device=key.words.device) + (key.words[0] & 0)
    words = philox((blocks, key.stream, key.step, 0), (key.words[0], key.words[1]))
    return torch.stack(words, -1).reshape(-1)[:count]


def uniform(key: Key, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform on (0, 1), in float32 and above never 0 nor 1, so that a logarithm is safe."""
    words = bits(key, math.prod(shape))
    if dtype == torch.float64:
        return ((words.to(dtype) + 0.5) * 2.0**-32).reshape(tuple(shape))
    # 23 bits and a half fill float32's 24 exactly, so that rounding can never reach 1.
    return (((words >> 9).to(torch.float32) + 0.5) * 2.0**-23).reshape(tuple(shape)).to(dtype)


def normal(key: Key, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal draws, by Box and Muller: two from each pair of uniform ones."""
    count = math.prod(shape)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    u, v = uniform(key, ((count + 1) // 2, 2), exact).unbind(1)
    radius, angle = torch.sqrt(-2.0 * torch.log(u)), 2.0 * math.pi * v
    draws = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], 1).reshape(-1)
    return draws[:count].reshape(tuple(shape)).to(dtype)


def keep_mask(key: Key, shape: Sequence[int], p: float) -> Tensor:
    """True with probability 1 − p. Compared as integers, so every precision sees the same mask."""
    return (bits(key, math.prod(shape)) >= round(p * 2**32)).reshape(tuple(shape))
