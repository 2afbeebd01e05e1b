"""Digests of data: a SHA-256 that identifies a data set, and a fast checksum that detects damage.

Both hash chunks of 4 MiB, in threads (hashing a chunk releases the GIL), and then the chunks' digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from undrift.cpus import usable_cpus

CHUNK = 1 << 22

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensors whose SHA-256 is known, with their version at the time: an in-place write increments the version."""


def sha256(data: np.ndarray) -> str:
    """Return the SHA-256 of the SHA-256 of each chunk of these bytes."""
    return hashlib.sha256(_by_chunk(data, hashlib.sha256)).hexdigest()


def checksum(data: np.ndarray) -> str:
    """Return the same with XXH3 (128 bits): ten times as fast as SHA-256, but no defence against forgery."""
    from xxhash import xxh3_128

    return xxh3_128(_by_chunk(data, xxh3_128)).hexdigest()


def _by_chunk(data: np.ndarray, hasher: Callable[[Any], Any]) -> bytes:
    chunks = [data[begin : begin + CHUNK] for begin in range(0, len(data), CHUNK)]
    if len(chunks) < 2:
        return b"".join(hasher(chunk).digest() for chunk in chunks)
    with ThreadPoolExecutor(min(8, usable_cpus())) as threads:
        return b"".join(threads.map(lambda chunk: hasher(chunk).digest(), chunks))


def as_bytes(tensor: Tensor) -> np.ndarray:
    """Return the tensor's values in memory order, as bytes; a view where it is contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def of_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's values, computed once per tensor; for lazily read data, their identity."""
    if not isinstance(tensor, Tensor):
        return str(tensor.identity)
    version = None if tensor.is_inference() else tensor._version
    known = _known.get(tensor)
    if known is None or version is None or known[0] != version:
        known = version, sha256(as_bytes(tensor))
        _known[tensor] = known
    return known[1]


def remember(tensor: Tensor, digest: str) -> None:
    """Record that this tensor's SHA-256 is `digest`, so that it need not be computed again."""
    if not tensor.is_inference():
        _known[tensor] = tensor._version, digest


def of_parts(store: Mapping[str, Tensor], **arrays: Tensor | np.ndarray) -> str:
    """Return the SHA-256 of a store and of the arrays that index it: every value, and all names, types and shapes."""
    tensors = {f"store {name}": tensor for name, tensor in store.items()}
    tensors |= {name: torch.as_tensor(array) for name, array in arrays.items()}
    described = {name: [str(t.dtype), list(t.shape), of_tensor(t)] for name, t in tensors.items()}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def digest_of(*values: Any) -> str:
    """Return the SHA-256 of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
