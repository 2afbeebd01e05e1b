"""The papers' small problems, other than federated runs on a data set."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.data.dataset import FederatedDataset
from undrift.expressions import parse_number
from undrift.functional.model import Model
from undrift.method.context import Server
from undrift.method.local import Local
from undrift.method.parse import as_method, parse_local, parse_method
from undrift.method.part import Part
from undrift.models import get, parse_model
from undrift.training.loop import train
from undrift.tree import Tree

Curve = dict[str, list[Any]]


def local_work(section: dict[str, Any]) -> Local:
    """Return the section `local` of an experiment file as an object."""
    return Local(**{key: parse_local(key, value) for key, value in section.items()})


@dataclass(frozen=True)
class Follow(Part):
    """Records every round's weights, on the host."""

    path: list[dict[str, Tensor]] = field(default_factory=list)

    def start(self, params: Tree, server: Server) -> Tree:
        return params

    def observe(self, params: Tree, state: Tree, server: Server) -> Tree:
        return params

    def history(self, state: Tree) -> dict[str, Any]:
        self.path.append({name: w.float().cpu() for name, w in state.items()})
        return {}


# ---- paper 2: a one-dimensional quadratic -------------------------------------------------------------------------

CLIENTS, START = 10_000, 0.4


class Point(nn.Module):
    """One number x. A client's target is its i, and its loss ½·i·x² − x."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([START], dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        return self.x.expand(len(batch), 1)


def point_loss(output: Tensor, i: Tensor) -> Tensor:
    return 0.5 * i[:, 0] * output[:, 0] ** 2 - output[:, 0]


def population() -> FederatedDataset:
    """Clients with i in [1, 3], of density ∝ 1/√i, at equidistant quantiles: i = (1 + u(√3 − 1))²."""
    u = (np.arange(CLIENTS) + 0.5) / CLIENTS
    i = torch.tensor((1 + u * (math.sqrt(3) - 1)) ** 2)[:, None]
    return FederatedDataset({"x": torch.zeros(CLIENTS, 1), "y": i}, torch.arange(CLIENTS), np.arange(CLIENTS + 1))


def expected(local: dict[str, Any], eta: float, rounds: int) -> list[float]:
    """The exact mean of x after every round: a round moves it by η times the mean over i of the change by K steps."""
    i = population().store["y"][:, 0].numpy()
    work = local_work(local)
    x, path = START, []
    for t in range(rounds):
        k = int(work.step_counts(t, np.array([0]), np.array([1]))[0])
        gamma = float(work.lr(t)) if callable(work.lr) else float(work.lr)
        x += eta * float(((1 - (1 - gamma * i) ** k) * (1 / i - x)).mean())
        path.append(x)
    return path


def step_fractions(schedule: str, rounds: int) -> Curve:
    """Return the share of constant-K steps taken up to every fortieth round, counted as in a run."""
    work = Local(steps=parse_number(schedule), lr=1.0)
    taken = np.cumsum([int(work.step_counts(t, np.array([0]), np.array([1]))[0]) for t in range(rounds)])
    first = int(work.step_counts(0, np.array([0]), np.array([1]))[0])
    at = [t for t in range(1, rounds + 1) if t % 40 == 0 or t == rounds]
    return {"round": at, "steps_fraction": [float(f"{taken[t - 1] / (first * t):.5g}") for t in at]}


# ---- paper 4: Example 1 and Table 4 ------------------------------------------------------------------------------


def example(method: str) -> Curve:
    """Activations and output for client 2's sample after client 1 took one step with rate 0.5; `method="none"` is
    before that step.
    """
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    third = 1 / 3
    for layer, rows in ((model[0], [[1, third], [third, 1]]), (model[2], [[10 / 9, 2 / 3], [2 / 3, 10 / 9]])):
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(torch.tensor(rows, dtype=torch.float64))
    mine, other = torch.tensor([[1, third]], dtype=torch.float64), torch.tensor([[third, 1]], dtype=torch.float64)
    trained: nn.Module = model
    if method != "none":
        data = FederatedDataset.from_clients([(mine, torch.tensor([0]))])
        trained = train(model, data, parse_method(method), rounds=1, local=Local(steps=1, lr=0.5), device="cpu").model
    with torch.no_grad():
        hidden = F.relu(trained.get_submodule("0")(other))[0].tolist()
        probability = float(torch.softmax(trained(other), 1)[0, 1])
    return {"round": [1], "first": [hidden[0]], "second": [hidden[1]], "probability": [probability]}


BOTH = ("model", "local", "seed", "engine")
"""The settings of both runs of `bound_neurons`."""


def bound_neurons(given: dict[str, Any], device: torch.device) -> Curve:
    """By how much client 1's training lowers the activations of client 2's bound neurons on client 2's samples.

    A neuron of the hidden layer counts as bound to the class on which its mean activation is highest. The model is
    trained by FedAvg over all clients until it reaches 88% on the test set; then only client 1 trains, with `method`.
    """
    data: FederatedDataset = given["data"]
    common = {"device": str(device)} | {name: x for name, x in given.items() if name in BOTH}
    follow, reached = Follow(), list[float]()

    def look(row: dict[str, Any]) -> None:
        reached.append(row["accuracy"])
        if row["accuracy"] >= 0.88:
            raise StopIteration

    with contextlib.suppress(StopIteration):
        train(**common, data=data, method=as_method("FedAvg()") + follow, rounds=given["rounds"], on_round=look)
    (name, options), shape = parse_model(given["model"]), data[0][0].shape[1:]
    model = get(name, classes=data.outputs, shape=shape, **options)
    model.load_state_dict(follow.path[-1])
    x, only_first = data[1][0], FederatedDataset.from_clients([data[0]])
    by_class = torch.stack([_activations(model, data[client][0]) for client in range(len(data))])
    before, bound = by_class[1], by_class.argmax(0) == 1
    after = train(**{**common, "model": model}, data=only_first, method=given["method"], rounds=1)
    fall = (before - _activations(after.model, x))[bound]
    mean = float(fall.mean()) if len(fall) else None
    each = [round(one, 4) for one in fall.tolist()]
    return {"round": [len(reached)], "accuracy": [reached[-1]], "fall": [mean], "falls": [each]}


def _activations(model: nn.Module, x: Tensor) -> Tensor:
    """Return the hidden layer's mean activations over the samples."""
    function = Model(model, torch.device("cpu"))
    with torch.no_grad():
        return next(iter(function.activations(function.start, x.cpu()).values())).mean(0)


# ---- paper 5: Figure 1 -------------------------------------------------------------------------------------------


def path(given: dict[str, Any], beta: float, device: torch.device) -> Curve:
    """Return the global model and its temporal ensemble by round, in the first two principal components."""
    follow = Follow()
    done = train(**{**given, "method": given["method"] + follow}, device=str(device))
    weights = torch.stack([torch.cat([w.flatten() for w in at.values()]) for at in follow.path]).double()
    ensemble, targets = torch.zeros_like(weights[0]), []
    for t, w in enumerate(weights, 1):
        ensemble = (1 - beta) * w + beta * ensemble
        targets.append(ensemble / (1 - beta**t))
    centred = weights - weights.mean(0)
    _, _, axes = torch.pca_lowrank(centred, q=2, center=False, niter=4)
    model, target = centred @ axes, (torch.stack(targets) - weights.mean(0)) @ axes
    return {
        "round": [row["round"] for row in done.history],
        "accuracy": [row.get("accuracy") for row in done.history],
        "model": [[round(v, 4) for v in point] for point in model.tolist()],
        "target": [[round(v, 4) for v in point] for point in target.tolist()],
    }
