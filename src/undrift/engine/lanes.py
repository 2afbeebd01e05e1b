"""The lanes engine: a whole cohort's local training as one program.

Parameters are stacked along a lane axis and one local step of all lanes is one call: `vmap` over the lanes of the
functions in `client.py`, traced. A lane takes its next client when one finishes, so a cohort of any size runs in
the memory of its lanes, and uneven clients leave few of them idle. Sums are added in the order that the packing
fixes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from undrift.engine.client import Program
from undrift.engine.cohort import Kept, Orders, Outcome, Resident, Sums, outcome
from undrift.engine.packing import stretches
from undrift.engine.plain import MEASURE_BATCH
from undrift.engine.trace import Traced
from undrift.models.functional import Params
from undrift.roles import Batch
from undrift.tree import Tree, tree_add, tree_map


class LanesEngine:
    name = "lanes"

    def __init__(self, program: Program, data: Resident, lanes: int) -> None:
        self.program, self.data, self.lanes = program, data, lanes
        self.step = Traced(self._step)

    def run(self, orders: Orders, buffers: Params, kept: Kept) -> Outcome:
        sums, state, lane = Sums(), None, None
        for stretch in stretches(orders.plan.steps, min(self.lanes, len(orders.plan.steps))):
            if stretch.begins:
                fresh_lane, fresh_state = self._begin(orders, [client for _, client in stretch.begins])
                where = [lane for lane, _ in stretch.begins]
                lane, state = self._put(lane, fresh_lane, where), self._put(state, fresh_state, where)
            rows, counts = self._batches(orders, stretch.clients, stretch.rows)
            steps = torch.from_numpy(stretch.rows).to(self.data.device)
            for k in range(len(stretch.rows)):
                state = self.step(state, lane, orders.shared, rows[k], counts[k], steps[k])
            ended = [lane for lane, _ in stretch.ends]
            self._end(orders, self._get(state, ended), self._get(lane, ended), [c for _, c in stretch.ends], sums, kept)
        return outcome(sums, orders.lanes)

    def _step(self, state: Tree, lane: Tree, shared: Tree, rows: Tensor, counts: Tensor, k: Tensor) -> Tree:
        """One local step of every lane."""
        mask = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        batch = self.data.batch(rows, mask)

        def one(state: Tree, lane: Tree, x: Tensor, y: Tensor, mask: Tensor, k: Tensor) -> Tree:
            g = grad(self.program.objective)(state["params"], lane, shared, Batch(x, y, mask), k)
            return self.program.advance(state, g, lane, shared, k)

        return vmap(one)(state, lane, batch.x, batch.y, batch.mask, k)

    def _begin(self, orders: Orders, clients: list[int]) -> tuple[Tree, Tree]:
        """Lanes for clients that start: what they have of their own, and their training state."""
        lane = tree_map(lambda t: t[clients], orders.lanes)
        start = tree_map(lambda t: t.expand(len(clients), *t.shape), orders.shared["start"])
        lane["measured"] = self.measure(start, lane, orders, clients, "before")
        lane["prepared"] = vmap(self.program.prepare, in_dims=(0, None))(lane, orders.shared)
        state = vmap(self.program.begin, in_dims=(0, None))(lane, orders.shared)
        return lane, tree_map(torch.Tensor.contiguous, state)

    def _end(self, orders: Orders, state: Tree, lane: Tree, clients: list[int], sums: Sums, kept: Kept) -> None:
        """Add up what clients that have finished send, and keep what they keep."""
        if self.program.method.measuring("after"):
            after = self.measure(state["params"], lane, orders, clients, "after")
            before = lane["measured"]
            parts = self.program.method.parts
            lane["measured"] = [a if p.measures == "after" else b for p, a, b in zip(parts, after, before, strict=True)]
        weighted, uploads, keeps = vmap(self.program.conclude, in_dims=(0, 0, None))(state, lane, orders.shared)
        sums.add(tree_map(lambda t: t.sum(0), (weighted, uploads)))
        names = orders.plan.clients[clients].tolist()
        sums.keep(keeps, kept, names)

    def survey(self, orders: Orders) -> list[Tree]:
        """The "finish" measures, summed over the clients of `orders`, as many at a time as there are lanes."""
        sums = Sums()
        for begin in range(0, len(orders.plan.clients), self.lanes):
            clients = list(range(begin, min(begin + self.lanes, len(orders.plan.clients))))
            lane = tree_map(lambda t, clients=clients: t[clients], orders.lanes)
            start = tree_map(lambda t, clients=clients: t.expand(len(clients), *t.shape), orders.shared["start"])
            sums.add(tree_map(lambda t: t.sum(0), self.measure(start, lane, orders, clients, "finish")))
        return sums.total  # type: ignore[no-any-return]

    def measure(self, params: Tree, lane: Tree, orders: Orders, clients: list[int], when: str) -> list[Tree]:
        """A pass over all data of these clients without training, all of them side by side."""
        if not self.program.method.measuring(when):
            return [() for _ in self.program.method.parts]
        ids = orders.plan.clients[clients]
        sizes = self.data.data.sizes[ids]
        found = None

        def one(params: Params, lane: Tree, x: Tensor, y: Tensor, mask: Tensor) -> Tree:
            return self.program.measure(params, lane, orders.shared, Batch(x, y, mask), when)

        for begin in range(0, int(sizes.max()), MEASURE_BATCH):
            width = min(MEASURE_BATCH, int(sizes.max()) - begin)
            positions = begin + np.arange(width)[None]
            rows = self.data.rows(ids, np.minimum(positions, sizes[:, None] - 1))
            mask = torch.from_numpy(positions < sizes[:, None]).to(self.data.device)
            batch = self.data.batch(torch.from_numpy(rows).to(self.data.device), mask)
            sums = vmap(one)(params, lane, batch.x, batch.y, batch.mask)
            found = sums if found is None else tree_add(found, sums)
        return found  # type: ignore[return-value]

    def _batches(self, orders: Orders, clients: np.ndarray, steps: np.ndarray) -> tuple[Tensor, Tensor]:
        """Rows of the store for every step and lane of a stretch, and how many of each are real."""
        which = orders.batches.first[clients][None] + steps
        positions = orders.batches.rows[which].swapaxes(0, 1)
        rows = self.data.rows(orders.plan.clients[clients], positions).swapaxes(0, 1)
        device = self.data.device
        return torch.from_numpy(np.ascontiguousarray(rows)).to(device), torch.from_numpy(
            orders.batches.counts[which]
        ).to(device)

    def _put(self, old: Tree, new: Tree, where: list[int]) -> Tree:
        """`old` with the lanes at `where` replaced; all of them, where there was nothing before."""
        if old is None:
            return new
        index = torch.tensor(where, device=self.data.device)
        return tree_map(lambda o, n: o.index_copy(0, index, n), old, new)

    def _get(self, tree: Tree, where: list[int]) -> Tree:
        index = torch.tensor(where, device=self.data.device)
        return tree_map(lambda t: t if len(where) == len(t) else t.index_select(0, index), tree)
