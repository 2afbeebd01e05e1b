"""One convolution of a cohort on a GPU, layer by layer of the papers' models: our kernels beside torch's grouped ones.

    python -m benchmarks.convolutions [--json FILE]

Microseconds of the forward pass and of the gradients of input and weights, each replayed as a CUDA graph. `vmap` makes
one grouped convolution of a cohort's, channels first; channels last in memory is the other way to ask torch for it.
Ours reads and writes channels last. What each call returns must agree with float64, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import record
from benchmarks.agree import check
from benchmarks.cifar10 import DEVICE
from undrift.functional.convolution.operations import conv2d_forward, conv2d_weight_grad

LAYERS = {  # lanes, batch, size, inputs, outputs, kernel, padding
    "VGG-9, 8 × 64, 32², 3 → 32": (8, 64, 32, 3, 32, 3, 1),
    "VGG-9, 8 × 64, 32², 32 → 64": (8, 64, 32, 32, 64, 3, 1),
    "VGG-9, 8 × 64, 16², 64 → 128": (8, 64, 16, 64, 128, 3, 1),
    "VGG-9, 8 × 64, 16², 128 → 128": (8, 64, 16, 128, 128, 3, 1),
    "VGG-9, 8 × 64, 8², 128 → 256": (8, 64, 8, 128, 256, 3, 1),
    "VGG-9, 8 × 64, 8², 256 → 256": (8, 64, 8, 256, 256, 3, 1),
    "FEMNIST CNN, 10 × 32, 28², 1 → 32": (10, 32, 28, 1, 32, 3, 0),
    "FEMNIST CNN, 10 × 32, 13², 32 → 64": (10, 32, 13, 32, 64, 3, 0),
    "LeNet-5, 12 × 100, 32², 3 → 6": (12, 100, 32, 3, 6, 5, 0),
    "LeNet-5, 12 × 100, 14², 6 → 16": (12, 100, 14, 6, 16, 5, 0),
    "ResNet-20, 2 × 256, 32², 16 → 16": (2, 256, 32, 16, 16, 3, 1),
    "ResNet-20, 2 × 256, 16², 32 → 32": (2, 256, 16, 32, 32, 3, 1),
    "ResNet-20, 2 × 256, 8², 64 → 64": (2, 256, 8, 64, 64, 3, 1),
    "pfl's CNN, 50 × 10, 32², 3 → 32": (50, 10, 32, 3, 32, 3, 0),
    "pfl's CNN, 50 × 10, 30², 32 → 64": (50, 10, 30, 32, 64, 3, 0),
}
WAYS = ("grouped", "channels last", "ours")


def microseconds(call: Callable[[], Any], replays: int = 20, repeats: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(replays):
            call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / replays)
    return statistics.median(times)


@dataclass(frozen=True)
class Inputs:
    """A layer's tensors: x lanes × batch × inputs × size², the output's gradient g, and the weights."""

    x: Tensor
    g: Tensor
    weight: Tensor
    bias: Tensor
    padding: int


@dataclass(frozen=True)
class Call:
    """What is timed, and what it returns as float64 expects it: lanes first, then as in `F.conv2d`."""

    run: Callable[[], Any]
    results: Callable[[Any], dict[str, Tensor]]


def draw(layer: tuple[int, ...], kind: torch.dtype) -> Inputs:
    lanes, batch, size, inputs, outputs, kernel, padding = layer
    out, generator = size + 2 * padding - kernel + 1, torch.Generator(DEVICE).manual_seed(0)
    shapes = (
        (lanes, batch, inputs, size, size), (lanes, batch, outputs, out, out), (lanes, outputs, inputs, kernel, kernel),
        (lanes, outputs),
    )  # fmt: skip
    x, g, w, b = (torch.randn(*shape, device=DEVICE, generator=generator).to(kind) for shape in shapes)
    return Inputs(x, g, w, b, padding)


def exact(given: Inputs) -> list[dict[str, Tensor]]:
    """The three calls' results in float64, lane by lane."""
    pad, one = (given.padding,) * 2, (1, 1)
    forward, back, weights, biases = [], [], [], []
    for x, g, w, b in zip(*(t.double() for t in (given.x, given.g, given.weight, given.bias)), strict=True):
        forward.append(F.conv2d(x, w, b, padding=given.padding))
        found = torch.ops.aten.convolution_backward(g, x, w, [len(b)], one, pad, one, False, (0, 0), 1, (True,) * 3)
        for lane, into in zip(found, (back, weights, biases), strict=True):
            into.append(lane)
    forward, back, weights, biases = (torch.stack(each) for each in (forward, back, weights, biases))
    return [{"output": forward}, {"input": back}, {"weight": weights, "bias": biases}]


def calls(given: Inputs) -> dict[str, list[Call]]:
    """Each way's three calls: forward, gradient with respect to the input, gradient with respect to the weights."""
    lanes, _, inputs = given.x.shape[:3]
    outputs, kernel, padding = given.weight.shape[1], given.weight.shape[-1], given.padding
    x, g = (t.permute(0, 1, 3, 4, 2).contiguous() for t in (given.x, given.g))
    weight = given.weight.permute(0, 1, 3, 4, 2).contiguous()
    flipped = given.weight.flip(3, 4).permute(0, 2, 3, 4, 1).contiguous()
    zeros, one = torch.zeros_like(given.x[:, 0, :, 0, 0]), (1, 1)
    pad, border = (padding, padding), (kernel - 1 - padding,) * 2

    def first(y: Tensor) -> Tensor:
        return y.permute(0, 1, 4, 2, 3)

    def matrix(y: Tensor) -> dict[str, Tensor]:
        return {"weight": first(y[..., :-1].unflatten(2, (kernel, kernel, inputs))), "bias": y[..., -1]}

    found = {
        "ours": [
            Call(lambda: conv2d_forward(x, weight, given.bias, one, pad), lambda y: {"output": first(y)}),
            Call(lambda: conv2d_forward(g, flipped, zeros, one, border), lambda y: {"input": first(y)}),
            Call(lambda: conv2d_weight_grad(g, x, (kernel, kernel), one, pad), matrix),
        ]
    }

    def split(y: Tensor) -> Tensor:
        return y.unflatten(1, (lanes, -1)).transpose(0, 1)

    for way, layout in (("grouped", torch.contiguous_format), ("channels last", torch.channels_last)):
        many, back = (t.transpose(0, 1).flatten(1, 2).contiguous(memory_format=layout) for t in (given.x, given.g))
        w = given.weight.flatten(0, 1).contiguous(memory_format=layout)

        def forward(many: Tensor = many, w: Tensor = w) -> Any:
            return F.conv2d(many, w, given.bias.flatten(), padding=padding, groups=lanes)

        def backward(wanted: Any, many: Tensor = many, back: Tensor = back, w: Tensor = w) -> Any:
            return torch.ops.aten.convolution_backward(
                back, many, w, [lanes * outputs], one, pad, one, False, (0, 0), lanes, wanted
            )

        found[way] = [
            Call(forward, lambda y: {"output": split(y)}),
            Call(lambda backward=backward: backward((True, False, False)), lambda y: {"input": split(y[0])}),
            Call(
                lambda backward=backward: backward((False, True, True)),
                lambda y: {"weight": y[1].unflatten(0, (lanes, -1)), "bias": y[2].unflatten(0, (lanes, -1))},
            ),
        ]
    return found


def row(name: str, layer: tuple[int, ...], precision: str, time: Callable[[Callable[[], Any]], float]) -> dict:
    """Every way's times; raises `SystemExit` if what one of them returns is not the convolution."""
    given = draw(layer, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    timed = [0, 2] if layer[3] <= 3 else [0, 1, 2]  # nobody asks for the gradient of a first layer's input
    expected, parts, agrees = exact(given), {}, {}
    for way, each in calls(given).items():
        side = f"{name}, {precision}, {way}"
        apart = [
            check(side, each[i].results(each[i].run()), expected[i], precision, "float64", steps=False) for i in timed
        ]
        agrees[way], parts[way] = max(apart), [time(each[i].run) for i in timed]
    total = {way: sum(parts[way]) for way in WAYS}
    return {"layer": name, "precision": precision, "microseconds": total, "parts": parts, "agrees": agrees}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    head = record.head("convolutions")
    print(f"{head['gpu']}, torch {head['torch']}; microseconds, forward + backward")
    print(f"{'':46}{''.join(f'{way:>15}' for way in WAYS)}   ours ÷ the better   ours agrees to")
    table = record.Table(arguments.json, head, "layer", "precision")
    for precision in ("bfloat16", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        for name, layer in LAYERS.items():
            with table.attempt():
                found = row(name, layer, precision, microseconds)
                took = found["microseconds"]
                best = min(took["grouped"], took["channels last"])
                cells = "".join(f"{took[way]:15.1f}" for way in WAYS)
                apart = found["agrees"]["ours"]
                print(f"{name + ', ' + precision:46}{cells}{best / took['ours']:11.2f}×{apart:15.1e}", flush=True)
                table.add(found)
    table.end()


if __name__ == "__main__":
    main()
