"""The plain engine: one client at a time, with ordinary autograd. Slow, simple, and right for every module.

It is the reference for the lanes engine, the place to debug a hook, and the engine for models that do not vmap
(`nn.RNN`) or whose training mode looks across a batch (batch norm).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from undrift.engine.client import Program
from undrift.engine.cohort import Kept, Orders, Outcome, Resident, Sums, Visit, outcome
from undrift.functional.convolution.lanes import by_itself
from undrift.functional.model import Params, ordinary_gradient
from undrift.method.context import Batch
from undrift.tree import Tree, tree_add, tree_map


class PlainEngine:
    def __init__(self, program: Program, data: Resident) -> None:
        self.program, self.data = program, data

    def run(self, orders: Orders, kept: Kept, visit: Visit | None = None, skip: bool = False) -> Outcome:
        sums = Sums()
        for c, client in enumerate(orders.plan.clients.tolist()):
            lane = tree_map(lambda t, c=c: t[c], orders.lanes)
            lane["measured"] = self.measure(orders.shared["start"], lane, orders.shared, client, "before")
            lane["prepared"] = self.program.prepare(lane, orders.shared)
            state = self.program.begin(lane, orders.shared)
            statistics = tree_map(torch.clone, self.program.model.tracked)
            first = orders.batches.first[c]
            for k in range(int(orders.plan.steps[c])):
                count = orders.batches.counts[first + k]
                batch = self.batch(client, orders.batches.rows[first + k, :count])
                step = torch.tensor(k, device=self.data.device)
                state = self.step(state, lane, orders.shared, batch, step, statistics)
            if visit:
                visit(tree_map(lambda t: t[None], {**state["params"], **statistics}), np.array([client]))
            after = self.measure(state["params"], lane, orders.shared, client, "after")
            lane["measured"] = self.program.latest(lane["measured"], after)
            sent, keeps, finite = self.program.conclude(state, lane, orders.shared, statistics, skip)
            sums.add(sent)
            sums.keep(tree_map(lambda t: t[None], keeps), kept, [client])
            if skip:
                sums.note(finite[None], [c])
        return outcome(sums, orders)

    def step(self, state: Tree, lane: Tree, shared: Tree, batch: Batch, k: Tensor, statistics: Params) -> Tree:
        with by_itself(self.data.device):
            g = ordinary_gradient(
                lambda w: self.program.objective(w, lane, shared, batch, k, statistics), state["params"]
            )
        return self.program.advance(state, g, lane, shared, k)

    def survey(self, orders: Orders) -> list[Tree]:
        """The "finish" measures, summed over the clients of `orders`."""
        sums = Sums()
        for c, client in enumerate(orders.plan.clients.tolist()):
            lane = tree_map(lambda t, c=c: t[c], orders.lanes)
            sums.add(self.measure(orders.shared["start"], lane, orders.shared, client, "finish"))
        return sums.total

    def measure(self, params: Params, lane: Tree, shared: Tree, client: int, when: str) -> list[Tree]:
        """A pass over all of a client's data without training."""
        if not self.program.method.measuring(when):
            return [() for _ in self.program.method.parts]
        n, width, found = int(self.data.data.sizes[client]), self.data.measure_width, None
        for number, begin in enumerate(range(0, n, width)):
            batch = self.batch(client, np.arange(begin, min(n, begin + width)))
            turn = torch.tensor(number, device=self.data.device)
            sums = self.program.measure(params, lane, shared, batch, when, turn)
            found = sums if found is None else tree_add(found, sums)
        return found  # type: ignore[return-value]

    def batch(self, client: int, positions: np.ndarray) -> Batch:
        rows = torch.from_numpy(self.data.rows(np.array([client]), positions[None])[0]).to(self.data.device)
        return self.data.batch(rows, torch.ones(len(rows), device=self.data.device))
