"""GRU and LSTM layers that run under vmap.

`nn.GRU` and `nn.LSTM` have no vmap rule. The layers here compute the same with the loops of `operations.py`, which have
one, and take the place of torch's in a model that is to run as lanes (`adopt`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from undrift.errors import UndriftError
from undrift.functional.recurrent.operations import GRURecurrence, LSTMRecurrence

State = Any
"""Hidden states, layers × batch × units: one tensor, or for an LSTM the pair (h, c)."""


class Settings(NamedTuple):
    """The arguments of `torch.gru` and `torch.lstm` after input, state and weights, in their order."""

    has_biases: bool
    num_layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool


def gru(x: Tensor, state: Tensor, weights: Sequence[Tensor], *settings: Any) -> tuple[Tensor, Tensor]:
    """`torch.gru`, for layers with biases and in one direction; `settings` are those of `Settings`.

    Function modes see the call, and its arguments in the same positions, as they would see that of `torch.gru`.
    """
    if has_torch_function(tensors := (x, state, *weights)):
        return handle_torch_function(gru, tensors, x, state, weights, *settings)
    out, ends = _stacked(_gru_layer, x, state.unbind(0), weights, Settings(*settings))
    return out, torch.stack(ends)


def lstm(
    x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm`, in the same way as `gru`."""
    if has_torch_function(tensors := (x, *state, *weights)):
        return handle_torch_function(lstm, tensors, x, state, weights, *settings)
    pairs = list(zip(*(s.unbind(0) for s in state), strict=True))
    out, ends = _stacked(_lstm_layer, x, pairs, weights, Settings(*settings))
    return out, torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends])


def _stacked(
    layer: Callable[..., tuple[Tensor, Any]],
    x: Tensor,
    states: Sequence[State],
    weights: Sequence[Tensor],
    settings: Settings,
) -> tuple[Tensor, list[Any]]:
    """Apply the layers one after another. Returns the last one's states at all times, and the final state of each."""
    if not settings.has_biases or settings.bidirectional:
        raise UndriftError('In lanes recurrent layers have biases and one direction; use engine="plain" for others.')
    x = x.transpose(0, 1) if settings.batch_first else x
    ends = []
    for i in range(settings.num_layers):
        x = F.dropout(x, settings.dropout, settings.training) if i else x
        x, end = layer(x, states[i], *weights[4 * i : 4 * i + 4])
        ends.append(end)
    return x.transpose(0, 1) if settings.batch_first else x, ends


def _gru_layer(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor]:
    """One layer over x, time × batch × features. Returns the hidden states of all time steps, and the last one."""
    width = h.shape[-1]
    b_rz, b_n = b_hh.split([2 * width, width])
    of_rz, inner = F.linear(x, w_ih, b_ih + F.pad(b_rz, (0, width))).split([2 * width, width], -1)
    base = torch.cat([of_rz, b_n.expand_as(inner)], -1)
    out = GRURecurrence.run(w_hh[None], base[None], inner[None], h[None])[0][0]
    return out, out[-1]


def _lstm_layer(
    x: Tensor, state: tuple[Tensor, Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    base = F.linear(x, w_ih, b_ih + b_hh)
    out, _, _, _, c = LSTMRecurrence.run(w_hh[None], base[None], state[0][None], state[1][None])
    return out[0], (out[0, -1], c[0])


class GRU(nn.GRU):
    """An `nn.GRU` that runs under vmap (Cho et al., 2014; torch's form of the equations)."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gru(x, _zero_state(self, x) if state is None else state, _weights(self), *_settings(self))


class LSTM(nn.LSTM):
    """An `nn.LSTM` that runs under vmap (Hochreiter and Schmidhuber, 1997)."""

    def forward(  # type: ignore[override]
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        state = (_zero_state(self, x), _zero_state(self, x)) if state is None else state
        out, h, c = lstm(x, state, _weights(self), *_settings(self))
        return out, (h, c)


def _zero_state(layer: nn.RNNBase, x: Tensor) -> Tensor:
    if x.dim() != 3:
        raise ValueError("a recurrent layer in lanes reads batches of sequences")
    return x.new_zeros(layer.num_layers, x.shape[0 if layer.batch_first else 1], layer.hidden_size)


def _weights(layer: nn.RNNBase) -> list[Tensor]:
    return [getattr(layer, name) for name in layer._flat_weights_names]


def _settings(layer: nn.RNNBase) -> Settings:
    return Settings(
        layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional, layer.batch_first
    )  # fmt: skip


OURS: dict[type[nn.Module], type[nn.Module]] = {nn.GRU: GRU, nn.LSTM: LSTM}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}


def adopt(module: nn.Module) -> None:
    """Turn a module's GRU and LSTM layers, where they are supported, into those that run under vmap; in place."""
    for layer in module.modules():
        if type(layer) in OURS and _is_supported(layer):
            layer.__class__ = OURS[type(layer)]


def release(module: nn.Module) -> None:
    """Turn them into torch's own again, in place."""
    for layer in module.modules():
        layer.__class__ = THEIRS.get(type(layer), type(layer))


def _is_supported(layer: Any) -> bool:
    """Return whether a layer has biases, one direction and no projection."""
    return layer.bias and not layer.bidirectional and not layer.proj_size
