"""(g) The methods of `tests/field.py` on the lanes engine, through captured graphs, against `tests/field_reference.py`.

Between them they use every hook of the contract. Clients' own models are compared by their loss on clients' own data.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import undrift as ud
from tests.carries import CARRIES
from tests.field_reference import METHODS, Case, clients_with_tests
from tests.gpu.checks import Check, Finding, counted_replays, flat, within
from tests.problems import net
from undrift.engine import graph

LOCAL, ROUNDS, SEED, BOUND = ud.Local(epochs=2, batch_size=8, lr=0.1), 5, 3, 1e-10
COMPILED = ("FedSAM", "MOON", "Ditto", "PerFedAvg", "FedDecorr")
"""Those whose local step is a program of a kind of its own; `make gpu-full` compiles the others, too."""


def follows(name: str, compiled: bool, device: str) -> Finding:
    """The weights after all rounds, and the loss of clients' own, against those that the equations give."""
    data, (method, simulate) = clients_with_tests(), METHODS[name]
    captured = graph.captures(torch.device(device))
    participation = 1.0 if name.startswith("Poisson") else 4  # that samples clients itself
    with counted_replays() as replays:
        run = ud.train(
            net(), data, method, rounds=ROUNDS, local=LOCAL, seed=SEED, evaluate_every=ROUNDS, engine="lanes",
            lanes=2, device=device, participation=participation, compile=compiled and captured,
        )  # fmt: skip
    assert run.choices["engine"] == "lanes" and run.choices["device"].startswith(device)
    assert run.choices["compile"] == (compiled and captured)
    if captured and not replays[0]:
        return Finding("FAIL", "no captured graph was replayed")
    wanted = simulate(Case(data, LOCAL, [row["clients"] for row in run.history], SEED))
    return within(wanted.distance(run, data), BOUND)


def carries(method: ud.Part, compiled: bool, device: str) -> Finding:
    """Carries that hand on tensors of the step before, which a graph overwrites, against the plain engine on a CPU."""
    data, compiled = clients_with_tests(), compiled and graph.captures(torch.device(device))
    options = {"rounds": 2, "local": LOCAL, "seed": SEED, "participation": 4}
    wanted = ud.train(net(), data, method, engine="plain", device="cpu", **options).params
    run = ud.train(net(), data, method, engine="lanes", lanes=2, device=device, compile=compiled, **options)
    a, b = (flat(params, list(wanted)) for params in (run.params, wanted))
    return within(float((a - b).norm() / b.norm()), BOUND)


def checks() -> Iterator[Check]:
    for part in CARRIES:
        name = f"a carry: {type(part).__name__}"
        yield Check("g", name, partial(carries, part, False), seconds=3.0)
        yield Check("g", f"{name}, compiled", partial(carries, part, True), seconds=30.0)
    for name in METHODS:
        yield Check("g", name, partial(follows, name, False), seconds=4.0)
        full = name not in COMPILED
        yield Check("g", f"{name}, compiled", partial(follows, name, True), seconds=40.0, full=full)
