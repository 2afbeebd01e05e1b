"""(c) tf32 and bfloat16 against float64, at the shapes of the papers' layers and for their whole models.

Rounding the operands of a product of random numbers changes it by about 3e-4 in tf32 and 3e-3 in bfloat16. Errors
add up through a whole network: on a CPU, the gradients of the models below are off by 2e-3 to 9e-3 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

import undrift as ud
from benchmarks.convolutions import LAYERS
from tests.gpu.checks import Check, Finding, relative, start_of, update_distance, within
from undrift.engine import graph
from undrift.functional.convolution.lanes import LaneConvolutions
from undrift.functional.recurrent.layers import adopt

Layer = Callable[..., Tensor]
BOUNDS = {"tf32": 1e-3, "bfloat16": 6e-3, "float32": 1e-5}
WHOLE = {"tf32": 5e-3, "bfloat16": 2e-2, "float32": 1e-4}
"""For whole models, and recurrent layers over many time steps. float32 stands in for both where there is no GPU.

Hopper's tensor cores cut float32 off to tf32 where cuBLAS rounds it first. So a layer of our kernels is off by 8e-4,
not 3e-4, and always towards zero: over the nine layers of VGG-9, or ResNet's twenty, that adds up to 4e-3.
"""
LINEAR = {  # lanes, batch, inputs, outputs
    "VGG-9, 8 × 64, 4096 → 512": (8, 64, 4096, 512),
    "VGG-9, 8 × 64, 512 → 10": (8, 64, 512, 10),
    "FEMNIST CNN, 10 × 32, 1600 → 512": (10, 32, 1600, 512),
    "LeNet-5, 12 × 100, 400 → 120": (12, 100, 400, 120),
    "LeNet-5, 12 × 100, 84 → 10": (12, 100, 84, 10),
    "StackOverflow, 10 × 32, 10000 → 100": (10, 32, 10000, 100),
}
RECURRENT = {  # kind, lanes, batch, time, inputs, width, layers
    "Shakespeare GRU, 10 × 32, 80 steps, 2 × 256": ("GRU", 10, 32, 80, 8, 256, 2),
    "LSTM, 12 × 100, 64 steps, 128": ("LSTM", 12, 100, 64, 40, 128, 1),
}
MODELS: dict[str, tuple[tuple[int, ...], int, int]] = {  # shape of a sample, classes, batch
    "logistic": ((1, 28, 28), 10, 50),
    "mlp": ((1, 28, 28), 10, 50),
    "lenet5": ((3, 32, 32), 10, 100),
    "cnn_fedavg": ((1, 28, 28), 10, 100),
    "cnn_femnist": ((1, 28, 28), 62, 32),
    "cnn_temporal": ((3, 32, 32), 10, 50),
    "vgg9": ((3, 32, 32), 10, 64),
    "resnet20": ((3, 32, 32), 10, 256),
    "gru": ((80,), 65, 32),
    "lstm": ((1, 40, 64), 10, 100),
}


@contextmanager
def arithmetic(precision: str) -> Iterator[torch.dtype]:
    """torch's switches for this precision; gives the type to compute in."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield torch.bfloat16 if precision == "bfloat16" else torch.float32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on(device: str, precision: str) -> str:
    """A CPU knows neither tf32 nor our kernels, so there it is float32, with a bound of its own."""
    return precision if device.startswith("cuda") else "float32"


def layer(
    function: Layer, shapes: list[tuple[int, ...]], precision: str, device: str, bounds: dict[str, float] = BOUNDS,
    plain: Layer | None = None,
) -> Finding:  # fmt: skip
    """A layer of all lanes, its output and all its gradients, against one lane after another in float64.

    `function` takes the tensors of one lane; their shapes, lanes first, come in the order input, weights, biases.
    `plain` is what the reference calls, where that is not the same function.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float64)

    tensors = [draw(shape) * (1.0 if i == 0 else shape[-1] ** -0.5) for i, shape in enumerate(shapes)]
    with torch.no_grad():
        g = draw((len(tensors[0]), *function(*(t[0] for t in tensors)).shape))

    def in_lanes(g: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        with LaneConvolutions():
            out, back = vjp(function, *tensors)
            return out, *back(g)

    def one_lane(g: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = (plain or function)(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, g)

    precision = on(device, precision)
    with arithmetic(precision) as dtype:
        found = vmap(in_lanes)(*(t.to(dtype) for t in (g, *tensors)))
    lanes = [one_lane(*lane) for lane in zip(g, *tensors, strict=True)]
    names = ["output", "input", "weight", "bias", *(f"tensor {i}" for i in range(3, len(shapes)))]
    wanted = {name: torch.stack(each) for name, each in zip(names, zip(*lanes, strict=True), strict=True)}
    return worst(relative(dict(zip(names, found, strict=True)), wanted), bounds[precision])


def worst(errors: dict[str, float], bound: float) -> Finding:
    """The largest error, by name. One that is NaN counts as the largest."""
    name = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    found = within(errors[name], bound)
    return Finding(found.status, f"{found.says} ({name})")


def convolution(shape: tuple[int, ...], precision: str, device: str) -> Finding:
    lanes, batch, size, inputs, outputs, kernel, padding = small(shape, device)
    shapes = [(lanes, batch, inputs, size, size), (lanes, outputs, inputs, kernel, kernel), (lanes, outputs)]
    return layer(lambda x, w, b: F.conv2d(x, w, b, padding=padding), shapes, precision, device)


def linear(shape: tuple[int, ...], precision: str, device: str) -> Finding:
    lanes, batch, inputs, outputs = small(shape, device)
    return layer(F.linear, [(lanes, batch, inputs), (lanes, outputs, inputs), (lanes, outputs)], precision, device)


def small(shape: tuple[int, ...], device: str) -> tuple[int, ...]:
    """Two lanes of four samples on a CPU, for which the papers' cohorts are too much."""
    return shape if device.startswith("cuda") else (2, 4, *shape[2:])


def recurrent(shape: tuple[Any, ...], precision: str, device: str) -> Finding:
    """The loops that stand for a recurrent layer in lanes, against torch's own layer."""
    kind, (lanes, batch), (time, inputs, width, layers) = shape[0], small(shape[1:3], device), shape[3:]
    ours, theirs = (getattr(nn, kind)(inputs, width, layers, batch_first=True).to(device).double() for _ in range(2))
    adopt(ours)
    names = [name for name, _ in ours.named_parameters()]

    def read(module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, weights, strict=True)), (x,))[0]

    shapes = [(lanes, batch, time, inputs), *((lanes, *w.shape) for w in ours.parameters())]
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN wants a layer's weights in one piece
        return layer(partial(read, ours), shapes, precision, device, WHOLE, partial(read, theirs))


def smoothed(model: nn.Module) -> None:
    """Take away what jumps: bfloat16 makes another element of a max-pooling's patch the largest now and then."""
    for layer in model.modules():
        for name, child in layer.named_children():
            if isinstance(child, nn.ReLU | nn.MaxPool2d):
                setattr(layer, name, nn.SiLU() if isinstance(child, nn.ReLU) else nn.AvgPool2d(child.kernel_size))


def whole(name: str, precision: str, compiled: bool, device: str) -> Finding:
    """Local steps of a cohort in lanes, one or where compiled a few, against the plain engine in float64.

    With one step the update is the clients' mean gradient, so errors are those of the gradient.
    """
    shape, classes, batch = MODELS[name]
    batch = batch if device.startswith("cuda") else 4
    model = ud.models.get(name, classes=classes, shape=shape, **({"dropout": False} if name == "vgg9" else {}))
    smoothed(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for w in model.parameters():  # Fixup starts layers at zero, behind which there is no gradient
            if not w.any():
                w.copy_(0.05 * torch.randn(w.shape, generator=generator))

    def client(n: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, classes, (n, *shape), generator=generator)
        x = tokens if name == "gru" else torch.rand(n, *shape, generator=generator)
        return x, torch.randint(0, classes, (n,), generator=generator)

    sizes = [4 * batch, batch, 3 * batch // 2, batch // 2] if compiled else [batch] * 4
    data = ud.FederatedDataset.from_clients([client(n) for n in sizes])
    # A large rate in the only step, or the rounding of weights that hardly move would be most of the error.
    local = ud.Local(epochs=1, batch_size=batch, lr=0.1 if compiled else 100.0)
    settings: dict[str, Any] = {"local": local, "rounds": 1, "device": device}
    wanted = ud.train(model.double(), data, engine="plain", **settings)
    asked, precision = {"tf32": "tf32", "bfloat16": "bfloat16"}, on(device, precision)
    found = ud.train(
        model.float(), data, engine="lanes", lanes=2 if compiled else 4, precision=asked.get(precision, "auto"),
        compile=compiled and graph.captures(torch.device(device)), **settings,
    )  # fmt: skip
    return within(update_distance(found.params, wanted.params, start_of(model)), WHOLE[precision])


def checks() -> Iterator[Check]:
    kinds = ((convolution, LAYERS), (linear, LINEAR), (recurrent, RECURRENT))
    for precision in ("tf32", "bfloat16"):
        for function, shapes in kinds:
            for name, shape in shapes.items():
                yield Check("c", f"{name}, {precision}", partial(function, shape, precision), seconds=6.0)
        for name in MODELS:
            yield Check("c", f"gradient of {name}, {precision}", partial(whole, name, precision, False), seconds=10.0)
            # Compiled steps carry their weights' low-precision copies along (`graph._cast_ahead`).
            title, once = f"steps of {name}, {precision}, compiled", name in ("cnn_femnist", "mlp")
            yield Check("c", title, partial(whole, name, precision, True), seconds=60.0, full=not once)
