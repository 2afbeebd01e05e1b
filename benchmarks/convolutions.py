"""One convolution of a cohort on a GPU, layer by layer of the papers' models: our kernels beside torch's grouped ones.

    python -m benchmarks.convolutions [--json FILE]

Microseconds of the forward pass and of the gradients of input and weights, each replayed as a CUDA graph. `vmap` makes
one grouped convolution of a cohort's, channels first; channels last in memory is the other way to ask torch for it.
Ours reads and writes channels last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from undrift.models.patches import correlate, gradient

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


def calls(layer: tuple[int, ...], kind: torch.dtype) -> dict[str, list[Callable[[], Any]]]:
    """Each way's three calls; the gradient of a first layer's input is left out."""
    lanes, batch, size, inputs, outputs, kernel, padding = layer
    out, one, first = size + 2 * padding - kernel + 1, (1, 1), inputs <= 3

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=kind)

    x, g = draw(lanes, batch, size, size, inputs), draw(lanes, batch, out, out, outputs)
    weight, bias = draw(lanes, outputs, kernel, kernel, inputs), draw(lanes, outputs)
    turned, zeros = draw(lanes, inputs, kernel, kernel, outputs), draw(lanes, inputs)
    around, pad = (kernel - 1 - padding,) * 2, (padding, padding)
    found = {
        "ours": [
            lambda: correlate(x, weight, bias, one, pad),
            lambda: correlate(g, turned, zeros, one, around),
            lambda: gradient(g, x, (kernel, kernel), one, pad),
        ]
    }
    for way, layout in (("grouped", torch.contiguous_format), ("channels last", torch.channels_last)):
        many = draw(batch, lanes * inputs, size, size).to(memory_format=layout)
        back = draw(batch, lanes * outputs, out, out).to(memory_format=layout)
        w = draw(lanes * outputs, inputs, kernel, kernel).to(memory_format=layout)

        def forward(many: Any = many, w: Any = w) -> Any:
            return F.conv2d(many, w, bias.flatten(), padding=padding, groups=lanes)

        def backward(wanted: Any, many: Any = many, back: Any = back, w: Any = w) -> Any:
            return torch.ops.aten.convolution_backward(
                back, many, w, [lanes * outputs], one, pad, one, False, (0, 0), lanes, wanted
            )

        found[way] = [
            forward,
            lambda backward=backward: backward((True, False, False)),
            lambda backward=backward: backward((False, True, True)),
        ]
    return {way: each[:1] + each[2:] if first else each for way, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    head = {"benchmark": "convolutions", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{head['gpu']}, torch {head['torch']}; microseconds, forward + backward")
    print(f"{'':46}{''.join(f'{way:>15}' for way in WAYS)}   ours ÷ the better")
    rows = []
    for precision in ("bfloat16", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        for name, layer in LAYERS.items():
            kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
            parts = {way: [microseconds(call) for call in each] for way, each in calls(layer, kind).items()}
            total = {way: sum(parts[way]) for way in WAYS}
            best = min(total["grouped"], total["channels last"])
            cells = "".join(f"{total[way]:15.1f}" for way in WAYS)
            print(f"{name + ', ' + precision:46}{cells}{best / total['ours']:11.2f}×", flush=True)
            rows.append({"layer": name, "precision": precision, "microseconds": total, "parts": parts})
    if arguments.json:
        arguments.json.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
