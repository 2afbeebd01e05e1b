"""A folder of images trains in less memory than it has, on disk and decoded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

LIMIT = 800 * 2**20
"""What the process may allocate. Python, torch and a small model take more than half of it."""
PICTURES, HEIGHT, WIDTH = 7000, 224, 224

TRAIN = """
import resource, sys
import torch, undrift as ud
torch.set_num_threads(2)
lazy, limit = sys.argv[2] == "lazy", int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
data = ud.load(sys.argv[1], ud.Dirichlet(0.5), clients=8, test_fraction=0.1, lazy=lazy)
if not lazy:
    data.store["x"] = data.store["x"].clone()  # in memory, where it does not fit
layers = torch.nn.Conv2d(3, 8, 8, stride=8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 4))
run = ud.train(model, data, rounds=2, local=ud.Local(epochs=1, batch_size=8, lr=0.1), participation=4, device="cpu")
assert len(run.history) == 2 and not run.stopped
print(run.choices["data"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def pictures(folder: Path) -> int:
    """Random pictures of four classes, stored without compression; gives the size of all files."""
    values = np.random.default_rng(0).integers(0, 255, 2 * HEIGHT * WIDTH * 3, np.uint8)
    for i in range(PICTURES):
        file = folder / f"class {i % 4}" / f"{i}.ppm"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = values[i * 17 : i * 17 + HEIGHT * WIDTH * 3]
        file.write_bytes(f"P6 {WIDTH} {HEIGHT} 255\n".encode() + pixels.tobytes())
    return sum(file.stat().st_size for file in folder.rglob("*.ppm"))


def test_a_folder_larger_than_memory(tmp_path):
    size, decoded = pictures(tmp_path / "pictures"), PICTURES * HEIGHT * WIDTH * 3
    assert min(size, decoded) > 1.1 * LIMIT
    environment = {**os.environ, "UNDRIFT_CACHE": str(tmp_path / "cache")}

    def run(kind: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", TRAIN, str(tmp_path / "pictures"), kind, str(LIMIT)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    lazy = run("lazy")
    assert lazy.returncode == 0, lazy.stderr
    place, peak = lazy.stdout.split()
    print(f"{size / 1e6:.0f} MB of pictures, at most {LIMIT / 1e6:.0f} MB allocated, {int(peak) / 1e3:.0f} MB resident")
    assert place == "disk" and int(peak) * 1024 < LIMIT
    whole = run("whole")
    assert whole.returncode != 0 and "allocate" in whole.stderr, whole.stderr  # so the limit is one
