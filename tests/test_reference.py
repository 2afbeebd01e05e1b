"""Every method, and the compositions users write, against the reference that is written from the equations."""

from __future__ import annotations

import functools

import pytest
import torch

import undrift as ud
from tests.equations import EVERYTHING, LOCALS, METHODS, SEED, WITH_NLR, cases, neuron_scales, stalls
from tests.problems import distance, make_clients, net
from tests.reference import simulate


@pytest.mark.parametrize(("name", "local"), list(cases()))
def test_method_follows_its_equations_on_both_engines(uneven, name, local):
    method, parts = EVERYTHING[name]
    rounds = 12 if stalls(name) else 4
    settings = {"rounds": rounds, "local": LOCALS[local], "participation": 3, "seed": SEED, "evaluate_every": rounds}
    lanes = ud.train(net(), uneven, method, engine="lanes", lanes=2, **settings)
    plain = ud.train(net(), uneven, method, engine="plain", **settings)
    cohorts = [row["clients"] for row in lanes.history]
    assert len({tuple(c) for c in cohorts}) > 2  # sampled, and not the same every time
    assert len({*cohorts[0], *cohorts[1]}) < 6 > len({*cohorts[0], *cohorts[2]})  # some come back, at once and later
    scales = neuron_scales(uneven) if "FedNLR" in name else None
    expected = simulate(net(), uneven, LOCALS[local], cohorts, parts, SEED, scales)
    assert distance(lanes.params, expected) < 1e-9
    assert distance(plain.params, expected) < 1e-9
    if "decays" in lanes.history[-1] and local == "full batches":
        assert lanes.history[-1]["decays"] > 0  # or no case would have seen a decay


def test_the_references_client_is_torchs_own_sgd(uneven):
    """One client, one round: the reference's own arithmetic against `torch.optim.SGD`."""
    local, model, (x, y) = LOCALS["momentum and decay"], net(), uneven[3]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for rows in ud.batches(uneven, local, client=3, round=0, seed=SEED):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    assert distance(simulate(net(), uneven, local, [[3]], [], SEED), dict(model.named_parameters())) < 1e-14


def test_one_full_step_of_everyone_is_a_step_of_central_training(uneven):
    """K = 1 and weights by samples: the union's gradient."""
    run = ud.train(net(), uneven, rounds=3, local=ud.Local(steps=1, lr=0.3))
    model, (x, y) = net(), (uneven.store["x"], uneven.store["y"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert distance(run.params, model.state_dict()) < 1e-12


HOOKS = """start plan broadcast keep measure prepare logits gradient rate project update upload transform
refine observe""".split()  # noqa: SIM905
RATES = ("TwoDLRD", "AllDecreasing", "AdditiveTuning", "FirstStepOnly", "FedNLR")
NOT_IN_WEIGHTS = {(name, hook) for name in RATES for hook in ("upload", "transform")} | {("FirstStepOnly", "start")}
NOT_IN_WEIGHTS |= {("Scaffold", "project")}  # which is for correction="after"


def overridden():
    """Every hook of every method that the weights depend on."""
    for name, (method, _) in (METHODS | {"FedNLR": WITH_NLR["FedNLR"]}).items():
        kind = type(method)
        idle = ("start", "observe", *(["broadcast"] if kind is ud.FedProx else []))  # without a target of one's own
        idle = idle if getattr(method, "target", "") is None else ()
        for hook in HOOKS:
            overrides = getattr(kind, hook) is not getattr(ud.Part, hook)
            if overrides and hook not in idle and (kind.__name__, hook) not in NOT_IN_WEIGHTS:
                yield pytest.param(name, hook, id=f"{name}.{hook}")


@functools.cache
def undisturbed(name):
    """A method with all of its hooks: its settings, its result and what its equations give; for all its hooks once."""
    method, parts = (METHODS | WITH_NLR)[name]
    data, local = make_clients([23, 5, 0, 41, 10, 17, 1]), ud.Local(epochs=2, batch_size=8, lr=0.4)
    rounds = 12 if stalls(name) else 4
    settings = {"rounds": rounds, "local": local, "participation": 3, "seed": SEED, "evaluate_every": rounds}
    whole = ud.train(net(), data, method, engine="plain", **settings)
    cohorts = [row["clients"] for row in whole.history]
    scales = neuron_scales(data) if name == "FedNLR" else None
    return settings, whole.params, simulate(net(), data, local, cohorts, parts, SEED, scales)


@pytest.mark.parametrize(("name", "hook"), list(overridden()))
def test_a_disconnected_hook_is_noticed(uneven, name, hook, monkeypatch):
    """Take any hook away from any method, and it no longer follows its equations."""
    method, _ = (METHODS | WITH_NLR)[name]
    settings, whole, expected = undisturbed(name)
    assert distance(whole, expected) < 1e-9
    monkeypatch.setattr(type(method), hook, getattr(ud.Part, hook))
    try:
        broken = ud.train(net(), uneven, method, engine="plain", **settings)
    except Exception:  # a hook that others stand on: noticed, too
        return
    assert distance(broken.params, expected) > 1e-9
