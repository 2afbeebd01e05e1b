"""FLamby's table of heart disease at four hospitals, against our methods: docs/correctness.md.

    python -m benchmarks.flamby --data DIR                    measure, into benchmarks/results/flamby.json
    python -m benchmarks.flamby --write docs/correctness.md   write the table into the page, from that file

Ogier du Terrail et al., *FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
Settings* (2022). The data, the settings and the published results per seed are those of FLamby's repository
(owkin/FLamby, commit edacf54): a linear layer on 13 features, batches of 4, 100 updates per round, 15 rounds, and the
accuracy on all hospitals' test samples together. Rates, betas and τ are read from its configuration. `DIR` has the
UCI's four files in `heart_disease/`, and FLamby's configuration and results in `published/`.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import train_test_split

import undrift as ud
from benchmarks.record import head

RESULTS = Path(__file__).parent / "results" / "flamby.json"
CENTRES = ("cleveland", "hungarian", "switzerland", "va")
SEEDS = (42, 43, 44, 45, 46)
DROPPED, CATEGORIES, LABEL = [10, 11, 12], [2, 6], 13
UPDATES, BATCH, EPOCHS = 100, 4, 50
ROUNDS = 486 // len(CENTRES) // BATCH * EPOCHS // UPDATES
"""FLamby's rule: 50 epochs of all training samples in rounds of 100 updates per client."""
SOURCE = {"repository": "owkin/FLamby", "commit": "edacf54", "licence of the data": "CC BY 4.0 (UCI)"}


@cache
def tables(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return features and labels of each centre, in the order of its file, without rows that lack a value."""
    frames = [
        pd.read_csv(folder / "heart_disease" / f"processed.{centre}.data", header=None, na_values="?")
        for centre in CENTRES
    ]
    every = pd.concat(frames, keys=CENTRES).drop(columns=DROPPED).dropna()
    labels = (every.pop(LABEL) > 0).astype(np.float32)
    features = pd.get_dummies(every, columns=CATEGORIES, drop_first=True).astype(np.float64)
    return [(features.loc[c].to_numpy(), labels.loc[c].to_numpy()) for c in CENTRES]


@cache
def data(folder: Path, centre: int | None = None) -> ud.FederatedDataset:
    """Return the centres as clients, each standardized by its own training samples, or one of them alone.

    The test set is that of all centres, standardized by the statistics of all training samples together.
    """
    splits = [split(x, y) for x, y in tables(folder)]
    pooled = np.concatenate([x for x, _, _, _ in splits])
    clients = [(standardized(x, x), targets(y)) for x, _, y, _ in splits]
    x = np.concatenate([test for _, test, _, _ in splits])
    y = np.concatenate([test for _, _, _, test in splits])
    test = (standardized(x, pooled), targets(y))
    own = clients if centre is None else clients[centre : centre + 1]
    return ud.FederatedDataset.from_clients(own, test=test, task=ud.Task(loss="binary_cross_entropy"))


def split(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Return training features, test features, training labels and test labels of a centre."""
    by_label = y if min(np.bincount(y.astype(int), minlength=2)) > 2 else None
    found: list[np.ndarray] = train_test_split(
        x, y, test_size=0.34, train_size=0.66, random_state=43, shuffle=True, stratify=by_label
    )
    return found


def standardized(x: np.ndarray, by: np.ndarray) -> torch.Tensor:
    return torch.tensor((x - by.mean(0)) / (by.std(0, ddof=1) + 1e-9), dtype=torch.float32)


def targets(y: np.ndarray) -> torch.Tensor:
    return torch.tensor(y[:, None], dtype=torch.float32)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    published: str
    """FLamby's name of it."""
    method: Any
    local: ud.Local
    rounds: Callable[[int], int] = lambda seed: ROUNDS
    """The number of rounds, given the seed."""
    centre: int | None = None
    """The only centre that trains; None for all of them."""


def rows(folder: Path) -> dict[str, Row]:
    """Return the rows of the table, with FLamby's settings."""
    strategies = json.loads((folder / "published" / "config_heart_disease.json").read_text())["strategies"]

    def local(name: str) -> ud.Local:
        return ud.Local(steps=UPDATES, batch_size=BATCH, lr=strategies[name]["learning_rate"])

    def adaptive(name: str, kind: Any) -> Any:
        given = strategies[name]
        betas = {beta: given[beta] for beta in ("beta1", "beta2") if beta in kind.__dataclass_fields__}
        return kind(lr=given["server_learning_rate"], tau=given["tau"], initial_v=0, **betas)

    adam, scaffold = strategies["FedAdam"], ud.ServerSGD(lr=strategies["Scaffold"]["server_learning_rate"])
    corrected = ud.ServerAdam(adam["server_learning_rate"], adam["beta1"], adam["beta2"], eps=adam["tau"])
    alone = ud.Local(epochs=EPOCHS, batch_size=BATCH, lr=0.001, optimizer=ud.Adam())
    return {
        "FedAvg": Row("FedAvg100", ud.FedAvg(), local("FedAvg")),
        "FedProx": Row("FedProx100", ud.FedProx(mu=strategies["FedProx"]["mu"]), local("FedProx")),
        "SCAFFOLD": Row("Scaffold100", ud.SCAFFOLD() + scaffold, local("Scaffold")),
        "FedAdam": Row("FedAdam100", adaptive("FedAdam", ud.FedAdam), local("FedAdam")),
        "FedYogi": Row("FedYogi100", adaptive("FedYogi", ud.FedYogi), local("FedYogi")),
        "FedAdagrad": Row("FedAdagrad100", adaptive("FedAdagrad", ud.FedAdagrad), local("FedAdagrad")),
        **{f"{c} alone": Row(f"Local {i}", ud.FedAvg(), alone, lambda seed: 1, i) for i, c in enumerate(CENTRES)},
        "Cleveland's turns": Row("Cyclic100", ud.FedAvg(), local("Cyclic"), turns, 0),
        'Scaffold(variates="uniform")': Row(
            "Scaffold100", ud.Scaffold(variates="uniform") + scaffold, local("Scaffold")
        ),
        "ServerAdam": Row("FedAdam100", corrected, local("FedAdam")),
    }


def turns(seed: int) -> int:
    """Return in how many of FLamby's cyclic rounds the first centre trains.

    Its code hands the weights of a centre to no other, and evaluates those of the first.
    """
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(CENTRES)) for _ in range(-(-ROUNDS // len(CENTRES)))])
    return int((order[:ROUNDS] == 0).sum())


def train(folder: Path, name: str, seed: int) -> ud.Result:
    """Train a row's model with this seed."""
    row = rows(folder)[name]
    torch.manual_seed(seed)
    model, rounds = torch.nn.Linear(13, 1), row.rounds(seed)
    return ud.train(
        model, data(folder, row.centre), row.method, rounds=rounds, local=row.local, seed=seed, evaluate_every=rounds
    )


def accuracy(folder: Path, result: ud.Result) -> float:
    """Return the accuracy on all centres' test samples, at a threshold of one half."""
    test = data(folder).test_rows
    assert test is not None
    x, y = test.take(test.store, test.index)
    with torch.no_grad():
        z = torch.nn.functional.linear(x, result.params["weight"], result.params["bias"])
    return float(((z > 0) == (y > 0.5)).double().mean())


def published(folder: Path, name: str) -> dict[int, float]:
    """Return the published accuracy of a row, per seed."""
    found, wanted = {}, (rows(folder)[name].published, "Pooled Test")
    for seed in SEEDS:
        with (folder / "published" / f"heart_seed{seed}.csv").open(newline="") as file:
            every = list(csv.DictReader(file))
        (found[seed],) = (float(row["Metric"]) for row in every if (row["Method"], row["Test"]) == wanted)
    return found


def measure(folder: Path) -> dict[str, Any]:
    found = []
    for name, row in rows(folder).items():
        ours = {str(seed): accuracy(folder, train(folder, name, seed)) for seed in SEEDS}
        theirs = {str(seed): value for seed, value in published(folder, name).items()}
        found.append({"row": name, "ours": ours, "published as": row.published, "published": theirs})
        print(f"{name}: {statistics.fmean(ours.values()):.4f}", flush=True)
    return {**head("flamby"), "data": SOURCE, "rows": found}


def table(found: dict[str, Any]) -> str:
    """Return the table in Markdown: per row, our accuracy and the published one, the mean and per seed."""
    lines = [f"| | mean | {' | '.join(map(str, SEEDS))} |", f"|---|---|{'---|' * len(SEEDS)}"]
    for row in found["rows"]:
        for label, values in ((row["row"], row["ours"]), (f"FLamby, {row['published as']}", row["published"])):
            each = " | ".join(f"{value:.4f}" for value in values.values())
            lines.append(f"| {label} | **{statistics.fmean(values.values()):.4f}** | {each} |")
    return "\n".join(lines)


BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def with_table(page: str, found: dict[str, Any]) -> str:
    """Return the page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(found)}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    if given.data:
        RESULTS.write_text(json.dumps(measure(given.data), indent=1) + "\n", encoding="utf-8")
    if given.write:
        found = json.loads(RESULTS.read_text(encoding="utf-8"))
        given.write.write_text(with_table(given.write.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
