"""The plain engine: one client at a time, with ordinary autograd. Slow, simple, and correct for every module.

It is the reference for the lanes engine, the place to debug a hook, and the engine for models that do not support vmap
(`nn.RNN`) or that change buffers in ways of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from undrift.engine.base import Outcome, RoundInputs, Visit
from undrift.engine.client import Program, Sent
from undrift.engine.device_data import DeviceData
from undrift.engine.sums import Sums, only_real
from undrift.errors import UndriftError
from undrift.functional.model import Params
from undrift.method.calls import blaming_the_model
from undrift.method.context import Batch
from undrift.tree import Tree, tree_add, tree_map


class PlainEngine:
    width = 1

    def __init__(self, program: Program, data: DeviceData) -> None:
        self.program, self.data = program, data

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        program, sums = self.program, Sums(self.program, inputs)
        constant = program.model.versions()
        for c, client in enumerate(inputs.filled.clients.tolist()):
            given = self.given(inputs, c)
            state = self.train(inputs, c, given)
            refuse_late_writes(constant, program.model.versions())
            if visit and c < inputs.cohort:
                trained = {**state["params"], **state.get("statistics", {})}
                visit(tree_map(lambda t: t[None], trained), np.array([client]))
            sent = self.conclude(state, client, given, skip)
            sums.add(sent.sums)
            sums.collect(tree_map(lambda t: t[None], sent), [c])
        return sums.outcome()

    def train(self, inputs: RoundInputs, c: int, given: dict[str, Tree]) -> Tree:
        """Train the client at position `c` of the cohort, and add to `given` what it measures and prepares."""
        self.begin(given, int(inputs.filled.clients[c]))
        state = self.program.initial(given)
        for k in self.steps(inputs, c):
            state = self.step(inputs, c, k, state, given)
        return state

    def begin(self, given: dict[str, Tree], client: int) -> None:
        """Add to `given` what a client finds out before its first step."""
        program = self.program
        given["measured"] = self.measure(given["start"], given, client, "sent")
        if program.using["begin"]:
            given["begun"] = program.begin(given)
        before = self.measure(program.starting(given), given, client, "before")
        given["measured"] = program.latest(given["measured"], before, "before")
        given["prepared"] = program.prepare(given)

    def steps(self, inputs: RoundInputs, c: int) -> Iterable[int]:
        """Return the local steps of the client at position `c` of the cohort."""
        return range(int(inputs.filled.steps[c]))

    def step(self, inputs: RoundInputs, c: int, k: int, state: Tree, given: Tree) -> Tree:
        """Return its training state after step `k`."""
        first, per_step = inputs.batches.first[c] + k * inputs.batches.per_step, inputs.batches.per_step
        batches = [self.batch_at(inputs, int(inputs.filled.clients[c]), first + j) for j in range(per_step)]
        gradient = self.program.model.gradient_and_buffers
        with blaming_the_model():
            return self.program.step(state, given, batches, torch.tensor(k, device=self.data.device), gradient)

    def conclude(self, state: Tree, client: int, given: dict[str, Tree], skip: bool) -> Sent:
        """Return what a client that has trained sends and keeps."""
        after = self.measure(state["params"], given, client, "after")
        given["measured"] = self.program.latest(given["measured"], after, "after")
        return self.program.conclude(state, given, skip)

    def given(self, inputs: RoundInputs, c: int) -> dict[str, Tree]:
        """Return the inputs of the client at position `c` of the cohort."""
        return self.program.given(inputs.shared, inputs.own(c))

    def measure_all(self, inputs: RoundInputs, when: str) -> list[Tree]:
        sums = Sums(self.program, inputs)
        for c, client in enumerate(inputs.filled.clients.tolist()):
            given = self.given(inputs, c)
            found = tree_map(lambda t: t[None], self.measure(given["start"], given, client, when))
            sums.add(tree_map(lambda t: t[0], only_real(found, given)))
        return sums.total

    def measure(self, params: Params, given: Tree, client: int, when: str) -> list[Tree]:
        """Run over all of a client's data without training."""
        if not self.program.method.measuring(when):
            return [() for _ in self.program.method.parts]
        n, width, found = int(self.data.data.sizes_of(np.array([client]))[0]), self.data.measure_width, None
        for number, begin in enumerate(range(0, n, width)):
            batch = self.batch(client, np.arange(begin, min(n, begin + width)))
            sums = self.program.measure(params, given, batch, when, torch.tensor(number, device=self.data.device))
            found = sums if found is None else tree_add(found, sums)
        return found  # type: ignore[return-value]

    def batch_at(self, inputs: RoundInputs, client: int, i: int) -> Batch:
        """Return the i-th batch of the round, without its padding."""
        return self.batch(client, inputs.batches.positions[i, : inputs.batches.counts[i]])

    def batch(self, client: int, positions: np.ndarray) -> Batch:
        rows = self.data.rows(self.data.indices(np.array([client]), positions[None])[0])
        return self.data.batch(rows, torch.ones(len(positions), device=self.data.device))


def refuse_late_writes(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> None:
    """Reject a model that starts to change what it left alone in its first passes: clients would share the change."""
    for name, version in before.items():
        if after[name] != version:
            raise UndriftError(
                f"The model changes {name!r}, but not in its first training passes, so clients would share the change; "
                "write to it in every training pass, with torch.where for those that are to leave it as it is."
            )
