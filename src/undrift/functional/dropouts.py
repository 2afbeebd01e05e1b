"""Dropout in all its forms as functions of a key: of tensors, of attention, between recurrent layers.

As in `distributions.py`, each function takes `draw` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.functional.distributions import Draw, exact
from undrift.random import keep_mask, uniform

SELU_LOW = -1.0507009873554805 * 1.6732632423543772
"""SELU's lower limit."""


# ---- of a tensor ---------------------------------------------------------------------------------------------------


def _drop(draw: Draw, x: Tensor, shape: Sequence[int], p: float, training: bool, inplace: bool) -> Tensor:
    """x / (1 − p) with probability 1 − p, else 0; the mask has this shape and spreads to that of x."""
    if not training or p == 0:
        return x
    dropped = torch.zeros_like(x) if p >= 1 else torch.where(draw(keep_mask, shape, p), x / (1 - p), 0.0)
    return x.copy_(dropped) if inplace else dropped


def _alpha_drop(draw: Draw, x: Tensor, shape: Sequence[int], p: float, training: bool, inplace: bool) -> Tensor:
    """Sets dropped entries to SELU's lower limit, then restores mean and variance (Klambauer et al., 2017)."""
    if not training or p == 0:
        return x
    if p >= 1:
        dropped = torch.zeros_like(x)
    else:
        a = ((1 - p) * (1 + p * SELU_LOW * SELU_LOW)) ** -0.5
        dropped = torch.where(draw(keep_mask, shape, p), x, SELU_LOW) * a - a * p * SELU_LOW
    return x.copy_(dropped) if inplace else dropped


def _entries(x: Tensor) -> Sequence[int]:
    return x.shape


def _channels(x: Tensor) -> Sequence[int]:
    """Return one entry per channel: the mask spans the first two axes, or of two axes the first."""
    first = 1 if x.dim() == 2 else 2
    return (*x.shape[:first], *[1] * (x.dim() - first))


def _features(x: Tensor) -> Sequence[int]:
    """Return one entry per feature, along the first two axes."""
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def _of(kind: Callable[..., Tensor], mask: Callable[[Tensor], Sequence[int]], always: bool = False) -> Any:
    """Run a dropout function of `torch.nn.functional`, or one of `torch`, which writes in place or never does."""

    def function(
        draw: Draw, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = always, **named: Any
    ) -> Tensor:
        return kind(draw, input, mask(input), p, named.get("train", training), inplace)

    return function


def _alpha_dropout(draw: Draw, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return _alpha_drop(draw, input, input.shape, p, training, inplace)


def _feature_alpha_dropout(
    draw: Draw, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return _alpha_drop(draw, input, _features(input), p, training, inplace)


def _rrelu(
    draw: Draw,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    **_: Any,
) -> Tensor:
    """Below 0, a slope drawn from [lower, upper) in training; their mean in evaluation (Xu et al., 2015)."""
    slope: Any = (lower + upper) / 2
    if training:
        slope = (draw(uniform, input.shape, exact(input.dtype)) * (upper - lower) + lower).to(input.dtype)
    found = torch.where(input > 0, input, input * slope)
    return input.copy_(found) if inplace else found


def _fractional(pool: Any, axes: int) -> Callable[..., Any]:
    """Fractional max pooling, which draws where its regions begin; those draws are an argument of torch's function."""

    def function(draw: Draw, input: Tensor, *args: Any, _random_samples: Tensor | None = None, **rest: Any) -> Any:
        batch = 1 if input.dim() == axes + 1 else input.shape[0]
        if _random_samples is None:
            _random_samples = draw(uniform, (batch, input.shape[-axes - 1], axes), input.dtype)
        return pool(input, *args, _random_samples=_random_samples, **rest)

    return function


# ---- of attention --------------------------------------------------------------------------------------------------


def _attention(
    draw: Draw,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout(softmax(s·QKᵀ + M))·V, as torch defines it; without dropout, torch's kernel.

    The softmax of half-precision scores is taken in float32, as the kernels do. A query that may see no key gets 0.
    """
    if not dropout_p:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = (query @ key.mT).to(exact(query.dtype)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        earlier = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~earlier, -math.inf)
    blind = None
    if attn_mask is not None:
        allowed = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if allowed else scores + attn_mask.to(scores.dtype)
        blind = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(blind, 0.0)  # before the softmax, whose gradient would be NaN
    weights = torch.softmax(scores, -1)
    weights = weights if blind is None else weights.masked_fill(blind, 0.0)
    return _drop(draw, weights, weights.shape, dropout_p, True, False).to(query.dtype) @ value


# ---- between recurrent layers --------------------------------------------------------------------------------------


def recurrent(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`torch.lstm` or one of its kind, with keyed dropout: its layers one by one, and the dropout between them.

    So cuDNN, whose dropout draws from a state of its own that cannot be reseeded, draws nothing.
    """

    def drawn(draw: Draw, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        packed = len(args) == 9 and isinstance(args[3], list | tuple)
        if kwargs or len(args) != 9 or not (isinstance(args[2], list | tuple) or packed):
            return function(*args, **kwargs)
        count, dropout, training = args[5:8] if packed else args[4:7]
        if count == 1 or not dropout or not training:
            return function(*args)
        x, states, weights = args[0], *(args[2:4] if packed else args[1:3])
        each, ends = len(weights) // count, []
        for i in range(count):
            x = _drop(draw, x, x.shape, dropout, True, False) if i else x
            own = weights[i * each : (i + 1) * each]
            of_layer = (_part(states, i, count), own)
            if packed:
                x, *end = function(x, args[1], *of_layer, args[4], 1, 0.0, training, args[8])
            else:
                x, *end = function(x, *of_layer, args[3], 1, 0.0, training, *args[7:])
            ends.append(end)
        return x, *(torch.cat(of_all) for of_all in zip(*ends, strict=True))

    return drawn


def _part(states: Any, i: int, count: int) -> Any:
    """Return the i-th layer's own of hidden states, layers · directions × batch × units; of an LSTM's pair, a pair."""
    if isinstance(states, list | tuple):
        return tuple(_part(state, i, count) for state in states)
    return states.chunk(count)[i]


_dropout, _channel_dropout = _of(_drop, _entries), _of(_drop, _channels)

DROPOUTS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    F.dropout1d: _channel_dropout,
    F.dropout2d: _channel_dropout,
    F.dropout3d: _channel_dropout,
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _feature_alpha_dropout,
    torch.dropout: _dropout,
    torch.dropout_: _of(_drop, _entries, always=True),
    torch.feature_dropout: _of(_drop, _features),
    torch.feature_dropout_: _of(_drop, _features, always=True),
    torch.alpha_dropout: _of(_alpha_drop, _entries),
    torch.alpha_dropout_: _of(_alpha_drop, _entries, always=True),
    torch.feature_alpha_dropout: _of(_alpha_drop, _features),
    torch.feature_alpha_dropout_: _of(_alpha_drop, _features, always=True),
    F.rrelu: _rrelu,
    torch.rrelu: _rrelu,
    torch.rrelu_: partial(_rrelu, inplace=True),
    F.fractional_max_pool2d: _fractional(F.fractional_max_pool2d, 2),
    F.fractional_max_pool2d_with_indices: _fractional(F.fractional_max_pool2d_with_indices, 2),
    F.fractional_max_pool3d: _fractional(F.fractional_max_pool3d, 3),
    F.fractional_max_pool3d_with_indices: _fractional(F.fractional_max_pool3d_with_indices, 3),
    F.scaled_dot_product_attention: _attention,
}
