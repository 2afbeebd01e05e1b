"""Modules whose forward pass is Python: branches on values, masks, own gradients, in-place writes, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.compat.case import Cases, Made
from tests.compat.cases.buffers import mlp
from tests.compat.samples import vectors

CASES = Cases("odd")
add = CASES.add
ROWS = vectors(8)


def layers(**more: Any) -> dict[str, Any]:
    return {"a": nn.Linear(8, 16), "b": nn.Linear(16, 3), **more}


# Gradient checkpointing: the recomputation must find the weights of the forward pass.
BIG = {"lr": 0.5}
add("checkpoint", lambda: Made(
    lambda m, x: m.b(checkpoint(lambda h: torch.tanh(m.a(h)), x, use_reentrant=False)), **layers()
), ROWS, review=("S1",), local=BIG, quick=True)  # fmt: skip
add("checkpoint, reentrant", lambda: Made(
    lambda m, x: m.b(checkpoint(lambda h: torch.tanh(m.c(h)), torch.tanh(m.a(x)), use_reentrant=True)),
    c=nn.Linear(16, 16), **layers()
), ROWS, review=("S1",), local=BIG, refused="use_reentrant=False",
    note="This form gives gradients to .backward() alone.")  # fmt: skip
add("checkpoint with dropout inside", lambda: Made(
    lambda m, x: m.b(checkpoint(lambda h: m.drop(torch.tanh(m.a(h))), x, use_reentrant=False)),
    drop=nn.Dropout(0.3), **layers()
), ROWS, review=("S1",), local=BIG, draws=True)  # fmt: skip
add("checkpoint_sequential", lambda: Made(
    lambda m, x: m.b(checkpoint_sequential(m.net, 2, m.a(x), use_reentrant=False)),
    net=nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), **layers()
), ROWS, review=("S1",), local=BIG)  # fmt: skip
add("checkpoint with batch norm inside", lambda: Made(
    lambda m, x: m.b(checkpoint(lambda h: torch.tanh(m.norm(m.a(h))), x, use_reentrant=False)),
    norm=nn.BatchNorm1d(16), **layers()
), ROWS, review=("S1",), local=BIG)  # fmt: skip


# Own gradients.
class OldSquare(torch.autograd.Function):
    """The form without `setup_context`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


class NewSquare(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


add("autograd.Function", lambda: Made(lambda m, x: m.b(OldSquare.apply(m.a(x))), **layers()), ROWS)
add("autograd.Function with setup_context", lambda: Made(
    lambda m, x: m.b(NewSquare.apply(m.a(x))), **layers()
), ROWS)  # fmt: skip
add("gradients inside forward", lambda: Made(
    lambda m, x: m.b(m.a(x) + force(m, x)), c=nn.Linear(8, 16), **layers()
), ROWS)  # fmt: skip


def force(m: Made, x: Tensor) -> Tensor:
    """The gradient of an energy, as physics-informed networks take it."""
    h = m.c(x)
    with torch.enable_grad():
        h = h if h.requires_grad else h.detach().requires_grad_()
        (g,) = torch.autograd.grad(torch.tanh(h).square().sum(), h, create_graph=True)
    return g


# In-place writes.
def in_place(m: Made, x: Tensor) -> Tensor:
    h = m.a(x)
    h += 1
    h -= 0.5
    h = nn.functional.relu(h, inplace=True)
    return m.b(h)


def into_zeros(m: Made, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 16, dtype=x.dtype)
    out[:, :8] = m.a(x)[:, :8]
    out[:, 8:] = torch.tanh(m.a(x)[:, 8:])
    return m.b(out)


def changes_input(m: Made, x: Tensor) -> Tensor:
    x += 1
    return m.b(torch.tanh(m.a(x)))


add("in-place operations (+=, ReLU)", lambda: Made(in_place, **layers()), ROWS, quick=True)
add("in-place writes into torch.zeros", lambda: Made(into_zeros, **layers()), ROWS)
add("x += 1 on the input", lambda: Made(changes_input, **layers()), ROWS, test=0, quick=True)


# Branches and indices that depend on values.
def branches(m: Made, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)) if x.mean() > 0 else torch.relu(m.a(x)))


def row_by_row(m: Made, x: Tensor) -> Tensor:
    h = m.a(x)
    up = x[:, 0] > 0
    return m.b(h.index_put((up,), torch.tanh(h[up])))


def experts(m: Made, x: Tensor) -> Tensor:
    """Each row goes to the expert that its gate prefers."""
    out, best = torch.zeros(len(x), 3, dtype=x.dtype), m.gate(x).argmax(-1)
    for i, expert in enumerate(m.experts):
        rows = torch.nonzero(best == i).flatten()
        out = out.index_add(0, rows, expert(x[rows]))
    return out + m.gate(x).logsumexp(-1, keepdim=True) * m.bias


def by_numpy(m: Made, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x) * float(x.numpy().std() + 1)))


def on_buffer(m: Made, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)) if bool(m.flag) else m.a(x))


def on_constant(m: Made, x: Tensor) -> Tensor:
    mask = torch.ones(4)
    return m.b(torch.tanh(m.a(x)) if (mask == 1).all() else m.a(x))


add("an if on the batch's values", lambda: Made(branches, **layers()), ROWS, quick=True)
add("a boolean mask", lambda: Made(row_by_row, **layers()), ROWS)
add("a mixture of experts by nonzero", lambda: Made(
    experts, gate=nn.Linear(8, 4), bias=nn.Parameter(torch.randn(3)), experts=nn.ModuleList(mlp() for _ in range(4))
), ROWS)  # fmt: skip
add("numpy on the input", lambda: Made(by_numpy, **layers()), ROWS)
add("an if on a buffer", lambda: Made(on_buffer, flag=torch.tensor(True), **layers()), ROWS)
add("an if on a constant of forward", lambda: Made(on_constant, **layers()), ROWS, quick=True)


# Parts of the model that do not train.
add("a frozen backbone under no_grad", lambda: Made(
    lambda m, x: m.head(features(m, x)), body=mlp().requires_grad_(False), head=nn.Linear(3, 3)
), ROWS)  # fmt: skip
add("parameters that are never used", lambda: Made(
    lambda m, x: m.net(x), net=mlp(), spare=nn.Linear(4, 4)
), ROWS)  # fmt: skip
add("one layer used twice", lambda: Made(
    lambda m, x: m.b(torch.tanh(m.c(torch.tanh(m.c(m.a(x)))))), c=nn.Linear(16, 16), **layers()
), ROWS)  # fmt: skip


@torch.no_grad()
def features(m: Made, x: Tensor) -> Tensor:
    return m.body(x)
