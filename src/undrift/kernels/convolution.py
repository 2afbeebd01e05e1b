"""A cohort's convolutions as products with matrices that are never made: kernels in Triton.

A convolution is the product of a picture's patches with the weights (`models/patches.py`). Here a tile of the patches
is gathered straight from the picture when its turn comes, so nothing is written but the result. Tensors are lanes ×
batch × height × width × channels, weights lanes × outputs × kernel × kernel × channels.

Tiles follow from shapes by a rule, not by timing, and partial sums lie in a fixed order: bits repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from undrift.kernels import precision, stages

WARPS = 2112
"""How many warps a sum over positions is split between, where there are positions enough: sixteen for each processor
of an H100, and as many on every other GPU."""


@triton.jit
def _patches(
    x, rows, m, tile, OH: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Rows m, and columns from tile · BK on, of a lane's patches: its positions × (kernel · channels)."""
    k = tile * BK + tl.arange(0, BK)
    picture, place = m // (OH * OW), m % (OH * OW)
    top, left = (place // OW) * SY - PY, (place % OW) * SX - PX
    if C % BK == 0:  # all of one place in the kernel: neighbours in memory
        tap = tile // (C // BK)
        channel = (tile % (C // BK)) * BK + tl.arange(0, BK)
        y, z = (top + tap // KW)[:, None], (left + tap % KW)[:, None]
    else:
        tap, channel = k // C, k % C
        y, z = top[:, None] + (tap // KW)[None], left[:, None] + (tap % KW)[None]
    there = (m < rows)[:, None] & (y >= 0) & (y < H) & (z >= 0) & (z < W) & (k < KH * KW * C)[None]
    return tl.load(x + ((picture[:, None] * H + y) * W + z) * C + channel[None], mask=there, other=0.0)


@triton.jit
def _correlate(
    x, weight, bias, out, rows,
    OH: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[m, n] = bias[n] + Σ_k patches[m, k] · weight[n, k], a tile of BM × BN for each program."""
    K: tl.constexpr = KH * KW * C
    across: tl.constexpr = (N + BN - 1) // BN
    tiles = tl.cdiv(rows, BM) * across
    tile, lane = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    m, n = (tile // across) * BM + tl.arange(0, BM), (tile % across) * BN + tl.arange(0, BN)
    x += lane * (rows // (OH * OW)) * (H * W * C)
    weight += lane * N * K
    total = tl.zeros((BM, BN), tl.float32)
    for turn in range(0, (K + BK - 1) // BK):
        a = _patches(x, rows, m, turn, OH, OW, H, W, C, KH, KW, SY, SX, PY, PX, BK)
        k = turn * BK + tl.arange(0, BK)
        b = tl.load(weight + n[None] * K + k[:, None], mask=(n < N)[None] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total += tl.load(bias + lane * N + n, mask=n < N, other=0.0).to(tl.float32)[None]
    at = (lane * rows + m)[:, None] * N + n[None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None])


@triton.jit
def _gradient(
    g, x, out, rows, lanes, TURNS: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[n, k] = Σ_m g[m, n] · patches[m, k] over a share of the m; one more column, whose patches are 1, is Σ_m g."""
    K: tl.constexpr = KH * KW * C
    across: tl.constexpr = (K + 1 + BK - 1) // BK
    tiles: tl.constexpr = across * ((N + BN - 1) // BN)
    tile, lane, part = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    n, k = (tile // across) * BN + tl.arange(0, BN), (tile % across) * BK + tl.arange(0, BK)
    g += lane * rows * N
    x += lane * (rows // (OH * OW)) * (H * W * C)
    total = tl.zeros((BN, BK), tl.float32)
    for turn in range(0, TURNS):
        m = (part * TURNS + turn) * BM + tl.arange(0, BM)
        b = _patches(x, rows, m, tile % across, OH, OW, H, W, C, KH, KW, SY, SX, PY, PX, BK)
        b = tl.where((k == K)[None], 1.0, b).to(x.dtype.element_ty)
        a = tl.load(g + m[:, None] * N + n[None], mask=(m < rows)[:, None] & (n < N)[None], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    at = ((part * lanes + lane) * N + n)[:, None] * (K + 1) + k[None]
    tl.store(out + at, total, mask=(n < N)[:, None] & (k <= K)[None])


def correlate(x: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    x, weight, bias = (t.contiguous() for t in (x, weight, bias))
    lanes, batch, height, width, channels = x.shape
    outputs, *kernel = weight.shape[1:4]
    high = (height + 2 * padding[0] - kernel[0]) // stride[0] + 1
    wide = (width + 2 * padding[1] - kernel[1]) // stride[1] + 1
    out = x.new_empty(lanes, batch, high, wide, outputs)
    rows, low = batch * high * wide, x.element_size() == 2
    tile = {
        "BM": 128,
        "BN": min(256 if low and _roomy(x.device) else 128, max(16, triton.next_power_of_2(outputs))),
        "BK": next((k for k in (64, 32, 16)[not low :] if channels % k == 0), 32),
    }
    _correlate[(triton.cdiv(rows, tile["BM"]) * triton.cdiv(outputs, tile["BN"]) * lanes,)](
        x, weight, bias, out, rows, high, wide, height, width, channels, outputs, *kernel, *stride, *padding, **tile,
        PRECISION=precision(), num_warps=8 if tile["BN"] >= 128 else 4,
        num_stages=stages(3, channels * x.element_size()),
    )  # fmt: skip
    return out


def gradient(g: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    g, x = g.contiguous(), x.contiguous()
    lanes, batch, height, width, channels = x.shape
    high, wide, outputs = g.shape[2:]
    rows, columns = batch * high * wide, channels * kernel[0] * kernel[1] + 1
    length, most, warps, ahead = 64, 128, 4, stages(3, channels * x.element_size(), outputs * g.element_size())
    if x.element_size() == 4:
        length, most = 32, 64
        if precision() == "tf32" and ahead > 1:
            # Tensor cores read tf32 only along the sum, which here lies across memory. With two warps Triton takes an
            # older instruction, which reads it as it lies, in half the time.
            length, warps, ahead = 16, 2, 4
    tile = {
        "BM": length,
        "BN": min(most, max(16, triton.next_power_of_2(outputs))),
        "BK": 64 if channels >= 16 else 32,
    }
    tiles, turns = triton.cdiv(columns, tile["BK"]) * triton.cdiv(outputs, tile["BN"]), triton.cdiv(rows, tile["BM"])
    share = triton.cdiv(turns, max(1, min(triton.cdiv(WARPS, warps * tiles * lanes), turns // 4)))
    parts = triton.cdiv(turns, share)
    out = torch.empty(parts, lanes, outputs, columns, device=x.device)
    _gradient[(tiles * lanes, parts)](
        g, x, out, rows, lanes, share, high, wide, height, width, channels, outputs, *kernel, *stride, *padding, **tile,
        PRECISION=precision(), num_warps=warps, num_stages=ahead,
    )  # fmt: skip
    return out.sum(0)


@cache
def _roomy(device: torch.device) -> bool:
    """Whether a processor's memory holds three turns of the largest tile."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 160 * 1024  # type: ignore[attr-defined]
