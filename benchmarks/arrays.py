"""CIFAR-10 as one uncompressed .npz, and as a data set for `ud.load`, where `datasets` is not installed.

    python -m benchmarks.arrays SRC_FOLDER DEST.npz

SRC_FOLDER, or folders below it, hold the parquet files of `uoft-cs/cifar10` (columns `img`, a struct with the PNG's
`bytes`, and `label`). Needs pyarrow and pillow. The file has what undrift's own cache has of the data set, so that
`ud.load(arrays.NAME, …)` gives the same clients as `ud.load("cifar10", …)`.
"""

from __future__ import annotations

import io
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

NAME = "cifar10 arrays"
ROWS = {"train": 50_000, "test": 10_000}


def decode(pictures: list[bytes]) -> np.ndarray:
    """Pictures as bytes: channels × height × width."""
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1) for data in pictures])


def convert(source: Path, file: Path) -> None:
    import pyarrow.parquet as pq

    arrays: dict[str, np.ndarray] = {}
    with ProcessPoolExecutor() as pool:
        for split, count in ROWS.items():
            parts = sorted(source.rglob(f"{split}-*.parquet"), key=lambda part: part.name)
            tables = [pq.read_table(part, columns=["img", "label"]) for part in parts]
            pictures = [row["bytes"] for table in tables for row in table["img"].to_pylist()]
            if len(pictures) != count:
                names = ", ".join(part.name for part in parts) or "no file"
                raise SystemExit(f"{source} has {len(pictures):,} {split} pictures ({names}), not {count:,}.")
            pieces = [pictures[i : i + 1000] for i in range(0, count, 1000)]
            arrays[f"{split}_x"] = np.concatenate(list(pool.map(decode, pieces)))
            arrays[f"{split}_y"] = np.concatenate([table["label"].to_numpy() for table in tables]).astype(np.int64)
    pixels = arrays["train_x"].transpose(1, 0, 2, 3).reshape(3, -1)
    counts = np.stack([np.bincount(channel, minlength=256) for channel in pixels]) / pixels.shape[1]
    levels = np.arange(256) / 255
    mean = counts @ levels
    arrays["mean"] = mean.astype(np.float32)[:, None, None]
    arrays["std"] = np.sqrt(counts @ levels**2 - mean**2).astype(np.float32)[:, None, None]
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **arrays)


def register(file: Path) -> str:
    """Make the file's data set known to `ud.load`; returns its name."""
    import torch

    import undrift as ud
    from undrift.data.sources import RECIPES

    with np.load(file) as found:
        arrays = {name: torch.from_numpy(found[name]) for name in found.files}
    ud.register_data(NAME, lambda: RECIPES["cifar10"].open(arrays, {"classes": None, "clients": []}))
    return NAME


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    began, file = time.perf_counter(), Path(sys.argv[2])
    convert(Path(sys.argv[1]), file)
    print(f"{file}: {file.stat().st_size / 2**20:.0f} MiB in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
