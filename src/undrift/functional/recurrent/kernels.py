"""Steps of recurrent layers on a GPU, each a kernel of its own: kernels in Triton.

A step's product with the hidden weights and everything after it are one kernel, which writes straight into the tensors
over all time. What the tensors are and what is computed is in `layers.py`; sums are in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from undrift.functional.triton import dot_precision, pipeline_stages, shared_memory


@triton.jit
def _sigmoid(a):
    return 1 / (1 + tl.exp(-a))


@triton.jit
def _tanh(a):
    return 2 / (1 + tl.exp(-2 * a)) - 1


@triton.jit
def _place(batch, H: tl.constexpr, BB: tl.constexpr, BU: tl.constexpr):
    """A program's lane, its samples and units, which of them exist, and where they lie in batch × units."""
    lane = tl.program_id(0).to(tl.int64)
    rows, units = tl.program_id(1) * BB + tl.arange(0, BB), tl.program_id(2) * BU + tl.arange(0, BU)
    in_batch, in_width = rows < batch, units < H
    there, at = in_batch[:, None] & in_width[None], rows[:, None] * H + units[None]
    return lane, rows, units, in_batch, in_width, there, at


@triton.jit
def _read(at, there):
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _through_gate(
    total, sent, across, factors, rows, units, k, inside, in_width, gate: tl.constexpr, GATES: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """total + (sent · factors_g) · W_g, over the units k."""
    f = _read(factors + rows[:, None] * (GATES * H) + gate * H + k[None], inside)
    at = across + units[None] * (GATES * H) + gate * H + k[:, None]
    w = tl.load(at, mask=in_width[None] & (k < H)[:, None], other=0.0)
    return tl.dot((sent * f).to(w.dtype), w, total, input_precision=P)


@triton.jit
def _gru_step(
    weight, base, inner, before, before_lane, h, rz, n, a_n, step, batch, TIME: tl.constexpr, H: tl.constexpr,
    BB: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    lane, rows, units, in_batch, in_width, there, at = _place(batch, H, BB, BU)
    before += lane * before_lane
    weight += lane * 3 * H * H
    now = (lane * TIME + step) * batch
    base += now * 3 * H + rows[:, None] * (3 * H) + units[None]
    kind = h.dtype.element_ty
    a_r = _read(base, there)
    a_z = _read(base + H, there)
    a_c = _read(base + 2 * H, there)
    for begin in range(0, H, BK):
        k = begin + tl.arange(0, BK)
        old = tl.load(before + rows[:, None] * H + k[None], mask=in_batch[:, None] & (k < H)[None], other=0.0)
        own, inside = weight + units[None] * H + k[:, None], in_width[None] & (k < H)[:, None]
        a_r = tl.dot(old, tl.load(own, mask=inside, other=0.0), a_r, input_precision=P)
        a_z = tl.dot(old, tl.load(own + H * H, mask=inside, other=0.0), a_z, input_precision=P)
        a_c = tl.dot(old, tl.load(own + 2 * H * H, mask=inside, other=0.0), a_c, input_precision=P)
    r, z = _sigmoid(a_r), _sigmoid(a_z)
    new = _tanh(_read(inner + now * H + at, there) + r * a_c)
    last = _read(before + at, there)
    tl.store(h + now * H + at, (new + z * (last - new)).to(kind), mask=there)
    tl.store(n + now * H + at, new.to(kind), mask=there)
    tl.store(a_n + now * H + at, a_c.to(kind), mask=there)
    both = rz + now * 2 * H + rows[:, None] * (2 * H) + units[None]
    tl.store(both, r.to(kind), mask=there)
    tl.store(both + H, z.to(kind), mask=there)


@triton.jit
def _gru_step_back(
    across, earlier, earlier_lane, factors, z, d, out, out_lane, step, batch, TIME: tl.constexpr, H: tl.constexpr,
    FIRST: tl.constexpr, BB: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """out = earlier + d·z + Σ_g (d · factors_g) · W_g, for one step back."""
    lane, rows, units, in_batch, in_width, there, at = _place(batch, H, BB, BU)
    now = (lane * TIME + step) * batch
    d += now * H
    factors += now * 3 * H
    across += lane * 3 * H * H
    total = _read(d + at, there)
    total *= _read(z + now * H + at, there)
    if not FIRST:
        total += _read(earlier + lane * earlier_lane + at, there)
    for begin in range(0, H, BK):
        k = begin + tl.arange(0, BK)
        inside = in_batch[:, None] & (k < H)[None]
        own = _read(d + rows[:, None] * H + k[None], inside)
        for gate in tl.static_range(3):
            total = _through_gate(total, own, across, factors, rows, units, k, inside, in_width, gate, 3, H, P)
    tl.store(out + lane * out_lane + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _lstm_step(
    weight, base, before, before_lane, c_before, c_lane, h, c, gates, g, step, batch,
    TIME: tl.constexpr, H: tl.constexpr, BB: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    lane, rows, units, in_batch, in_width, there, at = _place(batch, H, BB, BU)
    before += lane * before_lane
    weight += lane * 4 * H * H
    now = (lane * TIME + step) * batch
    wide = now * 4 * H + rows[:, None] * (4 * H) + units[None]
    a_i = _read(base + wide, there)
    a_f = _read(base + wide + H, there)
    a_g = _read(base + wide + 2 * H, there)
    a_o = _read(base + wide + 3 * H, there)
    for begin in range(0, H, BK):
        k = begin + tl.arange(0, BK)
        old = tl.load(before + rows[:, None] * H + k[None], mask=in_batch[:, None] & (k < H)[None], other=0.0)
        own, inside = weight + units[None] * H + k[:, None], in_width[None] & (k < H)[:, None]
        a_i = tl.dot(old, tl.load(own, mask=inside, other=0.0), a_i, input_precision=P)
        a_f = tl.dot(old, tl.load(own + H * H, mask=inside, other=0.0), a_f, input_precision=P)
        a_g = tl.dot(old, tl.load(own + 2 * H * H, mask=inside, other=0.0), a_g, input_precision=P)
        a_o = tl.dot(old, tl.load(own + 3 * H * H, mask=inside, other=0.0), a_o, input_precision=P)
    i, f, o, new = _sigmoid(a_i), _sigmoid(a_f), _sigmoid(a_o), _tanh(a_g)
    cell = f * _read(c_before + lane * c_lane + at, there) + i * new
    kind = h.dtype.element_ty
    tl.store(h + now * H + at, (o * _tanh(cell)).to(kind), mask=there)
    tl.store(c + now * H + at, cell.to(kind), mask=there)
    tl.store(g + now * H + at, new.to(kind), mask=there)
    tl.store(gates + wide, i.to(kind), mask=there)
    tl.store(gates + wide + H, f.to(kind), mask=there)
    tl.store(gates + wide + 2 * H, _sigmoid(a_g).to(kind), mask=there)
    tl.store(gates + wide + 3 * H, o.to(kind), mask=there)


@triton.jit
def _cell(later, forget, d, to_c, at, there, LAST: tl.constexpr):
    """The gradient of a cell: later · forget + d · to_c, or after the last step what it ended with."""
    cell = _read(later + at, there)
    if not LAST:
        cell *= _read(forget + at, there)
    return cell + _read(d + at, there) * _read(to_c + at, there)


@triton.jit
def _lstm_step_back(
    across, earlier, earlier_lane, factors, to_c, d, later, later_lane, forget, forget_lane, d_c, out, out_lane,
    step, batch, TIME: tl.constexpr, H: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    BB: tl.constexpr, BU: tl.constexpr, BK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """d_c = later · forget + d · to_c, and out = earlier + Σ_g ((d_c or d) · factors_g) · W_g, for one step back."""
    lane, rows, units, in_batch, in_width, there, at = _place(batch, H, BB, BU)
    now = (lane * TIME + step) * batch
    d += now * H
    to_c += now * H
    later += lane * later_lane
    forget += lane * forget_lane
    factors += now * 4 * H
    across += lane * 4 * H * H
    total = tl.zeros((BB, BU), tl.float32)
    if not FIRST:
        total += _read(earlier + lane * earlier_lane + at, there)
    for begin in range(0, H, BK):
        k = begin + tl.arange(0, BK)
        inside, place = in_batch[:, None] & (k < H)[None], rows[:, None] * H + k[None]
        own = _read(d + place, inside)
        cell = _cell(later, forget, d, to_c, place, inside, LAST)
        for gate in tl.static_range(4):
            sent = own if gate == 3 else cell
            total = _through_gate(total, sent, across, factors, rows, units, k, inside, in_width, gate, 4, H, P)
    kind = out.dtype.element_ty
    tl.store(out + lane * out_lane + at, total.to(kind), mask=there)
    tl.store(d_c + now * H + at, _cell(later, forget, d, to_c, at, there, LAST).to(kind), mask=there)


def _launch(like: Tensor, batch: int, width: int, reads: int, gates: int) -> tuple[Any, dict[str, Any]]:
    """The grid for a step of all lanes, and the sizes of a program's tile.

    In each turn of its loop a kernel reads `reads` tiles of samples × units, and the weights of so many gates.
    """
    rows, deep = min(64, max(16, triton.next_power_of_2(batch))), 64
    units = 16 if like.element_size() == 4 else 32
    grid = (len(like), triton.cdiv(batch, rows), triton.cdiv(width, units))
    turn = (reads * rows * deep + gates * deep * units) * like.element_size()
    fitting = min(3, 1 + 1024 * shared_memory(like.device) // turn)  # what is loaded ahead is in shared memory
    ahead = pipeline_stages(fitting, width * like.element_size())
    return grid, {"BB": rows, "BU": units, "BK": deep, "P": dot_precision(), "num_warps": 4, "num_stages": ahead}


def gru(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, base, inner, h = (t.contiguous() for t in (weight, base, inner, h))
    lanes, time, batch, width = inner.shape
    out, n, a_n = (torch.empty_like(inner) for _ in range(3))
    rz = inner.new_empty(lanes, time, batch, 2 * width)
    grid, tile = _launch(inner, batch, width, reads=1, gates=3)
    for step in range(time):
        before = out[:, step - 1] if step else h
        _gru_step[grid](
            weight, base, inner, before, before.stride(0), out, rz, n, a_n, step, batch, time, width, **tile
        )  # fmt: skip
    return out, rz, n, a_n


def gru_back(weight: Tensor, d_out: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    d_out, factors, z = (t.contiguous() for t in (d_out, factors, z))
    _, time, batch, width = d_out.shape
    across = weight.mT.contiguous()
    d, start = torch.empty_like(d_out), torch.empty_like(d_out[:, 0])
    d[:, -1] = d_out[:, -1]
    grid, tile = _launch(d_out, batch, width, reads=4, gates=3)
    for step in reversed(range(time)):
        earlier, out = d_out[:, step - 1], d[:, step - 1] if step else start
        _gru_step_back[grid](
            across, earlier, earlier.stride(0), factors, z, d, out, out.stride(0), step, batch, time, width, step == 0,
            **tile,
        )  # fmt: skip
    return d, start


def lstm(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, base, h, c = (t.contiguous() for t in (weight, base, h, c))
    lanes, time, batch, width = *base.shape[:3], h.shape[-1]
    out, cells, g = (base.new_empty(lanes, time, batch, width) for _ in range(3))
    gates = torch.empty_like(base)
    grid, tile = _launch(base, batch, width, reads=1, gates=4)
    for step in range(time):
        before, c_before = (out[:, step - 1], cells[:, step - 1]) if step else (h, c)
        _lstm_step[grid](
            weight, base, before, before.stride(0), c_before, c_before.stride(0), out, cells, gates, g, step, batch,
            time, width, **tile,
        )  # fmt: skip
    return out, cells, gates, g


def lstm_back(
    weight: Tensor, d_out: Tensor, d_end: Tensor, factors: Tensor, to_c: Tensor, f: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    d_out, d_end, factors, to_c, f = (t.contiguous() for t in (d_out, d_end, factors, to_c, f))
    _, time, batch, width = d_out.shape
    across = weight.mT.contiguous()
    d, d_c, start = torch.empty_like(d_out), torch.empty_like(d_out), torch.empty_like(d_end)
    d[:, -1] = d_out[:, -1]
    grid, tile = _launch(d_out, batch, width, reads=9, gates=4)
    for step in reversed(range(time)):
        earlier, out = d_out[:, step - 1], d[:, step - 1] if step else start
        last = step == time - 1
        later, forget = (d_end, f[:, 0]) if last else (d_c[:, step + 1], f[:, step + 1])
        _lstm_step_back[grid](
            across, earlier, earlier.stride(0), factors, to_c, d, later, later.stride(0), forget, forget.stride(0),
            d_c, out, out.stride(0), step, batch, time, width, step == 0, last, **tile,
        )  # fmt: skip
    return d, d_c, start
