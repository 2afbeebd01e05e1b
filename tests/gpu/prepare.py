"""Pieces of real data sets, small enough to be carried to a machine with a GPU and without `datasets`.

    python -m tests.gpu.prepare ../shared/data carry/real

Each becomes one .npz: clients' samples end to end, where each client begins, and test samples.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import undrift as ud
from undrift.data.dataset import Rows
from undrift.data.text import Bags, Windows

PIECES = {  # partition, clients (None: the data's own), clients kept, samples kept of each, test samples
    "cifar10": (ud.Dirichlet(0.5), 20, 20, 300, 1000),
    "mnist": (ud.ByKey(), None, 60, 100, 1000),
    "fashion_mnist": (ud.Dirichlet(0.3), 10, 10, 600, 1000),
    "shakespeare_roles": (ud.ByKey(), None, 20, 500, 1000),
    "ag_news": (ud.Dirichlet(5.0), 12, 12, 1200, 1000),
    "audiomnist": (ud.ByKey(), None, 24, 200, 600),
    "stackoverflow_tags": (ud.Dirichlet(0.3), 20, 20, 400, 1000),
}


def piece(name: str, folder: str) -> dict[str, np.ndarray]:
    partition, clients, kept, samples, tested = PIECES[name]
    data = ud.load(name, partition, clients, data_dir=folder)
    assert data.test_rows
    rng = np.random.default_rng(0)
    largest = np.sort(np.argsort(-data.sizes, kind="stable")[:kept])
    rows, offsets = [], [0]
    for client in largest.tolist():
        own = data.index[data.offsets[client] : data.offsets[client + 1]].numpy()
        # Clients differ in size here as well, by up to a factor of four.
        count = min(len(own), int(samples * rng.uniform(0.25, 1)))
        rows.append(np.sort(rng.choice(own, count, replace=False)))
        offsets.append(offsets[-1] + count)
    held = data.test_rows.index.numpy()
    chosen = np.sort(rng.choice(held, min(len(held), tested), replace=False))
    found = {"offsets": np.array(offsets)}
    for which, index, where in (("", np.concatenate(rows), data), ("test_", chosen, data.test_rows)):
        x, found[f"{which}y"] = arrays(Rows(where.store, torch.from_numpy(index), where.take))
        # A word is over by then; an LSTM takes long to learn to remember it through the silence after it.
        found[f"{which}x"] = x[..., :32] if name == "audiomnist" else x
    sizes = {"classes": data.outputs, "vocabulary": data.task.vocabulary or 0}
    if isinstance(data.take, Bags):
        sizes |= {"words": data.take.words, "tags": data.take.tags}
    return found | {name: np.array(size) for name, size in sizes.items()}


def arrays(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """As they are stored, but for windows of a text, which are taken out of it."""
    if isinstance(rows.take, Windows):
        x, y = (t.numpy() for t in rows.all())
        return x.astype(np.uint8), y
    return rows.store["x"][rows.index].numpy(), rows.store["y"][rows.index].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder in hub layout")
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in PIECES:
        path = asked.out / f"{name}.npz"
        found = piece(name, asked.data)
        np.savez_compressed(path, **found)  # type: ignore[arg-type]
        shape = "×".join(map(str, found["x"].shape))
        print(f"{name:<20} {shape:<16} {found['x'].dtype} {path.stat().st_size / 2**20:6.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
