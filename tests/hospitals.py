"""Tables of hospitals with named diagnoses, as files of nodes and as one table that has all rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

COLUMNS = ["age", "income", "smoker", "ratio"]
CLASSES = ["healthy", "ill", "observe"]
NODES = [["a"], ["b", "c"]]
"""The hospitals of each node."""


def frame(seed: int, rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, rows)
    x = {"age": 50 + 10 * y + rng.integers(-9, 10, rows), "income": rng.normal(4e4, 2e4, rows)}
    x |= {"smoker": rng.random(rows) < 0.3 + 0.2 * (y == 2), "ratio": rng.normal(0, 0.1, rows) + 0.1 * y}
    return pd.DataFrame(x).assign(outcome=np.array(CLASSES)[y], site=np.array(["a", "b", "c"])[np.arange(rows) % 3])


def hospitals(folder: Path, first: int = 0, normalize: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an experiment's changes, with all rows for data, and the nodes' configs, with files of their own rows.

    The second node lacks a class, has its columns in another order, integers for a column of floats, and 0 and 1 for
    truth values. `first` says which of the two has the first clients; its order of columns is that of the whole.
    """
    configs: list[dict[str, Any]] = []
    splits = {"train": frame(0, 90), "test": frame(1, 60)}
    order = NODES if first == 0 else NODES[::-1]
    for node, sites in enumerate(NODES):
        place = folder / f"node-{node}"
        place.mkdir(parents=True)
        for split, table in splits.items():
            own = kept(table)
            own = own[own.site.isin(sites)]
            if node == 1:
                own = own[["site", "ratio", "outcome", "income", "smoker", "age"]].astype({"smoker": int, "age": int})
            else:
                own = own.astype({"age": float})
            own.to_parquet(place / f"{split}.parquet", index=False)
        configs.append({"data": str(place), "label": "outcome", "client": "site"})
    (folder / "all").mkdir()
    columns = list(pd.read_parquet(folder / f"node-{first}" / "train.parquet").columns)
    for split, table in splits.items():
        rows = kept(table)
        whose = [rows[rows.site == site] for sites in order for site in sites]  # clients are numbered as they come
        pd.concat(whose).astype({"age": float})[columns].to_parquet(folder / "all" / f"{split}.parquet", index=False)
    data = {"name": str(folder / "all"), "partition": "ByKey()", "label": "outcome", "client": "site"}
    changes = {"model": "wide64", "data": data | {"normalize": normalize}, "rounds": 2}
    return changes, [configs[first], configs[1 - first]]


def kept(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table without the healthy patients of the second node."""
    return table[(table.site == "a") | (table.outcome != "healthy")]


def edited(config: dict[str, Any], change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change the tables of a node."""
    for split in ("train", "test"):
        file = Path(config["data"]) / f"{split}.parquet"
        change(pd.read_parquet(file)).to_parquet(file, index=False)
