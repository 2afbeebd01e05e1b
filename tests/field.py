"""Ten methods from the literature, each written with hooks in at most 30 lines, as a user of the package would.

They are tests of the contract, not part of the package: `field_reference.py` has the same equations without hooks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.func import grad

import undrift as ud


@dataclass(frozen=True)
class FedSAM(ud.Part):
    """Local steps of sharpness-aware minimization.

    Qu, Li, Duan, Liu, Tang and Lu, *Generalized Federated Learning via Sharpness Aware Minimization* (2022). The
    gradient is taken at `w + ρ·g/‖g‖`, with g the gradient of the batch at w. Only the difference to g is added, so
    that what other parts have added stays as it is.
    """

    rho: ud.Number

    def gradient(self, g, params, client):
        here = client.gradient(params)
        scale = self.rho / torch.sqrt(sum(h.square().sum() for h in here.values()))
        there = client.gradient(ud.tree_map(lambda w, h: w + scale * h, params, here))
        return ud.tree_map(lambda g, a, b: g + a - b, g, there, here)


@dataclass(frozen=True)
class MOON(ud.Part):
    """A contrastive term that draws a sample's features towards those of the global model.

    Li, He and Song, *Model-Contrastive Federated Learning* (2021). With z, z₊ and z₋ the sample's features in the
    local model, in the global model and in the client's previous local model, `μ·ℓ` is added to its loss:
    `ℓ = −log(exp(cos(z, z₊)/τ) / (exp(cos(z, z₊)/τ) + exp(cos(z, z₋)/τ)))`. A client without a previous local
    model takes the global one in its place.
    """

    mu: ud.Number
    tau: ud.Number = 0.5
    reads_rates = False

    def keep(self, params):
        return params

    def objective(self, losses, z, batch, params, client):
        glob, previous = (client.model.features(w, batch.x) for w in (client.start, client.kept))
        near, far = (F.cosine_similarity(batch.features, other, 1) for other in (glob, previous))
        return losses + self.mu * F.softplus((far - near) / self.tau)

    def upload(self, delta, client):
        return (), client.final


@dataclass(frozen=True)
class FedPer(ud.Part):
    """Each client has a head of its own, trained together with the shared body.

    Arivazhagan, Aggarwal, Singh and Choudhary, *Federated Learning with Personalization Layers* (2019).
    """

    personal: tuple[str, ...]


@dataclass(frozen=True)
class FedRep(ud.Part):
    """Each client has a head of its own, trained before the shared body.

    Collins, Hassani, Mokhtari and Shakkottai, *Exploiting Shared Representations for Personalized Federated
    Learning* (2021). The head takes the first of the local steps, `k < share·K`, and the body the others. A rate of 0
    stands still whatever the local optimizer does, which a gradient of 0 would not with momentum; and a gradient of 0
    keeps what is not trained yet out of the momentum.
    """

    personal: tuple[str, ...]
    share: ud.Number = 0.5

    def _trained(self, k, client):
        head = torch.where(k < self.share * client.steps, 1.0, 0.0)
        return {name: head if name in client.personal else 1 - head for name in client.start}

    def rate(self, k, client):
        return self._trained(k, client)

    def gradient(self, g, params, client):
        return ud.tree_map(torch.mul, g, self._trained(client.step, client))


@dataclass(frozen=True)
class Ditto(ud.Part):
    """Beside the global model, each client trains one of its own that stays near it.

    Li, Hu, Beirami and Smith, *Ditto: Fair and Robust Federated Learning Through Personalization* (2021). In every
    local step, on the same batch, `v ← v − γ·(∇f(v) + λ·(v − w₀))`, with w₀ the weights received.
    """

    lam: ud.Number
    reads_rates = False

    def keep(self, params):
        return params

    def carry(self, params, client):
        return client.kept

    def step(self, g, carry, params, client):
        def descend(v, g, w0):
            return v - client.lr * (g + self.lam * (v - w0))

        return g, ud.tree_map(descend, carry, client.gradient(carry), client.start)

    def upload(self, delta, client):
        return (), client.carry

    def own(self, params, client):
        return client.kept


@dataclass(frozen=True)
class PerFedAvg(ud.Part):
    """Clients look for weights from which one step of their own leads far, to first order.

    Fallah, Mokhtari and Ozdaglar, *Personalized Federated Learning with Theoretical Guarantees* (2020), Per-FedAvg
    (FO). With two batches per local step, the gradient is `∇f(w − α·∇f(w; B₀); B₁)`.
    """

    alpha: ud.Number
    batches = 2
    replaces_gradient = True

    def gradient(self, g, params, client):
        ahead = ud.tree_map(lambda w, g: w - self.alpha * g, params, client.gradient(params))
        return client.gradient(ahead, batch=1)


@dataclass(frozen=True)
class Median(ud.Part):
    """The coordinate-wise median of the clients' updates.

    Yin, Chen, Ramchandran and Bartlett, *Byzantine-Robust Distributed Learning* (2018). Of an even number of clients,
    the mean of the two in the middle.
    """

    def aggregate(self, updates, state, server):
        def middle(u):
            ordered = u.sort(0).values
            return (ordered[(len(u) - 1) // 2] + ordered[len(u) // 2]) / 2

        return ud.tree_map(middle, updates), state


@dataclass(frozen=True)
class Mime(ud.Part):
    """Local steps that mimic those of a server with all data: MimeSGDm of Karimireddy et al., *Mime* (2020).

    A local step is `y ← y − η·((1 − β)·(∇f(y) − ∇f(x)) + m′)`, with x as sent and `m ← m′ = β·m + (1 − β)·∇F(x)`.
    """

    beta: ud.Number
    measures = "cohort"

    def start(self, params):
        return ud.tree_map(torch.zeros_like, params)

    def measure(self, params, batch, client):
        share = batch.mask * client.weight / client.n
        return grad(lambda w: (client.loss(client.model(w, batch.x), batch.y) * share).sum())(params)

    def broadcast(self, params, state, server):
        return self._momentum(state, server)

    def _momentum(self, m, server):
        whole = max(1, int(server.client_weights.sum()))
        return ud.tree_map(lambda m, c: self.beta * m + (1 - self.beta) / whole * c, m, server.totals.measured)

    def gradient(self, g, params, client):
        old = client.gradient(client.start)
        return ud.tree_map(lambda g, old, m: (1 - self.beta) * (g - old) + m, g, old, client.received)

    def observe(self, params, state, server):
        return self._momentum(state, server) if len(server.cohort) else state


@dataclass(frozen=True)
class Poisson(ud.Part):
    """Every client takes part with probability p, independently of the others; a round may be empty.

    What privacy accountants call Poisson sampling. It takes the place of the cohorts that `participation` draws.
    """

    p: ud.Number
    ranges = {"p": "[0, 1]"}  # noqa: RUF012 - as a user writes it

    def plan(self, plan, state, server):
        drawn = ud.random.uniform(server.key, server.clients.shape, torch.float64) < self.p
        clients = server.clients[drawn.cpu().numpy()]
        return replace(plan, clients=clients, steps=server.steps(clients)), state


@dataclass(frozen=True)
class FedDecorr(ud.Part):
    """A penalty on the correlation of features, which heterogeneous clients let collapse.

    Shi, Liang, Zhang, Tan and Bai, *Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous
    Federated Learning* (2023): `β·‖K‖²_F/d²` with K the d × d correlation matrix of the batch's features. The
    small ε in each standard deviation keeps a batch of one sample finite, whose penalty is 0.
    """

    beta: ud.Number
    epsilon: float = 1e-8

    def objective(self, losses, z, batch, params, client):
        features, real = batch.features, batch.mask[:, None]
        n = real.sum()
        centred = (features - (features * real).sum(0) / n) * real
        scaled = centred / torch.sqrt(centred.square().sum(0) / n + self.epsilon)
        correlation = scaled.T @ scaled / n
        return losses + self.beta * correlation.square().mean()
