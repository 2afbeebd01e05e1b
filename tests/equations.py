"""Methods and compositions that are compared with their equations, each with what `reference.simulate` takes for it."""

from __future__ import annotations

import math

import pytest
import torch

import undrift as ud

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
    "Scaffold, two weightings": (ud.Scaffold(variates="uniform"), [("Scaffold", "uniform")]),
    "FedNova": (ud.FedNova(), [("FedNova", None)]),
    "FedDyn": (ud.FedDyn(alpha=0.3), [("FedDyn", 0.3)]),
    "FedRS": (ud.FedRS(alpha=0.5), [("FedRS", 0.5)]),
    "FedLC": (ud.FedLC(tau=0.5), [("FedLC", 0.5)]),
    "FedCurv": (ud.FedCurv(weight=1.5), [("FedCurv", 1.5)]),
    "FedCL": (ud.FedCL(weight=2.0), [("FedCL", {"weight": 2.0})]),
    "FedCL, summed": (ud.FedCL(weight=0.02, fisher="sum"), [("FedCL", {"weight": 0.02, "sum": True})]),
    "FedCL, per tensor": (
        ud.FedCL(weight=0.5, fisher="tensor", batch_size=3),
        [("FedCL", {"weight": 0.5, "batch_size": 3})],
    ),
    "FedCL-TE": (ud.FedCL(weight=2.0, target=TE), [("FedCL", {"weight": 2.0, "beta": 0.6})]),
    "TwoDLRD": (ud.TwoDLRD(window=1, C=0.5), [("TwoDLRD", {"window": 1, "C": 0.5})]),
    "AllDecreasing": (ud.AllDecreasing(window=1), [("AllDecreasing", {"window": 1, "factor": 0.8})]),
    "AdditiveTuning": (ud.AdditiveTuning(window=1, C=0.4), [("AdditiveTuning", {"window": 1, "C": 0.4})]),
    "FirstStepOnly": (ud.FirstStepOnly(after=2), [("FirstStepOnly", 2)]),
    "ServerSGD": (ud.ServerSGD(lr=0.7, momentum=0.9), [("ServerSGD", {"lr": 0.7, "momentum": 0.9})]),
    "ServerAdam": (ud.ServerAdam(lr=0.05), [("ServerAdam", 0.05)]),
    "ServerYogi": (ud.ServerYogi(lr=0.05), [("ServerYogi", 0.05)]),
    "ServerAdagrad": (ud.ServerAdagrad(lr=0.05), [("ServerAdagrad", 0.05)]),
    "FedAvgM": (ud.FedAvgM(), [("FedAvgM", {"lr": 1.0, "momentum": 0.9})]),
    "FedAdam": (ud.FedAdam(lr=0.05), [("FedAdam", {"lr": 0.05})]),
    "FedAdam, other constants": (
        ud.FedAdam(lr=0.02, beta1=0.5, beta2=0.9, tau=1e-2, initial_v=0.0),
        [("FedAdam", {"lr": 0.02, "beta1": 0.5, "beta2": 0.9, "tau": 1e-2, "initial_v": 0.0})],
    ),
    "FedYogi": (ud.FedYogi(lr=0.05), [("FedYogi", {"lr": 0.05})]),
    "FedAdagrad": (ud.FedAdagrad(lr=0.05), [("FedAdagrad", {"lr": 0.05, "beta1": 0.0})]),
    "SignAgreement": (ud.SignAgreement(threshold=2), [("SignAgreement", 2)]),
    "Projection": (ud.Projection(radius=2.0), [("Projection", (2.0, "origin"))]),
    "Projection, global": (ud.Projection(radius=0.1, center="global"), [("Projection", (0.1, "global"))]),
    "GradientNoise": (ud.GradientNoise(std=0.1), [("GradientNoise", 0.1)]),
    "ServerTraining": (
        ud.ServerTraining(lr=0.1, epochs=2, batch_size=16, weight_decay=0.01),
        [("ServerTraining", {"lr": 0.1, "epochs": 2, "batch_size": 16, "weight_decay": 0.01})],
    ),
    "ServerTraining, momentum": (
        ud.ServerTraining(lr=0.1, epochs=2, batch_size=16, weight_decay=0.01, momentum=0.9),
        [("ServerTraining", {"lr": 0.1, "epochs": 2, "batch_size": 16, "weight_decay": 0.01, "momentum": 0.9})],
    ),
    "ServerTraining, clipped": (
        ud.ServerTraining(lr=0.1, epochs=2, batch_size=16, weight_decay=0.01, clip_norm=0.2),
        [("ServerTraining", {"lr": 0.1, "epochs": 2, "batch_size": 16, "weight_decay": 0.01, "clip_norm": 0.2})],
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
    "Scaffold, uniform mean": (
        ud.SCAFFOLD() + ud.FedAvg(weighting="uniform"),
        [("Scaffold", None), ("FedAvg", "uniform")],
    ),
    "Scaffold + TwoDLRD": (
        ud.Scaffold() + ud.TwoDLRD(window=1, C=0.4),
        [("Scaffold", None), ("TwoDLRD", {"window": 1, "C": 0.4})],
    ),
    "Scaffold + FedAdam": (ud.Scaffold() + ud.FedAdam(lr=0.05), [("Scaffold", None), ("FedAdam", {"lr": 0.05})]),
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


DECAYING = ("TwoDLRD", "AllDecreasing", "AdditiveTuning")
"""Methods that wait for training to stall, which takes them more rounds than others need."""

TOGETHER = {"FedAvg": LOCALS, "FedNova": ("momentum and decay", "schedules"), "Scaffold": ("mini-batches", "schedules")}
"""Local work that a method's own equations depend on: what `make test` tries beside the one kind per method."""


def stalls(name: str) -> bool:
    return any(method in name for method in DECAYING)


def cases():
    """Every method with every kind of local work.

    `make test` has each method with one kind, turn and turn about, and the pairings that interact: `TOGETHER`, and full
    batches for what waits for a stall, which comes soonest with them. The rest is marked `long`, for `make soak`.
    """
    for turn, name in enumerate(EVERYTHING):
        kinds = [local for local in LOCALS if not ("Scaffold" in name and local == "momentum and decay")]
        usual = {kinds[turn % len(kinds)], *TOGETHER.get(name, ()), *(["full batches"] if stalls(name) else [])}
        for local in kinds:
            yield pytest.param(name, local, id=f"{name}, {local}", marks=[] if local in usual else pytest.mark.long)
