"""(j) A history that is read late, evaluation and figures of drift among it, against that of the plain engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import undrift as ud
from tests.field import Median
from tests.gpu.checks import Check, Finding, within
from tests.gpu.models import data_for, make
from undrift.engine import graph

SIZES = (41, 5, 23, 10, 17, 1, 33)
METHODS = {
    "FedAvg": ud.FedAvg(),
    "Scaffold": ud.Scaffold(),
    "FedNLR, with a history of its own": ud.FedNLR(),
    "median, which gathers updates": Median(),
}


def data_with_test(model: str) -> ud.FederatedDataset:
    """Uneven clients, and a test set of the first one's samples."""
    data = data_for(model, SIZES)
    x, y = data[0]
    return ud.FederatedDataset.from_clients([data[i] for i in range(len(data))], test=(x.flip(0), y))


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without how long they took."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def trained(model: str, dtype: torch.dtype, method: ud.Part, device: str, **options: Any) -> list[dict[str, Any]]:
    """The history. Nobody listens to its rows, so that on a GPU they are complete one round late."""
    local = ud.Local(epochs=2, batch_size=8, lr=0.05)
    run = ud.train(
        make(model, dtype), data_with_test(model), method, rounds=5, participation=5, local=local, device=device,
        drift="layers", **options,
    )  # fmt: skip
    assert run.stopped is None, run.stopped
    return run.history


def apart(found: Any, wanted: Any) -> float:
    """The largest difference between numbers of two histories, relative to 1 or their size; infinite if they differ."""
    if type(found) is not type(wanted):
        return math.inf
    if isinstance(wanted, dict):
        same = found.keys() == wanted.keys()
        return max((apart(found[k], v) for k, v in wanted.items()), default=0.0) if same else math.inf
    if isinstance(wanted, list):
        same = len(found) == len(wanted)
        return max((apart(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0) if same else math.inf
    if not isinstance(wanted, float):
        return 0.0 if found == wanted else math.inf
    off = abs(found - wanted) / max(1.0, abs(wanted))
    return math.inf if math.isnan(off) else off


def same(model: str, dtype: torch.dtype, name: str, options: dict[str, Any], device: str) -> Finding:
    compiled = options.get("compile", False) and graph.captures(torch.device(device))
    given = {"engine": "lanes", "lanes": 3, **options, "compile": compiled}
    found = trained(model, dtype, METHODS[name], device, **given)
    wanted = trained(model, dtype, METHODS[name], "cpu", engine="plain")
    return within(apart(timeless(found), timeless(wanted)), 1e-9 if dtype == torch.float64 else 1e-3)


def checks() -> Iterator[Check]:
    for name in METHODS:
        yield Check("j", f"{name}, linear, float64", partial(same, "linear", torch.float64, name, {}))
        yield Check("j", f"{name}, convolution, float64", partial(same, "convolution, padded", torch.float64, name, {}))
    run = partial(same, "convolution, padded", torch.float32, "FedAvg", {"compile": True})
    yield Check("j", "FedAvg, convolution, float32, compiled", run, seconds=40.0)
