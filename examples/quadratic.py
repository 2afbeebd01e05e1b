"""The K-decay paper's one-dimensional example: why many local steps miss the optimum, and how decaying them cures it.

Client i, i on [1, 3] with density ∝ 1/√i, has the loss ½·i·x² − x; the sum's minimum is at 1/E[i] ≈ 0.5234, but with
K local steps FedAvg heads for E[(1−(1−γi)^K)/i] / E[1−(1−γi)^K]. Ten clients a round, γ = 0.1, η = 0.01, x₁ = 0.4.

    python examples/quadratic.py [--runs 10] [--rounds 3000] [--out runs/quadratic]

All of it takes about half an hour on two cores; `--runs 1 --rounds 600` half a minute.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import undrift as ud

CLIENTS, GAMMA, ETA, START = 10_000, 0.1, 0.01, 0.4
OPTIMUM = 1 / ((3**1.5 - 1) / 3 / (math.sqrt(3) - 1))  # 1/E[i]
SCHEMES: dict[str, dict] = {
    "K = 1": {"steps": 1},
    "K = 10": {"steps": 10},
    "K = 50": {"steps": 50},
    "K = 10, γ decays by 0.995": {"steps": 10, "lr": ud.decay(GAMMA, 0.995)},
    "K decays by 0.99": {"steps": ud.decay(10, 0.99)},
    "K decays by 0.995": {"steps": ud.decay(10, 0.995)},
    "K decays by 0.9995": {"steps": ud.decay(10, 0.9995)},
}


class Point(torch.nn.Module):
    """One number; a client's target is its i, so that its loss is ½·i·x² − x."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor([START], dtype=torch.float64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.x.expand(len(batch), 1)


def loss(output: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return 0.5 * i[:, 0] * output[:, 0] ** 2 - output[:, 0]


def population() -> ud.FederatedDataset:
    """Clients at equal steps of the distribution function: i = (1 + u(√3 − 1))²."""
    u = (np.arange(CLIENTS) + 0.5) / CLIENTS
    i = torch.tensor((1 + u * (math.sqrt(3) - 1)) ** 2)[:, None]
    offsets = np.arange(CLIENTS + 1)
    return ud.FederatedDataset({"x": torch.zeros(CLIENTS, 1), "y": i}, torch.arange(CLIENTS), offsets)


def surrogate(k: int) -> float:
    """Where FedAvg with a constant K heads for."""
    i = population().store["y"]
    moved = 1 - (1 - GAMMA * i) ** k
    return float((moved / i).mean() / moved.mean())


@dataclass(frozen=True)
class Record(ud.Part):
    """Where the global model stands, in the history."""

    def start(self, params: dict) -> torch.Tensor:
        return params["x"]

    def observe(self, params: dict, state: torch.Tensor, server: ud.Server) -> torch.Tensor:
        return params["x"]

    def history(self, state: torch.Tensor) -> dict:
        return {"x": float(state)}


def curve(data: ud.FederatedDataset, local: dict, rounds: int, seed: int) -> tuple[np.ndarray, float]:
    """x after every round, and the share of the constant-K steps that were taken."""
    work = ud.Local(**{"lr": GAMMA, "batch_size": 1, **local})
    method = ud.FedAvg(weighting="uniform") + ud.ServerSGD(lr=ETA) + Record()
    history = ud.train(Point(), data, method, rounds=rounds, local=work, participation=10, seed=seed, loss=loss).history
    return np.array([row["x"] for row in history]), history[-1]["steps_fraction"]


def expected(local: dict, rounds: int) -> np.ndarray:
    """The mean of x after every round, exactly: a round moves it by η times the mean over i of what K steps do."""
    i = population().store["y"][:, 0].numpy()
    work = ud.Local(**{"lr": GAMMA, **local})
    x, path = START, []
    for t in range(rounds):
        k = int(work.step_counts(t, np.array([0]), np.array([1]))[0])
        gamma = work.lr(t) if callable(work.lr) else work.lr
        x += ETA * float(((1 - (1 - gamma * i) ** k) * (1 / i - x)).mean())
        path.append(x)
    return np.array(path)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("runs/quadratic"))
    arguments = parser.parse_args()
    data, middle = population(), min(500, arguments.rounds) - 1
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    print(f"optimum {OPTIMUM:.4f}; after {middle + 1} and {arguments.rounds} rounds, mean of {arguments.runs} runs")
    print(f"{'':28}{'ours':>18}{'expected':>18}{'steps':>8}")
    for name, local in SCHEMES.items():
        runs = [curve(data, local, arguments.rounds, seed) for seed in range(arguments.runs)]
        mean, exact = np.mean([x for x, _ in runs], axis=0), expected(local, arguments.rounds)
        columns = "".join(f"{path[middle]:9.4f}{path[-1]:9.4f}" for path in (mean, exact))
        print(f"{name:28}{columns}{runs[0][1]:8.2f}", flush=True)
        axes.plot(range(1, len(mean) + 1), mean, label=name, linewidth=1.4)
    axes.axhline(OPTIMUM, color="black", linestyle=":", linewidth=1, label="optimum")
    axes.set(
        xlabel="round", ylabel="x", ylim=(START, 0.6), title="Fewer local steps as rounds go by: nearer the optimum"
    )
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    arguments.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out / "quadratic.png", dpi=130)
    print(f"The picture is in {arguments.out / 'quadratic.png'}.")


if __name__ == "__main__":
    main()
