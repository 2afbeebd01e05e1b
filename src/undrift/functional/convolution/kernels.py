"""A cohort's convolutions as products with matrices that are never made: kernels in Triton.

A convolution is the product of a picture's patches with the weights (`operations.py`). Here a tile of the patches
is gathered straight from the picture when its turn comes, so nothing is written but the result. Tensors are lanes ×
batch × height × width × channels, weights lanes × outputs × kernel × kernel × channels.

Tiles follow from shapes by a rule, not by timing, and partial sums lie in a fixed order: bits repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from undrift.functional.triton import memory, precision, stages

WARPS = 2112
"""How many warps a sum over positions is split between, where there are positions enough: sixteen for each processor
of an H100, and as many on every other GPU."""


@triton.jit
def _patches(
    x, rows, m, k, tile, OH: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """A lane's patches: positions m along one axis, the (kernel · channels) k of tile number `tile` along the other."""
    picture, place = m // (OH * OW), m % (OH * OW)
    top, left = (place // OW) * SY - PY, (place % OW) * SX - PX
    tap = tile // (C // BK) if C % BK == 0 else k // C  # the former is all of one place: neighbours in memory
    y, z = top + tap // KW, left + tap % KW
    there = (m < rows) & (y >= 0) & (y < H) & (z >= 0) & (z < W) & (k < KH * KW * C)
    return tl.load(x + ((picture * H + y) * W + z) * C + (k - tap * C), mask=there, other=0.0)


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
        k = turn * BK + tl.arange(0, BK)
        a = _patches(x, rows, m[:, None], k[None], turn, OH, OW, H, W, C, KH, KW, SY, SX, PY, PX, BK)
        b = tl.load(weight + n[None] * K + k[:, None], mask=(n < N)[None] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total += tl.load(bias + lane * N + n, mask=n < N, other=0.0).to(tl.float32)[None]
    at = (lane * rows + m)[:, None] * N + n[None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None])


@triton.jit
def _sums(
    g, sums, turned, lanes, batch, stride, TURN: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Σ over the SIZE positions of each picture of g; with TURN, g also turned: lanes × outputs × positions."""
    blocks: tl.constexpr = (N + BN - 1) // BN
    picture, n = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    lane, place = picture // batch, picture % batch
    g += picture * SIZE * N
    turned += lane * N * stride + place * SIZE
    total = tl.zeros((BN,), tl.float32)
    for first in range(0, SIZE, BM):
        m = first + tl.arange(0, BM)
        there = (m < SIZE)[:, None] & (n < N)[None]
        values = tl.load(g + m[:, None] * N + n[None], mask=there, other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
        if TURN:
            tl.store(turned + n[None] * stride + m[:, None], values, mask=there)
    tl.store(sums + (place * lanes + lane) * N + n, total, mask=n < N)


@triton.jit
def _product(
    g, x, rows, limit, right, down, first, TURNS: tl.constexpr, tile, n, k, APART: tl.constexpr, TURNED: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_m patches[m, k] · g[m, n] over TURNS · BM of the m; g's steps from n to n are `right`, from m to m `down`."""
    if APART:
        total = tl.zeros((BK, BN), tl.float32)
        for turn in range(0, TURNS):
            m = first + turn * BM + tl.arange(0, BM)
            a = _patches(x, rows, m[None], k[:, None], tile, OH, OW, H, W, C, KH, KW, SY, SX, PY, PX, BK)
            b = tl.load(g + n[None] * right + m[:, None] * down, mask=(m < limit)[:, None] & (n < N)[None], other=0.0)
            # Not as it was loaded: so Triton keeps the operand in registers, in which tf32 may lie either way.
            total = tl.dot(-a if TURNED else a, b, total, input_precision=PRECISION)
        return -total if TURNED else total
    else:
        total = tl.zeros((BN, BK), tl.float32)
        for turn in range(0, TURNS):
            m = first + turn * BM + tl.arange(0, BM)
            b = _patches(x, rows, m[:, None], k[None], tile, OH, OW, H, W, C, KH, KW, SY, SX, PY, PX, BK)
            b = tl.where((k == KH * KW * C)[None], 1.0, b).to(x.dtype.element_ty)
            a = tl.load(g + m[:, None] * N + n[None], mask=(m < rows)[:, None] & (n < N)[None], other=0.0)
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
        return tl.trans(total)


@triton.jit
def _gradient(
    g, x, out, rows, stride, lanes, SHARE: tl.constexpr, SQUARED: tl.constexpr, APART: tl.constexpr,
    TURNED: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    N: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[n, k] = Σ_m g[m, n] · patches[m, k] over a share of the m, as many turns as SHARE says.

    SQUARED: such a sum for each picture by itself, squared, and added up over as many pictures. Unless the bias's sums
    are taken APART, there is one more column, whose patches are 1. TURNED: in g, `stride` positions lie side by side.
    """
    K: tl.constexpr = KH * KW * C
    across: tl.constexpr = (K + (0 if APART else 1) + BK - 1) // BK
    tiles: tl.constexpr = across * ((N + BN - 1) // BN)
    tile, lane, part = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    n, k = (tile // across) * BN + tl.arange(0, BN), (tile % across) * BK + tl.arange(0, BK)
    g += lane * stride * N
    x += lane * (rows // (OH * OW)) * (H * W * C)
    right, down = (stride, 1) if TURNED else (1, N)
    if SQUARED:
        size: tl.constexpr = OH * OW
        total = tl.zeros((BK, BN), tl.float32)
        for turn in tl.range(0, SHARE, flatten=True):
            picture = part * SHARE + turn
            there = tl.where(picture < rows // size, size, 0)
            one = _product(
                g + picture * size * down, x + picture * (H * W * C), there, there, right, down, 0,
                (size + BM - 1) // BM, tile % across, n, k, APART, TURNED, OH, OW, H, W, C, N, KH, KW, SY, SX, PY, PX,
                BM, BN, BK, PRECISION,
            )  # fmt: skip
            total += one * one
    else:
        total = _product(
            g, x, rows, stride, right, down, part * (SHARE * BM), SHARE, tile % across, n, k, APART, TURNED,
            OH, OW, H, W, C, N, KH, KW, SY, SX, PY, PX, BM, BN, BK, PRECISION,
        )  # fmt: skip
    at = ((part * lanes + lane) * N + n)[None] * (K + 1) + k[:, None]
    tl.store(out + at, total, mask=(n < N)[None] & (k < K + (0 if APART else 1))[:, None])


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
        "BN": _breadth(outputs, 256 if low and memory(x.device) >= 160 else 128),
        "BK": next((k for k in (64, 32, 16)[not low :] if channels % k == 0), 32),
    }
    _correlate[(triton.cdiv(rows, tile["BM"]) * triton.cdiv(outputs, tile["BN"]) * lanes,)](
        x, weight, bias, out, rows, high, wide, height, width, channels, outputs, *kernel, *stride, *padding, **tile,
        PRECISION=precision(), num_warps=8 if tile["BN"] >= 128 else 4,
        num_stages=stages(3, channels * x.element_size()),
    )  # fmt: skip
    return out


def gradient(
    g: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], squared: bool = False
) -> Tensor:
    g, x = g.contiguous(), x.contiguous()
    lanes, batch, height, width, channels = x.shape
    high, wide, outputs = g.shape[2:]
    size, columns = high * wide, channels * kernel[0] * kernel[1] + 1
    rows, low, runs = batch * size, x.element_size() == 2, channels * x.element_size()
    # Hopper's tensor cores read tf32 only along the sum, which lies across memory: so g is turned, and patches go
    # through registers. A column of ones would send them there in bf16 too; for many channels summing g apart pays.
    fits = not runs % 16 and not (squared and size % 4)
    turned = precision() == "tf32" and not low and fits and memory(x.device) >= 224
    apart = turned or (low and channels >= 64 and outputs >= 128 and not runs % 16)
    tile = {
        "BM": 64 if low else 32,
        "BN": _breadth(outputs, 128 if low or turned else 64),
        "BK": 64 if channels >= 16 or turned else 32,
    }
    warps = 4
    if turned and squared and size <= 64:
        tile["BM"] = 64  # a picture a turn
        if tile["BN"] == 128:
            tile["BK"], warps = 128, 8
    assert not turned or tile["BK"] == 16 * warps  # with more, Triton 3.6 loses where a picture of several turns begins
    sums, values = _apart(g, turned) if apart else (None, g)
    length = values.shape[-1] if turned else rows
    tiles = triton.cdiv(columns - apart, tile["BK"]) * triton.cdiv(outputs, tile["BN"])
    turns = batch if squared else triton.cdiv(rows, tile["BM"])
    share = triton.cdiv(turns, max(1, min(triton.cdiv(WARPS, warps * tiles * lanes), turns // 4)))
    parts = triton.cdiv(turns, share)
    out = torch.empty(parts, lanes, outputs, columns, device=x.device)
    _gradient[(tiles * lanes, parts)](
        values, x, out, rows, length, lanes, share, squared, apart, turned, high, wide, height, width, channels,
        outputs, *kernel, *stride, *padding, **tile, PRECISION=precision(), num_warps=warps,
        num_stages=stages(3, runs, 0 if turned else outputs * g.element_size()),
    )  # fmt: skip
    found = out.sum(0)
    if sums is not None:
        torch.sum(sums.square() if squared else sums, 0, out=found[..., -1])
    return found


def _apart(g: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
    """Σ over each picture's positions of g, batch × lanes × outputs; and g, turned if asked, filled up to sixteens."""
    lanes, batch, high, wide, outputs = g.shape
    rows, block = batch * high * wide, _breadth(outputs, 64)
    sums, values, length = torch.empty(batch, lanes, outputs, device=g.device), g, triton.cdiv(rows, 16) * 16
    if turned:
        values = g.new_empty(lanes, outputs, length)
        values[..., rows:].zero_()
    _sums[(lanes * batch * triton.cdiv(outputs, block),)](
        g, sums, values, lanes, batch, length, turned, high * wide, outputs, 64, block
    )
    return sums, values


def _breadth(outputs: int, most: int) -> int:
    """How many outputs a tile has: products take powers of two, from 16."""
    return min(most, max(16, triton.next_power_of_2(outputs)))
