"""The picture of docs/drift.md: agreement of the clients' updates and test accuracy, with FedAvg and SCAFFOLD.

python scripts/drift_picture.py [--out docs/images/drift.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

import undrift as ud

OUT = Path(__file__).parent.parent / "docs" / "images" / "drift.svg"
METHODS = {"FedAvg": (ud.FedAvg(), "#8a8f98"), "SCAFFOLD": (ud.Scaffold(), "#e0701a")}
COLUMNS = {"agreement": "agreement of the clients' updates", "accuracy": "test accuracy"}
INK = "#7d838c"
"""A grey that reads on light and dark pages; the background is transparent."""
ROUNDS, SEEDS = 40, 3


def curves(method: ud.Part, rounds: int = ROUNDS) -> dict[str, np.ndarray]:
    """The columns, seeds × rounds."""
    rows = []
    for seed in range(SEEDS):
        data = ud.load("digits", ud.Dirichlet(0.1), clients=10, seed=seed)
        local = ud.Local(epochs=2, batch_size=32, lr=0.1)
        history = ud.train("mlp", data, method, rounds=rounds, local=local, seed=seed, drift=True).history
        rows.append([[row[name] for name in COLUMNS] for row in history])
    return dict(zip(COLUMNS, np.array(rows).transpose(2, 0, 1), strict=True))


def draw(found: dict[str, dict[str, np.ndarray]], out: Path) -> None:
    plt.rcParams.update({"font.size": 11, "svg.hashsalt": "undrift", "text.color": INK, "axes.labelcolor": INK})
    figure, both = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    for axes, (column, words) in zip(both, COLUMNS.items(), strict=True):
        for name, runs in found.items():
            mean, spread = runs[column].mean(0), runs[column].std(0, ddof=1)
            rounds, colour = np.arange(1, len(mean) + 1), METHODS[name][1]
            axes.plot(rounds, mean, color=colour, linewidth=2.2, label=name)
            axes.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.16, linewidth=0)
        axes.set(xlim=(1, len(mean)), ylim=(0, 1), xlabel="round")
        axes.set_title(words, fontsize=11, loc="left")
        axes.grid(color=INK, alpha=0.2, linewidth=0.6)
        axes.tick_params(colors=INK)
        axes.spines[:].set_color(INK)
        axes.spines[["top", "right"]].set_visible(False)
    both[1].legend(frameon=False, loc="lower right", labelcolor="linecolor")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, transparent=True, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw({name: curves(method) for name, (method, _) in METHODS.items()}, arguments.out)


if __name__ == "__main__":
    main()
