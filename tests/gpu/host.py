"""(h) Data that stay on the host give the bits of data on the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import undrift as ud
from tests.gpu.checks import Check, Finding
from tests.gpu.models import data_for
from undrift.engine import graph

METHODS = {"FedAvg": ud.FedAvg(), "Scaffold": ud.Scaffold(), "FedCurv, which measures": ud.FedCurv(0.1)}


def trained(method: ud.Part, place: str, device: str, options: dict[str, Any]) -> ud.Result:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 4),
    )  # fmt: skip
    data = data_for("convolution, padded", (41, 5, 23, 10, 17, 1))
    local = ud.Local(epochs=3, batch_size=8, lr=0.05)
    return ud.train(model, data, method, rounds=4, local=local, device=device, data_on=place, **options)


def same(name: str, options: dict[str, Any], device: str) -> Finding:
    """With pieces of two steps, so that the host is not done before the device begins."""
    options = {**options, "compile": options.get("compile", False) and graph.captures(torch.device(device))}
    whole, graph.PIECE_STEPS = graph.PIECE_STEPS, 2
    try:
        one, other = (trained(METHODS[name], place, device, options) for place in ("device", "host"))
    finally:
        graph.PIECE_STEPS = whole
    differ = [key for key in one.params if not torch.equal(one.params[key], other.params[key])]
    figures = one.history[-1].get("loss") == other.history[-1].get("loss")
    if differ or not figures or other.choices["data"] != "host":
        return Finding("FAIL", f"different bits in {', '.join(differ) or 'the evaluation'}")
    return Finding("ok", "the same bits")


def checks() -> Iterator[Check]:
    for name in METHODS:
        for engine, options in {
            "3 lanes": {"engine": "lanes", "lanes": 3},
            "3 lanes, bfloat16": {"engine": "lanes", "lanes": 3, "precision": "bfloat16"},
            "plain": {"engine": "plain"},
        }.items():
            yield Check("h", f"{name}, {engine}", partial(same, name, options), seconds=8.0)
    compiled = {"engine": "lanes", "lanes": 3, "compile": True}
    yield Check("h", "FedAvg, compiled", partial(same, "FedAvg", compiled), seconds=40.0)
