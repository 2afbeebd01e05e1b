"""Random draws from explicit keys: every draw is a function of a key, never of global state.

The generator is Philox4x32-10 (Salmon et al., *Parallel Random Numbers: As Easy as 1, 2, 3*, 2011), a keyed bijection
of a counter. It uses only integer operations, so one definition works for Python integers, numpy arrays and torch
tensors, on every device, inside `vmap` and CUDA graphs, and gives the same words everywhere. On a GPU a draw is one
operation (`philox_words`): in plain torch it would be some 150, and torch's compiler may repeat them in every kernel
that reads a draw.

A key is derived from (seed, purpose, round, client). Inside local training, the counter is (block, stream, step, 0):
`step` is the local step, and `stream` distinguishes the draws of one step.
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
from undrift.tree import Tree, tree_leaves, tree_structure, tree_unflatten
from undrift.triton import available
from undrift.vmap import fold_into_lanes

MASK = 0xFFFFFFFF
MOST_LANES = 65535
"""The largest number of lanes that the kernel takes, which are along the second axis of its grid."""
Words = tuple[Any, Any, Any, Any]


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Return four 32-bit words from a counter of four words and a key of two: integers, int64 arrays or int64 tensors.

    A product of two 32-bit words needs 64 bits and may wrap around to a negative int64. The masks correct that.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c0, c1, c2, c3


def fold(key: tuple[Any, Any], word: Any) -> tuple[Any, Any]:
    """Return a new key from a key and a word: an integer, or an int64 array for an array of keys."""
    return philox((word & MASK, word >> 32 & MASK, 0, 0), key)[:2]


def derive(seed: int, purpose: str, *words: Any) -> tuple[Any, Any]:
    """Return the key of (seed, purpose, words…). The last word may be an array, for one key per entry."""
    if not whole(seed) or not 0 <= seed < 2**64:
        raise UndriftError(f"seed must be a whole number from 0 to 2**64 - 1, not {seed!r}.")
    key: tuple[Any, Any] = fold((int(seed) & MASK, int(seed) >> 32 & MASK), zlib.crc32(purpose.encode()))
    for word in words:
        key = fold(key, word)
    return key


def host_generator(seed: int, purpose: str, *words: int) -> np.random.Generator:
    """Return a numpy generator for draws on the host, such as those of a partition."""
    return np.random.Generator(np.random.Philox(key=list(derive(seed, purpose, *words))))


def torch_seed(seed: int, purpose: str, *words: int) -> int:
    """Return a seed for a torch generator, such as the one that initializes a model."""
    low, high = derive(seed, purpose, *words)
    return int(low | high << 32) & 0x7FFFFFFFFFFFFFFF


def choose(key: tuple[int, int], population: int, count: int) -> np.ndarray:
    """Draw `count` distinct numbers below `population`, in ascending order, in time that depends on `count` only.

    A large share is the beginning of a random permutation. A small one is drawn with duplicates removed.
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
    """The key of random draws inside local training. A part's own is `client.key`.

    Example:
        >>> key = Key(torch.tensor([1, 2]), torch.tensor(0))
        >>> bool((uniform(key, (3,)) == uniform(key, (3,))).all())
        True
        >>> bool((uniform(key, (3,)) == uniform(key.stream_at(1), (3,))).any())
        False

    Args:
        words: The two words of the client's key.
        step: The local step.
        stream: Distinguishes the draws of one step.
    """

    words: Tensor
    step: Tensor
    stream: int = 0

    def stream_at(self, i: int) -> Key:
        """Return the key of the i-th stream after this one, whose draws are independent of this key's.

        Args:
            i: How many streams to advance.
        """
        return replace(self, stream=self.stream + i)


@torch.library.custom_op("undrift::philox_words", mutates_args=())
def philox_words(keys: Tensor, steps: Tensor, stream: int, count: int) -> Tensor:
    """Return lanes × `count` words of the counters (block, stream, step, 0), four per block.

    Args:
        keys: Lanes × 2 words.
        steps: The local step of each lane.
        stream: Distinguishes the draws of one step.
        count: How many words to draw per lane.
    """
    if available(keys.device, keys.dtype) and len(keys) <= MOST_LANES:
        from undrift.random import kernels

        return kernels.philox_words(keys, steps, stream, count)
    return _words(keys, steps, stream, count).contiguous()


@philox_words.register_fake
def _(keys: Tensor, steps: Tensor, stream: int, count: int) -> Tensor:
    return keys.new_empty(len(keys), count)


philox_words.register_vmap(fold_into_lanes(philox_words))


def _words(keys: Tensor, steps: Tensor, stream: int, count: int) -> Tensor:
    """The words in plain torch, with or without lanes."""
    blocks = torch.arange((count + 3) // 4, device=keys.device)
    words = philox((blocks, stream, steps[..., None], 0), (keys[..., :1], keys[..., 1:]))
    return torch.stack(words, -1).flatten(-2)[..., :count]


def bits(key: Key, count: int) -> Tensor:
    """Draw random 32-bit words, as int64.

    Example:
        >>> key = Key(torch.tensor([1, 2]), torch.tensor(0))
        >>> bits(key, 3).dtype
        torch.int64

    Args:
        key: The key.
        count: How many words to draw.

    Returns:
        A tensor of `count` integers from 0 to 2³² − 1.
    """
    words, step, stream = key.words, key.step.to(key.words.device), key.stream & MASK
    # Kernels run on the current device, which a run's own is.
    if words.is_cuda and words.device.index == torch.cuda.current_device():
        return philox_words(words[None], step[None], stream, count)[0]
    return _words(words, step, stream, count)


def uniform(key: Key, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniformly from (0, 1). In float32 and float64, the results are never 0 or 1, so that logarithms are finite.

    Example:
        >>> key = Key(torch.tensor([1, 2]), torch.tensor(0))
        >>> bool((uniform(key, (2, 3)) > 0).all())
        True

    Args:
        key: The key.
        shape: The shape of the result.
        dtype: The dtype of the result.

    Returns:
        A tensor of this shape and dtype.
    """
    words = bits(key, math.prod(shape))
    if dtype == torch.float64:
        return ((words.to(dtype) + 0.5) * 2.0**-32).reshape(tuple(shape))
    # 23 bits plus one half need exactly float32's 24 bits, so that rounding can never give 1.
    return (((words >> 9).to(torch.float32) + 0.5) * 2.0**-23).reshape(tuple(shape)).to(dtype)


def normal(key: Key, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from the standard normal distribution, by the Box–Muller transform.

    Example:
        >>> key = Key(torch.tensor([1, 2]), torch.tensor(0))
        >>> normal(key, (2, 3)).shape
        torch.Size([2, 3])

    Args:
        key: The key.
        shape: The shape of the result.
        dtype: The dtype of the result.

    Returns:
        A tensor of this shape and dtype.
    """
    count = math.prod(shape)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    u, v = uniform(key, ((count + 1) // 2, 2), exact).unbind(1)
    radius, angle = torch.sqrt(-2.0 * torch.log(u)), 2.0 * math.pi * v
    draws = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], 1).reshape(-1)
    return draws[:count].reshape(tuple(shape)).to(dtype)


def normal_like(key: Key, tree: Tree) -> Tree:
    """Draw a tree from the standard normal distribution.

    All entries are one draw, in the order of the tree's tensors. With many small tensors, this takes a fraction of the
    time of a draw per tensor.

    Example:
        >>> key = Key(torch.tensor([1, 2]), torch.tensor(0))
        >>> drawn = normal_like(key, {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)})
        >>> drawn["weight"].shape
        torch.Size([3, 2])

    Args:
        key: The key.
        tree: Nested dicts, lists and tuples of tensors, of which only the shapes and dtypes matter.

    Returns:
        A tree of the same structure, shapes and dtypes.
    """
    leaves = tree_leaves(tree)
    exact = torch.float64 if any(t.dtype == torch.float64 for t in leaves) else torch.float32
    counts = [t.numel() for t in leaves]
    pieces = normal(key, (sum(counts),), exact).split(counts)
    drawn = [own.reshape(t.shape).to(t.dtype) for own, t in zip(pieces, leaves, strict=True)]
    return tree_unflatten(drawn, tree_structure(tree))


def keep_mask(key: Key, shape: Sequence[int], p: float) -> Tensor:
    """Draw a boolean mask that is True with probability 1 − p. It is the same in every precision.

    Example:
        >>> key = Key(torch.tensor([1, 2]), torch.tensor(0))
        >>> keep_mask(key, (2, 3), p=0.0).all().item()
        True

    Args:
        key: The key.
        shape: The shape of the mask.
        p: The probability of False.

    Returns:
        A boolean tensor of this shape.
    """
    return (bits(key, math.prod(shape)) >= round(p * 2**32)).reshape(tuple(shape))
