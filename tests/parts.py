"""Parts and models that exercise every hook and every kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import undrift as ud
from undrift.random import normal


@dataclass(frozen=True)
class Everything(ud.Part):
    """Every client hook at once: each changes the outcome, so an engine that skips one is caught."""

    scale: ud.Number
    skip: str = ""
    measures = "before"

    def start(self, params):
        return {"rounds": torch.zeros(()), "total": torch.zeros((), dtype=torch.float64)}

    def plan(self, plan, state, server):
        return plan if self.skip == "plan" else replace(plan, steps=plan.steps + plan.round % 2), state

    def broadcast(self, params, state, server):
        assert server.data[0].shape[1] == 6
        if self.skip == "broadcast":
            return {"pull": ud.tree_map(torch.zeros_like, params), "rounds": 0.0}
        noise = {n: normal(server.key.stream_at(i), w.shape, w.dtype) for i, (n, w) in enumerate(params.items())}
        return {"pull": noise, "rounds": state["rounds"] + 1}

    def keep(self, params):
        return {"memory": ud.tree_map(torch.zeros_like, params), "times": torch.zeros(())}

    def measure(self, params, batch, client):
        z = client.model(params, batch.x) * batch.mask[:, None]
        losses = client.loss(client.model(params, batch.x), batch.y) * batch.mask
        return {"z": z.sum(0), "loss": losses.sum(), "n": batch.mask.sum() * 1.0}

    def prepare(self, client):
        if self.skip == "measure":
            return torch.ones_like(client.measured["z"])
        return 1 + torch.softmax(client.measured["z"] / client.measured["n"], 0) + 0 * client.received["rounds"]

    def logits(self, z, client):
        return z if self.skip == "logits" else z * client.prepared + 0.1 * client.label_counts / client.n

    def gradient(self, g, params, client):
        if self.skip == "gradient":
            return g
        drawn = {n: normal(client.key.stream_at(i), w.shape, w.dtype) for i, (n, w) in enumerate(params.items())}
        memory = client.kept["memory"]
        return {
            n: g[n]
            + self.scale * (params[n] - client.start[n])
            + 0.01 * drawn[n]
            + memory[n]
            + 0.01 * client.received["pull"][n]
            for n in g
        }

    def rate(self, k, client):
        return 1.0 if self.skip == "rate" else 0.9**k * client.steps / (client.steps + 1)

    def project(self, params, client):
        return params if self.skip == "project" else ud.tree_map(lambda w: w.clamp(-0.3, 0.3), params)

    def update(self, delta, client):
        return delta if self.skip == "update" else ud.tree_map(lambda d, a: d / a, delta, client.work)

    def upload(self, delta, client):
        if self.skip == "upload":
            return {"d": ud.tree_map(torch.zeros_like, delta), "w": client.work["3.bias"] * 0}, client.kept
        memory = ud.tree_map(lambda m, d, r: 0.5 * m - 0.01 * d / r, client.kept["memory"], delta, client.rate_sum)
        return {"d": delta, "w": client.work["3.bias"] * client.weight}, {
            "memory": memory,
            "times": client.kept["times"] + 1,
        }

    def transform(self, update, state, server):
        if self.skip == "transform":
            return update, state
        extra = server.totals.sums["w"] / server.totals.weight
        state = {"rounds": state["rounds"] + 1, "total": state["total"] + server.totals.sums["w"]}
        return ud.tree_map(
            lambda u, d: u * extra + 0.01 * d / server.population, update, server.totals.sums["d"]
        ), state

    def refine(self, params, state, server):
        if self.skip == "refine":
            return params, state
        return ud.tree_map(lambda w: w * (1 - 0.001 * server.round), params), state

    def observe(self, params, state, server):
        if self.skip == "observe":
            return state
        return {**state, "total": state["total"] + (params["3.bias"] - server.params["3.bias"]).sum()}

    def history(self, state):
        return {"total": float(state["total"])}


@dataclass(frozen=True)
class After(ud.Part):
    """Measures after training and once at the end."""

    measures = "after"
    skip: str = ""

    def measure(self, params, batch, client):
        return (client.model(params, batch.x) * batch.mask[:, None]).square().sum(0)

    def upload(self, delta, client):
        return client.measured, client.kept

    def transform(self, update, state, server):
        return {**update, "3.bias": update["3.bias"] + 1e-3 * server.totals.sums}, state


@dataclass(frozen=True)
class Finish(ud.Part):
    measures = "finish"
    skip: str = ""

    def measure(self, params, batch, client):
        return {"sum": (batch.x * batch.mask[:, None]).sum(0), "n": batch.mask.sum() * 1.0}

    def finish(self, params, state, server):
        if self.skip == "finish":
            return params
        assert server.totals.sums["n"] == 97 and server.totals.size == server.population == 6
        return {**params, "0.weight": params["0.weight"] + server.totals.sums["sum"] / server.totals.sums["n"]}


METHOD = Everything(scale=ud.decay(0.5, 0.9)) + After() + Finish() + ud.ServerSGD(momentum=0.5)


class Branching(torch.nn.Module):
    """A forward pass that looks at its values, which vmap cannot follow."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4).double()

    def forward(self, x):
        z = self.layer(x)
        return z if z.sum() > 0 else z * 1.0


class Recurrent(torch.nn.Module):
    def __init__(self, both_ways=True):
        super().__init__()
        self.cell = torch.nn.GRU(2, 5, batch_first=True, bidirectional=both_ways)
        self.head = torch.nn.Linear(10 if both_ways else 5, 4)
        self.double()

    def forward(self, x):
        return self.head(self.cell(x.view(-1, 3, 2))[0][:, -1])


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)
        ).double()

    def forward(self, x):
        return self.layers(x)
