"""What one client does in a round, written once for both engines.

A local step is, in this order: the gradient of the loss (with the `logits` hooks), plus weight decay, then the
`gradient` hooks in the order of `+`, then momentum, then the rate, the step, and the `project` hooks. The lanes
engine maps these functions over a lane axis, the plain engine calls them as they are.

`lane` is what belongs to one client, `shared` what the whole cohort has in common, `state` what training changes:
all of them trees of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from undrift.losses import Loss
from undrift.method import Method, Part, part_stream
from undrift.models.functional import Model, Params
from undrift.random import Key
from undrift.roles import Batch, Client
from undrift.tree import Tree, tree_map, tree_sub, tree_zeros


@dataclass(frozen=True)
class Program:
    """The functions of one client's round: pure, of tensors alone, and fixed for the whole run."""

    model: Model
    method: Method
    loss: Loss
    momentum: bool
    """Whether any round has momentum: without it there is no velocity to carry."""
    weight_decay: bool

    @property
    def reads_rates(self) -> bool:
        """Only `update` and `upload` may read `rate_sum` and `work`; without them nobody pays for the sums."""
        return bool(self.method.overriding("update") or self.method.overriding("upload"))

    def clients(self, lane: Tree, shared: Tree, k: Tensor) -> list[tuple[Part, Client]]:
        """Every part, with this round's numbers in it, beside the client as that part sees it."""
        base = Client(
            id=lane["id"],
            round=shared["round"],
            n=lane["n"],
            weight=lane["weight"],
            label_counts=lane["label_counts"],
            steps=lane["steps"],
            start=shared["start"],
            key=Key(lane["key"], k),
            model=self.model,
            loss=self.loss,
        )
        own = {name: lane[name] for name in ("kept", "measured", "prepared") if name in lane}
        return [
            (
                part,
                replace(
                    base,
                    key=base.key.stream_at(part_stream(i)),
                    received=shared["received"][i],
                    **{n: v[i] for n, v in own.items()},
                ),
            )
            for i, part in enumerate(self.method.bind(shared["numbers"]).parts)
        ]

    def measure(self, params: Params, lane: Tree, shared: Tree, batch: Batch, when: str) -> Tree:
        """One batch of each measuring part's sums."""
        return [
            part.measure(params, batch, client) if part.measures == when else ()
            for part, client in self.clients(lane, shared, torch.zeros_like(lane["id"]))
        ]

    def prepare(self, lane: Tree, shared: Tree) -> Tree:
        return [part.prepare(client) for part, client in self.clients(lane, shared, torch.zeros_like(lane["id"]))]

    def begin(self, lane: Tree, shared: Tree) -> Tree:
        """Training state before the first step."""
        state: dict[str, Any] = {"params": tree_map(torch.clone, shared["start"])}
        if self.momentum:
            state["velocity"] = tree_zeros(shared["start"])
        if self.reads_rates:
            k = torch.zeros_like(lane["id"])
            zeros = tree_map(
                lambda m: torch.zeros_like(m) + 0.0 * shared["lr"], self.multiplier(k, self.clients(lane, shared, k))
            )
            state |= {"rate_sum": zeros, "work": zeros, "inertia": torch.zeros_like(shared["lr"])}
        return state

    def objective(
        self, params: Params, lane: Tree, shared: Tree, batch: Batch, k: Tensor, statistics: Params | None = None
    ) -> Tensor:
        """The mean loss of a batch over its real rows."""
        clients = self.clients(lane, shared, k)
        z = self.model.train(params, batch.x, Key(lane["key"], k), statistics)
        for part, client in clients:
            z = part.logits(z, client)
        losses = self.loss(z, batch.y)
        mask = batch.mask.to(losses.dtype)
        return (losses * mask).sum() / mask.sum()

    def advance(self, state: Tree, g: Params, lane: Tree, shared: Tree, k: Tensor) -> Tree:
        """One local step, given the gradient of the loss."""
        clients, params, after = self.clients(lane, shared, k), state["params"], dict(state)
        if self.weight_decay:
            g = tree_map(lambda g, w: g + shared["weight_decay"] * w, g, params)
        for part, client in clients:
            g = part.gradient(g, params, client)
        if self.momentum:
            g = after["velocity"] = tree_map(lambda v, g: shared["momentum"] * v + g, state["velocity"], g)
        multiplier = self.multiplier(k, clients)
        rate = tree_map(lambda m: m * shared["lr"], multiplier)
        params = _times(rate, g, lambda rate, g, w: torch.addcmul(w, rate.to(w.dtype), g, value=-1), params)
        for part, client in clients:
            params = part.project(params, client)
        after["params"] = params
        if self.reads_rates:
            after["inertia"] = shared["momentum"] * state["inertia"] + 1
            after["rate_sum"] = tree_map(torch.add, state["rate_sum"], rate)
            after["work"] = tree_map(lambda a, m: a + m * after["inertia"], state["work"], multiplier)
        return after

    def multiplier(self, k: Tensor, clients: list[tuple[Part, Client]]) -> Tree:
        """The product of the parts' rates in step k: a number, or a tree where one of them is."""
        product: Tree = torch.ones((), dtype=torch.float64, device=k.device)
        for part, client in clients:
            if type(part).rate is not Part.rate:
                rate = part.rate(k, client)
                if isinstance(product, dict):
                    product = _times(rate, product, lambda rate, p: rate * p)
                else:
                    product = tree_map(lambda r, p=product: r * p, rate)
        return product

    def latest(self, before: list[Tree], after: list[Tree]) -> list[Tree]:
        """What each part has measured by the end of training."""
        return [
            a if part.measures == "after" else b for part, b, a in zip(self.method.parts, before, after, strict=True)
        ]

    def conclude(self, state: Tree, lane: Tree, shared: Tree, statistics: Tree = ()) -> tuple[Tree, Tree]:
        """What the client sends (its weighted update, each part's sums, weighted statistics) and what it keeps."""
        delta = tree_sub(state["params"], shared["start"])
        update, sums, kept = delta, [], []
        rates = {name: state[name] for name in ("rate_sum", "work") if name in state}
        for part, client in [(p, replace(c, **rates)) for p, c in self.clients(lane, shared, lane["steps"])]:
            update = part.update(update, client)
            own_sums, own_kept = part.upload(delta, client)
            sums.append(own_sums)
            kept.append(own_kept)
        weighted = [tree_map(lambda t: t * lane["weight"], tree) for tree in (update, statistics or {})]
        return (weighted[0], sums, weighted[1]), kept


def _times(rate: Tree, tree: Tree, combine: Any, *rest: Tree) -> Tree:
    """`combine(rate, leaf, …)` over the leaves of `tree`, with one rate for all of them or a tree of rates."""
    if isinstance(rate, dict):
        return tree_map(combine, rate, tree, *rest)
    return tree_map(lambda *leaves: combine(rate, *leaves), tree, *rest)
