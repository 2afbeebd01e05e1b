"""Recurrent layers that run as lanes, and the models built on them.

`nn.GRU` and `nn.LSTM` have no vmap rule, so here are the same layers (same equations, same parameters by name and
shape) as tensor operations. As in cuDNN, the input's share of all time steps is one product, only the recurrence is
a loop, and the gradient of the hidden weights is one product over all steps at the end.

The derivative of a step is linear in the gradient `d` that reaches its hidden state, and all its factors are known
before the loop runs backwards. So the loop back is, for a GRU: multiply `d` by the factors, then one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from undrift.errors import UndriftError

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
            moved = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
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
        raise UndriftError("undrift's recurrent layers have no second derivative; use nn.GRU or nn.LSTM for that.")


class _GRULoop(_Loop):
    """a = base + h·Wᵀ;  r, z = σ(a_r), σ(a_z);  n = tanh(inner + r·a_n);  h ← n + z·(h − n).

    `base` holds the input's share of r and z, and the hidden bias of n; `inner` the input's share of n.
    """

    @staticmethod
    def forward(weight: Tensor, base: Tensor, inner: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        width, across, steps = h.shape[-1], weight.mT, []
        for base_t, inner_t in zip(base.unbind(1), inner.unbind(1), strict=True):
            a_rz, a_n = torch.baddbmm(base_t, h, across).split([2 * width, width], -1)
            rz = torch.sigmoid(a_rz)
            r, z = rz.split(width, -1)
            n = torch.tanh(torch.addcmul(inner_t, r, a_n))
            h = torch.lerp(n, h, z)
            steps.append((h, rz, n, a_n))
        return _over_time(steps)

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
        outs, steps = list(d_out.unbind(1)), []
        d, earlier = outs[-1], [torch.zeros_like(outs[0]), *outs[:-1]]
        for d_earlier, factors_t, z_t in reversed(list(zip(earlier, factors.unbind(1), z.unbind(1), strict=True))):
            steps.append((d,))
            d_a = (d.unsqueeze(-2) * factors_t).flatten(-2)
            d = torch.addcmul(d_earlier, d, z_t).baddbmm_(d_a, weight)  # in place, or it would copy first
        return *_over_time(steps[::-1]), d


class _LSTMLoop(_Loop):
    """a = base + h·Wᵀ;  i, f, o = σ(a_i), σ(a_f), σ(a_o);  g = tanh(a_g);  c ← f·c + i·g;  h ← o·tanh(c)."""

    @staticmethod
    def forward(weight: Tensor, base: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        width, across, steps = h.shape[-1], weight.mT, []
        for base_t in base.unbind(1):
            a = torch.baddbmm(base_t, h, across)
            gates = torch.sigmoid(a)  # g's quarter too: one call is cheaper than three
            i, f, _, o = gates.split(width, -1)
            g = torch.tanh(a.narrow(-1, 2 * width, width))
            c = torch.addcmul(i * g, f, c)
            h = o * torch.tanh(c)
            steps.append((h, c, gates, g))
        return *_over_time(steps), c

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
        outs, steps = list(d_out.unbind(1)), []
        d, earlier = outs[-1], [torch.zeros_like(outs[0]), *outs[:-1]]
        known = list(zip(earlier, factors.unbind(1), to_c.unbind(1), f.unbind(1), strict=True))
        for d_earlier, factors_t, to_c_t, f_t in reversed(known):
            d_c = torch.addcmul(d_c, d, to_c_t)
            steps.append((d, d_c))
            d_a = (torch.stack((d_c, d_c, d_c, d), -2) * factors_t).flatten(-2)
            d, d_c = torch.baddbmm(d_earlier, d_a, weight), d_c * f_t
        return *_over_time(steps[::-1]), d, d_c


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
            "undrift's recurrent layers have biases, one direction and no dropout; use nn.GRU or nn.LSTM for others."
        )
    x = x.transpose(0, 1) if batch_first else x
    ends = []
    for i in range(num_layers):
        x, end = layer(x, states[i], *weights[4 * i : 4 * i + 4])
        ends.append(end)
    return x.transpose(0, 1) if batch_first else x, ends


class _Recurrent(nn.Module):
    """Parameters named, shaped, ordered and drawn as those of torch's own layer, so that state dicts exchange."""

    gates = 0

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.names: list[str] = []
        rows, bound = self.gates * hidden_size, 1 / math.sqrt(hidden_size)
        for i in range(num_layers):
            shapes = {
                f"weight_ih_l{i}": (rows, hidden_size if i else input_size),
                f"weight_hh_l{i}": (rows, hidden_size),
                f"bias_ih_l{i}": (rows,),
                f"bias_hh_l{i}": (rows,),
            }
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))
                self.names.append(name)

    def _run(self, function: Callable[..., Any], x: Tensor, state: State) -> Any:
        weights = [getattr(self, name) for name in self.names]
        return function(x, state, weights, True, self.num_layers, 0.0, self.training, False, True)

    def _zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.num_layers, len(x), self.hidden_size)


class GRU(_Recurrent):
    """`nn.GRU(…, batch_first=True)` that runs as lanes (Cho et al., 2014; torch's form of the equations)."""

    gates = 3

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._run(gru, x, self._zeros(x) if state is None else state)


class LSTM(_Recurrent):
    """`nn.LSTM(…, batch_first=True)` that runs as lanes (Hochreiter and Schmidhuber, 1997)."""

    gates = 4

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, h, c = self._run(lstm, x, (self._zeros(x), self._zeros(x)) if state is None else state)
        return out, (h, c)


class Reader(nn.Module):
    """A recurrent layer that reads a sample step by step, and a linear layer on its last hidden state.

    Samples are tokens, or a sequence of features, or a spectrogram 1 × features × time.
    """

    def __init__(self, rnn: _Recurrent, embedding: nn.Embedding | None, classes: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.rnn = rnn
        self.head = nn.Linear(rnn.hidden_size, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            if x.is_floating_point():
                raise UndriftError(f"This model reads tokens: x must hold whole numbers, such as int64, not {x.dtype}.")
            x = self.embedding(x.long())
        elif x.dim() == 4:
            x = x.squeeze(1).transpose(1, 2)
        return self.head(self.rnn(x)[0][:, -1])


def gru_reader(
    classes: int,
    shape: tuple[int, ...],
    vocabulary: int | None = None,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """The GRU that reads Shakespeare in the paper on decaying K: embedding 8, two layers of 256, one next character.

    Without a vocabulary, what is read and what comes next are the same characters.
    """
    if len(shape) == 1 and vocabulary is None:
        vocabulary = classes
    return _reader("gru", GRU, classes, shape, vocabulary, embedding, hidden, layers)


def lstm_reader(
    classes: int,
    shape: tuple[int, ...],
    vocabulary: int | None = None,
    embedding: int = 64,
    hidden: int = 128,
    layers: int = 1,
) -> nn.Module:
    """An LSTM for words or spectrograms, as in 2D-LRD's experiments, which do not give its sizes."""
    if len(shape) == 1 and vocabulary is None:
        raise UndriftError(
            f'The model "lstm" reads samples of shape {shape} as tokens, and must know how many different ones there '
            "are; give models.get a vocabulary."
        )
    return _reader("lstm", LSTM, classes, shape, vocabulary, embedding, hidden, layers)


def _reader(
    name: str,
    kind: type[_Recurrent],
    classes: int,
    shape: tuple[int, ...],
    vocabulary: int | None,
    embedding: int,
    hidden: int,
    layers: int,
) -> nn.Module:
    spectrogram = len(shape) == 3 and shape[0] == 1
    if not (len(shape) in (1, 2) or spectrogram) or not math.prod(shape):
        raise UndriftError(
            f'The model "{name}" needs tokens of shape (time,), sequences of shape (time, features) or spectrograms of '
            f"shape (1, features, time), not samples of shape {shape}."
        )
    table = nn.Embedding(vocabulary, embedding) if len(shape) == 1 and vocabulary else None
    features = embedding if table is not None else shape[1]
    return Reader(kind(features, hidden, layers), table, classes)
