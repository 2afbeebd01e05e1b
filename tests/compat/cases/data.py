"""Losses, labels, and the forms in which data come."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import undrift as ud
from tests.compat.case import Cases, Made
from tests.compat.cases.buffers import mlp
from tests.compat.samples import labels, numbers, series, two_inputs, vectors

CASES = Cases("data")
add = CASES.add
ROWS = vectors(8)
WEIGHTS = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def several(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8, generator=g), (torch.rand(n, 3, generator=g) < 0.4).float()


def focal(output: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(output, y, reduction="none")
    return (1 - (-ce).exp()) ** 2 * ce


def some_missing(missing: int, share: float = 0.3) -> Any:
    """Labels of which some are not known."""

    def make(g: Generator, n: int) -> tuple[Tensor, Tensor]:
        x, y = ROWS(g, n)
        return x, y.masked_fill(torch.rand(n, generator=g) < share, missing)

    return make


# Losses that are a mean over samples.
add('loss="mse", targets of shape (n, 1)', regressor, numbers(8), loss="mse", quick=True)
add('loss="mse", targets of shape (n,)', regressor, numbers(8, targets=()), loss="mse")
add('loss="binary_cross_entropy", several labels', mlp, several, loss="binary_cross_entropy")
add("a focal loss", mlp, ROWS, loss=focal)
add("label smoothing", mlp, ROWS, loss=nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none"))
add("class weights per sample", mlp, ROWS, loss=nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"))
add("ignore_index=-100", mlp, some_missing(-100), loss=nn.CrossEntropyLoss(reduction="none"))
add("labels of -1 for unlabelled samples", mlp, some_missing(-1), quick=True, loss=lambda z, y: F.cross_entropy(
    z, y, ignore_index=-1, reduction="none"
))  # fmt: skip
add("nn.HuberLoss", regressor, numbers(8), loss=lambda z, y: F.huber_loss(z, y, reduction="none").squeeze(1))
add("a triplet loss (three inputs)", lambda: Made(
    lambda m, a, b, c: F.triplet_margin_loss(m.net(a), m.net(b), m.net(c), reduction="none"), net=mlp()
), lambda g, n: (tuple(torch.randn(n, 8, generator=g) for _ in range(3)), torch.zeros(n, dtype=torch.int64)),
    loss=lambda output, y: output)  # fmt: skip
add("a model that returns its own loss per sample", lambda: Made(
    lambda m, x, labels: F.cross_entropy(m.net(x), labels, reduction="none"), net=mlp()
), lambda g, n: ({"x": torch.randn(n, 8, generator=g), "labels": labels(g, n, 3)}, torch.zeros(n, dtype=torch.int64)),
    loss=lambda output, y: output)  # fmt: skip

# torch's losses as they are.
add("nn.CrossEntropyLoss()", mlp, ROWS, loss=nn.CrossEntropyLoss(), quick=True)
add("nn.CrossEntropyLoss(weight)", mlp, ROWS, loss=nn.CrossEntropyLoss(weight=WEIGHTS), review=("S3",))
add("nn.MSELoss()", regressor, numbers(8), loss=nn.MSELoss())
add(
    'nn.BCEWithLogitsLoss(reduction="none") on (n, 3)', mlp, several, loss=nn.BCEWithLogitsLoss(reduction="none")
)  # fmt: skip


# Losses and models in which samples of a batch see one another.
def normalised(output: Tensor, y: Tensor) -> Tensor:
    """torch's weighted cross-entropy, which divides by the weights of the batch's labels: n times a sample's share."""
    ce = F.cross_entropy(output, y, WEIGHTS, reduction="none")
    return ce * len(y) / WEIGHTS[y].sum()


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    one, two = F.normalize(output, dim=2).unbind(1)
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)), reduction="none")


def views(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 8, generator=g), torch.zeros(n, dtype=torch.int64)


def own_statistics(m: Made, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.tanh((h - h.mean(0)) / (h.std(0, unbiased=False) + 0.1)))


def among_rows(m: Made, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h + torch.softmax(h @ h.T / 4, 1) @ h)


def functional_norm(m: Made, x: Tensor) -> Tensor:
    return m.b(torch.tanh(F.batch_norm(m.a(x), None, None, training=True)))


def two_layers() -> dict[str, nn.Module]:
    return {"a": nn.Linear(8, 16), "b": nn.Linear(16, 3)}


ALONE = {"review": ("S3",), "test": 0}
add("torch's weighted cross-entropy", mlp, ROWS, loss=normalised, quick=True, **ALONE,
    batch_loss=lambda z, y: F.cross_entropy(z, y, WEIGHTS))  # fmt: skip
add("a contrastive loss within the batch", mlp, views, loss=contrastive, **ALONE)
add("own batch statistics", lambda: Made(own_statistics, **two_layers()), ROWS, quick=True, **ALONE)
add("attention over the batch", lambda: Made(among_rows, **two_layers()), ROWS, **ALONE)
add("F.batch_norm(training=True)", lambda: Made(functional_norm, **two_layers()), ROWS, **ALONE)


# Losses that return one number for a batch, as plain PyTorch has them.
def cox(output: Tensor, y: Tensor) -> Tensor:
    """The negative logarithm of Cox's partial likelihood, per event."""
    time, event = y.unbind(1)
    order = time.argsort(descending=True)
    risk, event = output[order, 0], event[order]
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp(min=1)


def patients(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    target = torch.stack([torch.rand(n, generator=g), (torch.rand(n, generator=g) < 0.7).float()], 1)
    return torch.randn(n, 8, generator=g), target.double()


def of_pairs(output: Tensor, y: Tensor) -> Tensor:
    return contrastive(output, y).mean()


WHOLE = {"review": ("MR",), "test": 0}
add("Cox's partial likelihood", lambda: nn.Linear(8, 1), patients, loss=cox, batch_loss=cox, quick=True, **WHOLE)
add("Cox's partial likelihood, drop_last", lambda: nn.Linear(8, 1), patients, loss=cox, batch_loss=cox,
    local={"drop_last": True}, sizes=(9, 4, 13), **WHOLE)  # fmt: skip
add("a contrastive loss, one number per batch", mlp, views, loss=of_pairs, batch_loss=of_pairs, **WHOLE)
add("F.cross_entropy as it is", mlp, ROWS, loss=F.cross_entropy, batch_loss=F.cross_entropy, review=("MR",))


# Samples and outputs of other forms.
def halves(g: Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
    x, y = ROWS(g, n)
    return {"left": x[:, :4], "right": x[:, 4:]}, y


def in_dicts(g: Generator, n: int) -> tuple[dict[str, Any], Tensor]:
    x, y = halves(g, n)
    return {"both": {"inner": x}, "sizes": (x["left"].abs(), x["right"].abs())}, y


class OneDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.body(torch.cat([batch["left"], batch["right"]], 1))


class Dicts(OneDict):
    def forward(self, both: dict[str, Any], sizes: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(both["inner"]) + self.body(torch.cat(sizes, 1))


@dataclass
class Outputs:
    logits: Tensor
    hidden: Tensor


class ReturnsDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Outputs:
        h = torch.tanh(self.a(x))
        return Outputs(self.b(h), h)


add("forward(self, batch) with a dict", OneDict, halves, review=("MR",), quick=True)
add("dicts and tuples in a dict", Dicts, in_dicts, review=("MR",))
add("outputs in a dataclass", ReturnsDataclass, ROWS, review=("MR",), quick=True)


# Losses that vmap refuses.
def where_large(output: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(output, y, reduction="none")
    large = losses > 1
    return losses.index_put((large,), 2 * losses[large])


def spoken(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    """Series with a sequence of up to five labels from 1; the first number is its length."""
    x = torch.randn(n, 12, 5, generator=g)
    length = torch.randint(1, 6, (n,), generator=g)
    return x, torch.cat([length[:, None], torch.randint(1, 6, (n, 5), generator=g)], 1)


def ctc(output: Tensor, y: Tensor) -> Tensor:
    length, targets = y[:, 0], y[:, 1:]
    steps = torch.full_like(length, output.shape[1])
    logs = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logs, targets[:, : int(length.max())], steps, length, reduction="none")


add("a loss with a boolean mask", mlp, ROWS, loss=where_large)
add("CTC", lambda: Made(
    lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.GRU(5, 8, batch_first=True), head=nn.Linear(8, 6)
), spoken, loss=ctc, local={"lr": 0.01})  # fmt: skip


# The forms in which data come.
def small_tokens(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1, 40, (n, 10), generator=g).to(torch.uint8), labels(g, n, 3)


def by_name(g: Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
    return {"number": torch.randn(n, 8, generator=g), "kind": labels(g, n, 5)}, labels(g, n, 3)


add("x as a tuple of two tensors", lambda: Made(
    lambda m, a, b: m.b(torch.tanh(m.a(a) + b)), **two_layers()
), two_inputs((8,), (16,)), quick=True)  # fmt: skip
add("x as a dict of tensors", lambda: Made(
    lambda m, number, kind: m.b(torch.tanh(m.a(number) + m.kinds(kind))), kinds=nn.Embedding(5, 16), **two_layers()
), by_name, quick=True)  # fmt: skip
add("a dict of one tensor", lambda: Made(
    lambda m, x: m.net(x), net=mlp()
), lambda g, n: ({"x": torch.randn(n, 8, generator=g)}, labels(g, n, 3)))  # fmt: skip
add("tokens as int32", lambda: nn.Sequential(
    nn.Embedding(40, 6), nn.Flatten(), nn.Linear(60, 3)
), lambda g, n: (small_tokens(g, n)[0].int(), labels(g, n, 3)))  # fmt: skip
add("tokens as uint8", lambda: Made(
    lambda m, x: m.net(x.long()), net=nn.Sequential(nn.Embedding(40, 6), nn.Flatten(), nn.Linear(60, 3))
), small_tokens)  # fmt: skip


def three_columns() -> ud.FederatedDataset:
    """A `Dataset` of (x1, x2, y), given to `ud.load`."""
    g = Generator().manual_seed(1)
    (a, b), y = two_inputs((8,), (16,))(g, 25)
    return ud.load(TensorDataset(a.double(), b.double(), y), ud.IID(), clients=3)


class OfPairs(Dataset):
    """Items ({"a": …, "b": …}, y)."""

    def __init__(self) -> None:
        (self.a, self.b), self.y = two_inputs((8,), (16,))(Generator().manual_seed(1), 25)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"a": self.a[i].double(), "b": self.b[i].double()}, self.y[i]


def ragged() -> ud.FederatedDataset:
    g = Generator().manual_seed(1)
    rows = [[torch.randn(3 + i % 4, 5, generator=g) for i in range(size)] for size in (12, 7, 6)]
    return ud.FederatedDataset.from_clients([(x, labels(g, len(x), 3)) for x in rows])


def takes_two() -> nn.Module:
    return Made(lambda m, a, b: m.b(torch.tanh(m.a(a) + b)), **two_layers())


add("a TensorDataset of three columns", takes_two, ROWS, dataset=three_columns)
add("a Dataset of dicts", takes_two, ROWS, dataset=lambda: ud.load(OfPairs(), ud.IID(), clients=3))
add(
    "samples of different lengths", lambda: Made(
        lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=nn.GRU(5, 8, batch_first=True), head=nn.Linear(8, 3)
    ), series(), dataset=ragged, refused="pair (x, y)",
    note="A batch is a tensor: pad samples to one length and pass the lengths as a second input.",
)  # fmt: skip


# Own functions that take samples from a store.
@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """A file per sample, for as long as the process lives."""
    made = tempfile.TemporaryDirectory(prefix="compat-")
    for i, row in enumerate(ROWS(Generator().manual_seed(1), 25)[0].double()):
        np.save(Path(made.name) / f"{i}.npy", row.numpy())
    return made


def from_files() -> ud.FederatedDataset:
    """Each sample is a file, read when it is taken."""
    y = ROWS(Generator().manual_seed(1), 25)[1]

    def take(store: dict[str, Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
        files = [Path(folder().name) / f"{i}.npy" for i in store["id"][indices].tolist()]
        return torch.stack([torch.from_numpy(np.load(file)) for file in files]), store["y"][indices]

    return ud.FederatedDataset({"id": torch.arange(25), "y": y}, torch.arange(25), np.array([0, 12, 19, 25]), take)


def with_dict() -> ud.FederatedDataset:
    """An own function that makes a dict."""
    (a, b), y = two_inputs((8,), (16,))(Generator().manual_seed(1), 25)

    def take(store: dict[str, Tensor], indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"a": store["a"][indices], "b": store["b"][indices]}, store["y"][indices]

    store = {"a": a.double(), "b": b.double(), "y": y}
    return ud.FederatedDataset(store, torch.arange(25), np.array([0, 12, 19, 25]), take)


add("an own take that reads files", mlp, ROWS, dataset=from_files, review=("S2",), quick=True)
add("an own take that returns a dict", takes_two, ROWS, dataset=with_dict)
