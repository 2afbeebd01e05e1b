"""ResNet-18 with batch norm on a GPU: lanes against the plain engine, which runs torch's own batch norm.

`PYTHONPATH=src python -m benchmarks.norms` prints one JSON line: how far the two engines are apart in float64, on
uneven clients with short batches, then seconds per round of each in tf32, the lanes compiled. CIFAR's stem (3 × 3, no
pooling), batches of 64, ten clients per round with ten steps each, made-up pictures.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch
from torch import Tensor, nn

import undrift as ud


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = before == width and stride == 1
        across = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.across = nn.Identity() if same else across

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.across(x))


def resnet18(width: int = 64) -> nn.Module:
    """He et al., *Deep Residual Learning for Image Recognition* (2016), with the stem that is usual for 32 × 32."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for i, w in enumerate((width, 2 * width, 4 * width, 8 * width)):
        layers += [Block(before, w, 1 if i == 0 else 2), Block(w, w, 1)]
        before = w
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def pictures(sizes: list[int], dtype: torch.dtype = torch.float32) -> ud.FederatedDataset:
    generator = torch.Generator().manual_seed(0)
    clients = []
    for n in sizes:
        x = torch.randn(n, 3, 32, 32, generator=generator, dtype=dtype)
        clients.append((x, torch.randint(0, 10, (n,), generator=generator)))
    return ud.FederatedDataset.from_clients(clients)


def distance(device: str, width: int) -> float:
    """‖lanes − plain‖ / ‖plain‖ in float64, over weights and running statistics, after two rounds of uneven clients."""
    data, local = pictures([10, 7, 5], torch.float64), ud.Local(epochs=1, batch_size=4, lr=0.01)
    found = []
    for engine in ("lanes", "plain"):
        run = ud.train(resnet18(width).double(), data, rounds=2, local=local, engine=engine, device=device)
        assert run.choices["engine"] == engine
        state = run.model.state_dict()
        found.append(torch.cat([t.double().cpu().flatten() for t in state.values()]))
    return float((found[0] - found[1]).norm() / found[1].norm())


def seconds(device: str, engine: str, clients: int, rounds: int, samples: int, **options: Any) -> float:
    """The median time of a round, without the first two."""
    data, local = pictures([samples] * clients), ud.Local(epochs=1, batch_size=64, lr=0.01)
    run = ud.train(
        resnet18(), data, rounds=rounds, local=local, engine=engine, device=device, precision="tf32", **options
    )
    assert run.choices["engine"] == engine and not run.stopped
    return statistics.median(row["seconds"] for row in run.history[2:])


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = device == "cpu"  # only to see that the script works
    found: dict[str, Any] = {"distance in float64": distance(device, 8 if small else 64)}
    clients, samples, rounds = (2, 64, 3) if small else (10, 640, 7)
    for name, engine, options in (
        ("plain", "plain", {}),
        ("lanes", "lanes", {"compile": False}),
        ("lanes, compiled", "lanes", {"compile": not small}),
    ):
        found[name] = seconds(device, engine, clients, rounds, samples, **options)
    found["times plain, compiled"] = found["plain"] / found["lanes, compiled"]
    found["device"] = torch.cuda.get_device_name() if not small else "CPU"
    json.dump({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
