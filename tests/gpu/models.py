"""Small models, one of each kind that lanes can train, and data for them.

They are smooth (tanh, no max-pooling) but for one: where a ReLU switches or a maximum moves, rounding alone would grow
beyond the bounds of a comparison. In float32 that is rare. Widths are odd or small, away from the sizes of tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import undrift as ud

CLASSES, WORDS, TIME = 4, 9, 7


class Reader(nn.Module):
    """Tokens through an embedding, then a recurrent layer, then a linear one on its last output."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(WORDS, rnn.input_size), rnn
        self.head = nn.Linear(rnn.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(x))[0][:, -1])


class Attention(nn.Module):
    """One head of attention over tokens, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        scores = self.query(h) @ self.key(h).mT / math.sqrt(h.shape[-1])
        return self.head((scores.softmax(-1) @ self.value(h)).mean(1))


class Transformer(nn.Module):
    """torch's own transformer layer: its attention and layer norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.table(x)).mean(1))


class Bag(nn.Module):
    """The mean of tokens' embeddings, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)).mean(1))


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, CLASSES))


def _norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, CLASSES))


def _padded() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(8, 5, 5, padding=2), nn.Tanh(),
        nn.Flatten(), nn.Linear(80, CLASSES),
    )  # fmt: skip


def _strided() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.Tanh(), nn.Conv2d(6, 16, 2), nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def _pooled() -> nn.Module:
    """Convolutions that are fused with what follows, and at last one that is not, because of its window."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 20, 5, padding=2), nn.MaxPool2d(2),
        nn.ReLU(), nn.Conv2d(20, 7, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(7, 6, 2, padding=1),
        nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(6, CLASSES),
    )  # fmt: skip


POOLED = "convolution, pooled"
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "linear": (_linear, (6,)),
    "layer norm": (_norm, (6,)),
    "convolution, padded": (_padded, (3, 8, 8)),
    "convolution, strided": (_strided, (3, 8, 8)),
    POOLED: (_pooled, (3, 8, 8)),
    "GRU": (lambda: Reader(nn.GRU(5, 12, 2, batch_first=True)), None),
    "LSTM": (lambda: Reader(nn.LSTM(5, 12, batch_first=True)), None),
    "attention": (lambda: Attention(6), None),
    "transformer layer": (lambda: Transformer(8), None),
    "embedding": (lambda: Bag(6), None),
}
"""By name, what makes the model, and the shape of its samples; None for tokens."""


def make(name: str, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return MODELS[name][0]().to(dtype)


def data_for(name: str, sizes: tuple[int, ...]) -> ud.FederatedDataset:
    """Clients of these sizes, with inputs and labels that differ from client to client."""
    generator, shape = torch.Generator().manual_seed(1), MODELS[name][1]
    clients = []
    for i, n in enumerate(sizes):
        if shape is None:
            x = torch.randint(0, WORDS, (n, TIME), generator=generator)
        else:
            x = torch.randn(n, *shape, generator=generator, dtype=torch.float64) + 0.3 * (i % 3)
        skewed = torch.rand(n, generator=generator) ** (1 + i % 2)
        clients.append((x, (CLASSES * skewed).long().clamp(max=CLASSES - 1)))
    return ud.FederatedDataset.from_clients(clients)
