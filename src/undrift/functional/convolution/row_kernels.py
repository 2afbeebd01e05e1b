"""Operations of `operations.py` that multiply nothing, as Triton kernels: programs have blocks of one row each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from undrift.functional.convolution.geometry import NO_ENTRY

NOTHING = tl.constexpr(NO_ENTRY)


@triton.jit
def _pool_grad(g, chosen, out, H: tl.constexpr, W: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """out[y, z, n] = g[y // 2, z // 2, n] where that window has chosen (y, z), else 0. H and W are those of out."""
    width: tl.constexpr = W // 2 * N
    blocks: tl.constexpr = (width + BLOCK - 1) // BLOCK
    row, i = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(g + row * width + i, mask=i < width, other=0.0)
    which = tl.load(chosen + row * width + i, mask=i < width, other=NOTHING)
    sample, y = row // (H // 2), row % (H // 2) * 2
    out += (sample * H + y) * (W * N)
    for entry in tl.static_range(4):
        at = (entry // 2 * W + i // N * 2 + entry % 2) * N + i % N
        tl.store(out + at, tl.where(which == entry, value, 0.0).to(out.dtype.element_ty), mask=i < width)


@triton.jit
def _add_columns(
    x, out, COLUMNS: tl.constexpr, PADDING: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    """out[y, z, c] = Σ_i x[y, z + PADDING - i, i, c] over the COLUMNS of a kernel; x is W wide, y any row."""
    width: tl.constexpr = (W + COLUMNS - 1 - 2 * PADDING) * C
    blocks: tl.constexpr = (width + BLOCK - 1) // BLOCK
    row, at = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    x += row * W * COLUMNS * C
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(COLUMNS):
        z = at // C + PADDING - i
        inside = (at < width) & (z >= 0) & (z < W)
        total += tl.load(x + (z * COLUMNS + i) * C + at % C, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=at < width)


def add_columns(x: Tensor, columns: int, padding: int) -> Tensor:
    x, width, channels = x.contiguous(), x.shape[3], x.shape[4] // columns
    out = x.new_empty(*x.shape[:3], width + columns - 1 - 2 * padding, channels)
    grid, block = _by_row(out.shape[:3].numel(), out.shape[3] * channels)
    _add_columns[grid](x, out, columns, padding, width, channels, block)
    return out


def pool_grad(g: Tensor, chosen: Tensor, height: int, width: int) -> Tensor:
    g, chosen = g.contiguous(), chosen.contiguous()
    lanes, batch, rows, columns, outputs = g.shape
    make = g.new_zeros if height % 2 or width % 2 else g.new_empty
    out = make(lanes, batch, height, width, outputs)
    grid, block = _by_row(lanes * batch * rows, columns * outputs)
    _pool_grad[grid](g, chosen, out, height, width, outputs, block)
    return out


def _by_row(rows: int, width: int) -> tuple[tuple[int], int]:
    """Return the grid of a kernel in which programs have blocks of a row each, and the size of a block."""
    block = min(1024, triton.next_power_of_2(width))
    return (rows * triton.cdiv(width, block),), block
