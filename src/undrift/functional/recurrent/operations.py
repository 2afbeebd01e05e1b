"""Loops over time of GRU and LSTM layers, for all lanes at once, with their gradients.

As in cuDNN, the input's contribution to all time steps is one matrix product outside the loop (`layers.py`), only the
recurrence is a loop, and the gradient of the hidden weights is one product over all steps after it.

The derivative of a step is linear in the gradient `d` with respect to its hidden state, and all factors of it are known
before the backward loop begins. A step of the GRU's backward loop is therefore: multiply `d` by the factors, then one
matrix product.

The four operations are written here in plain torch, which is what runs on a CPU; on a GPU the kernels of `kernels.py`
compute the same. Tensors are lanes × time × batch × …, states lanes × batch × units, weights lanes × (gates · units) ×
units. `d_x` is the gradient with respect to x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from undrift.errors import UndriftError
from undrift.triton import available
from undrift.vmap import lanes_first


class Recurrence(Function):
    """A loop over time as an autograd function; the weight is its first argument.

    Since a loop has an axis of lanes of its own, it needs no vmap inside it: a vmapped axis is folded into the lanes
    or, if the weight is not vmapped, into the batch. Every step is then one `baddbmm` and a few pointwise operations.
    """

    @classmethod
    def run(cls, *tensors: Tensor) -> tuple[Tensor, ...]:
        return cls.apply(*tensors)  # type: ignore[no-untyped-call]

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> Any:
        size, own_weight = info.batch_size, in_dims[0] is not None

        def axis(dims: int) -> int:
            return 0 if own_weight else 1 if dims == 3 else 2

        def fold(tensor: Tensor, dim: int | None) -> Tensor:
            moved = lanes_first(tensor, dim, size)
            at = axis(moved.dim() - 1)
            return moved.movedim(0, at).flatten(at, at + 1)

        weight, *rest = args
        folded = [fold(tensor, dim) for tensor, dim in zip(rest, in_dims[1:], strict=True)]
        outs = cls.run(fold(weight, in_dims[0]) if own_weight else weight, *folded)
        dims = tuple(axis(out.dim()) for out in outs)
        return tuple(out.unflatten(at, (size, -1)) for out, at in zip(outs, dims, strict=True)), dims


class RecurrenceBackward(Recurrence):
    """The backward loop of a recurrence. It has no derivative of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UndriftError('Recurrent layers have no second derivative in lanes; use engine="plain" for that.')


class GRURecurrence(Recurrence):
    """a = base + h·Wᵀ;  r, z = σ(a_r), σ(a_z);  n = tanh(inner + r·a_n);  h ← n + z·(h − n).

    `base` is the input's contribution to r and z, and the hidden bias of n; `inner` is the input's contribution to n.
    """

    @staticmethod
    def forward(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return gru_forward(weight, base, inner, h)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], inputs[3], *output)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> Any:
        weight, start, h, rz, n, a_n = ctx.saved_tensors
        before, (r, z) = _states_before(start, h), rz.chunk(2, -1)
        to_inner = (1 - z) * (1 - n * n)
        factors = torch.stack([to_inner * a_n * r * (1 - r), (before - n) * z * (1 - z), to_inner * r], -2)
        d, d_start = GRURecurrenceBackward.run(weight, d_out, factors, z)
        d_base = (d.unsqueeze(-2) * factors).flatten(-2)
        return _weight_grad(d_base, before), d_base, d * to_inner, d_start


class GRURecurrenceBackward(RecurrenceBackward):
    @staticmethod
    def forward(weight: Tensor, d_out: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return gru_backward(weight, d_out, factors, z)


@torch.library.custom_op("undrift::gru_forward", mutates_args=())
def gru_forward(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `GRURecurrence` by its equations; returns h, r and z, n, and a_n of all steps."""
    if available(inner.device, inner.dtype):
        from undrift.functional.recurrent import kernels

        return kernels.gru_forward(weight, base, inner, h)
    width, weight_t, steps = h.shape[-1], weight.mT, []
    for base_t, inner_t in zip(base.unbind(1), inner.unbind(1), strict=True):
        a_rz, a_n = torch.baddbmm(base_t, h, weight_t).split([2 * width, width], -1)
        rz = torch.sigmoid(a_rz)
        r, z = rz.split(width, -1)
        n = torch.tanh(torch.addcmul(inner_t, r, a_n))
        h = torch.lerp(n, h, z)
        steps.append((h, rz, n, a_n))
    out, all_rz, all_n, all_a_n = _stack_steps(steps)
    return out, all_rz, all_n, all_a_n


@gru_forward.register_fake
def _(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = inner.new_empty
    return like(inner.shape), like(*inner.shape[:-1], 2 * h.shape[-1]), like(inner.shape), like(inner.shape)


@torch.library.custom_op("undrift::gru_backward", mutates_args=())
def gru_backward(weight: Tensor, d_out: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """d ← d_out + d·z + (d·factors)·W, backwards in time; returns d of all steps and of the initial state."""
    if available(d_out.device, d_out.dtype):
        from undrift.functional.recurrent import kernels

        return kernels.gru_backward(weight, d_out, factors, z)
    outs, steps = list(d_out.unbind(1)), []
    d, previous = outs[-1], [torch.zeros_like(outs[0]), *outs[:-1]]
    for d_previous, factors_t, z_t in reversed(list(zip(previous, factors.unbind(1), z.unbind(1), strict=True))):
        steps.append((d,))
        d_a = (d.unsqueeze(-2) * factors_t).flatten(-2)
        d = torch.addcmul(d_previous, d, z_t).baddbmm_(d_a, weight)  # in place, which saves a copy
    return _stack_steps(steps[::-1])[0], d


@gru_backward.register_fake
def _(weight: Tensor, d_out: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return d_out.new_empty(d_out.shape), d_out.new_empty(d_out[:, 0].shape)


class LSTMRecurrence(Recurrence):
    """a = base + h·Wᵀ;  i, f, o = σ(a_i), σ(a_f), σ(a_o);  g = tanh(a_g);  c ← f·c + i·g;  h ← o·tanh(c).

    `base` is the input's contribution to all gates, and the biases.
    """

    @staticmethod
    def forward(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        out, cells, gates, g = lstm_forward(weight, base, h, c)
        return out, cells, gates, g, cells[:, -1].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:4])
        ctx.save_for_backward(inputs[0], *inputs[2:], *output[:4])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _c: Any, _gates: Any, _g: Any, d_c_end: Tensor) -> Any:
        weight, start, c_start, h, c, gates, g = ctx.saved_tensors
        (i, f, _, o), tanh = gates.chunk(4, -1), torch.tanh(c)
        of_c = [g * i * (1 - i), _states_before(c_start, c) * f * (1 - f), i * (1 - g * g)]
        factors, to_c = torch.stack([*of_c, tanh * o * (1 - o)], -2), o * (1 - tanh * tanh)
        d, d_c, d_start, d_c_start = LSTMRecurrenceBackward.run(weight, d_out, d_c_end, factors, to_c, f)
        d_base = (torch.stack((d_c, d_c, d_c, d), -2) * factors).flatten(-2)
        return _weight_grad(d_base, _states_before(start, h)), d_base, d_start, d_c_start


class LSTMRecurrenceBackward(RecurrenceBackward):
    @staticmethod
    def forward(
        weight: Tensor, d_out: Tensor, d_c_end: Tensor, factors: Tensor, to_c: Tensor, f: Tensor
    ) -> tuple[Tensor, ...]:
        d, d_cells, d_start = lstm_backward(weight, d_out, d_c_end, factors, to_c, f)
        return d, d_cells, d_start, d_cells[:, 0] * f[:, 0]


@torch.library.custom_op("undrift::lstm_forward", mutates_args=())
def lstm_forward(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `LSTMRecurrence` by its equations; returns h, c, σ(a) and g of all steps."""
    if available(base.device, base.dtype):
        from undrift.functional.recurrent import kernels

        return kernels.lstm_forward(weight, base, h, c)
    width, weight_t, steps = h.shape[-1], weight.mT, []
    for base_t in base.unbind(1):
        a = torch.baddbmm(base_t, h, weight_t)
        gates = torch.sigmoid(a)  # also of a_g, which is not needed: one call is cheaper than three
        i, f, _, o = gates.split(width, -1)
        g = torch.tanh(a.narrow(-1, 2 * width, width))
        c = torch.addcmul(i * g, f, c)
        h = o * torch.tanh(c)
        steps.append((h, c, gates, g))
    out, cells, all_gates, all_g = _stack_steps(steps)
    return out, cells, all_gates, all_g


@lstm_forward.register_fake
def _(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    narrow = (*base.shape[:3], h.shape[-1])
    return base.new_empty(narrow), base.new_empty(narrow), base.new_empty(base.shape), base.new_empty(narrow)


@torch.library.custom_op("undrift::lstm_backward", mutates_args=())
def lstm_backward(
    weight: Tensor, d_out: Tensor, d_c: Tensor, factors: Tensor, to_c: Tensor, f: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """d_c ← d_c·f + d·to_c;  d ← d_out + ((d_c, d_c, d_c, d)·factors)·W, backwards in time.

    `d_c` is the gradient with respect to the last cell state. Returns d and d_c of all steps, and d of the initial
    state.
    """
    if available(d_out.device, d_out.dtype):
        from undrift.functional.recurrent import kernels

        return kernels.lstm_backward(weight, d_out, d_c, factors, to_c, f)
    outs, steps = list(d_out.unbind(1)), []
    d, previous = outs[-1], [torch.zeros_like(outs[0]), *outs[:-1]]
    known = list(zip(previous, factors.unbind(1), to_c.unbind(1), f.unbind(1), strict=True))
    for d_previous, factors_t, to_c_t, f_t in reversed(known):
        d_c = torch.addcmul(d_c, d, to_c_t)
        steps.append((d, d_c))
        d_a = (torch.stack((d_c, d_c, d_c, d), -2) * factors_t).flatten(-2)
        d, d_c = torch.baddbmm(d_previous, d_a, weight), d_c * f_t
    all_d, all_d_c = _stack_steps(steps[::-1])
    return all_d, all_d_c, d


@lstm_backward.register_fake
def _(
    weight: Tensor, d_out: Tensor, d_c: Tensor, factors: Tensor, to_c: Tensor, f: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return d_out.new_empty(d_out.shape), d_out.new_empty(d_out.shape), d_c.new_empty(d_c.shape)


def _stack_steps(steps: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(each, 1) for each in zip(*steps, strict=True))


def _states_before(start: Tensor, states: Tensor) -> Tensor:
    """Return the state that each step started from."""
    return torch.cat([start.unsqueeze(1), states[:, :-1]], 1)


def _weight_grad(d_base: Tensor, before: Tensor) -> Tensor:
    """Return the gradient of the hidden weights, summed over time and batch in one product."""
    return d_base.flatten(1, 2).mT @ before.flatten(1, 2)
