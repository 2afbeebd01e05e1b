"""(a) Every method on the lanes engine, through captured graphs, against `tests/reference.py`: float64, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import undrift as ud
from tests.equations import EVERYTHING, LOCALS, SEED, cases, neuron_scales
from tests.gpu.checks import Check, Finding, counted_replays, flat, within
from tests.problems import make_clients, net
from tests.reference import simulate
from undrift.engine import graph

SIZES = [23, 5, 0, 41, 10, 17, 1]
"""Those of the fixture `uneven`."""
BOUND = 1e-9


def follows(name: str, local: str, device: str) -> Finding:
    """The weights after all rounds, against those that the equations give for the same cohorts."""
    data, (method, parts) = make_clients(SIZES), EVERYTHING[name]
    rounds = 12 if "Decreasing" in name or "LRD" in name or "Tuning" in name else 6
    with counted_replays() as replays:
        run = ud.train(
            net(), data, method, rounds=rounds, local=LOCALS[local], participation=3, seed=SEED,
            evaluate_every=rounds, engine="lanes", lanes=2, device=device,
        )  # fmt: skip
    assert run.choices["engine"] == "lanes" and run.choices["device"].startswith(device)
    if graph.captures(torch.device(device)) and not replays[0]:
        return Finding("FAIL", "no captured graph was replayed")
    cohorts = [row["clients"] for row in run.history]
    scales = neuron_scales(data) if "FedNLR" in name else None
    wanted = simulate(net(), data, LOCALS[local], cohorts, parts, SEED, scales)
    a, b = (flat(params, list(wanted)) for params in (run.params, wanted))
    return within(float((a - b).norm() / b.norm()), BOUND)


def checks() -> Iterator[Check]:
    for case in cases():
        name, local = case.values
        yield Check("a", f"{name}, {local}", partial(follows, name, local), seconds=4.0)
