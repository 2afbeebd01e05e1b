"""Parts that record more than a run's usual history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from undrift.method.context import Batch, Client, Server
from undrift.method.part import Part
from undrift.tree import Tree, tree_map


@dataclass(frozen=True)
class TrainingLoss(Part):
    """The cohort's mean loss over all its samples, at the weights received."""

    measures: ClassVar[str | None] = "before"
    reads_rates: ClassVar[bool] = False

    def start(self, params: Tree, server: Server) -> Tree:
        return {"loss": torch.zeros((), dtype=torch.float64), "samples": torch.ones((), dtype=torch.float64)}

    def measure(self, params: Tree, batch: Batch, client: Client) -> Tree:
        losses = client.loss(client.model(params, batch.x), batch.y).double()
        mask = batch.mask.double()
        return {"loss": (losses * mask).sum(), "samples": mask.sum()}

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return client.measured, client.kept

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        return update, server.totals.sums

    def history(self, state: Tree) -> dict[str, Any]:
        return {"training_loss": float(state["loss"] / state["samples"])}


@dataclass(frozen=True)
class Coordinates(Part):
    """Two coordinates of each round's update, and the share of all coordinates whose sign changes between updates.

    The two coordinates are those of the first tensor that change most in the first round.
    """

    def start(self, params: Tree, server: Server) -> Tree:
        first = next(iter(params.values()))
        return {
            "places": torch.zeros(2, dtype=torch.int64),
            "two": first.new_zeros(2),
            "update": tree_map(torch.zeros_like, params),
            "opposite": torch.zeros((), dtype=torch.float64),
        }

    def observe(self, params: Tree, state: Tree, server: Server) -> Tree:
        update = {name: params[name] - server.params[name] for name in params}
        first = next(iter(update.values())).flatten()
        chosen = (state["places"] == 0).all()
        places = torch.where(chosen, torch.topk(first.abs(), 2).indices, state["places"])
        turns = [torch.sign(update[name]) * torch.sign(state["update"][name]) for name in update]
        turned, moved = torch.stack([torch.stack([(t < 0).sum(), (t != 0).sum()]) for t in turns]).sum(0).double()
        return {"places": places, "two": first[places], "update": update, "opposite": turned / moved.clamp(min=1)}

    def history(self, state: Tree) -> dict[str, Any]:
        first, second = state["two"].tolist()
        return {"first": first, "second": second, "opposite": float(state["opposite"])}


@dataclass(frozen=True)
class Weights(Part):
    """The model's only weight, for problems of one dimension."""

    def start(self, params: Tree, server: Server) -> Tree:
        return next(iter(params.values()))

    def observe(self, params: Tree, state: Tree, server: Server) -> Tree:
        return next(iter(params.values()))

    def history(self, state: Tree) -> dict[str, Any]:
        return {"x": float(state)}
