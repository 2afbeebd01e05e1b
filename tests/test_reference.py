"""Every method, and the compositions users write, against the reference that is written from the equations."""

from __future__ import annotations

import math

import pytest
import torch

import undrift as ud
from tests.problems import distance, net
from tests.reference import simulate

SEED = 3
LOCALS = {
    "full batches": ud.Local(steps=4, batch_size=None, lr=0.2),
    "mini-batches": ud.Local(epochs=2, batch_size=8, lr=0.1),
    "momentum and decay": ud.Local(epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.01),
    "schedules": ud.Local(steps=ud.decay(9, 0.7), batch_size=8, lr=ud.inverse(0.2, 3)),
}
TE = ud.TemporalEnsemble(beta=0.6)
METHODS = {
    "FedAvg": (ud.FedAvg(), []),
    "FedAvg, uniform": (ud.FedAvg(weighting="uniform"), [("FedAvg", "uniform")]),
    "FedProx": (ud.FedProx(mu=0.7), [("FedProx", {"mu": 0.7})]),
    "FedProx, decaying": (ud.FedProx(mu=ud.decay(2.0, 0.5)), [("FedProx", {"mu": lambda t: 2.0 * 0.5**t})]),
    "FedProx-TE": (ud.FedProx(mu=2.0, target=TE), [("FedProx", {"mu": 2.0, "beta": 0.6})]),
    "Scaffold": (ud.Scaffold(), [("Scaffold", None)]),
    "FedNova": (ud.FedNova(), [("FedNova", None)]),
    "FedDyn": (ud.FedDyn(alpha=0.3), [("FedDyn", 0.3)]),
    "FedRS": (ud.FedRS(alpha=0.5), [("FedRS", 0.5)]),
    "FedLC": (ud.FedLC(tau=0.5), [("FedLC", 0.5)]),
    "FedCurv": (ud.FedCurv(weight=1.5), [("FedCurv", 1.5)]),
    "FedCL": (ud.FedCL(weight=2.0), [("FedCL", {"weight": 2.0})]),
    "FedCL-TE": (ud.FedCL(weight=2.0, target=TE), [("FedCL", {"weight": 2.0, "beta": 0.6})]),
    "TwoDLRD": (ud.TwoDLRD(window=1, C=0.5), [("TwoDLRD", {"window": 1, "C": 0.5})]),
    "AllDecreasing": (ud.AllDecreasing(window=1), [("AllDecreasing", {"window": 1, "factor": 0.8})]),
    "AdditiveTuning": (ud.AdditiveTuning(window=1, C=0.4), [("AdditiveTuning", {"window": 1, "C": 0.4})]),
    "FirstStepOnly": (ud.FirstStepOnly(after=2), [("FirstStepOnly", 2)]),
    "ServerSGD": (ud.ServerSGD(lr=0.7, momentum=0.9), [("ServerSGD", {"lr": 0.7, "momentum": 0.9})]),
    "ServerAdam": (ud.ServerAdam(lr=0.05), [("ServerAdam", 0.05)]),
    "ServerYogi": (ud.ServerYogi(lr=0.05), [("ServerYogi", 0.05)]),
    "ServerAdagrad": (ud.ServerAdagrad(lr=0.05), [("ServerAdagrad", 0.05)]),
    "SignAgreement": (ud.SignAgreement(threshold=2), [("SignAgreement", 2)]),
    "Projection": (ud.Projection(radius=2.0), [("Projection", (2.0, "origin"))]),
    "Projection, global": (ud.Projection(radius=0.1, center="global"), [("Projection", (0.1, "global"))]),
    "GradientNoise": (ud.GradientNoise(std=0.1), [("GradientNoise", 0.1)]),
    "ServerTraining": (
        ud.ServerTraining(lr=0.1, epochs=2, batch_size=16, weight_decay=0.01),
        [("ServerTraining", {"lr": 0.1, "epochs": 2, "batch_size": 16, "weight_decay": 0.01})],
    ),
}
COMPOSITIONS = {
    "FedProx-TE + momentum": (
        ud.FedProx(mu=1.0, target=TE) + ud.ServerSGD(momentum=0.9),
        [("FedProx", {"mu": 1.0, "beta": 0.6}), ("ServerSGD", {"lr": 1.0, "momentum": 0.9})],
    ),
    "FedNova + momentum": (
        ud.FedNova() + ud.ServerSGD(momentum=0.9),
        [("FedNova", None), ("ServerSGD", {"lr": 1.0, "momentum": 0.9})],
    ),
    "FedNova + SignAgreement": (ud.FedNova() + ud.SignAgreement(2), [("FedNova", None), ("SignAgreement", 2)]),
    "FedNova + TwoDLRD": (
        ud.FedNova() + ud.TwoDLRD(window=1, C=0.3),
        [("FedNova", None), ("TwoDLRD", {"window": 1, "C": 0.3})],
    ),
    "FedDyn + momentum": (
        ud.FedDyn(alpha=0.3) + ud.ServerSGD(momentum=0.5),
        [("FedDyn", 0.3), ("ServerSGD", {"lr": 1.0, "momentum": 0.5})],
    ),
    "paper 3's best": (
        ud.ServerTraining(lr=0.1, batch_size=16) + ud.ServerSGD(momentum=0.9) + ud.SignAgreement(2),
        [
            ("ServerTraining", {"lr": 0.1, "epochs": 1, "batch_size": 16, "weight_decay": 0.0}),
            ("ServerSGD", {"lr": 1.0, "momentum": 0.9}),
            ("SignAgreement", 2),
        ],
    ),
    "sign agreement before momentum": (
        ud.SignAgreement(2) + ud.ServerSGD(momentum=0.9),
        [("SignAgreement", 2), ("ServerSGD", {"lr": 1.0, "momentum": 0.9})],
    ),
    "TwoDLRD + FedProx": (
        ud.TwoDLRD(window=1) + ud.FedProx(mu=0.5),
        [("TwoDLRD", {"window": 1, "C": 0.2}), ("FedProx", {"mu": 0.5})],
    ),
    "Scaffold + TwoDLRD": (
        ud.Scaffold() + ud.TwoDLRD(window=1, C=0.4),
        [("Scaffold", None), ("TwoDLRD", {"window": 1, "C": 0.4})],
    ),
    "projection with noise": (
        ud.Projection(radius=2.0) + ud.GradientNoise(std=0.05),
        [("Projection", (2.0, "origin")), ("GradientNoise", 0.05)],
    ),
    "FedRS + FedLC + FedCurv + uniform Adam": (
        ud.FedAvg(weighting="uniform") + ud.FedRS(0.7) + ud.FedLC(0.1) + ud.FedCurv(0.5) + ud.ServerAdam(lr=0.02),
        [("FedAvg", "uniform"), ("FedRS", 0.7), ("FedLC", 0.1), ("FedCurv", 0.5), ("ServerAdam", 0.02)],
    ),
}
NLR = ud.FedNLR(base=1.0, depth=0.45, width=0.3)
WITH_NLR = {
    "FedNLR": (NLR, []),
    "FedDyn + FedNLR": (ud.FedDyn(alpha=0.3) + NLR, [("FedDyn", 0.3)]),
    "Scaffold + FedNLR": (ud.Scaffold() + NLR, [("Scaffold", None)]),
    "FedRS + FedNLR": (ud.FedRS(0.5) + NLR, [("FedRS", 0.5)]),
    "FedLC + FedNLR": (NLR + ud.FedLC(0.5), [("FedLC", 0.5)]),
    "FedNova + FedNLR": (ud.FedNova() + NLR, [("FedNova", None)]),
    "TwoDLRD + FedNLR": (ud.TwoDLRD(window=1, C=0.4) + NLR, [("TwoDLRD", {"window": 1, "C": 0.4})]),
}
EVERYTHING = METHODS | COMPOSITIONS | WITH_NLR


def neuron_scales(data):
    """FedNLR's scales for `net()`, from its equations: layers of 8 and 4 neurons, tanh after the first."""

    def scales(w, i):
        x, _ = data[i]
        w1, b1, w2, b2 = w.split([48, 8, 32, 4])
        hidden = torch.tanh(x @ w1.view(8, 6).T + b1)
        logits = hidden @ w2.view(4, 8).T + b2
        found = []
        for layer, h in enumerate((hidden.mean(0), logits.mean(0)), start=1):
            mu = 1.0 + 0.45 * layer / 2 + 0.3 * math.log10(len(h))
            temperature = (h.max() - h.min()) / math.log(mu)
            found.append(len(h) * torch.softmax(h / temperature, 0))
        s1, s2 = found
        return torch.cat([s1.repeat_interleave(6), s1, s2.repeat_interleave(8), s2])

    return scales


def cases():
    for name in EVERYTHING:
        for local in LOCALS:
            if "Scaffold" not in name or local != "momentum and decay":
                yield pytest.param(name, local, id=f"{name}, {local}")


@pytest.mark.parametrize(("name", "local"), list(cases()))
def test_method_follows_its_equations_on_both_engines(uneven, name, local):
    method, parts = EVERYTHING[name]
    rounds = 12 if "Decreasing" in name or "LRD" in name or "Tuning" in name else 6
    settings = {"rounds": rounds, "local": LOCALS[local], "participation": 3, "seed": SEED, "evaluate_every": rounds}
    lanes = ud.train(net(), uneven, method, engine="lanes", lanes=2, **settings)
    plain = ud.train(net(), uneven, method, engine="plain", **settings)
    cohorts = [row["clients"] for row in lanes.history]
    assert len({tuple(c) for c in cohorts}) > 2  # sampled, and not the same every time
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
refine after""".split()  # noqa: SIM905
RATES = ("TwoDLRD", "AllDecreasing", "AdditiveTuning", "FirstStepOnly", "FedNLR")
FOR_HISTORY = {(name, hook) for name in RATES for hook in ("upload", "transform")} | {("FirstStepOnly", "start")}


def overridden():
    """Every hook of every method that the weights depend on."""
    for name, (method, _) in (METHODS | {"FedNLR": WITH_NLR["FedNLR"]}).items():
        kind = type(method)
        idle = ("start", "after", *(["broadcast"] if kind is ud.FedProx else []))  # without a target of one's own
        idle = idle if getattr(method, "target", "") is None else ()
        for hook in HOOKS:
            overrides = getattr(kind, hook) is not getattr(ud.Part, hook)
            if overrides and hook not in idle and (kind.__name__, hook) not in FOR_HISTORY:
                yield pytest.param(name, hook, id=f"{name}.{hook}")


@pytest.mark.parametrize(("name", "hook"), list(overridden()))
def test_a_disconnected_hook_is_noticed(uneven, name, hook, monkeypatch):
    """Take any hook away from any method, and it no longer follows its equations."""
    method, parts = (METHODS | WITH_NLR)[name]
    local, rounds = ud.Local(epochs=2, batch_size=8, lr=0.4), 12
    settings = {"rounds": rounds, "local": local, "participation": 3, "seed": SEED, "evaluate_every": rounds}
    whole = ud.train(net(), uneven, method, engine="plain", **settings)
    cohorts = [row["clients"] for row in whole.history]
    scales = neuron_scales(uneven) if name == "FedNLR" else None
    expected = simulate(net(), uneven, local, cohorts, parts, SEED, scales)
    assert distance(whole.params, expected) < 1e-9
    monkeypatch.setattr(type(method), hook, getattr(ud.Part, hook))
    try:
        broken = ud.train(net(), uneven, method, engine="plain", **settings)
    except Exception:  # a hook that others stand on: noticed, too
        return
    assert distance(broken.params, expected) > 1e-9
