"""The plain engine: one client at a time, with ordinary autograd. Slow, simple, and right for every module.

It is the reference for the lanes engine, the place to debug a hook, and the engine for models that do not vmap
(`nn.RNN`) or whose training mode looks across a batch (batch norm).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from undrift.engine.base import Outcome, RoundInputs, Visit
from undrift.engine.client import Program
from undrift.engine.device_data import DeviceData
from undrift.engine.sums import Sums
from undrift.functional.model import Params, ordinary_gradient
from undrift.method.context import Batch
from undrift.tree import Tree, tree_add, tree_map


class PlainEngine:
    def __init__(self, program: Program, data: DeviceData) -> None:
        self.program, self.data = program, data

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        program, sums = self.program, Sums(self.program)
        for c, client in enumerate(inputs.plan.clients.tolist()):
            given = self.given(inputs, c)
            given["measured"] = self.measure(given["start"], given, client, "before")
            given["prepared"] = program.prepare(given)
            state = program.begin(given)
            statistics = tree_map(torch.clone, given["tracked"])
            first = inputs.batches.first[c]
            for k in range(int(inputs.plan.steps[c])):
                count = inputs.batches.counts[first + k]
                batch = self.batch(client, inputs.batches.positions[first + k, :count])
                state = self.step(state, given, batch, torch.tensor(k, device=self.data.device), statistics)
            if visit:
                visit(tree_map(lambda t: t[None], {**state["params"], **statistics}), np.array([client]))
            after = self.measure(state["params"], given, client, "after")
            given["measured"] = program.latest(given["measured"], after)
            sent, keeps, finite = program.conclude(state, given, statistics, skip)
            sums.add(sent)
            sums.keep(tree_map(lambda t: t[None], keeps), [client])
            if skip:
                sums.note(finite[None], [c])
        return sums.outcome(inputs)

    def given(self, inputs: RoundInputs, c: int) -> dict[str, Tree]:
        """The inputs of the client at position `c` of the cohort."""
        return {**inputs.shared, **tree_map(lambda t: t[c], inputs.clients)}

    def step(self, state: Tree, given: Tree, batch: Batch, k: Tensor, statistics: Params) -> Tree:
        g = ordinary_gradient(lambda w: self.program.objective(w, given, batch, k, statistics), state["params"])
        return self.program.advance(state, g, given, k)

    def measure_all(self, inputs: RoundInputs) -> list[Tree]:
        sums = Sums(self.program)
        for c, client in enumerate(inputs.plan.clients.tolist()):
            given = self.given(inputs, c)
            sums.add(self.measure(given["start"], given, client, "finish"))
        return sums.total

    def measure(self, params: Params, given: Tree, client: int, when: str) -> list[Tree]:
        """A pass over all of a client's data without training."""
        if not self.program.method.measuring(when):
            return [() for _ in self.program.method.parts]
        n, width, found = int(self.data.data.sizes[client]), self.data.measure_width, None
        for number, begin in enumerate(range(0, n, width)):
            batch = self.batch(client, np.arange(begin, min(n, begin + width)))
            sums = self.program.measure(params, given, batch, when, torch.tensor(number, device=self.data.device))
            found = sums if found is None else tree_add(found, sums)
        return found  # type: ignore[return-value]

    def batch(self, client: int, positions: np.ndarray) -> Batch:
        indices = torch.from_numpy(self.data.indices(np.array([client]), positions[None])[0]).to(self.data.device)
        return self.data.batch(indices, torch.ones(len(indices), device=self.data.device))
