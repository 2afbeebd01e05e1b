"""`philox_words` as a Triton kernel: one launch per draw, and products of 32-bit words in 32 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""The counters per program, each of which gives four words."""


@triton.jit
def _philox(keys, steps, out, stream, count, BLOCK: tl.constexpr):
    """out[lane, 4 · block + i] = the i-th word of the counter (block, stream, step, 0) under the lane's key."""
    lane, block = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k0, k1 = tl.load(keys + 2 * lane).to(tl.uint32), tl.load(keys + 2 * lane + 1).to(tl.uint32)
    c0, c1 = block.to(tl.uint32), (tl.zeros((BLOCK,), tl.int64) + stream).to(tl.uint32)
    c2, c3 = (tl.zeros((BLOCK,), tl.int64) + tl.load(steps + lane)).to(tl.uint32), tl.zeros((BLOCK,), tl.uint32)
    m0, m1 = tl.full((BLOCK,), 0xD2511F53, tl.uint32), tl.full((BLOCK,), 0xCD9E8D57, tl.uint32)
    w0, w1 = tl.full((), 0x9E3779B9, tl.uint32), tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, c2 * m1, high0 ^ c3 ^ k1, c0 * m0
        k0, k1 = k0 + w0, k1 + w1
    at = block.to(tl.int64) * 4
    out += lane * count
    tl.store(out + at, c0.to(tl.int64), mask=at < count)
    tl.store(out + at + 1, c1.to(tl.int64), mask=at + 1 < count)
    tl.store(out + at + 2, c2.to(tl.int64), mask=at + 2 < count)
    tl.store(out + at + 3, c3.to(tl.int64), mask=at + 3 < count)


def philox_words(keys: Tensor, steps: Tensor, stream: int, count: int) -> Tensor:
    out = torch.empty(len(keys), count, dtype=torch.int64, device=keys.device)
    if count:
        grid = (triton.cdiv(count, 4 * BLOCK), len(keys))
        _philox[grid](keys.contiguous(), steps.contiguous(), out, stream, count, BLOCK)
    return out
