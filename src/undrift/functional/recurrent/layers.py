"""Recurrent layers that run as lanes.

`nn.GRU` and `nn.LSTM` have no vmap rule, so here are the same layers as tensor operations, which take their place where
a model is to run as lanes (`adopt`). As in cuDNN, the input's share of all time steps is one product, only the
recurrence is a loop, and the gradient of the hidden weights is one product over all steps at the end.

The derivative of a step is linear in the gradient `d` that reaches its hidden state, and all its factors are known
before the loop runs backwards. So the loop back is, for a GRU: multiply `d` by the factors, then one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from undrift.errors import UndriftError
from undrift.functional.triton import available
from undrift.functional.vmap import lanes_first

State = Any
"""Hidden states, layers × batch × units: one tensor, or for an LSTM the pair (h, c)."""


class _Loop(Function):
    """A loop over time. Tensors are lanes × time × batch × …, states and weights lanes × …; the weight comes first.

    With an axis for lanes of its own a loop needs no vmap inside it: one more axis of lanes is folded into that one,
    or, where the weight is common to all, into the batch. Every step is then one `baddbmm` and a few pointwise calls.
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


class _LoopBack(_Loop):
    """The way back, which is not differentiated again."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UndriftError('Recurrent layers have no second derivative in lanes; use engine="plain" for that.')


class _GRULoop(_Loop):
    """a = base + h·Wᵀ;  r, z = σ(a_r), σ(a_z);  n = tanh(inner + r·a_n);  h ← n + z·(h − n).

    `base` holds the input's share of r and z, and the hidden bias of n; `inner` the input's share of n.
    """

    @staticmethod
    def forward(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return _gru(weight, base, inner, h)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], inputs[3], *output)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> Any:
        weight, start, h, rz, n, a_n = ctx.saved_tensors
        before, (r, z) = _before(start, h), rz.chunk(2, -1)
        to_inner = (1 - z) * (1 - n * n)
        factors = torch.stack([to_inner * a_n * r * (1 - r), (before - n) * z * (1 - z), to_inner * r], -2)
        d, d_start = _GRULoopBack.run(weight, d_out, factors, z)
        d_base = (d.unsqueeze(-2) * factors).flatten(-2)
        return _weight_gradient(d_base, before), d_base, d * to_inner, d_start


class _GRULoopBack(_LoopBack):
    @staticmethod
    def forward(weight: Tensor, d_out: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return _gru_back(weight, d_out, factors, z)


@torch.library.custom_op("undrift::gru", mutates_args=())
def _gru(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if available(inner.device, inner.dtype):
        from undrift.functional.recurrent import kernels

        return kernels.gru(weight, base, inner, h)
    width, across, steps = h.shape[-1], weight.mT, []
    for base_t, inner_t in zip(base.unbind(1), inner.unbind(1), strict=True):
        a_rz, a_n = torch.baddbmm(base_t, h, across).split([2 * width, width], -1)
        rz = torch.sigmoid(a_rz)
        r, z = rz.split(width, -1)
        n = torch.tanh(torch.addcmul(inner_t, r, a_n))
        h = torch.lerp(n, h, z)
        steps.append((h, rz, n, a_n))
    out, all_rz, all_n, all_a_n = _over_time(steps)
    return out, all_rz, all_n, all_a_n


@_gru.register_fake
def _(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = inner.new_empty
    return like(inner.shape), like(*inner.shape[:-1], 2 * h.shape[-1]), like(inner.shape), like(inner.shape)


@torch.library.custom_op("undrift::gru_back", mutates_args=())
def _gru_back(weight: Tensor, d_out: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    if available(d_out.device, d_out.dtype):
        from undrift.functional.recurrent import kernels

        return kernels.gru_back(weight, d_out, factors, z)
    outs, steps = list(d_out.unbind(1)), []
    d, earlier = outs[-1], [torch.zeros_like(outs[0]), *outs[:-1]]
    for d_earlier, factors_t, z_t in reversed(list(zip(earlier, factors.unbind(1), z.unbind(1), strict=True))):
        steps.append((d,))
        d_a = (d.unsqueeze(-2) * factors_t).flatten(-2)
        d = torch.addcmul(d_earlier, d, z_t).baddbmm_(d_a, weight)  # in place, or it would copy first
    return _over_time(steps[::-1])[0], d


@_gru_back.register_fake
def _(weight: Tensor, d_out: Tensor, factors: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return d_out.new_empty(d_out.shape), d_out.new_empty(d_out[:, 0].shape)


class _LSTMLoop(_Loop):
    """a = base + h·Wᵀ;  i, f, o = σ(a_i), σ(a_f), σ(a_o);  g = tanh(a_g);  c ← f·c + i·g;  h ← o·tanh(c)."""

    @staticmethod
    def forward(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        out, cells, gates, g = _lstm(weight, base, h, c)
        return out, cells, gates, g, cells[:, -1].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:4])
        ctx.save_for_backward(inputs[0], *inputs[2:], *output[:4])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _c: Any, _gates: Any, _g: Any, d_end: Tensor) -> Any:
        weight, start, c_start, h, c, gates, g = ctx.saved_tensors
        (i, f, _, o), tanh = gates.chunk(4, -1), torch.tanh(c)
        of_c = [g * i * (1 - i), _before(c_start, c) * f * (1 - f), i * (1 - g * g)]
        factors = torch.stack([*of_c, tanh * o * (1 - o)], -2)
        d, d_c, d_start, d_c_start = _LSTMLoopBack.run(weight, d_out, d_end, factors, o * (1 - tanh * tanh), f)
        d_base = (torch.stack((d_c, d_c, d_c, d), -2) * factors).flatten(-2)
        return _weight_gradient(d_base, _before(start, h)), d_base, d_start, d_c_start


class _LSTMLoopBack(_LoopBack):
    @staticmethod
    def forward(
        weight: Tensor, d_out: Tensor, d_c: Tensor, factors: Tensor, to_c: Tensor, f: Tensor
    ) -> tuple[Tensor, ...]:
        d, d_cells, d_start = _lstm_back(weight, d_out, d_c, factors, to_c, f)
        return d, d_cells, d_start, d_cells[:, 0] * f[:, 0]


@torch.library.custom_op("undrift::lstm", mutates_args=())
def _lstm(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if available(base.device, base.dtype):
        from undrift.functional.recurrent import kernels

        return kernels.lstm(weight, base, h, c)
    width, across, steps = h.shape[-1], weight.mT, []
    for base_t in base.unbind(1):
        a = torch.baddbmm(base_t, h, across)
        gates = torch.sigmoid(a)  # g's quarter too: one call is cheaper than three
        i, f, _, o = gates.split(width, -1)
        g = torch.tanh(a.narrow(-1, 2 * width, width))
        c = torch.addcmul(i * g, f, c)
        h = o * torch.tanh(c)
        steps.append((h, c, gates, g))
    out, cells, all_gates, all_g = _over_time(steps)
    return out, cells, all_gates, all_g


@_lstm.register_fake
def _(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    narrow = (*base.shape[:3], h.shape[-1])
    return base.new_empty(narrow), base.new_empty(narrow), base.new_empty(base.shape), base.new_empty(narrow)


@torch.library.custom_op("undrift::lstm_back", mutates_args=())
def _lstm_back(
    weight: Tensor, d_out: Tensor, d_c: Tensor, factors: Tensor, to_c: Tensor, f: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if available(d_out.device, d_out.dtype):
        from undrift.functional.recurrent import kernels

        return kernels.lstm_back(weight, d_out, d_c, factors, to_c, f)
    outs, steps = list(d_out.unbind(1)), []
    d, earlier = outs[-1], [torch.zeros_like(outs[0]), *outs[:-1]]
    known = list(zip(earlier, factors.unbind(1), to_c.unbind(1), f.unbind(1), strict=True))
    for d_earlier, factors_t, to_c_t, f_t in reversed(known):
        d_c = torch.addcmul(d_c, d, to_c_t)
        steps.append((d, d_c))
        d_a = (torch.stack((d_c, d_c, d_c, d), -2) * factors_t).flatten(-2)
        d, d_c = torch.baddbmm(d_earlier, d_a, weight), d_c * f_t
    all_d, all_d_c = _over_time(steps[::-1])
    return all_d, all_d_c, d


@_lstm_back.register_fake
def _(
    weight: Tensor, d_out: Tensor, d_c: Tensor, factors: Tensor, to_c: Tensor, f: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return d_out.new_empty(d_out.shape), d_out.new_empty(d_out.shape), d_c.new_empty(d_c.shape)


def _over_time(steps: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(each, 1) for each in zip(*steps, strict=True))


def _before(start: Tensor, states: Tensor) -> Tensor:
    """The state that each step started from."""
    return torch.cat([start.unsqueeze(1), states[:, :-1]], 1)


def _weight_gradient(d_base: Tensor, before: Tensor) -> Tensor:
    return d_base.flatten(1, 2).mT @ before.flatten(1, 2)


def _gru_layer(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor]:
    """One layer over x, time × batch × features; gives all its hidden states, and the last."""
    width = h.shape[-1]
    b_rz, b_n = b_hh.split([2 * width, width])
    of_rz, inner = F.linear(x, w_ih, b_ih + F.pad(b_rz, (0, width))).split([2 * width, width], -1)
    base = torch.cat([of_rz, b_n.expand_as(inner)], -1)
    out = _GRULoop.run(w_hh[None], base[None], inner[None], h[None])[0][0]
    return out, out[-1]


def _lstm_layer(
    x: Tensor, state: tuple[Tensor, Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    base = F.linear(x, w_ih, b_ih + b_hh)
    out, _, _, _, c = _LSTMLoop.run(w_hh[None], base[None], state[0][None], state[1][None])
    return out[0], (out[0, -1], c[0])


def gru(
    x: Tensor,
    state: Tensor,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """`torch.gru`, for layers with biases, in one direction and without dropout. Watchers see it as torch's."""
    settings = (has_biases, num_layers, dropout, training, bidirectional, batch_first)
    if has_torch_function(tensors := (x, state, *weights)):
        return handle_torch_function(gru, tensors, x, state, weights, *settings)
    out, ends = _layers(_gru_layer, x, state.unbind(0), weights, *settings)
    return out, torch.stack(ends)


def lstm(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm`, for layers with biases, in one direction and without dropout. Watchers see it as torch's."""
    settings = (has_biases, num_layers, dropout, training, bidirectional, batch_first)
    if has_torch_function(tensors := (x, *state, *weights)):
        return handle_torch_function(lstm, tensors, x, state, weights, *settings)
    pairs = list(zip(*(s.unbind(0) for s in state), strict=True))
    out, ends = _layers(_lstm_layer, x, pairs, weights, *settings)
    return out, torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends])


def _layers(
    layer: Callable[..., tuple[Tensor, Any]],
    x: Tensor,
    states: Sequence[State],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[Any]]:
    """Layer upon layer, time first in between."""
    if not has_biases or bidirectional or (dropout and training):
        raise UndriftError(
            'In lanes recurrent layers have biases, one direction and no dropout; use engine="plain" for others.'
        )
    x = x.transpose(0, 1) if batch_first else x
    ends = []
    for i in range(num_layers):
        x, end = layer(x, states[i], *weights[4 * i : 4 * i + 4])
        ends.append(end)
    return x.transpose(0, 1) if batch_first else x, ends


class GRU(nn.GRU):
    """An `nn.GRU` that runs as lanes (Cho et al., 2014; torch's form of the equations)."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gru(x, _zeros(self, x) if state is None else state, *_settings(self))


class LSTM(nn.LSTM):
    """An `nn.LSTM` that runs as lanes (Hochreiter and Schmidhuber, 1997)."""

    def forward(  # type: ignore[override]
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, h, c = lstm(x, (_zeros(self, x), _zeros(self, x)) if state is None else state, *_settings(self))
        return out, (h, c)


def _zeros(layer: nn.RNNBase, x: Tensor) -> Tensor:
    if x.dim() != 3:
        raise ValueError("a recurrent layer in lanes reads batches of sequences")
    return x.new_zeros(layer.num_layers, x.shape[0 if layer.batch_first else 1], layer.hidden_size)


def _settings(layer: nn.RNNBase) -> tuple[Any, ...]:
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    return weights, layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional, layer.batch_first


OURS: dict[type[nn.Module], type[nn.Module]] = {nn.GRU: GRU, nn.LSTM: LSTM}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}


def adopt(module: nn.Module) -> None:
    """Let torch's recurrent layers run as lanes, those that the loops above can stand for."""
    for layer in module.modules():
        if type(layer) in OURS and _plain(layer):
            layer.__class__ = OURS[type(layer)]


def release(module: nn.Module) -> None:
    """Make them torch's own again."""
    for layer in module.modules():
        layer.__class__ = THEIRS.get(type(layer), type(layer))


def _plain(layer: Any) -> bool:
    between = layer.dropout and layer.num_layers > 1
    return layer.bias and not layer.bidirectional and not between and not layer.proj_size
