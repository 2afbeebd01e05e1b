"""The operations of `operations.py` as Triton kernels, one launch per time step.

A kernel computes a step's matrix product with the hidden weights and everything that follows it, and writes the results
into the tensors that hold all steps. `operations.py` says what the tensors are; sums are in float32.

H is the number of hidden units. A program computes a tile of BB samples × BU units of one lane, and takes the units
that it sums over BK at a time. `x_lane` is the stride of a tensor x from lane to lane.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from undrift.triton import dot_precision, pipeline_stages, shared_memory


@triton.jit
def _sigmoid(a):
    return 1 / (1 + tl.exp(-a))


@triton.jit
def _tanh(a):
    return 2 / (1 + tl.exp(-2 * a)) - 1


@triton.jit
def _tile(batch, H: tl.constexpr, BB: tl.constexpr, BU: tl.constexpr):
    """A program's lane, its samples and units, masks of both and of the tile, and the tile's offsets in batch × H."""
    lane = tl.program_id(0).to(tl.int64)
    samples, units = tl.program_id(1) * BB + tl.arange(0, BB), tl.program_id(2) * BU + tl.arange(0, BU)
    in_batch, in_units = samples < batch, units < H
    mask, at = in_batch[:, None] & in_units[None], samples[:, None] * H + units[None]
    return lane, samples, units, in_batch, in_units, mask, at


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add_gate(
    total, d, weight_t, factors, samples, units, k, mask, in_units, gate: tl.constexpr, GATES: tl.constexpr,
    H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total + (d · factors) · weight of one gate, summed over the units k."""
    f = _load(factors + samples[:, None] * (GATES * H) + gate * H + k[None], mask)
    at = weight_t + units[None] * (GATES * H) + gate * H + k[:, None]
    w = tl.load(at, mask=in_units[None] & (k < H)[:, None], other=0.0)
    return tl.dot((d * f).to(w.dtype), w, total, input_precision=PRECISION)


@triton.jit
def _gru_forward_step(
    weight, base, inner, before, before_lane, h, rz, n, a_n, step, batch, TIME: tl.constexpr, H: tl.constexpr,
    BB: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The next hidden state, from the one `before`; the gates and the candidate's preactivation, for the gradients."""
    lane, samples, units, in_batch, in_units, mask, at = _tile(batch, H, BB, BU)
    before += lane * before_lane
    weight += lane * 3 * H * H
    now = (lane * TIME + step) * batch
    base += now * 3 * H + samples[:, None] * (3 * H) + units[None]
    dtype = h.dtype.element_ty
    a_r = _load(base, mask)
    a_z = _load(base + H, mask)
    a_c = _load(base + 2 * H, mask)
    for first in range(0, H, BK):
        k = first + tl.arange(0, BK)
        h_k = tl.load(before + samples[:, None] * H + k[None], mask=in_batch[:, None] & (k < H)[None], other=0.0)
        w, w_mask = weight + units[None] * H + k[:, None], in_units[None] & (k < H)[:, None]
        a_r = tl.dot(h_k, tl.load(w, mask=w_mask, other=0.0), a_r, input_precision=PRECISION)
        a_z = tl.dot(h_k, tl.load(w + H * H, mask=w_mask, other=0.0), a_z, input_precision=PRECISION)
        a_c = tl.dot(h_k, tl.load(w + 2 * H * H, mask=w_mask, other=0.0), a_c, input_precision=PRECISION)
    r, z = _sigmoid(a_r), _sigmoid(a_z)
    new = _tanh(_load(inner + now * H + at, mask) + r * a_c)
    old = _load(before + at, mask)
    tl.store(h + now * H + at, (new + z * (old - new)).to(dtype), mask=mask)
    tl.store(n + now * H + at, new.to(dtype), mask=mask)
    tl.store(a_n + now * H + at, a_c.to(dtype), mask=mask)
    gates = rz + now * 2 * H + samples[:, None] * (2 * H) + units[None]
    tl.store(gates, r.to(dtype), mask=mask)
    tl.store(gates + H, z.to(dtype), mask=mask)


@triton.jit
def _gru_backward_step(
    weight_t, d_out, d_out_lane, factors, z, d, d_before, d_before_lane, step, batch, TIME: tl.constexpr,
    H: tl.constexpr, FIRST: tl.constexpr, BB: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """d_before = d_out + d · z + Σ over gates of (d · factors) · weight; `d_out` is the previous step's, if any."""
    lane, samples, units, in_batch, in_units, mask, at = _tile(batch, H, BB, BU)
    now = (lane * TIME + step) * batch
    d += now * H
    factors += now * 3 * H
    weight_t += lane * 3 * H * H
    total = _load(d + at, mask)
    total *= _load(z + now * H + at, mask)
    if not FIRST:
        total += _load(d_out + lane * d_out_lane + at, mask)
    for first in range(0, H, BK):
        k = first + tl.arange(0, BK)
        k_mask = in_batch[:, None] & (k < H)[None]
        d_k = _load(d + samples[:, None] * H + k[None], k_mask)
        for gate in tl.static_range(3):
            total = _add_gate(
                total, d_k, weight_t, factors, samples, units, k, k_mask, in_units, gate, 3, H, PRECISION
            )  # fmt: skip
    tl.store(d_before + lane * d_before_lane + at, total.to(d_before.dtype.element_ty), mask=mask)


@triton.jit
def _lstm_forward_step(
    weight, base, before, before_lane, c_before, c_before_lane, h, c, gates, g, step, batch, TIME: tl.constexpr,
    H: tl.constexpr, BB: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The next hidden and cell states, from those `before`; the gates, for the gradients."""
    lane, samples, units, in_batch, in_units, mask, at = _tile(batch, H, BB, BU)
    before += lane * before_lane
    weight += lane * 4 * H * H
    now = (lane * TIME + step) * batch
    wide = now * 4 * H + samples[:, None] * (4 * H) + units[None]
    a_i = _load(base + wide, mask)
    a_f = _load(base + wide + H, mask)
    a_g = _load(base + wide + 2 * H, mask)
    a_o = _load(base + wide + 3 * H, mask)
    for first in range(0, H, BK):
        k = first + tl.arange(0, BK)
        h_k = tl.load(before + samples[:, None] * H + k[None], mask=in_batch[:, None] & (k < H)[None], other=0.0)
        w, w_mask = weight + units[None] * H + k[:, None], in_units[None] & (k < H)[:, None]
        a_i = tl.dot(h_k, tl.load(w, mask=w_mask, other=0.0), a_i, input_precision=PRECISION)
        a_f = tl.dot(h_k, tl.load(w + H * H, mask=w_mask, other=0.0), a_f, input_precision=PRECISION)
        a_g = tl.dot(h_k, tl.load(w + 2 * H * H, mask=w_mask, other=0.0), a_g, input_precision=PRECISION)
        a_o = tl.dot(h_k, tl.load(w + 3 * H * H, mask=w_mask, other=0.0), a_o, input_precision=PRECISION)
    i, f, o, new = _sigmoid(a_i), _sigmoid(a_f), _sigmoid(a_o), _tanh(a_g)
    cell = f * _load(c_before + lane * c_before_lane + at, mask) + i * new
    dtype = h.dtype.element_ty
    tl.store(h + now * H + at, (o * _tanh(cell)).to(dtype), mask=mask)
    tl.store(c + now * H + at, cell.to(dtype), mask=mask)
    tl.store(g + now * H + at, new.to(dtype), mask=mask)
    tl.store(gates + wide, i.to(dtype), mask=mask)
    tl.store(gates + wide + H, f.to(dtype), mask=mask)
    tl.store(gates + wide + 2 * H, _sigmoid(a_g).to(dtype), mask=mask)
    tl.store(gates + wide + 3 * H, o.to(dtype), mask=mask)


@triton.jit
def _cell_grad(d_c_after, f_after, d, to_c, at, mask, LAST: tl.constexpr):
    """The gradient of a step's cell state: d_c_after · f_after + d · to_c. After the LAST step there is no gate f."""
    d_c = _load(d_c_after + at, mask)
    if not LAST:
        d_c *= _load(f_after + at, mask)
    return d_c + _load(d + at, mask) * _load(to_c + at, mask)


@triton.jit
def _lstm_backward_step(
    weight_t, d_out, d_out_lane, factors, to_c, d, d_c_after, d_c_after_lane, f_after, f_after_lane, d_c,
    d_before, d_before_lane, step, batch, TIME: tl.constexpr, H: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    BB: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_c by `_cell_grad`, and d_before = d_out + Σ over gates of (d_c, or for the output gate d, · factors) · weight.

    `d_out` is the previous step's, if any.
    """
    lane, samples, units, in_batch, in_units, mask, at = _tile(batch, H, BB, BU)
    now = (lane * TIME + step) * batch
    d += now * H
    to_c += now * H
    d_c_after += lane * d_c_after_lane
    f_after += lane * f_after_lane
    factors += now * 4 * H
    weight_t += lane * 4 * H * H
    total = tl.zeros((BB, BU), tl.float32)
    if not FIRST:
        total += _load(d_out + lane * d_out_lane + at, mask)
    for first in range(0, H, BK):
        k = first + tl.arange(0, BK)
        k_mask, k_at = in_batch[:, None] & (k < H)[None], samples[:, None] * H + k[None]
        d_k = _load(d + k_at, k_mask)
        d_c_k = _cell_grad(d_c_after, f_after, d, to_c, k_at, k_mask, LAST)
        for gate in tl.static_range(4):
            through = d_k if gate == 3 else d_c_k
            total = _add_gate(
                total, through, weight_t, factors, samples, units, k, k_mask, in_units, gate, 4, H, PRECISION
            )  # fmt: skip
    dtype = d_before.dtype.element_ty
    tl.store(d_before + lane * d_before_lane + at, total.to(dtype), mask=mask)
    tl.store(d_c + now * H + at, _cell_grad(d_c_after, f_after, d, to_c, at, mask, LAST).to(dtype), mask=mask)


def _launch(like: Tensor, batch: int, width: int, reads: int, gates: int) -> tuple[Any, dict[str, Any]]:
    """Return the grid for one step of all lanes, and the launch parameters.

    Each iteration of a kernel's loop loads `reads` tiles of samples × units, and the weights of `gates` gates.
    """
    samples, depth = min(64, max(16, triton.next_power_of_2(batch))), 64
    units = 16 if like.element_size() == 4 else 32
    grid = (len(like), triton.cdiv(batch, samples), triton.cdiv(width, units))
    loaded = (reads * samples * depth + gates * depth * units) * like.element_size()
    fitting = min(3, 1 + 1024 * shared_memory(like.device) // loaded)  # stages keep what they load in shared memory
    stages = pipeline_stages(fitting, width * like.element_size())
    tile = {"BB": samples, "BU": units, "BK": depth}
    return grid, {**tile, "PRECISION": dot_precision(), "num_warps": 4, "num_stages": stages}


def gru_forward(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, base, inner, h = (t.contiguous() for t in (weight, base, inner, h))
    lanes, time, batch, width = inner.shape
    out, n, a_n = (torch.empty_like(inner) for _ in range(3))
    rz = inner.new_empty(lanes, time, batch, 2 * width)
    grid, options = _launch(inner, batch, width, reads=1, gates=3)
    for step in range(time):
        before = out[:, step - 1] if step else h
        _gru_forward_step[grid](
            weight, base, inner, before, before.stride(0), out, rz, n, a_n, step, batch, time, width, **options
        )  # fmt: skip
    return out, rz, n, a_n


def gru_backward(weight: Tensor, d_out: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    d_out, factors, z = (t.contiguous() for t in (d_out, factors, z))
    _, time, batch, width = d_out.shape
    weight_t = weight.mT.contiguous()
    d, d_start = torch.empty_like(d_out), torch.empty_like(d_out[:, 0])
    d[:, -1] = d_out[:, -1]
    grid, options = _launch(d_out, batch, width, reads=4, gates=3)
    for step in reversed(range(time)):
        previous, d_before = d_out[:, step - 1], d[:, step - 1] if step else d_start
        _gru_backward_step[grid](
            weight_t, previous, previous.stride(0), factors, z, d, d_before, d_before.stride(0), step, batch,
            time, width, step == 0, **options,
        )  # fmt: skip
    return d, d_start


def lstm_forward(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, base, h, c = (t.contiguous() for t in (weight, base, h, c))
    lanes, time, batch, width = *base.shape[:3], h.shape[-1]
    out, cells, g = (base.new_empty(lanes, time, batch, width) for _ in range(3))
    gates = torch.empty_like(base)
    grid, options = _launch(base, batch, width, reads=1, gates=4)
    for step in range(time):
        before, c_before = (out[:, step - 1], cells[:, step - 1]) if step else (h, c)
        _lstm_forward_step[grid](
            weight, base, before, before.stride(0), c_before, c_before.stride(0), out, cells, gates, g, step, batch,
            time, width, **options,
        )  # fmt: skip
    return out, cells, gates, g


def lstm_backward(
    weight: Tensor, d_out: Tensor, d_c_end: Tensor, factors: Tensor, to_c: Tensor, f: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    d_out, d_c_end, factors, to_c, f = (t.contiguous() for t in (d_out, d_c_end, factors, to_c, f))
    _, time, batch, width = d_out.shape
    weight_t = weight.mT.contiguous()
    d, d_c, d_start = torch.empty_like(d_out), torch.empty_like(d_out), torch.empty_like(d_c_end)
    d[:, -1] = d_out[:, -1]
    grid, options = _launch(d_out, batch, width, reads=9, gates=4)
    for step in reversed(range(time)):
        previous, d_before = d_out[:, step - 1], d[:, step - 1] if step else d_start
        last = step == time - 1
        d_c_after, f_after = (d_c_end, f[:, 0]) if last else (d_c[:, step + 1], f[:, step + 1])
        _lstm_backward_step[grid](
            weight_t, previous, previous.stride(0), factors, to_c, d, d_c_after, d_c_after.stride(0),
            f_after, f_after.stride(0), d_c, d_before, d_before.stride(0), step, batch,
            time, width, step == 0, last, **options,
        )  # fmt: skip
    return d, d_c, d_start
