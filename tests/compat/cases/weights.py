"""Modules that reach weights by another way than their names, have them under several, or hang hooks on them."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compat.case import Cases, Made
from tests.compat.cases.buffers import mlp
from tests.compat.cases.language import token_loss
from tests.compat.samples import next_tokens, tokens, two_inputs, vectors

CASES = Cases("idioms")
add = CASES.add
ROWS = vectors(8)


# ---- weights reached by another way than their names ---------------------------------------------------------------
class Net(nn.Module):
    """Two layers; derived classes reach the second in their own way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))


class InAttributes(nn.Module):
    """A head that `make` derives from the embedding, when the module is made or called for the first time.

    Most users call `.double()` afterwards, which keeps the parameters but gives them other memory.
    """

    def __init__(self, make: Callable[[Any], Any], use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.emb, self.mix = nn.Embedding(40, 8), nn.Linear(8, 8)
        self.kept, self.use = make(self), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.kept, torch.tanh(self.mix(self.emb(x))))


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], Tensor]]] = {
    "functools.partial(F.linear, weight=emb.weight)": (
        lambda m: functools.partial(F.linear, weight=m.emb.weight), lambda head, h: head(h)
    ),
    "lambda h: F.linear(h, self.emb.weight)": (
        lambda m: lambda h: F.linear(h, m.emb.weight), lambda head, h: head(h)
    ),
    "a weight in a plain list": (lambda m: [m.emb.weight], lambda heads, h: F.linear(h, heads[0])),
    "a dict of lambdas": (
        lambda m: {"head": lambda h: F.linear(h, m.emb.weight)}, lambda heads, h: heads["head"](h)
    ),
}  # fmt: skip
for name, (make, use) in WAYS.items():
    add(name, functools.partial(InAttributes, make, use), next_tokens(), loss=token_loss, review=("M1",),
        quick=name.startswith("functools"))  # fmt: skip


class Penalized(Net):
    """The norm of all weights, from a plain list of parameters, is a part of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = list(self.parameters())

    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "penalty": sum(w.square().sum() for w in self.weights).expand(len(x))}


class Sliced(nn.Module):
    """Queries and values as slices of one weight, made once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Parameter(torch.randn(16, 8).double() / 3), nn.Linear(8, 3).double()
        self.q, self.v = self.qkv[:8], self.qkv[8:]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.q.T) * (x @ self.v.T))


class TiedByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec, self.head = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 3)
        self.double()
        self.dec.weight.data = self.enc.weight.data.t()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.dec(torch.tanh(self.enc(x)))))


class Weak(Net):
    """A layer that refers to its parent's head weakly, to avoid a cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.head = weakref.ref(self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head()(self.hidden(x))


class ByType(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if isinstance(self.last.weight, nn.Parameter) else 1)


KNOWN: list[nn.Module] = []


class ByGlobalName(Net):
    """Uses the one model that there is by a global name."""

    def __init__(self) -> None:
        super().__init__()
        KNOWN[:] = [self]

    def forward(self, x: Tensor) -> Tensor:
        return KNOWN[0].last(self.hidden(x))


def patched() -> nn.Module:
    """As libraries for adapters do: the forward of a layer, and of the whole, wrapped in a function of the old one."""
    module = Net()
    layer, old_layer, old = module.last, module.last.forward, module.forward
    module.last.forward = lambda h: old_layer(h) + 0.5 * F.linear(h, layer.weight)
    module.forward = lambda x: 2 * old(x)
    return module


def bound() -> nn.Module:
    module = Net()
    module.forward = types.MethodType(lambda self, x: self.last(torch.relu(self.first(x))), module)
    return module


add("a list of parameters for an L2 penalty", Penalized, ROWS, review=("M1",), output="all", batch_loss=lambda z, y: (
    F.cross_entropy(z["logits"], y) + 0.1 * z["penalty"].mean()
), loss=lambda z, y: F.cross_entropy(z["logits"], y, reduction="none") + 0.1 * z["penalty"])  # fmt: skip
add("self.q = self.qkv[:8] in __init__", Sliced, ROWS, dtype=None, samples_dtype=torch.float64, review=("M1",),
    quick=True)  # fmt: skip
add("dec.weight.data = enc.weight.data.t()", TiedByData, ROWS, dtype=None, samples_dtype=torch.float64, review=("M1",),
    refused="two parameters in the same memory", quick=True,
    note="Parameters that share memory would be averaged as two.")  # fmt: skip
add("a weak reference to a layer", Weak, ROWS, review=("M1",), refused="weak reference", quick=True,
    note="In a copy it still leads to the first module. A function that makes the model is a way out.")  # fmt: skip
add("a weak reference to a layer, model=function", Weak, ROWS, review=("M1",), factory=True)
add("forward monkey-patched with closures", patched, ROWS, review=("M1",))
add("forward replaced by types.MethodType", bound, ROWS, review=("M1",))
add("isinstance(p, nn.Parameter) in forward", ByType, ROWS, review=("M1",))
add("the module by a global name", ByGlobalName, ROWS, review=("M1",), refused="by a global name",
    note="Every copy of the module would use that one.")  # fmt: skip


# ---- modules under several names -----------------------------------------------------------------------------------
def repeated() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3))


def shared_blocks(m: Made, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = torch.tanh(layer(x))
    return m.head(x)


def siamese(m: Made, a: Tensor, b: Tensor) -> Tensor:
    return m.head((m.left(a) - m.right(b)).abs())


def of_one_encoder() -> nn.Module:
    encoder = mlp()
    return Made(siamese, left=encoder, right=encoder, head=nn.Linear(3, 3))


def of_one_embedding() -> nn.Module:
    embedding = nn.Embedding(40, 8)
    return Made(
        lambda m, x: m.head(torch.tanh(m.source(x).mean(1) * m.target(x[:, :1]).mean(1))),
        source=embedding, target=embedding, head=nn.Linear(8, 3),
    )  # fmt: skip


class Alias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = mlp()
        self.first = self.backbone[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x) + self.first(x)[:, :3]


class Helper:
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def offset(self) -> Tensor:
        return self.net.last.bias.sum()


class Helped(Net):
    """A helper that is not a module, and knows the network."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.helper.offset())


class Child(nn.Module):
    """A layer that knows its parent, out of sight of `modules()`."""

    def __init__(self, parent: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parent, self.own = parent, nn.Linear(16, 3)

    def forward(self, h: Tensor) -> Tensor:
        return self.own(h) + F.linear(h, self.parent[0].last.weight)


class Parent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child([self])

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.hidden(x))


def tied_head(m: Made, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.mix(m.embed(x))))


def tied_embedding() -> nn.Module:
    module = Made(tied_head, embed=nn.Embedding(40, 8), mix=nn.Linear(8, 8), head=nn.Linear(8, 40, bias=False))
    module.head.weight = module.embed.weight
    return module


TWICE: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "nn.Sequential(l, tanh, l, …)": (repeated, ROWS, {}),
    "nn.ModuleList([layer] * 3)": (lambda: Made(
        shared_blocks, layers=nn.ModuleList([nn.Linear(8, 8)] * 3), head=nn.Linear(8, 3)
    ), ROWS, {}),
    "a siamese network's one encoder under two names": (of_one_encoder, two_inputs((8,), (8,)), {}),
    "one embedding for encoder and decoder": (of_one_embedding, tokens(), {}),
    "one weight for embedding and head": (tied_embedding, next_tokens(), {"loss": token_loss}),
    "an alias, self.first = self.backbone[0]": (Alias, ROWS, {}),
    "a helper that refers back to the network": (Helped, ROWS, {}),
    "a layer that refers back to its parent": (Parent, ROWS, {}),
}  # fmt: skip
for name, (build, samples, options) in TWICE.items():
    for test in (8, 0):
        add(name + ("" if test else ", no test set"), build, samples, test=test, review=("M2",), **options,
            quick=name.startswith("nn.Sequential"))  # fmt: skip


# ---- hooks on parameters -------------------------------------------------------------------------------------------
def hooked(hook: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = Net().double()
        hook(module)
        return module

    return build


def halved_after(p: Tensor) -> None:
    p.grad.mul_(0.5)


def masked(module: nn.Module) -> None:
    """A fixed pattern of weights that train, as in sparse fine-tuning."""
    mask = torch.rand(16, 8).double().round()
    module.first.weight.register_hook(lambda g: g * mask)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "p.register_hook that scales": lambda m: m.last.weight.register_hook(lambda g: 3 * g),
    "p.register_hook that clips": lambda m: [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in m.parameters()],
    "p.register_hook that masks": masked,
    "p.register_post_accumulate_grad_hook": lambda m: m.last.weight.register_post_accumulate_grad_hook(halved_after),
    "module.register_full_backward_hook": lambda m: m.last.register_full_backward_hook(
        lambda layer, before, after: (2 * before[0],)
    ),
}
for name, hook in HOOKS.items():
    add(
        name, hooked(hook), ROWS, dtype=None, samples_dtype=torch.float64, review=("M3",), quick=name.endswith("scales")
    )


# ---- losses that read the model ------------------------------------------------------------------------------------
def variational(m: Made, x: Tensor) -> Tensor:
    """Without draws, which no other loop would repeat."""
    mean, spread = m.encode(x).chunk(2, 1)
    m.kl = 0.5 * (mean.square() + spread.exp() - spread - 1).sum(1).mean()
    return m.decode(mean)


def gated(m: Made, x: Tensor) -> Tensor:
    share = m.gate(x).softmax(1)
    m.aux = 2 * share.mean(0).square().sum()
    return sum(share[:, i : i + 1] * expert(x) for i, expert in enumerate(m.experts))


def gated_with_aux(m: Made, x: Tensor) -> tuple[Tensor, Tensor]:
    share = m.gate(x).softmax(1)
    return sum(share[:, i : i + 1] * e(x) for i, e in enumerate(m.experts)), share.square().sum(1)


def vae() -> nn.Module:
    module = Made(variational, encode=nn.Linear(8, 8), decode=nn.Linear(4, 3))
    module.kl = 0.0
    return module


def experts(forward: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = Made(forward, gate=nn.Linear(8, 2), experts=nn.ModuleList(mlp() for _ in range(2)))
        module.aux = 0.0
        return module

    return build


def plus(read: Callable[[Any], Any]) -> Callable[[nn.Module], Any]:
    return lambda m: lambda z, y: F.cross_entropy(z, y, reduction="none") + read(m)


READING = {"reads": True, "refused": "A loss must not read the model itself",
           "note": "Return from forward what the loss needs."}  # fmt: skip
add("a VAE's self.kl, read by the loss", vae, ROWS, loss=plus(lambda m: m.kl), review=("M4",), **READING)  # fmt: skip
add("a mixture of experts' self.aux, read by the loss", experts(gated), ROWS, loss=plus(lambda m: m.aux),
    review=("M4",), **READING)  # fmt: skip
add("an L2 penalty of the model's parameters in the loss", Net, ROWS,
    loss=plus(lambda m: 0.01 * sum(p.square().sum() for p in m.parameters())), review=("M4",), quick=True,
    **READING)  # fmt: skip
add('a mixture of experts that returns its auxiliary loss, output="all"', experts(gated_with_aux), ROWS, output="all",
    loss=lambda z, y: F.cross_entropy(z[0], y, reduction="none") + z[1], review=("M4",))  # fmt: skip
