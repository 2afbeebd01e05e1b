"""CTC: a loss whose shapes depend on the lengths of a batch's targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift as ud
from tests.handloop import hand_loop
from tests.problems import distance

SIZES, FRAMES, LABELS = [5, 1, 7, 4], 8, 4
LOCAL = ud.Local(epochs=2, batch_size=3, lr=0.2)


def spoken(n: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Padded features with their numbers of frames; targets are (frames, length, labels…, padding)."""
    rng = np.random.default_rng(seed)
    frames, lengths = rng.integers(6, FRAMES + 1, n), rng.integers(1, LABELS - 1, n)
    targets = np.where(np.arange(LABELS) < lengths[:, None], rng.integers(1, 5, (n, LABELS)), 0)
    y = torch.tensor(np.concatenate([frames[:, None], lengths[:, None], targets], 1))
    return {"features": torch.tensor(rng.normal(size=(n, FRAMES, 3))), "frames": torch.tensor(frames)}, y


class Listener(nn.Module):
    """Scores of four letters and the blank, per frame; frames after the end hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.hidden, self.head = nn.Linear(3, 6).double(), nn.Linear(6, 5).double()

    def forward(self, features: Tensor, frames: Tensor | None = None) -> Tensor:
        if frames is not None:
            features = features * (torch.arange(FRAMES) < frames.unsqueeze(-1)).unsqueeze(-1)
        return self.head(self.hidden(features).tanh())


def ctc(z: Tensor, y: Tensor) -> Tensor:
    log_p = z.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_p, y[:, 2:], y[:, 0], y[:, 1], reduction="none", zero_infinity=True)


def alone(z: Tensor, y: Tensor) -> Tensor:
    """The same of one sample, cut to its own lengths."""
    frames, length = int(y[0]), int(y[1])
    log_p = z[:frames].log_softmax(-1).unsqueeze(1)
    return F.ctc_loss(log_p, y[None, 2 : 2 + length], y[:1], y[1:2], reduction="sum", zero_infinity=True)


def one_by_one(z: Tensor, y: Tensor) -> Tensor:
    """The mean over a batch's samples, each cut to its own lengths."""
    return torch.stack([alone(*pair) for pair in zip(z, y, strict=True)]).mean()


def clients(as_dict: bool) -> ud.FederatedDataset:
    pairs = [spoken(n, i) for i, n in enumerate(SIZES)]
    return ud.FederatedDataset.from_clients([(x if as_dict else x["features"], y) for x, y in pairs])


@pytest.mark.parametrize(
    ("engine", "as_dict"),
    [
        ("plain", False),
        ("plain", True),
        ("auto", False),
    ],
)
def test_training_is_that_of_a_loop_by_hand(engine, as_dict):
    data = clients(as_dict)
    found = ud.train(Listener(), data, rounds=2, local=LOCAL, loss=ctc, engine=engine).model
    assert distance(dict(found.named_parameters()), hand_loop(Listener(), data, LOCAL, 2, one_by_one)) < 1e-12
