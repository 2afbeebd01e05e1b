"""What one client does in a round, written once for all engines.

A local step is, in this order: the gradient of the loss (with the `logits` hooks), plus weight decay, then the
`gradient` hooks in the order of `+`, then momentum, then the rate, the step, and the `project` hooks. The lanes
engine maps these functions over a lane axis, the plain engine calls them as they are.

`given` is what the client is given: one client's entries of `RoundInputs`, both trees merged. `state` is what training
changes: `params`; `velocity` with momentum; `rate_sum`, `work` and `momentum_sum` where a part reads the rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from undrift.functional.model import Model, Params
from undrift.losses import Loss
from undrift.method.context import Batch, Client
from undrift.method.part import Method, Part, aligned, part_stream
from undrift.random import Key
from undrift.tree import Tree, tree_leaves, tree_map, tree_sub, tree_where, tree_zeros

# The step that stands in the key of hooks outside a local step. Hooks of the same step have the same key.
PREPARE, CONCLUDE = 2**31, 2**31 + 1
AUGMENT = 2**16 - 1
"""The stream of a step's draws that changes its batch: the last of the model's own, before those of the parts."""
MEASURE = {when: 2**31 + (i << 28) for i, when in enumerate(("before", "after", "finish"), start=1)}


@dataclass(frozen=True)
class Program:
    """The functions of one client's round, fixed for the whole run: pure, but for `objective` writing `statistics`."""

    model: Model
    method: Method
    loss: Loss
    momentum: bool
    """Whether any round has momentum: without it there is no velocity to carry."""
    weight_decay: bool
    augment: Callable[[Tensor, Key], Tensor] | None = None
    """Changes a batch before a step."""

    @property
    def reads_rates(self) -> bool:
        """Whether a part reads `rate_sum` or `work`, in `update` or `upload`; otherwise they are not computed."""
        return any(part.reads_rates for hook in ("update", "upload") for _, part in self.method.overriding(hook))

    def clients(self, given: Tree, step: Tensor | int) -> list[tuple[Part, Client]]:
        """Every part, with this round's numbers in it, beside the client as that part sees it."""
        step = torch.full_like(given["id"], step) if isinstance(step, int) else step
        base = Client(
            id=given["id"],
            round=given["round"],
            n=given["n"],
            weight=given["weight"],
            label_counts=given["label_counts"],
            steps=given["steps"],
            lr=given["lr"],
            start=given["start"],
            key=Key(given["key"], step),
            model=self.model.at(given["tracked"]),
            loss=self.loss,
        )
        own = {name: given[name] for name in ("kept", "measured", "prepared") if name in given}
        views = []
        for i, part in enumerate(self.method.bind(given["numbers"]).parts):
            mine: dict[str, Any] = {name: trees[i] for name, trees in own.items()}
            key = base.key.stream_at(part_stream(part))
            views.append((part, replace(base, key=key, received=given["received"][i], **mine)))
        return views

    def measure(self, params: Params, given: Tree, batch: Batch, when: str, number: Tensor) -> Tree:
        """Each measuring part's sums over batch `number` of a pass over the client's data."""
        return [
            tree_map(_summable, part.measure(params, batch, client)) if part.measures == when else ()
            for part, client in self.clients(given, MEASURE[when] + number)
        ]

    def prepare(self, given: Tree) -> Tree:
        return [part.prepare(client) for part, client in self.clients(given, PREPARE)]

    def begin(self, given: Tree) -> Tree:
        """Training state before the first step."""
        state: dict[str, Any] = {"params": tree_map(torch.clone, given["start"])}
        if self.momentum:
            state["velocity"] = tree_zeros(given["start"])
        if self.reads_rates:
            k = torch.zeros_like(given["id"])
            zeros = tree_map(torch.zeros_like, self.multiplier(k, self.clients(given, k), given["start"]))
            state |= {"rate_sum": zeros, "work": zeros, "momentum_sum": torch.zeros_like(given["lr"])}
        return state

    def objective(
        self, params: Params, given: Tree, batch: Batch, k: Tensor, statistics: Params | None = None
    ) -> Tensor:
        """The mean loss of a batch over its real rows."""
        clients = self.clients(given, k)
        key = Key(given["key"], k)
        x = self.augment(batch.x, key.stream_at(AUGMENT)) if self.augment else batch.x
        z = self.model.train(params, x, key, statistics)
        for part, client in clients:
            z = part.logits(z, client)
        losses = self.loss(z, batch.y)
        mask = batch.mask.to(losses.dtype)
        return (losses * mask).sum() / mask.sum()

    def advance(self, state: Tree, g: Params, given: Tree, k: Tensor) -> Tree:
        """One local step, given the gradient of the loss."""
        clients, params, after = self.clients(given, k), state["params"], dict(state)
        if self.weight_decay:
            g = tree_map(lambda g, w: g + given["weight_decay"] * w, g, params)
        for part, client in clients:
            g = aligned(part.gradient(g, params, client), params, part, "gradient")
        if self.momentum:
            velocity = tree_map(lambda v, g: given["momentum"] * v + g, state["velocity"], g)
            g = after["velocity"] = {n: v.to(params[n].dtype) for n, v in velocity.items()}
        multiplier = self.multiplier(k, clients, params)
        rate = tree_map(lambda m: m * given["lr"], multiplier)
        rates: Tree = rate if isinstance(rate, dict) else dict.fromkeys(params, rate)
        params = {n: torch.addcmul(w, rates[n].to(w.dtype), g[n], value=-1) for n, w in params.items()}
        for part, client in clients:
            params = aligned(part.project(params, client), params, part, "project")
        after["params"] = params
        if self.reads_rates:
            after["momentum_sum"] = given["momentum"] * state["momentum_sum"] + 1
            after["rate_sum"] = tree_map(torch.add, state["rate_sum"], rate)
            after["work"] = tree_map(lambda a, m: a + m * after["momentum_sum"], state["work"], multiplier)
        return after

    def multiplier(self, k: Tensor, clients: list[tuple[Part, Client]], params: Params) -> Tree:
        """The product of the parts' rates in step k: a float64 number, or a tree where one of them is."""
        product: Tree = torch.ones((), dtype=torch.float64, device=k.device)
        rating = {i for i, _ in self.method.overriding("rate")}
        for part, client in (pair for i, pair in enumerate(clients) if i in rating):
            rate = part.rate(k.to(self.model.accum_dtype), client)
            if isinstance(rate, dict):
                rate = aligned(rate, params, part, "rate")
                product = product if isinstance(product, dict) else dict.fromkeys(params, product)
                product = {n: r * product[n] for n, r in rate.items()}
            else:
                product = tree_map(lambda p, rate=rate: p * rate, product)
        return product

    def latest(self, before: list[Tree], after: list[Tree]) -> list[Tree]:
        """Each part's measurements by the end of training."""
        return [
            a if part.measures == "after" else b for part, b, a in zip(self.method.parts, before, after, strict=True)
        ]

    def conclude(self, state: Tree, given: Tree, statistics: Tree = (), skip: bool = False) -> tuple[Tree, Tree, Tree]:
        """The client's share of the sums (weighted update, each part's sums, weighted statistics) and its new state.

        With `skip`, a client with anything in these that is not finite sends zeros and keeps what it had; the third
        result then says whether all is finite.
        """
        delta = tree_sub(state["params"], given["start"])
        update, sums, kept = delta, [], []
        rates: dict[str, Any] = {}
        for name in ("rate_sum", "work") if self.reads_rates else ():
            rates[name] = state[name] if isinstance(state[name], dict) else dict.fromkeys(delta, state[name])
        for part, client in [(p, replace(c, **rates)) for p, c in self.clients(given, CONCLUDE)]:
            update = aligned(part.update(update, client), delta, part, "update")
            own_sums, own_kept = part.upload(delta, client)
            sums.append(tree_map(_summable, own_sums))
            kept.append(own_kept)
        # In at least float32: a half-precision update times a client's samples would overflow.
        dtype = self.model.accum_dtype
        weighted = [tree_map(lambda t: t.to(dtype) * given["weight"], tree) for tree in (update, statistics or {})]
        sent = (weighted[0], sums, weighted[1])
        if not skip:
            return sent, kept, ()
        numbers = [t for t in tree_leaves((sent, kept)) if t.is_floating_point()]
        finite = torch.stack([t.isfinite().all() for t in numbers]).all()
        return tree_where(finite, sent, tree_zeros(sent)), tree_where(finite, kept, given["kept"]), finite


def _summable(leaf: Any) -> Tensor:
    """Votes and counts add up as whole numbers: bytes would overflow, and True + True is True."""
    leaf = torch.as_tensor(leaf)
    return leaf if leaf.is_floating_point() else leaf.long()
