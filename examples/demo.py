"""Four methods on handwritten digits, non-IID over twenty clients: live progress, a table and a plot.

python examples/demo.py [--out runs/demo]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import undrift as ud

ROUNDS = 100
LOCAL = ud.Local(epochs=2, batch_size=32, lr=0.1)
METHODS = {
    "FedAvg": ud.FedAvg(),
    "FedProx": ud.FedProx(mu=1.0),
    "FedAvgM": ud.FedAvgM(momentum=0.8),
    "FedAdam": ud.FedAdam(lr=0.1),
}
COLOURS = dict(zip(METHODS, ("#555555", "#1f77b4", "#d95f02", "#1b9e77"), strict=True))


def train_all(data: ud.FederatedDataset) -> dict[str, ud.Result]:
    """Train every method from the same initial weights, on the same cohorts and batches."""
    columns = [TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    results = {}
    with Progress(*columns, TextColumn("{task.fields[accuracy]}")) as progress:
        for name, method in METHODS.items():
            bar = progress.add_task(name, total=ROUNDS, accuracy="")

            def show(row: dict, bar: int = bar) -> None:
                progress.update(bar, advance=1, accuracy=f"accuracy {row['accuracy']:.1%}")

            results[name] = ud.train(
                "mlp", data, method, rounds=ROUNDS, local=LOCAL, participation=0.4, seed=0, on_round=show
            )
    return results


def table(results: dict[str, ud.Result], seconds: float) -> Table:
    shown = Table(title=f"digits, 20 clients by Dirichlet(0.1): {seconds:.0f} s")
    for heading in ("method", "last 10 rounds", "best round", "rounds to 90%"):
        shown.add_column(heading, justify="left" if heading == "method" else "right")
    for name, result in results.items():
        curve = [row["accuracy"] for row in result.history]
        reached = next((str(i + 1) for i, accuracy in enumerate(curve) if accuracy >= 0.9), "–")
        shown.add_row(name, f"{sum(curve[-10:]) / 10:.1%}", f"{max(curve):.1%}", reached)
    return shown


def picture(data: ud.FederatedDataset, results: dict[str, ud.Result], path: Path) -> None:
    """Plot which client holds which digits, and the accuracy of each method by round."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1, 1.5), layout="constrained")
    counts = data.label_counts().numpy()
    bottom = 0 * counts[:, 0]
    for digit in range(10):
        left.bar(range(len(data)), counts[:, digit], bottom=bottom, color=plt.cm.tab10(digit), label=str(digit))
        bottom = bottom + counts[:, digit]
    left.set(title="Digits held by each client", xlabel="client", ylabel="samples", xticks=[])
    left.legend(ncols=5, fontsize=7, frameon=False, loc="upper center")
    left.set_ylim(0, 1.25 * bottom.max())
    for name, result in results.items():
        curve = [100 * row["accuracy"] for row in result.history]
        right.plot(range(1, len(curve) + 1), curve, label=name, color=COLOURS[name], linewidth=1.6)
    right.set(title="Accuracy of the global model", xlabel="round", ylabel="%", ylim=(0, 100))
    right.legend(frameon=False, loc="lower right")
    right.grid(alpha=0.25)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the folder for the plot")
    out = parser.parse_args().out
    data = ud.load("digits", partition=ud.Dirichlet(alpha=0.1), clients=20, seed=0)
    began = time.perf_counter()
    results = train_all(data)
    Console().print(table(results, time.perf_counter() - began))
    picture(data, results, out / "demo.png")
    print(f"The plot is in {out / 'demo.png'}.")


if __name__ == "__main__":
    main()
