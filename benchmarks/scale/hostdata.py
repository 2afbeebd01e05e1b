"""Data larger than the device: on the host, read lazily, and a cohort too large for a GPU's memory.

`PYTHONPATH=src python -m benchmarks.scale.hostdata speed` (also with `--compile`), `… lazy` and `… split`, on a GPU.
Each prints a row and adds it to `benchmarks/results/hostdata.json`:

- `speed`: VGG-9 on made-up pictures of CIFAR-10's shape, with the data on the device and on the host, in turns; each
  time is that of a long run less that of a short one, so that tracing and capturing are left out. First both are
  compared after three rounds, to the bit;
- `lazy`: a folder of made-up pictures, read as they are needed: how far the process's resident memory grows at most,
  beside a small run that loads the same libraries. Without Pillow, the pictures (PPM) are read by this script;
- `split`: the same cohort in all of the memory and in too little of it, where lanes are halved after an error.

`--small` makes it all tiny, to see whether it runs, on a CPU too.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import undrift as ud
from benchmarks.agree import distance
from benchmarks.record import Table, head
from undrift.data.images import ImageFolder

RESULTS = Path(__file__).parents[1] / "results" / "hostdata.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pictures(count: int) -> ud.FederatedDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 10, (count,), generator=generator)
    return ud.load((x, y), ud.IID(), clients=20, test_fraction=0.02)


def speed(small: bool, compile: bool) -> dict[str, Any]:
    data, (short, long, repeats) = pictures(400 if small else 50_000), (1, 2, 1) if small else (3, 13, 3)
    options: dict[str, Any] = {"compile": compile} if DEVICE == "cuda" else {}
    local = ud.Local(epochs=1 if small else 2, batch_size=10 if small else 64, lr=0.01)

    def train(place: str, rounds: int, precision: str) -> ud.Result:
        result = ud.train(
            "vgg9", data, rounds=rounds, local=local, participation=8, device=DEVICE, data_on=place,
            precision=precision, evaluate_every=10**6, **options,
        )  # fmt: skip
        assert result.choices["data"] == place
        return result

    precision = "bfloat16" if DEVICE == "cuda" else "auto"
    one, other = (train(place, 3, precision).params for place in ("device", "host"))
    row: dict[str, Any] = {"what": "speed", "compile": compile, "precision": precision}
    row["same bits after 3 rounds"] = all(torch.equal(one[name], other[name]) for name in one)
    found: dict[str, list[float]] = {"device": [], "host": []}
    for _ in range(repeats):
        for place, rates in found.items():
            begun = time.perf_counter()
            train(place, short, precision)
            middle = time.perf_counter()
            history = train(place, long, precision).history[short:]
            seconds = time.perf_counter() - middle - (middle - begun)
            rates.append(sum(one["samples"] for one in history) / seconds)
    medians = {place: statistics.median(rates) for place, rates in found.items()}
    row |= {f"{place}, samples/s": rate for place, rate in medians.items()}
    row |= {f"{place}, all": [round(rate) for rate in rates] for place, rates in found.items()}
    return row | {"host / device": medians["host"] / medians["device"]}


def lazy(small: bool, compile: bool) -> dict[str, Any]:
    count, side = (60, 32) if small else (16_000, 224)
    if importlib.util.find_spec("PIL") is None:
        ImageFolder.from_file = lambda self, file: ppm(file)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        size = write_folder(Path(folder), count, side)
        few = (torch.rand(64, 3, side, side), torch.arange(64) % 4)
        train_pictures(ud.load(few, ud.IID(), clients=8, test_fraction=0.1))  # libraries, kernels, buffers
        gc.collect()
        before = resident(reset=True)
        begun = time.perf_counter()
        run = train_pictures(ud.load(folder, ud.IID(), clients=8, test_fraction=0.1, lazy=True))
        seconds, grown = time.perf_counter() - begun, resident(peak=True) - before
    row = {"what": "lazy", "compile": False, "pictures": count, "folder, MB": size / 1e6, "data": run.choices["data"]}
    row |= {"resident before, MB": before / 1e6, "grown at most, MB": grown / 1e6, "share of the folder": grown / size}
    return row | {"s": seconds, "samples": sum(one["samples"] for one in run.history)}


def train_pictures(data: ud.FederatedDataset) -> ud.Result:
    layers = torch.nn.Conv2d(3, 16, 8, stride=8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 4))
    local = ud.Local(epochs=1, batch_size=32, lr=0.1)
    return ud.train(model, data, rounds=2, local=local, device=DEVICE)


def write_folder(folder: Path, count: int, side: int) -> int:
    """Pictures of four classes without compression; gives the size of all files."""
    values = np.random.default_rng(0).integers(0, 255, 2 * side * side * 3, np.uint8)
    for i in range(count):
        file = folder / f"class {i % 4}" / f"{i}.ppm"
        file.parent.mkdir(parents=True, exist_ok=True)
        begin = i * 7 % (side * side * 3)
        file.write_bytes(f"P6 {side} {side} 255\n".encode() + values[begin : begin + side * side * 3].tobytes())
    return sum(file.stat().st_size for file in folder.rglob("*.ppm"))


def ppm(file: Path) -> np.ndarray:
    """A picture, channels first."""
    heading, _, pixels = file.read_bytes().partition(b"\n")
    width, height = map(int, heading.split()[1:3])
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3).transpose(2, 0, 1)


def resident(peak: bool = False, reset: bool = False) -> int:
    """The process's resident memory in bytes, now or at its peak since that was reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    wanted = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def split(small: bool, compile: bool) -> dict[str, Any]:
    data, lanes = pictures(400 if small else 20_000), 20
    options: dict[str, Any] = {"compile": compile} if DEVICE == "cuda" else {}
    local = ud.Local(epochs=1, batch_size=5 if small else 128, lr=0.01)

    def train() -> ud.Result:
        return ud.train("vgg9(dropout=False)", data, rounds=3, local=local, lanes=lanes, device=DEVICE, **options)

    if DEVICE != "cuda":
        return {"what": "split", "compile": compile, "lanes": train().choices["lanes"]}
    whole, used = train(), torch.cuda.max_memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(0.4 * used / total)
        narrow = train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    row = {"what": "split", "compile": compile, "memory, GB": 0.4 * used / 1e9, "needed, GB": used / 1e9}
    row |= {"lanes asked for": lanes, "lanes": narrow.choices["lanes"], "engine": narrow.choices["engine"]}
    row["column"] = [one.get("lanes") for one in narrow.history]
    return row | {"weights apart": distance(*({n: w.cpu() for n, w in r.params.items()} for r in (narrow, whole)))}


PARTS = {"speed": speed, "lazy": lazy, "split": split}


def main() -> None:
    parser = argparse.ArgumentParser(description="Data on the host, read lazily, and too little memory.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    row = PARTS[asked.part](asked.small, asked.compile)
    row = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
    print(row)
    if not asked.small:
        Table(asked.out, head("data on the host"), "what", "compile").add(row)


if __name__ == "__main__":
    main()
