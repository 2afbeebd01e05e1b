"""Modules of unusual types and precisions, wrapped, compiled, exported, or unable to train at all."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.compat.case import Cases, Made
from tests.compat.cases.buffers import mlp
from tests.compat.samples import vectors

CASES = Cases("odd")
add = CASES.add
ROWS = vectors(8)
LARGE = {"lr": 2.0}
"""A rate at which weights of low precision move by many of their last digits."""


# Precisions.
add("a float32 model", mlp, ROWS, dtype=torch.float32)
add("a float64 model", mlp, ROWS, quick=True)
add("a bfloat16 model", mlp, ROWS, dtype=torch.bfloat16, local=LARGE)
add("a float16 model", mlp, ROWS, dtype=torch.float16, local=LARGE)


def with_autocast(m: Made, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.net(x).float()


add(
    "autocast inside forward",
    lambda: Made(with_autocast, net=mlp()),
    ROWS,
    dtype=torch.float32,
    bound=0.02,
    local=LARGE,
)


class Packed(nn.Module):
    """Ids and numbers in one tensor, or as two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.body = nn.Embedding(1100, 6), nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is None:
            ids, x = x[:, 0].long(), x[:, 1:]
        return self.head(torch.tanh(self.names(ids) + self.body(x.to(self.body.weight.dtype))))


def packed(two: bool) -> Any:
    def make(g: Generator, n: int) -> tuple[Any, Tensor]:
        ids, x = torch.randint(501, 550, (n,), generator=g) * 2 - 1, torch.randn(n, 4, generator=g)
        y = torch.randint(3, (n,), generator=g)
        return ((x, ids) if two else torch.cat([ids[:, None].float(), x], 1)), y

    return make


BF16 = {"precision": "bfloat16"}
add(
    "ids packed into a float x, a bfloat16 model", lambda: Packed().bfloat16(), packed(False), dtype=None, local=LARGE,
    review=("S8",), quick=True, refused="whole numbers among floats",
    note="bfloat16 has no 1043.",
)  # fmt: skip
add(
    'ids as an argument of their own, precision="bfloat16"', Packed, packed(True), dtype=torch.float32, bound=0.05,
    local=LARGE, options=BF16, review=("S8",), quick=True,
)  # fmt: skip


def looks_at_precision(output: Tensor, y: Tensor) -> Tensor:
    """Twice the loss for outputs of lower precision than the head's."""
    return F.cross_entropy(output, y, reduction="none") * (1 if output.dtype == torch.float32 else 2)


add("a bfloat16 backbone under a float32 head", lambda: Made(
    lambda m, x: m.head(torch.tanh(m.body(x.bfloat16())).float()),
    body=nn.Linear(8, 16).bfloat16(), head=nn.Linear(16, 3)
), ROWS, dtype=None, bound=0.02, local={"lr": 1.0}, loss=looks_at_precision, review=("S9",), quick=True)  # fmt: skip


# Complex numbers.
def filtered(m: Made, x: Tensor) -> Tensor:
    """A learned filter of frequencies."""
    return m.head(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.filter), n=8))


add("FFT in forward", lambda: Made(
    filtered, filter=nn.Parameter(torch.randn(5, 2)), head=nn.Linear(8, 3)
), ROWS)  # fmt: skip
add("complex weights", lambda: Made(
    lambda m, x: m.head((x.to(m.w.dtype) @ m.w).abs()), w=nn.Parameter(torch.randn(8, 6, dtype=torch.complex128)),
    head=nn.Linear(6, 3).double()
), lambda g, n: (torch.randn(n, 8, generator=g).double(), torch.randint(3, (n,), generator=g)),
    dtype=None, refused="complex", note="Weights and what is sent are real numbers.")  # fmt: skip


# Wrapped, compiled, exported.
def exported() -> nn.Module:
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(mlp(), (torch.randn(4, 8),), dynamic_shapes=({0: batch},))
    return program.module()


def compiled_in_place() -> nn.Module:
    module = mlp()
    module.compile(backend="eager")
    return module


add("DataParallel", lambda: nn.DataParallel(mlp()), ROWS)
add("torch.compile(model)", lambda: torch.compile(mlp(), backend="eager"), ROWS)
add("model.compile()", compiled_in_place, ROWS)
add("fx.symbolic_trace", lambda: torch.fx.symbolic_trace(mlp()), ROWS)
add("torch.export", exported, vectors(8), dtype=None, hand=False)  # torch has no train() for it
add("a scripted submodule", lambda: nn.Sequential(
    torch.jit.script(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 3)
), ROWS)  # fmt: skip
add(
    "torch.jit.script", lambda: torch.jit.script(mlp()), ROWS, refused="TorchScript",
    note="Its weights cannot be replaced.",
)  # fmt: skip


def quantized() -> nn.Module:
    from torch.ao import quantization

    module = nn.Sequential(quantization.QuantStub(), *mlp(), quantization.DeQuantStub()).train()
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    module = quantization.prepare_qat(module)
    module(torch.randn(4, 8))  # gives its observers their shapes
    return module


add("prepare_qat (fake quantization), called once before", quantized, ROWS, dtype=torch.float32)


# Hooks.
class Remembers(nn.Module):
    """Features by a forward hook that closes over `self`, as many feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head, self.kept = mlp(), nn.Linear(16, 3), {}
        self.net[1].register_forward_hook(lambda layer, args, output: self.kept.update(h=output))

    def forward(self, x: Tensor) -> Tensor:
        self.net(x)
        return self.head(self.kept["h"])


def hooked() -> nn.Module:
    module = mlp()
    module[0].register_forward_hook(lambda layer, args, output: output * 1.5)
    module[2].register_forward_pre_hook(lambda layer, args: (args[0] + 0.1,))
    return module


add("forward hooks", hooked, ROWS, quick=True)
add("a hook that closes over self", Remembers, ROWS)


# What has no values, or cannot be copied.
def on_meta() -> nn.Module:
    with torch.device("meta"):
        return mlp()


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.lock = mlp(), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.net(x)


def called_lazy() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3))
    module(torch.randn(2, 8))
    return module


add("the meta device", on_meta, ROWS, refused="meta device", note="There are no weights to start from.")
add("LazyLinear", lambda: nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3)), ROWS, hand=False)
add("LazyLinear, called once before", called_lazy, ROWS)
add("a module that holds a lock", Locked, ROWS, refused="cannot be copied", note="Locks cannot be copied.")
add("a deep copy of another module", lambda: copy.deepcopy(mlp()), ROWS)
add("ParameterList and ParameterDict", lambda: Made(
    lambda m, x: torch.tanh(x @ m.list[0] + m.dict["bias"]) @ m.list[1],
    list=nn.ParameterList([torch.randn(8, 16) / 3, torch.randn(16, 3) / 4]),
    dict=nn.ParameterDict({"bias": torch.zeros(16)})
), ROWS)  # fmt: skip
