"""Modules and losses in which a call is not a function of its arguments: Python state, generators, shapes by value."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.compat.case import Cases, Made
from tests.compat.cases.buffers import mlp
from tests.compat.cases.weights import Net
from tests.compat.samples import labels, padded_series, series, tokens, vectors

CASES = Cases("idioms")
add = CASES.add
ROWS = vectors(8)


# ---- state in Python -----------------------------------------------------------------------------------------------
class Cooling(Net):
    """A temperature that falls with every call, to a floor."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature = max(0.5, 0.9 * self.temperature)
        return super().forward(x) / self.temperature


class WarmingUp(Net):
    """Nothing changes before the hundredth call, which no two steps would show."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 100 else 2)


class ByBatchSize(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if len(x) >= 4 else 0.5)


class CachesByShape(Net):
    """Positions that are computed once per length, as many transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        if width not in self.cache:
            self.cache[width] = torch.linspace(0, 1, width, dtype=x.dtype)
        return super().forward(x + self.cache[width])


class CachesInEval(nn.Module):
    """The product of two factors is kept in evaluation mode, and forgotten in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 3, bias=False)
        self.merged: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.merged = None
            return self.up(self.down(x))
        if self.merged is None:
            self.merged = self.up.weight.detach() @ self.down.weight.detach()
        return F.linear(x, self.merged)


class MergesInEval(CachesInEval):
    """The same, forgotten when the mode changes, as LoRA layers do."""

    def train(self, mode: bool = True) -> MergesInEval:
        self.merged = None
        return super().train(mode)


class AlwaysTraining(Net):
    """`eval` is overridden, as for dropout that also draws in prediction."""

    def eval(self) -> AlwaysTraining:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 1)


class BackwardInside(Net):
    """Takes an energy's gradient by `.backward()`."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.enable_grad():
            own = h.detach().requires_grad_()
            torch.tanh(own).square().sum().backward()
        return self.last(torch.tanh(h) + 0.1 * own.grad)


COUNTS = {"review": ("M5",), "note": "What a client computes would depend on who trained before it."}
add("a temperature that falls with every call", Cooling, ROWS, refused="counts its calls", **COUNTS)
add("a counter that matters after a hundred calls", WarmingUp, ROWS, refused="counts its calls", quick=True, **COUNTS)
add("a branch by the batch's size", ByBatchSize, ROWS, review=("M5",), quick=True)
add("a branch by the batch's size, no test set", ByBatchSize, ROWS, test=0, review=("M5",))
add("a cache by shape", CachesByShape, ROWS, review=("M5",))
add("factors merged in evaluation mode", MergesInEval, ROWS, review=("M5",), local={"lr": 0.5})
add("a product kept in evaluation mode, until the next step", CachesInEval, ROWS, review=("M5",), local={"lr": 0.5})
add("eval() overridden", AlwaysTraining, ROWS, review=("M5",))
add(".backward() in forward", BackwardInside, ROWS, review=("M5",))

CASES.needs = ("rotary_embedding_torch",)


def rotary(**options: Any) -> Any:
    def build() -> nn.Module:
        from rotary_embedding_torch import RotaryEmbedding

        return Made(rotated, embed=nn.Linear(5, 24), rotary=RotaryEmbedding(8, **options), head=nn.Linear(8, 3))

    return build


def rotated(m: Made, x: Tensor) -> Tensor:
    q, k, v = m.embed(x).chunk(3, -1)
    q, k = m.rotary.rotate_queries_or_keys(q[:, None]), m.rotary.rotate_queries_or_keys(k[:, None])
    return m.head(F.scaled_dot_product_attention(q, k, v[:, None])[:, 0].mean(1))


add("rotary_embedding_torch", rotary(), series(), review=("M5",))
add("rotary_embedding_torch, learned_freq=True", rotary(learned_freq=True), series(), review=("M5",))

CASES.needs = ("loralib",)


def merging() -> nn.Module:
    import loralib

    module = nn.Sequential(loralib.Linear(8, 16, r=2), nn.Tanh(), loralib.Linear(16, 3, r=2))
    for layer in module:
        if isinstance(layer, loralib.Linear):
            nn.init.normal_(layer.lora_B)
    return module


add("loralib, merged into frozen weights in evaluation mode", merging, ROWS, review=("M5",), local={"lr": 0.2})

CASES.needs = ("revtorch",)


def reversible() -> nn.Module:
    import revtorch

    blocks = nn.ModuleList(revtorch.ReversibleBlock(mlp_of(4), mlp_of(4)) for _ in range(2))
    return Made(lambda m, x: m.head(m.body(m.stem(x))), stem=nn.Linear(8, 8), body=revtorch.ReversibleSequence(blocks),
                head=nn.Linear(8, 3))  # fmt: skip


def mlp_of(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))


add("revtorch's reversible blocks", reversible, ROWS, review=("M5",))

CASES.needs = ()


# ---- generators seeded in forward ----------------------------------------------------------------------------------
def by_generator() -> Tensor:
    return torch.randn(8, 16, generator=Generator().manual_seed(5), dtype=torch.float64)


def by_fork() -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.randn(8, 16, dtype=torch.float64)


def by_global() -> Tensor:
    torch.manual_seed(5)
    return torch.randn(8, 16, dtype=torch.float64)


def by_numpy() -> Tensor:
    return torch.from_numpy(np.random.default_rng(5).standard_normal((8, 16)))


for how, features in {
    "torch.Generator().manual_seed(5)": by_generator, "torch.manual_seed(5) in fork_rng": by_fork,
    "torch.manual_seed(5)": by_global, "np.random.default_rng(5)": by_numpy,
}.items():  # fmt: skip
    add(f"fixed random features in forward, {how}", lambda features=features: Made(
        lambda m, x: m.last(torch.tanh(m.first(x) + x @ features())), first=nn.Linear(8, 16), last=nn.Linear(16, 3)
    ), ROWS, review=("M6",), quick=how.startswith("torch.Generator"))  # fmt: skip


# ---- shapes that depend on values, in a loss -----------------------------------------------------------------------
def by_unique(z: Tensor, y: Tensor) -> Tensor:
    """Every class of the batch counts the same."""
    _, inverse, counts = y.unique(return_inverse=True, return_counts=True)
    return F.cross_entropy(z, y, reduction="none") / counts[inverse] * len(y) / len(counts)


def by_bincount(z: Tensor, y: Tensor) -> Tensor:
    """Rare classes of the batch count more; there are as many counts as the largest label needs."""
    counts = torch.bincount(y)
    weights = (1 / counts.clamp(min=1).to(z.dtype)) / len(counts)
    return F.cross_entropy(z, y, reduction="none") * weights[y]


def by_runs(z: Tensor, y: Tensor) -> Tensor:
    """More for a batch with more runs of a label."""
    return F.cross_entropy(z, y, reduction="none") * len(torch.unique_consecutive(y))


def by_mask(z: Tensor, y: Tensor) -> Tensor:
    """The mean over samples of the first two classes, times the share of them."""
    some = y < 2
    return z.square().mean(1) + some * F.cross_entropy(z[some], y[some]) if some.any() else z.square().mean(1)


LOSSES = {
    "torch.unique": by_unique, "torch.bincount": by_bincount, "torch.unique_consecutive": by_runs,
    "a boolean mask's samples": by_mask,
}  # fmt: skip
# Without short batches, samples that see one another are no reason against lanes.
FEW: dict[str, dict[str, Any]] = {
    "": {}, ", one lane": {"options": {"lanes": 1}, "sizes": (12, 8, 8)}, ", one client": {"sizes": (24,)},
}  # fmt: skip
for (name, loss), (where, options) in [(pair, few) for pair in LOSSES.items() for few in FEW.items()]:
    add(f"a loss with {name}{where}", mlp, ROWS, loss=loss, test=0, local={"steps": 3}, review=("M7",), **options,
        quick=name == "torch.bincount" and where == ", one lane")  # fmt: skip


# ---- the samples' precision ----------------------------------------------------------------------------------------
ROUNDED = {"review": ("M8",), "dtype": None, "warned": "more digits than float32"}


def since_1970(m: Made, x: Tensor) -> Tensor:
    """Minutes from a time in seconds."""
    minutes = (x[:, :1] - 1.7e9) / 60
    return m.net(torch.cat([minutes.to(torch.float32), x[:, 1:].to(torch.float32)], 1))


def times(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 8, generator=g).double()
    x[:, 0] = 1.7e9 + 120 * torch.rand(n, generator=g).double()
    return x, labels(g, n, 3)


def by_id(m: Made, x: Tensor) -> Tensor:
    """Ids above 2²⁴ are hashed."""
    return m.head(torch.tanh(m.ids(x[:, 0].long() % 1009) + m.body(x[:, 1:].to(torch.float32))))


def ids(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 5, generator=g).double()
    x[:, 0] = 2**25 + torch.randint(2**24, (n,), generator=g)
    return x, labels(g, n, 3)


def with_ids(m: Made, ids: Tensor, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.ids(ids % 1009) + m.body(x)))


def apart(g: Generator, n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = ids(g, n)
    return (x[:, 0].long(), x[:, 1:].float()), y


def hashed(forward: Any) -> nn.Module:
    return Made(forward, ids=nn.Embedding(1009, 8), body=nn.Linear(4, 8), head=nn.Linear(8, 3))


add("times in seconds since 1970, float64, into a float32 model", lambda: Made(since_1970, net=mlp()), times,
    quick=True, note="float32 has them to two minutes; a warning says so.", **ROUNDED)  # fmt: skip
add("ids above 2²⁴ among float64 numbers, into a float32 model", partial(hashed, by_id), ids,
    note="float32 has no odd numbers above 2²⁴; a warning says so.", **ROUNDED)  # fmt: skip
add("ids above 2²⁴ as integers of their own, into a float32 model", partial(hashed, with_ids), apart, dtype=None,
    review=("M8",))  # fmt: skip
add("times in seconds since 1970, into a float64 model", lambda: Made(
    lambda m, x: m.net(torch.cat([(x[:, :1] - 1.7e9) / 60, x[:, 1:]], 1)), net=mlp()
), times, review=("M8",))  # fmt: skip


# ---- gradients and evaluation in ways of their own -----------------------------------------------------------------
def pooled(m: Made, x: Tensor) -> Tensor:
    return m.head(m.embed(x).mean(1))


def encoded(m: Made, x: Tensor, lengths: Tensor) -> Tensor:
    padding = torch.arange(x.shape[1]) >= lengths[:, None]
    return m.head(
        m.body(m.embed(x), src_key_padding_mask=padding).mean(1)
    )  # with zeros for padding in evaluation alone


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, **options)
    return Made(encoded, embed=nn.Linear(5, 8), body=nn.TransformerEncoder(layer, 2), head=nn.Linear(8, 3))


FREQUENT = {"scale_grad_by_freq": True}
add("nn.Embedding(scale_grad_by_freq=True)", lambda: Made(
    pooled, embed=nn.Embedding(6, 8, **FREQUENT), head=nn.Linear(8, 3)
), tokens(vocabulary=6), review=("M9",), quick=True)  # fmt: skip
add("nn.EmbeddingBag(scale_grad_by_freq=True)", lambda: nn.Sequential(
    nn.EmbeddingBag(6, 8, mode="sum", **FREQUENT), nn.Linear(8, 3)
), tokens(vocabulary=6), review=("M9",))  # fmt: skip
add("nn.TransformerEncoder, its fast path of nested tensors", encoder, padded_series(), review=("M9",))
add("nn.TransformerEncoder, its fast path of nested tensors, norm first", partial(encoder, norm_first=True),
    padded_series(), review=("M9",))  # fmt: skip
