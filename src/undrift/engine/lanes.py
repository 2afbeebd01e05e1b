"""The lanes engine: the local training of a whole cohort as one program.

Parameters are stacked along a lane axis, and one local step of all lanes is one call (`vectorized.py`, traced). When a
client finishes, its lane takes the next one. So a cohort of any size runs in the memory of its lanes, and few lanes are
idle if clients take different numbers of steps. Sums are added in the order that the packing fixes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from undrift.engine import groups
from undrift.engine.base import Outcome, RoundInputs, Visit
from undrift.engine.client import MEASURE
from undrift.engine.feed import Arrays
from undrift.engine.groups import Beginning, Ending, copied, take
from undrift.engine.packing import Segment, pack, segments
from undrift.engine.steps import Stepper
from undrift.engine.sums import Sums, only_real
from undrift.engine.trace import CALLING, Traced
from undrift.engine.vectorized import Vectorized, contiguous
from undrift.functional.model import Params
from undrift.tree import Tree, tree_add, tree_map


class LanesEngine:
    """Trains `lanes` clients side by side.

    Args:
        functions: The functions of all lanes.
        stepper: Takes a segment of local steps.
        lanes: How many clients train side by side.
        trace_passes: Trace passes without training too. They are few steps long, so that pays only where launching
            costs more than computing; and it must be done where threads may not call the model.
        compiled: The precision in which compiled programs compute; None compiles none.
    """

    def __init__(
        self,
        functions: Vectorized,
        stepper: Stepper,
        lanes: int,
        trace_passes: bool = False,
        compiled: torch.dtype | None = None,
    ) -> None:
        self.program, self.data = functions.program, functions.data
        self.stepper, self.lanes, self.width, self.compiled = stepper, lanes, lanes, compiled
        self.start = Traced(functions.start, compiled if self.program.using["prepare"] else None)
        self.starting_weights = Traced(functions.begin)
        self.conclude = {skip: Traced(partial(functions.conclude, skip), compiled) for skip in (False, True)}
        passes = {when: partial(functions.measure, when) for when in MEASURE}
        self.passes = {when: Traced(one, compiled) if trace_passes else one for when, one in passes.items()}

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        steps = inputs.filled.steps
        return self.train(pack(steps, min(self.lanes, len(steps))), inputs, visit, skip).outcome()

    def train(
        self, queues: list[list[int]], inputs: RoundInputs, visit: Callable[..., None] | None, skip: bool
    ) -> Sums:
        """Train the clients in each lane's queue, one after another."""
        sums, held = self.sums(inputs), None  # type: Sums, Tree
        plan, width = list(segments(inputs.filled.steps, queues)), len(queues)
        order = [client for segment in plan for _, client in segment.begins]
        vary = "real" in inputs.clients or inputs.owner is not None  # of several runs, some may end before others
        sizes = groups.sizes(len(order), width, vary)
        beginning = Beginning(order, sizes.copy(), partial(self.begin, inputs))
        ending = Ending(sizes.copy())
        with self.data.feed(self.batches(inputs, segment) for segment in plan) as fed:
            for segment, pieces in zip(plan, fed, strict=True):
                lanes, state = beginning.fill(held, [lane for lane, _ in segment.begins])
                for batches in pieces:
                    state = self.stepper.run(state, lanes, inputs.shared, batches)
                held = lanes, state
                self.finish(ending.add(segment.ends, held), inputs, sums, visit, skip)
        return sums

    def finish(
        self,
        done: Iterator[tuple[Tree, list[int]]],
        inputs: RoundInputs,
        sums: Sums,
        visit: Callable[..., None] | None,
        skip: bool,
    ) -> None:
        """End groups of clients. Nothing refers to them afterwards, so that their memory is free for the next."""
        for (lanes, state), clients in done:
            if visit:
                self.visit(visit, {**state["params"], **state.get("statistics", {})}, inputs, clients)
            self.end(inputs, state, lanes, clients, sums, skip)

    def sums(self, inputs: RoundInputs) -> Sums:
        """Return the accumulator of what the clients of a round send."""
        return Sums(self.program, inputs)

    def visit(self, visit: Callable[..., None], params: Params, inputs: RoundInputs, clients: list[int]) -> None:
        """Pass on the weights of clients that have trained, except those that only fill up the cohort."""
        real = [j for j, c in enumerate(clients) if c < inputs.cohort]
        if real:
            with CALLING:
                visit(take(params, real), inputs.filled.clients[[clients[j] for j in real]])

    def begin(self, inputs: RoundInputs, clients: list[int]) -> tuple[Tree, Tree]:
        """Lanes for clients that start: what they have of their own, and their training state."""
        lanes = self.own(inputs, clients)
        sent = self.measure({}, lanes, inputs, clients, "sent")
        if self.program.using["begin"]:
            lanes["begun"] = self.starting_weights({**lanes, "measured": sent}, inputs.shared)
        before = self.measure({}, lanes, inputs, clients, "before")
        lanes["measured"] = self.program.latest(sent, before, "before")
        lanes["prepared"], state = self.start(lanes, inputs.shared)
        return lanes, state

    def end(self, inputs: RoundInputs, state: Tree, lanes: Tree, clients: list[int], sums: Sums, skip: bool) -> None:
        """Add up what clients that have finished send, and keep what they keep."""
        after = self.measure(state["params"], lanes, inputs, clients, "after")
        lanes = {**lanes, "measured": self.program.latest(lanes["measured"], after, "after")}
        sent = self.conclude[skip](state, lanes, inputs.shared)
        sums.take(sent, clients)

    def measure_all(self, inputs: RoundInputs, when: str) -> list[Tree]:
        sums, cohort = Sums(self.program, inputs), len(inputs.filled.clients)
        for begin in range(0, cohort, self.lanes):
            clients = list(range(begin, min(begin + self.lanes, cohort)))
            lanes = self.own(inputs, clients)
            found = only_real(self.measure({}, lanes, inputs, clients, when), lanes)
            sums.add(tree_map(lambda t: t.sum(0), found))
        return sums.total

    def measure(self, params: Params, lanes: Tree, inputs: RoundInputs, clients: list[int], when: str) -> list[Tree]:
        """Run over all data of these clients without training, side by side. See `Vectorized.measure`."""
        if not self.program.method.measuring(when):
            return [() for _ in self.program.method.parts]
        ids = inputs.filled.clients[clients]
        sizes, width = self.data.data.sizes_of(ids), self.data.measure_width
        found = None

        def batch(number: int, begin: int) -> Arrays:
            positions = begin + np.arange(width)[None]
            indices = self.data.indices(ids, np.minimum(positions, sizes[:, None] - 1))
            return indices[None], (positions < sizes[:, None])[None], np.array([number])

        begins = range(0, int(sizes.max()), width)
        with self.data.feed(itertools.starmap(batch, enumerate(begins))) as fed:
            for moved in itertools.chain.from_iterable(fed):
                sums = self.passes[when](params, lanes, inputs.shared, *tree_map(lambda t: t[0], moved))
                found = sums if found is None else tree_add(found, sums)
        return contiguous(found)

    def batches(self, inputs: RoundInputs, segment: Segment) -> Arrays:
        """Return, per step and lane of a segment, each batch's indices and real size, and the local step."""
        per_step = inputs.batches.per_step
        rows = (inputs.batches.first[segment.clients][None] + segment.steps * per_step)[..., None] + np.arange(per_step)
        positions = inputs.batches.positions[rows].swapaxes(0, 1)
        indices = self.data.indices(inputs.filled.clients[segment.clients], positions).swapaxes(0, 1)
        return np.ascontiguousarray(indices), inputs.batches.counts[rows], segment.steps

    def own(self, inputs: RoundInputs, clients: list[int]) -> dict[str, Tree]:
        """Return the own entries of clients that start. Their states are fetched now, not for the whole cohort at once.

        Where they are of several runs, also what each of them shares with its own run's clients.
        """
        chosen = take if len(clients) == 1 else copied  # several are lanes, which are written in place later
        found = {**chosen(inputs.clients, clients), "kept": inputs.kept(clients)}
        return found if inputs.owner is None else found | chosen(inputs.runs, inputs.owner[clients].tolist())
