"""The operations of `operations.py` as Triton kernels: implicit matrix products, without a matrix of patches.

A convolution is the product of the input's patches with the weights. A tile of the patches is gathered from the input
at the moment it is needed, so nothing but the result is written to memory.

In the kernels, m runs over positions of the output (batch · OH · OW), n over its channels, and k over the entries of a
patch (KH · KW · C), channels fastest; these sizes are those of `Dims`. A program computes one lane's tile of BM × BN
outputs, or of BN × BK weights. With max-pooling after the convolution, BM × BN outputs become BM / 4 × BN.

Tiles follow from shapes by a rule, not by timing, and partial sums are added in a fixed order, so results repeat bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from undrift.functional.convolution.geometry import NO_ENTRY, output_size
from undrift.triton import dot_precision, pipeline_stages, shared_memory

WARPS = 2112
"""How many warps to split a sum over positions between, if there are enough positions: sixteen per multiprocessor of an
H100, and the same number on every GPU, since the order of the sums depends on it."""
NOTHING = tl.constexpr(NO_ENTRY)


class Dims(NamedTuple):
    """The dimensions of a convolution, which kernels are compiled for."""

    H: int  # height, width and channels of the input
    W: int
    C: int
    OH: int  # height, width and channels of the output
    OW: int
    N: int
    KH: int  # height and width of the kernel
    KW: int
    K: int  # entries of a patch, KH · KW · C
    SH: int  # stride, vertical and horizontal
    SW: int
    PH: int  # padding, vertical and horizontal
    PW: int


@triton.jit
def _patches(x, positions, m, k, k_tile, D: tl.constexpr, BK: tl.constexpr):
    """Entries k of the patches at positions m of one lane; k is the tile number `k_tile` of BK entries."""
    sample, position = m // (D.OH * D.OW), m % (D.OH * D.OW)
    top, left = (position // D.OW) * D.SH - D.PH, (position % D.OW) * D.SW - D.PW
    # Where BK divides the channels, a tile belongs to one tap of the kernel, so that its loads are contiguous.
    tap = k_tile // (D.C // BK) if D.C % BK == 0 else k // D.C
    y, z = top + tap // D.KW, left + tap % D.KW
    inside = (m < positions) & (y >= 0) & (y < D.H) & (z >= 0) & (z < D.W) & (k < D.K)
    return tl.load(x + ((sample * D.H + y) * D.W + z) * D.C + (k - tap * D.C), mask=inside, other=0.0)


@triton.jit
def _larger(a, i, b, j):
    """The larger of two values, and its index: the smaller index of equal values. NaN is larger than any number."""
    second = (b > a) | ((b == a) & (j < i)) | ((b != b) & ((a == a) | (j < i)))
    return tl.where(second, b, a), tl.where(second, j, i)


@triton.jit
def _conv2d_forward(
    x, weight, bias, out, chosen, positions, POOLED: tl.constexpr, RELU: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[m, n] = bias[n] + Σ_k patches[m, k] · weight[n, k], a tile of BM × BN per program.

    POOLED: out has the largest of each window of 2 × 2 positions, and `chosen` says which; RELU: after ReLU. BM must be
    128 then.
    """
    n_tiles: tl.constexpr = (D.N + BN - 1) // BN
    batch = positions // (D.OH * D.OW)
    windows = batch * ((D.OH // 2) * (D.OW // 2))
    tiles = tl.cdiv(4 * windows if POOLED else positions, BM) * n_tiles
    tile, lane = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    row, n = tl.arange(0, BM), (tile % n_tiles) * BN + tl.arange(0, BN)
    if POOLED:  # with four warps, a thread gets the rows r, r + 8, r + 64 and r + 72 of a result: these are a window
        window, entry = (tile // n_tiles) * 32 + row // 16 % 4 * 8 + row % 8, row // 64 * 2 + row // 8 % 2
        y, z = window // (D.OW // 2) % (D.OH // 2) * 2 + entry // 2, window % (D.OW // 2) * 2 + entry % 2
        m = (window // ((D.OH // 2) * (D.OW // 2)) * D.OH + y) * D.OW + z
    else:
        m = (tile // n_tiles) * BM + row
    x += lane * batch * (D.H * D.W * D.C)
    weight += lane * D.N * D.K
    total = tl.zeros((BM, BN), tl.float32)
    for k_tile in range(0, (D.K + BK - 1) // BK):
        k = k_tile * BK + tl.arange(0, BK)
        a = _patches(x, positions, m[:, None], k[None], k_tile, D, BK)
        b = tl.load(weight + n[None] * D.K + k[:, None], mask=(n < D.N)[None] & (k < D.K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    total += tl.load(bias + lane * D.N + n, mask=n < D.N, other=0.0).to(tl.float32)[None]
    if POOLED:
        bit = tl.arange(0, 2)
        entry = tl.broadcast_to(bit[:, None, None, None, None] * 2 + bit[None, None, :, None, None], (2, 4, 2, 8, BN))
        total, entry = tl.reduce((tl.reshape(total, (2, 4, 2, 8, BN)), entry), 0, _larger)
        total, entry = tl.reduce((total, entry), 1, _larger)
        total, entry = tl.reshape(total, (32, BN)), tl.reshape(entry, (32, BN))
        if RELU:
            total, entry = tl.where(total <= 0, 0.0, total), tl.where(total <= 0, NOTHING, entry)
        m, positions = (tile // n_tiles) * 32 + tl.arange(0, 32), windows
    at, inside = (lane * positions + m)[:, None] * D.N + n[None], (m < positions)[:, None] & (n < D.N)[None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
    if POOLED:
        tl.store(chosen + at, entry.to(tl.uint8), mask=inside)


@triton.jit
def _sum_positions(
    g, sums, transposed, lanes, batch, length, TRANSPOSE: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """sums[n] = Σ g[m, n] over the SIZE positions of each sample. TRANSPOSE: also write g as lanes × N × `length`."""
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    index, n = (tl.program_id(0) // n_tiles).to(tl.int64), (tl.program_id(0) % n_tiles) * BN + tl.arange(0, BN)
    lane, sample = index // batch, index % batch
    g += index * SIZE * N
    transposed += lane * N * length + sample * SIZE
    total = tl.zeros((BN,), tl.float32)
    for first in range(0, SIZE, BM):
        m = first + tl.arange(0, BM)
        inside = (m < SIZE)[:, None] & (n < N)[None]
        values = tl.load(g + m[:, None] * N + n[None], mask=inside, other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
        if TRANSPOSE:
            tl.store(transposed + n[None] * length + m[:, None], values, mask=inside)
    tl.store(sums + (sample * lanes + lane) * N + n, total, mask=n < N)


@triton.jit
def _weight_grad_tile(SEPARATE_BIAS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return a program's lane, its part of the sum, its outputs n and entries k, and which tile of k these are.

    Unless SEPARATE_BIAS, there is one more k, for the bias.
    """
    k_tiles: tl.constexpr = (D.K + (0 if SEPARATE_BIAS else 1) + BK - 1) // BK
    tiles: tl.constexpr = k_tiles * ((D.N + BN - 1) // BN)
    tile, lane, part = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    n, k = (tile // k_tiles) * BN + tl.arange(0, BN), (tile % k_tiles) * BK + tl.arange(0, BK)
    return lane, part, n, k, tile % k_tiles


@triton.jit
def _patches_times_g(
    g, x, positions, limit, g_n, g_m, first, STEPS: tl.constexpr, n, k, k_tile,
    SEPARATE_BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_m patches[m, k] · g[m, n] over STEPS · BM positions m from `first`; g has the strides g_n and g_m.

    Unless SEPARATE_BIAS, patches have one more entry, k = K, which is 1: its sum is the gradient of the bias.
    """
    if SEPARATE_BIAS:
        total = tl.zeros((BK, BN), tl.float32)
        for step in range(0, STEPS):
            m = first + step * BM + tl.arange(0, BM)
            a = _patches(x, positions, m[None], k[:, None], k_tile, D, BK)
            b = tl.load(g + n[None] * g_n + m[:, None] * g_m, mask=(m < limit)[:, None] & (n < D.N)[None], other=0.0)
            # Triton keeps an operand in registers if it is not used as loaded, and from registers the tensor cores
            # take tf32 in either layout. Hence the two changes of sign.
            total = tl.dot(-a if TRANSPOSED else a, b, total, input_precision=PRECISION)
        return -total if TRANSPOSED else total
    else:
        total = tl.zeros((BN, BK), tl.float32)
        for step in range(0, STEPS):
            m = first + step * BM + tl.arange(0, BM)
            b = _patches(x, positions, m[:, None], k[None], k_tile, D, BK)
            b = tl.where((k == D.K)[None], 1.0, b).to(x.dtype.element_ty)
            a = tl.load(g + m[:, None] * D.N + n[None], mask=(m < positions)[:, None] & (n < D.N)[None], other=0.0)
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
        return tl.trans(total)


@triton.jit
def _store_weight_grad(out, total, lane, part, lanes, n, k, SEPARATE_BIAS: tl.constexpr, D: tl.constexpr):
    """Write a tile into out, parts × lanes × N × (K + 1); the last column is left alone if SEPARATE_BIAS."""
    at = ((part * lanes + lane) * D.N + n)[None] * (D.K + 1) + k[:, None]
    tl.store(out + at, total, mask=(n < D.N)[None] & (k < D.K + (0 if SEPARATE_BIAS else 1))[:, None])


@triton.jit
def _conv2d_weight_grad(
    g, x, out, positions, length, lanes, STEPS: tl.constexpr, SEPARATE_BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[part, n, k] = Σ_m g[m, n] · patches[m, k] over the part's STEPS · BM positions m.

    A lane of g is positions × outputs, or if TRANSPOSED outputs × `length`, which is positions and zeros after them.
    """
    lane, part, n, k, k_tile = _weight_grad_tile(SEPARATE_BIAS, D, BN, BK)
    g += lane * length * D.N
    x += lane * (positions // (D.OH * D.OW)) * (D.H * D.W * D.C)
    g_n, g_m = (length, 1) if TRANSPOSED else (1, D.N)
    total = _patches_times_g(
        g, x, positions, length, g_n, g_m, part * (STEPS * BM), STEPS, n, k, k_tile,
        SEPARATE_BIAS, TRANSPOSED, D, BM, BN, BK, PRECISION,
    )  # fmt: skip
    _store_weight_grad(out, total, lane, part, lanes, n, k, SEPARATE_BIAS, D)


@triton.jit
def _conv2d_squared_weight_grad(
    g, x, out, positions, length, lanes, SAMPLES: tl.constexpr, SEPARATE_BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_conv2d_weight_grad`, but the sum over the part's SAMPLES samples of the square of each one's gradient."""
    size: tl.constexpr = D.OH * D.OW
    lane, part, n, k, k_tile = _weight_grad_tile(SEPARATE_BIAS, D, BN, BK)
    g += lane * length * D.N
    x += lane * (positions // size) * (D.H * D.W * D.C)
    g_n, g_m = (length, 1) if TRANSPOSED else (1, D.N)
    total = tl.zeros((BK, BN), tl.float32)
    for index in tl.range(0, SAMPLES, flatten=True):
        sample = part * SAMPLES + index
        limit = tl.where(sample < positions // size, size, 0)
        one = _patches_times_g(
            g + sample * size * g_m, x + sample * (D.H * D.W * D.C), limit, limit, g_n, g_m, 0, (size + BM - 1) // BM,
            n, k, k_tile, SEPARATE_BIAS, TRANSPOSED, D, BM, BN, BK, PRECISION,
        )  # fmt: skip
        total += one * one
    _store_weight_grad(out, total, lane, part, lanes, n, k, SEPARATE_BIAS, D)


def _dims(x: Tensor, outputs: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Dims:
    (H, W, C), (KH, KW), (SH, SW), (PH, PW) = x.shape[2:], kernel, stride, padding
    OH, OW = output_size((H, W), kernel, stride, padding)
    return Dims(H, W, C, OH, OW, outputs, KH, KW, KH * KW * C, SH, SW, PH, PW)


def conv2d_forward(x: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    return _forward(x, weight, bias, stride, padding, pooled=False, relu=False)[0]


def conv2d_pool(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int], relu: bool
) -> tuple[Tensor, Tensor]:
    return _forward(x, weight, bias, stride, padding, pooled=True, relu=relu)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Sequence[int], padding: Sequence[int], pooled: bool, relu: bool
) -> tuple[Tensor, Tensor]:
    x, weight, bias = (t.contiguous() for t in (x, weight, bias))
    lanes, batch, low = *x.shape[:2], x.element_size() == 2
    d = _dims(x, weight.shape[1], weight.shape[2:4], stride, padding)
    height, width = (d.OH // 2, d.OW // 2) if pooled else (d.OH, d.OW)
    out = x.new_empty(lanes, batch, height, width, d.N)
    chosen = torch.empty_like(out, dtype=torch.uint8) if pooled else out
    largest = 64 if pooled else 256 if low and shared_memory(x.device) >= 160 else 128
    tile = {
        "BM": 128,
        "BN": _output_tile(d.N, largest),
        "BK": next((k for k in (64, 32, 16)[not low :] if d.C % k == 0), 32),
    }
    rows = batch * height * width * (4 if pooled else 1)
    _conv2d_forward[(triton.cdiv(rows, tile["BM"]) * triton.cdiv(d.N, tile["BN"]) * lanes,)](
        x, weight, bias, out, chosen, batch * d.OH * d.OW, pooled, relu, d, **tile, PRECISION=dot_precision(),
        num_warps=8 if tile["BN"] >= 128 else 4, num_stages=pipeline_stages(3, d.C * x.element_size()),
    )  # fmt: skip
    return out, chosen


def conv2d_weight_grad(
    g: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    return _weight_grad(g, x, kernel, stride, padding, squared=False)


def conv2d_squared_weight_grad(
    g: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    return _weight_grad(g, x, kernel, stride, padding, squared=True)


def _weight_grad(
    g: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], squared: bool
) -> Tensor:
    """Launch either of the two kernels. One splits the sum over positions into parts, the other that over samples."""
    g, x = g.contiguous(), x.contiguous()
    d = _dims(x, g.shape[4], kernel, stride, padding)
    lanes, batch, size = *x.shape[:2], d.OH * d.OW
    positions, low, run = batch * size, x.element_size() == 2, d.C * x.element_size()
    # Hopper's tensor cores read tf32 from shared memory only if the summed axis, here the positions, is contiguous. So
    # g is transposed, and patches go through registers. The bias's column of ones would send them through registers in
    # bf16 too; with many channels it is cheaper to sum g separately.
    aligned = not run % 16 and not (squared and size % 4)
    transposed = dot_precision() == "tf32" and not low and aligned and shared_memory(x.device) >= 224
    separate_bias = transposed or (low and d.C >= 64 and d.N >= 128 and not run % 16)
    tile = {
        "BM": 64 if low else 32,
        "BN": _output_tile(d.N, 128 if low or transposed else 64),
        "BK": 64 if d.C >= 16 or transposed else 32,
    }
    warps = 4
    if transposed and squared and size <= 64:
        tile["BM"] = 64  # one step per sample
        if tile["BN"] == 128:
            tile["BK"], warps = 128, 8
    # With a larger BK, Triton 3.6 loses track of where a sample begins that takes several steps.
    assert not transposed or tile["BK"] == 16 * warps
    sums, values = _separate_bias(g, transposed) if separate_bias else (None, g)
    length = values.shape[-1] if transposed else positions
    tiles = triton.cdiv(d.K + (not separate_bias), tile["BK"]) * triton.cdiv(d.N, tile["BN"])
    terms = batch if squared else triton.cdiv(positions, tile["BM"])
    per_part = triton.cdiv(terms, max(1, min(triton.cdiv(WARPS, warps * tiles * lanes), terms // 4)))
    parts = triton.cdiv(terms, per_part)
    out = torch.empty(parts, lanes, d.N, d.K + 1, device=x.device)
    (_conv2d_squared_weight_grad if squared else _conv2d_weight_grad)[(tiles * lanes, parts)](
        values, x, out, positions, length, lanes, per_part, separate_bias, transposed, d, **tile,
        PRECISION=dot_precision(), num_warps=warps,
        num_stages=pipeline_stages(3, run, 0 if transposed else d.N * g.element_size()),
    )  # fmt: skip
    grad = out.sum(0)
    if sums is not None:
        torch.sum(sums.square() if squared else sums, 0, out=grad[..., -1])
    return grad


def _separate_bias(g: Tensor, transpose: bool) -> tuple[Tensor, Tensor]:
    """Σ g over the positions of each sample, batch × lanes × outputs; and g itself.

    `transpose`: g as lanes × outputs × positions, with zeros after them up to a multiple of 16.
    """
    lanes, batch, out_height, out_width, outputs = g.shape
    positions, block = batch * out_height * out_width, _output_tile(outputs, 64)
    sums, values, length = torch.empty(batch, lanes, outputs, device=g.device), g, triton.cdiv(positions, 16) * 16
    if transpose:
        values = g.new_empty(lanes, outputs, length)
        values[..., positions:].zero_()
    _sum_positions[(lanes * batch * triton.cdiv(outputs, block),)](
        g, sums, values, lanes, batch, length, transpose, out_height * out_width, outputs, 64, block
    )
    return sums, values


def _output_tile(outputs: int, largest: int) -> int:
    """Return how many outputs a tile has: `tl.dot` takes powers of two, from 16."""
    return min(largest, max(16, triton.next_power_of_2(outputs)))
