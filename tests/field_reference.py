"""The methods of `field.py` once more, from their equations alone: one client at a time, the weights one flat float64
vector, the forward pass written out, ordinary autograd, no hooks.

It shares with the package the batches (`ud.batches`), the cohorts of a run, and the keyed draws of Poisson sampling.
The model is `problems.net()`: `tanh(x·W₁ᵀ + b₁)·W₂ᵀ + b₂` with 6 inputs, 8 features and 4 outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import undrift as ud
from tests import field as methods
from tests.problems import distance, make_clients, net
from undrift.method.part import PLAN, part_stream
from undrift.random import Key, derive, uniform

SHAPES = {"0.weight": (8, 6), "0.bias": (8,), "3.weight": (4, 8), "3.bias": (4,)}
BODY = 8 * 6 + 8
"""How many of the weights are the body's; those of the head follow."""
HEAD = ("3.*",)
SIZES, TESTS = [23, 5, 0, 41, 10, 17, 1], [4, 3, 4, 5, 2, 6, 3]


def clients_with_tests() -> ud.FederatedDataset:
    """Uneven clients, one of them empty, each with test data of its own."""
    data, own = make_clients(SIZES), make_clients(TESTS)
    data.client_test = ud.FederatedDataset.from_clients([own[i] for i in range(len(TESTS))])
    return data


def tree(w: Tensor) -> dict[str, Tensor]:
    parts = w.split([int(np.prod(shape)) for shape in SHAPES.values()])
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def features(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ tree(w)["0.weight"].T + tree(w)["0.bias"])


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(features(w, x) @ tree(w)["3.weight"].T + tree(w)["3.bias"], y)


def gradient(w: Tensor, x: Tensor, y: Tensor, of: Callable[..., Tensor] = loss) -> Tensor:
    w = w.detach().clone().requires_grad_()
    return torch.autograd.grad(of(w, x, y), w)[0]


def mean(updates: list[Tensor], sizes: list[int]) -> Tensor:
    return sum(n * u for n, u in zip(sizes, updates, strict=True)) / sum(sizes)


def median(updates: list[Tensor], sizes: list[int]) -> Tensor:
    return torch.from_numpy(np.median(torch.stack(updates).numpy(), 0))


@dataclass
class Found:
    """What a method has trained."""

    w: Tensor
    """The global weights."""
    own: dict[int, Tensor] = field(default_factory=dict)
    """By client, where they are not the global ones: the weights that it would use."""
    cohorts: list[list[int]] | None = None
    """Who took part in each round, where the method itself decides that."""

    @property
    def params(self) -> dict[str, Tensor]:
        return tree(self.w)

    def losses(self, data: ud.FederatedDataset, clients: list[int]) -> list[float]:
        """The loss of each client's own weights on its own test data."""
        return [float(loss(self.own.get(i, self.w), *data.client_test[i])) for i in clients]

    def distance(self, run: ud.Result, data: ud.FederatedDataset) -> float:
        """How far a run is from this: in its weights, or in the loss of a client's own; infinite for other cohorts."""
        by_client = run.history[-1]["by_client"]
        losses = torch.tensor(self.losses(data, by_client["client"]), dtype=torch.float64)
        own = (torch.tensor(by_client["loss"], dtype=torch.float64) / losses - 1).abs().max()
        if self.cohorts is not None and self.cohorts != [row["clients"] for row in run.history]:
            return float("inf")
        params = {name: w.cpu() for name, w in run.params.items()}
        return float(torch.stack([own, torch.tensor(distance(params, self.params)).double()]).max())  # NaN if one is


@dataclass
class Case:
    """What the methods are simulated on."""

    data: ud.FederatedDataset
    local: ud.Local
    cohorts: list[list[int]]
    seed: int

    def batches(self, t: int, i: int, method: Any = None) -> list[tuple[Tensor, Tensor]]:
        x, y = self.data[i]
        found = ud.batches(self.data, self.local, client=i, round=t, seed=self.seed, method=method)
        return [(x[rows], y[rows]) for rows in found]

    def sgd(self, w: Tensor, t: int, i: int, step: Callable[..., Tensor], batches: list[Any] | None = None) -> Tensor:
        """A client's weights after its local steps; `step(v, k, x, y)` is the gradient that they follow."""
        velocity, local = torch.zeros_like(w), self.local
        for k, batch in enumerate(batches or self.batches(t, i)):
            velocity = local.momentum * velocity + step(w, k, *batch) + local.weight_decay * w
            w = w - local.lr * velocity
        return w

    def rounds(self, client: Callable[[Tensor, int, int], Tensor], server: Callable[..., Tensor] = mean) -> Tensor:
        """The global weights after all rounds; `client(w, t, i)` is what client i makes of w, on top of which it may
        keep something of its own."""
        w = parameters_to_vector(net().parameters()).detach()
        for t, cohort in enumerate(self.cohorts):
            if cohort:
                w = w + server([client(w, t, i) - w for i in cohort], [len(self.data[i][0]) for i in cohort])
        return w


def fedavg(case: Case, server: Callable[..., Tensor] = mean) -> Found:
    return Found(
        case.rounds(lambda w, t, i: case.sgd(w, t, i, lambda v, k, x, y: gradient(v, x, y)), server), {}, case.cohorts
    )


def fedsam(case: Case, rho: float, mu: float = 0.0) -> Found:
    """With FedProx's term, whose gradient is taken at w itself."""

    def client(w: Tensor, t: int, i: int) -> Tensor:
        def step(v: Tensor, k: int, x: Tensor, y: Tensor) -> Tensor:
            g = gradient(v, x, y)
            return gradient(v + rho * g / g.norm(), x, y) + mu * (v - w)

        return case.sgd(w, t, i, step)

    return Found(case.rounds(client))


def moon(case: Case, mu: Callable[[int], float], tau: float) -> Found:
    previous: dict[int, Tensor] = {}

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    def client(w: Tensor, t: int, i: int) -> Tensor:
        def contrastive(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
            z = features(v, x)
            positive = torch.exp(cosine(z, features(w, x)) / tau)
            negative = torch.exp(cosine(z, features(previous.get(i, w), x)) / tau)
            return loss(v, x, y) - mu(t) * torch.log(positive / (positive + negative)).mean()

        trained = case.sgd(w, t, i, lambda v, k, x, y: gradient(v, x, y, contrastive))
        previous[i] = trained
        return trained

    return Found(case.rounds(client))


def personal_head(case: Case, share: float | None = None) -> Found:
    """FedPer; with a `share`, FedRep: the head takes that share of the steps, before the body."""
    heads: dict[int, Tensor] = {}

    def client(w: Tensor, t: int, i: int) -> Tensor:
        v, velocity = torch.cat([w[:BODY], heads.get(i, w[BODY:])]), torch.zeros_like(w)
        batches, local = case.batches(t, i), case.local
        for k, (x, y) in enumerate(batches):
            moves = torch.ones_like(w)
            if share is not None:
                moves[BODY:] = k < share * len(batches)
                moves[:BODY] = 1 - moves[BODY]
            now = local.momentum * velocity + gradient(v, x, y) + local.weight_decay * v
            velocity = torch.where(moves > 0, now, velocity)  # as an optimizer that skips what is not trained
            v = v - local.lr * moves * velocity
        heads[i] = v[BODY:]
        return torch.cat([v[:BODY], w[BODY:]])

    w = case.rounds(client)
    return Found(w, {i: torch.cat([w[:BODY], head]) for i, head in heads.items()})


def ditto(case: Case, lam: float) -> Found:
    own: dict[int, Tensor] = {}

    def client(w: Tensor, t: int, i: int) -> Tensor:
        v = own.get(i, w)
        for x, y in case.batches(t, i):
            v = v - case.local.lr * (gradient(v, x, y) + lam * (v - w))
        own[i] = v
        return case.sgd(w, t, i, lambda v, k, x, y: gradient(v, x, y))

    return Found(case.rounds(client), own)


def per_fedavg(case: Case, alpha: float) -> Found:
    def client(w: Tensor, t: int, i: int) -> Tensor:
        found = case.batches(t, i, methods.PerFedAvg(alpha))
        pairs = [(*first, *second) for first, second in zip(found[::2], found[1::2], strict=True)]

        def step(v: Tensor, k: int, x: Tensor, y: Tensor, other_x: Tensor, other_y: Tensor) -> Tensor:
            return gradient(v - alpha * gradient(v, x, y), other_x, other_y)

        return case.sgd(w, t, i, step, pairs)

    return Found(case.rounds(client))


def mime(case: Case, beta: float) -> Found:
    """As the paper writes it: c and m are sent, and m changes after the round."""
    m, c = torch.zeros(sum(int(np.prod(s)) for s in SHAPES.values()), dtype=torch.float64), None
    counted = -1

    def client(w: Tensor, t: int, i: int) -> Tensor:
        nonlocal m, c, counted
        if t != counted:  # a new round
            m = m if c is None else beta * m + (1 - beta) * c
            x, y = (torch.cat(parts) for parts in zip(*(case.data[j] for j in case.cohorts[t]), strict=True))
            c, counted = gradient(w, x, y), t

        def step(v: Tensor, k: int, x: Tensor, y: Tensor) -> Tensor:
            return (1 - beta) * (gradient(v, x, y) - gradient(w, x, y) + c) + beta * m

        return case.sgd(w, t, i, step)

    return Found(case.rounds(client))


def poisson(case: Case, p: float, server: Callable[..., Tensor] = mean) -> Found:
    everyone, cohorts = np.flatnonzero(case.data.sizes), []
    for t in range(len(case.cohorts)):
        words = torch.tensor(derive(case.seed, "server", t))
        key = Key(words, torch.tensor(PLAN), part_stream(methods.Poisson(p)))
        cohorts.append(everyone[uniform(key, everyone.shape, torch.float64).numpy() < p].tolist())
    return fedavg(replace(case, cohorts=cohorts), server)


def feddecorr(case: Case, beta: float, epsilon: float) -> Found:
    def penalized(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = features(v, x)
        z = (z - z.mean(0)) / torch.sqrt(z.var(0, correction=0) + epsilon)
        correlation = torch.einsum("ni,nj->ij", z, z) / len(z)
        return loss(v, x, y) + beta * torch.linalg.matrix_norm(correlation) ** 2 / len(correlation) ** 2

    def client(w: Tensor, t: int, i: int) -> Tensor:
        return case.sgd(w, t, i, lambda v, k, x, y: gradient(v, x, y, penalized))

    return Found(case.rounds(client))


METHODS: dict[str, tuple[Any, Callable[[Case], Found]]] = {
    "FedSAM": (methods.FedSAM(rho=0.3), partial(fedsam, rho=0.3)),
    "MOON": (methods.MOON(mu=ud.decay(2.0, 0.5)), partial(moon, mu=lambda t: 2.0 * 0.5**t, tau=0.5)),
    "FedPer": (methods.FedPer(personal=HEAD), personal_head),
    "FedRep": (methods.FedRep(personal=HEAD, share=0.5), partial(personal_head, share=0.5)),
    "Ditto": (methods.Ditto(lam=0.7), partial(ditto, lam=0.7)),
    "PerFedAvg": (methods.PerFedAvg(alpha=0.2), partial(per_fedavg, alpha=0.2)),
    "Median": (methods.Median(), partial(fedavg, server=median)),
    "Mime": (methods.Mime(beta=0.6), partial(mime, beta=0.6)),
    "Poisson": (methods.Poisson(p=0.3), partial(poisson, p=0.3)),
    "FedDecorr": (methods.FedDecorr(beta=0.5), partial(feddecorr, beta=0.5, epsilon=1e-8)),
    "Poisson + Median": (methods.Poisson(p=0.3) + methods.Median(), partial(poisson, p=0.3, server=median)),
    "FedSAM + FedProx": (methods.FedSAM(rho=0.3) + ud.FedProx(mu=0.5), partial(fedsam, rho=0.3, mu=0.5)),
}
"""Each method with what simulates it."""
