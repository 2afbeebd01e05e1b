"""(k) Runs side by side, which train and are evaluated as one program, against the same runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import undrift as ud
from tests.gpu.checks import Check, Finding, within
from tests.gpu.late import apart, data_with_test, timeless
from tests.gpu.models import make
from undrift.engine import graph
from undrift.training.side_by_side import side_by_side

METHODS = {
    "FedAvg": ud.FedAvg(),
    "Scaffold, which keeps state": ud.Scaffold(),
    "noise": ud.Projection(3.0, center="global") + ud.GradientNoise(0.01),
}
ROUNDS = (5, 3, 4)
"""Of each run: some end before others."""


def task(model: str, dtype: torch.dtype, method: ud.Part, seed: int, device: str, **options: Any) -> Any:
    local = ud.Local(epochs=2, batch_size=8, lr=0.05 / (seed + 1))
    return partial(
        ud.train, make(model, dtype), data_with_test(model), method, rounds=ROUNDS[seed], participation=5, local=local,
        device=device, seed=seed, **options,
    )  # fmt: skip


def same(model: str, dtype: torch.dtype, name: str, compiled: bool, device: str) -> Finding:
    compiled = compiled and graph.captures(torch.device(device))
    make_task = partial(task, model, dtype, METHODS[name])
    many = side_by_side([make_task(seed, device, compile=compiled) for seed in range(3)])
    off = 0.0
    for seed, run in enumerate(many):
        if isinstance(run, BaseException):
            raise run
        if len(run.choices.get("beside", [])) != 2:
            return Finding("FAIL", f"run {seed} did not train beside the others")
        alone = make_task(seed, "cpu", engine="plain")()
        rows = [timeless(r.history) for r in (run, alone)]
        weights = [{k: w.double().cpu().flatten().tolist() for k, w in r.params.items()} for r in (run, alone)]
        off = max(off, apart(*rows), apart(*weights))
    return within(off, 1e-9 if dtype == torch.float64 else 1e-3)


def checks() -> Iterator[Check]:
    for name in METHODS:
        for model in ("linear", "convolution, padded"):
            yield Check("k", f"{name}, {model}, float64", partial(same, model, torch.float64, name, False))
        run = partial(same, "convolution, padded", torch.float32, name, True)
        yield Check("k", f"{name}, convolution, float32, compiled", run, seconds=40.0)
