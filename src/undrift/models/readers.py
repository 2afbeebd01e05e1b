"""Recurrent models: a GRU or LSTM, and a linear layer on its hidden state."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from undrift.errors import UndriftError, quoted


class Reader(nn.Module):
    """A recurrent layer, and a linear layer on its last hidden state, or on the mean of all.

    Samples are tokens, sequences of features, or spectrograms of 1 × features × time.
    """

    def __init__(self, rnn: nn.RNNBase, embedding: nn.Embedding | None, classes: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.rnn = rnn
        self.pool = "last"
        self.head = nn.Linear(rnn.hidden_size, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            if x.is_floating_point():
                raise UndriftError(f"This model reads tokens: x must hold whole numbers, such as int64, not {x.dtype}.")
            x = self.embedding(x.long())
        elif x.dim() == 4:
            x = x.squeeze(1).transpose(1, 2)
        hidden = self.rnn(x)[0]
        return self.head(hidden[:, -1] if self.pool == "last" else hidden.mean(1))


def gru_reader(
    classes: int,
    shape: tuple[int, ...],
    vocabulary: int | None = None,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """The GRU for Shakespeare in the paper on decaying K: embedding 8, two layers of 256, next-character prediction.

    Without a vocabulary, inputs are taken from the same characters as outputs.
    """
    if len(shape) == 1 and vocabulary is None:
        vocabulary = classes
    return _reader("gru", nn.GRU, classes, shape, vocabulary, embedding, hidden, layers)


def lstm_reader(
    classes: int,
    shape: tuple[int, ...],
    vocabulary: int | None = None,
    embedding: int = 64,
    hidden: int = 128,
    layers: int = 1,
    pool: str = "last",
    forget_bias: float | None = None,
) -> nn.Module:
    """An LSTM for words or spectrograms, as in 2D-LRD's experiments, which do not give its sizes.

    `pool` is `"last"` or `"mean"`: whether the last hidden state is classified or the mean over time. `forget_bias` is
    the initial bias of the forget gates; by default it is PyTorch's, which is close to 0, so that long texts are
    forgotten at first.
    """
    if len(shape) == 1 and vocabulary is None:
        raise UndriftError(
            f'The model "lstm" reads samples of shape {shape} as tokens, and needs to know how many different ones '
            "there are; pass vocabulary to models.get."
        )
    if pool not in ("last", "mean"):
        raise UndriftError(f'lstm(pool) must be "last" or "mean", not {quoted(pool)}.')
    number = isinstance(forget_bias, int | float) and not isinstance(forget_bias, bool) and math.isfinite(forget_bias)
    if not (number or forget_bias is None):
        raise UndriftError(f"lstm(forget_bias) must be a finite number, or None, not {quoted(forget_bias)}.")
    reader = _reader("lstm", nn.LSTM, classes, shape, vocabulary, embedding, hidden, layers)
    reader.pool = pool
    if forget_bias is not None:
        with torch.no_grad():
            for layer in range(layers):
                # The gates are in the order input, forget, cell, output, and their two biases are added.
                forget = slice(hidden, 2 * hidden)
                getattr(reader.rnn, f"bias_ih_l{layer}")[forget] = forget_bias
                getattr(reader.rnn, f"bias_hh_l{layer}")[forget] = 0
    return reader


def _reader(
    name: str,
    kind: type[nn.GRU] | type[nn.LSTM],
    classes: int,
    shape: tuple[int, ...],
    vocabulary: int | None,
    embedding: int,
    hidden: int,
    layers: int,
) -> Reader:
    spectrogram = len(shape) == 3 and shape[0] == 1
    if not (len(shape) in (1, 2) or spectrogram) or not math.prod(shape):
        raise UndriftError(
            f'The model "{name}" needs tokens of shape (time,), sequences of shape (time, features) or spectrograms of '
            f"shape (1, features, time), not samples of shape {shape}."
        )
    table = nn.Embedding(vocabulary, embedding) if len(shape) == 1 and vocabulary else None
    features = embedding if table is not None else shape[1]
    return Reader(kind(features, hidden, layers, batch_first=True), table, classes)
