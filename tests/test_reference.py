"""Each method against a plain reference written here from its equations: one client at a time, `torch.optim.SGD`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import undrift as ud
from tests.problems import distance, net

ROUNDS, SEED = 6, 3
LOCALS = {
    "full batches": ud.Local(steps=4, batch_size=None, lr=0.2),
    "mini-batches": ud.Local(epochs=2, batch_size=8, lr=0.1),
    "momentum and decay": ud.Local(epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.01),
    "schedules": ud.Local(steps=ud.decay(9, 0.7), batch_size=8, lr=ud.inverse(0.2, 3)),
}
Weights = dict[str, torch.Tensor]


def client(data, local, w: Weights, i: int, t: int, penalty: Callable) -> Weights:
    """Client i's update in round t. `penalty(parameters)` joins the loss."""
    model = net()
    model.load_state_dict(w)
    lr = local.lr(t) if callable(local.lr) else local.lr
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=local.momentum, weight_decay=local.weight_decay)
    x, y = data[i]
    for rows in ud.batches(data, local, client=i, round=t, seed=SEED):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
        (loss + penalty(dict(model.named_parameters()), t)).backward()
        optimizer.step()
    return {n: (p - w[n]).detach() for n, p in model.named_parameters()}


def reference(data, local, cohorts, weighting="samples", penalty=None, server=None) -> Weights:
    w = copy.deepcopy(net().state_dict())
    for t, cohort in enumerate(cohorts):
        start = w
        pull = penalty and (lambda p, t, start=start: penalty(p, start, t))
        updates = [client(data, local, w, i, t, pull or (lambda p, t: 0.0)) for i in cohort]
        weights = [len(data[i][0]) if weighting == "samples" else 1 for i in cohort]
        mean = {n: sum(p * u[n] for p, u in zip(weights, updates, strict=True)) / sum(weights) for n in w}
        step = server(mean) if server else mean
        w = {n: w[n] + step[n] for n in w}
    return w


def proximal(mu):
    """½μ‖w − w₀‖², by autograd."""
    return lambda p, w0, t: 0.5 * mu(t) * sum((p[n] - w0[n]).square().sum() for n in p)


class Momentum:
    """v ← βv + Δ, w ← w + ηv."""

    def __init__(self, lr, beta):
        self.lr, self.beta, self.v = lr, beta, 0

    def __call__(self, mean):
        self.v = {n: (self.beta * self.v[n] if self.v else 0) + d for n, d in mean.items()}
        return {n: self.lr * v for n, v in self.v.items()}


class Adam:
    """Algorithm 3 of the K-decay paper: q = −Δ, τ = 1 in the first round."""

    def __init__(self, lr, b1=0.9, b2=0.999, eps=1e-8):
        self.lr, self.b1, self.b2, self.eps, self.tau = lr, b1, b2, eps, 0
        self.m, self.v = {}, {}

    def __call__(self, mean):
        self.tau += 1
        rate = self.lr * (1 - self.b2**self.tau) ** 0.5 / (1 - self.b1**self.tau)
        step = {}
        for n, d in mean.items():
            q = -d
            self.m[n] = self.b1 * self.m.get(n, 0) + (1 - self.b1) * q
            self.v[n] = self.b2 * self.v.get(n, 0) + (1 - self.b2) * q**2
            step[n] = -rate * self.m[n] / (self.v[n].sqrt() + self.eps)
        return step


METHODS = {
    "FedAvg": (ud.FedAvg(), {}),
    "FedAvg, uniform": (ud.FedAvg(weighting="uniform"), {"weighting": "uniform"}),
    "FedProx": (ud.FedProx(mu=0.7), {"penalty": proximal(lambda t: 0.7)}),
    "FedProx, decaying": (ud.FedProx(mu=ud.decay(2.0, 0.5)), {"penalty": proximal(lambda t: 2.0 * 0.5**t)}),
    "ServerSGD": (ud.ServerSGD(lr=0.7, momentum=0.9), {"server": lambda: Momentum(0.7, 0.9)}),
    "ServerAdam": (ud.ServerAdam(lr=0.05), {"server": lambda: Adam(0.05)}),
    "FedProx + ServerAdam, uniform": (
        ud.FedAvg(weighting="uniform") + ud.FedProx(mu=0.7) + ud.ServerAdam(lr=0.05, beta1=0.5, beta2=0.9, eps=1e-3),
        {"weighting": "uniform", "penalty": proximal(lambda t: 0.7), "server": lambda: Adam(0.05, 0.5, 0.9, 1e-3)},
    ),
}


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("name", METHODS)
def test_method_follows_its_equation(uneven, name, local, engine):
    method, equation = METHODS[name]
    settings = {"rounds": ROUNDS, "local": LOCALS[local], "participation": 3, "seed": SEED, "evaluate_every": ROUNDS}
    run = ud.train(net(), uneven, method, engine=engine, lanes=2, **settings)
    cohorts = [row["clients"] for row in run.history]
    assert len({tuple(c) for c in cohorts}) > 2  # sampled, and not the same every time
    if "server" in equation:
        equation = {**equation, "server": equation["server"]()}
    assert distance(run.params, reference(uneven, LOCALS[local], cohorts, **equation)) < 1e-9


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
