"""The lanes engine: a whole cohort's local training as one program.

Parameters are stacked along a lane axis and one local step of all lanes is one call: `vmap` over the lanes of the
functions in `client.py`, traced. A lane takes its next client when one finishes, so a cohort of any size runs in
the memory of its lanes, and uneven clients leave few of them idle. Sums are added in the order that the packing
fixes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from undrift.engine.client import MEASURE, Program
from undrift.engine.cohort import Kept, Orders, Outcome, Resident, Sums, Visit, outcome
from undrift.engine.graph import StepGraph, captures
from undrift.engine.packing import Stretch, busy, pack, stretches
from undrift.engine.threads import at_once
from undrift.engine.trace import CALLING, Traced
from undrift.functional.convolution.lanes import LaneConvolutions, by_itself
from undrift.functional.model import Params
from undrift.functional.triton import available
from undrift.method.context import Batch
from undrift.tree import Tree, to_device, tree_add, tree_leaves, tree_map, tree_structure, tree_unflatten

THREADS_BUSY = 0.9
"""How much of the time threads must be busy; else one client at a time has all cores."""


class LanesEngine:
    def __init__(self, program: Program, data: Resident, lanes: int, compiled: bool = False, threads: int = 1) -> None:
        self.program, self.data, self.lanes = program, data, lanes
        self.compiled = program.model.compute if compiled else None
        self.threads = threads
        self.own_convolutions = available(data.device, program.model.compute)
        self.step = Traced(self._step)
        self.start = Traced(self._start, self.compiled if program.method.overriding("prepare") else None)
        self.conclude = {skip: Traced(partial(self._conclude, skip), self.compiled) for skip in (False, True)}
        self.graphs: dict[Any, StepGraph] | None = {} if captures(data.device) else None
        # A pass without training is few steps long: it is traced only where launching costs more than computing, and
        # where threads must not call the model.
        traced = self.graphs is not None or threads > 1
        passes = {when: partial(self._pass, when) for when in MEASURE}
        self.passes = {when: Traced(one, self.compiled) if traced else one for when, one in passes.items()}

    def run(self, orders: Orders, kept: Kept, visit: Visit | None = None, skip: bool = False) -> Outcome:
        steps = orders.plan.steps
        if self.threads > 1:
            queues = pack(steps, min(self.threads, len(steps)))
            if busy(steps, queues) >= THREADS_BUSY:
                total = Sums()
                for sums in at_once(lambda queue: self._work([queue], orders, kept, visit, skip), queues):
                    total.join(sums)
                return outcome(total, orders)
        return outcome(self._work(pack(steps, min(self.lanes, len(steps))), orders, kept, visit, skip), orders)

    def _work(self, queues: list[list[int]], orders: Orders, kept: Kept, visit: Visit | None, skip: bool) -> Sums:
        """Train the clients that wait for each lane."""
        sums, state, lane, lanes = Sums(), None, None, len(queues)
        for stretch in stretches(orders.plan.steps, queues):
            for where, clients in _groups(stretch.begins, lanes):
                fresh_lane, fresh_state = self._begin(orders, clients)
                lane, state = self._put(lane, fresh_lane, where, lanes), self._put(state, fresh_state, where, lanes)
            state = self._steps(state, lane, orders, stretch)
            for where, clients in _groups(stretch.ends, lanes):
                done = self._get(state, where, lanes)
                if visit:
                    with CALLING:
                        visit(done["params"], orders.plan.clients[clients])
                self._end(orders, done, self._get(lane, where, lanes), clients, sums, kept, skip)
        return sums

    def _steps(self, state: Tree, lane: Tree, orders: Orders, stretch: Stretch) -> Tree:
        """A stretch of local steps of every lane. Trees are taken apart once, not at every step."""
        rows, counts, k = self._batches(orders, stretch)
        program, tree = self.step.at(state, lane, orders.shared, rows[0], counts[0], k[0])
        assert tree == tree_structure(state), "a step must leave the training state's shape as it found it"
        if self.graphs is not None:
            rest = (lane, orders.shared)
            if id(program) not in self.graphs:
                self.graphs[id(program)] = StepGraph(program, state, rest, (rows, counts, k), self.compiled)
            return self.graphs[id(program)].run(state, rest, (rows, counts, k))
        leaves, others = tree_leaves(state), tree_leaves((lane, orders.shared))
        for i in range(len(stretch.rows)):
            leaves = program(*leaves, *others, rows[i], counts[i], k[i])
        return tree_unflatten(leaves, tree)

    def _step(self, state: Tree, lane: Tree, shared: Tree, rows: Tensor, counts: Tensor, k: Tensor) -> Tree:
        """One local step of every lane."""
        mask = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        batch = self.data.batch(rows, mask)

        def one(state: Tree, lane: Tree, x: Tensor, y: Tensor, mask: Tensor, k: Tensor) -> Tree:
            with self.convolutions(len(rows)):
                g = grad(self.program.objective)(state["params"], lane, shared, Batch(x, y, mask), k)
            return self.program.advance(state, g, lane, shared, k)

        everything = (state, lane, batch.x, batch.y, batch.mask, k)
        if len(rows) == 1:  # one lane needs no vmap, whose rule for convolutions takes a CPU a tenth more
            return _contiguous(tree_map(lambda t: t[None], one(*tree_map(lambda t: t[0], everything))))
        return _contiguous(vmap(one)(*everything))

    def convolutions(self, lanes: int) -> AbstractContextManager[Any]:
        """Inside it, the convolutions of so many lanes run as they do best."""
        if self.own_convolutions:
            return LaneConvolutions()
        return by_itself(self.data.device) if lanes == 1 else nullcontext()

    def _begin(self, orders: Orders, clients: list[int]) -> tuple[Tree, Tree]:
        """Lanes for clients that start: what they have of their own, and their training state."""
        lane = self._get(orders.lanes, clients, 0)
        lane["measured"] = self.measure(orders.shared["start"], lane, orders, clients, "before")
        lane["prepared"], state = self.start(lane, orders.shared)
        return lane, state

    def _start(self, lane: Tree, shared: Tree) -> tuple[Tree, Tree]:
        def one(lane: Tree) -> tuple[Tree, Tree]:
            prepared = self.program.prepare(lane, shared)
            return prepared, self.program.begin({**lane, "prepared": prepared}, shared)

        prepared, state = vmap(one)(lane)
        # A graph's buffers take the same weights for all lanes as they are; a traced program wants them spread out.
        return _contiguous(prepared), state if self.graphs is not None else _contiguous(state)

    def _end(
        self, orders: Orders, state: Tree, lane: Tree, clients: list[int], sums: Sums, kept: Kept, skip: bool
    ) -> None:
        """Add up what clients that have finished send, and keep what they keep."""
        after = self.measure(state["params"], lane, orders, clients, "after")
        lane = {**lane, "measured": self.program.latest(lane["measured"], after)}
        sent, keeps, finite = self.conclude[skip](state, lane, orders.shared)
        sums.add(sent)
        sums.keep(keeps, kept, orders.plan.clients[clients].tolist())
        if skip:
            sums.note(finite, clients)

    def _conclude(self, skip: bool, state: Tree, lane: Tree, shared: Tree) -> tuple[Tree, Tree, Tree]:
        conclude = partial(self.program.conclude, skip=skip)
        sent, keeps, finite = vmap(conclude, in_dims=(0, 0, None))(state, lane, shared)
        return tree_map(lambda t: t.sum(0), sent), _contiguous(keeps), finite

    def survey(self, orders: Orders) -> list[Tree]:
        """The "finish" measures, summed over the clients of `orders`, as many at a time as there are lanes."""
        sums = Sums()
        for begin in range(0, len(orders.plan.clients), self.lanes):
            clients = list(range(begin, min(begin + self.lanes, len(orders.plan.clients))))
            lane = self._get(orders.lanes, clients, 0)
            found = self.measure(orders.shared["start"], lane, orders, clients, "finish")
            sums.add(tree_map(lambda t: t.sum(0), found))
        return sums.total

    def measure(self, params: Tree, lane: Tree, orders: Orders, clients: list[int], when: str) -> list[Tree]:
        """A pass over all data of these clients without training, all of them side by side."""
        if not self.program.method.measuring(when):
            return [() for _ in self.program.method.parts]
        ids = orders.plan.clients[clients]
        sizes, width = self.data.data.sizes[ids], self.data.measure_width
        found = None
        for number, begin in enumerate(range(0, int(sizes.max()), width)):
            positions = begin + np.arange(width)[None]
            rows = self.data.rows(ids, np.minimum(positions, sizes[:, None] - 1))
            arrays = (torch.from_numpy(rows), torch.from_numpy(positions < sizes[:, None]), torch.tensor(number))
            moved = [to_device(array, self.data.device) for array in arrays]
            sums = self.passes[when](params, lane, orders.shared, *moved)
            found = sums if found is None else tree_add(found, sums)
        return _contiguous(found)

    def _pass(self, when: str, params: Tree, lane: Tree, shared: Tree, rows: Tensor, mask: Tensor, turn: Tensor) -> Any:
        """One batch of it. Weights are each lane's own after training, and before it one and the same."""
        batch, trained = self.data.batch(rows, mask), when == "after"

        def one(params: Params, lane: Tree, x: Tensor, y: Tensor, mask: Tensor) -> Tree:
            with LaneConvolutions() if self.own_convolutions and trained else nullcontext():
                return self.program.measure(params, lane, shared, Batch(x, y, mask), when, turn)

        return vmap(one, (0 if trained else None, 0, 0, 0, 0))(params, lane, batch.x, batch.y, batch.mask)

    def _batches(self, orders: Orders, stretch: Stretch) -> tuple[Tensor, Tensor, Tensor]:
        """For every step and lane of a stretch: rows of the store, how many of them are real, and the local step."""
        which = orders.batches.first[stretch.clients][None] + stretch.rows
        positions = orders.batches.rows[which].swapaxes(0, 1)
        rows = self.data.rows(orders.plan.clients[stretch.clients], positions).swapaxes(0, 1)
        arrays = (np.ascontiguousarray(rows), orders.batches.counts[which], stretch.rows)
        one, two, three = (to_device(torch.from_numpy(array), self.data.device) for array in arrays)
        return one, two, three

    def _put(self, old: Tree, new: Tree, where: list[int], lanes: int) -> Tree:
        """`old` with the lanes at `where` replaced by `new`."""
        if len(where) == lanes:
            return new
        index = to_device(torch.tensor(where), self.data.device)
        if old is None:
            old = tree_map(lambda n: n.new_zeros(lanes, *n.shape[1:]), new)
        return tree_map(lambda o, n: o.index_copy_(0, index, n), old, new)

    def _get(self, tree: Tree, where: list[int], lanes: int) -> Tree:
        if len(where) == lanes:
            return tree
        index = to_device(torch.tensor(where), self.data.device)
        return tree_map(lambda t: t.index_select(0, index), tree)


def _groups(pairs: list[tuple[int, int]], lanes: int) -> list[tuple[list[int], list[int]]]:
    """(lane, client) pairs to handle together: all lanes at once, or one by one. Two shapes, so two traces, suffice."""
    if len(pairs) == lanes:
        return [([lane for lane, _ in pairs], [client for _, client in pairs])]
    return [([lane], [client]) for lane, client in pairs]


def _contiguous(tree: Tree) -> Tree:
    """A traced program is right for the strides it was traced with, so what goes round must keep them."""
    return tree_map(torch.Tensor.contiguous, tree)
