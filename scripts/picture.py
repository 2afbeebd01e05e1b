"""The README's picture: test accuracy of four methods on label-skewed digits, 20 clients.

    python scripts/picture.py [--out docs/images/undrift.svg]

Every method has the settings chosen for it on validation data (benchmarks/results/troubles.json, "skewed labels").
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

import undrift as ud

ROOT = Path(__file__).parent.parent
COLOURS = {"FedAvg": "#8a8f98", "SCAFFOLD": "#e0701a", "FedDyn": "#1b9e77", "FedAdam": "#3d85c6"}
INK = "#7d838c"
"""A grey that reads on light and dark pages; the background is transparent."""
ROUNDS, SEEDS = 40, 3


def curves(method: str, lr: float, rounds: int = ROUNDS) -> np.ndarray:
    """Accuracy in per cent, seeds × rounds."""
    rows = []
    for seed in range(SEEDS):
        data = ud.load("digits", ud.Dirichlet(0.05), clients=20, seed=seed)
        local = ud.Local(epochs=2, batch_size=32, lr=lr)
        history = ud.train("mlp", data, method, rounds=rounds, local=local, participation=0.4, seed=seed).history
        rows.append([100 * row["accuracy"] for row in history])
    return np.array(rows)


def draw(found: dict[str, np.ndarray], out: Path) -> None:
    plt.rcParams.update({"font.size": 11, "svg.hashsalt": "undrift", "text.color": INK, "axes.labelcolor": INK})
    figure, axes = plt.subplots(figsize=(8.4, 3.9), layout="constrained")
    last = len(next(iter(found.values()))[0])
    rounds, ends = np.arange(1, last + 1), {}
    for name, runs in found.items():
        mean, spread = runs.mean(0), runs.std(0, ddof=1)
        axes.plot(rounds, mean, color=COLOURS[name], linewidth=2.2)
        axes.fill_between(rounds, mean - spread, mean + spread, color=COLOURS[name], alpha=0.16, linewidth=0)
        ends[name] = mean[-5:].mean()
    place = 200.0
    for name, height in sorted(ends.items(), key=lambda item: -item[1]):
        place = min(height, place - 6.5)  # keep the labels of lines that end close together apart
        text = f"{name}  {height:.0f}%"
        axes.annotate(
            text, (last + last / 40, place), color=COLOURS[name], va="center", annotation_clip=False, weight="bold"
        )
    axes.set(xlim=(1, last), ylim=(0, 100), xlabel="round", ylabel="test accuracy, %")
    axes.set_title(
        "Label skew: digits over 20 clients by Dirichlet(0.05), 8 clients per round", fontsize=11, loc="left"
    )
    axes.grid(color=INK, alpha=0.2, linewidth=0.6)
    axes.tick_params(colors=INK)
    axes.spines[:].set_color(INK)
    axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, transparent=True, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "undrift.svg")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cells = json.loads((ROOT / "benchmarks" / "results" / "troubles.json").read_text(encoding="utf-8"))["cells"]
    chosen = {c["name"]: (c["method"], c["setting"]["local.lr"]) for c in cells if c["partition"] == "skewed labels"}
    draw({name: curves(*chosen[name]) for name in COLOURS}, arguments.out)


if __name__ == "__main__":
    main()
