"""The cohorts of several runs as one: runs that differ only in numbers and draws share the lanes of one program.

Each client gets the weights, the broadcast and the numbers of its own run, and what it sends is added to its own run's
sums. The program is that of one of the runs: for it, it makes no difference whether an entry is the cohort's or the
client's own (`Program.given`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from undrift.data.dataset import FederatedDataset
from undrift.engine.base import Outcome, RoundInputs
from undrift.engine.client import Program, Sent
from undrift.engine.device_data import DeviceData
from undrift.engine.groups import take
from undrift.engine.lanes import LanesEngine
from undrift.engine.packing import pack
from undrift.engine.sums import Sums
from undrift.functional.model import Params
from undrift.method.local import Batches
from undrift.tree import Tree, to_device, tree_map, tree_stack


@dataclass(frozen=True)
class Stacked(RoundInputs):
    """The rounds of several runs as one: the clients of the first, then those of the second, and so on."""

    each: Sequence[RoundInputs] = ()
    begins: Sequence[int] = ()
    """Per run: the position of its first client."""

    def split(self, clients: Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
        """By run, of clients at these positions: which of them are its own, and their positions in its own cohort."""
        assert self.owner is not None
        owners = self.owner[list(clients)]
        for run in np.unique(owners).tolist():
            where = np.flatnonzero(owners == run).tolist()
            yield run, where, [clients[j] - self.begins[run] for j in where]

    def own_kept(self, clients: Sequence[int]) -> list[Tree]:
        """Return what clients at these positions have kept, each in its own run."""
        found, order = [], []
        for run, where, own in self.split(clients):
            found.append(self.each[run].kept(own))
            order += where
        whole: list[Tree] = tree_map(lambda *t: torch.cat(t), *found)
        if order != sorted(order):
            back = torch.from_numpy(np.argsort(order))
            whole = tree_map(lambda t: t[to_device(back, t.device)], whole)
        return whole


def stacked(each: Sequence[RoundInputs], firsts: Sequence[int]) -> Stacked:
    """Return these runs' rounds as one. `firsts`: where each run's clients begin in the data of all (`data_of`)."""
    sizes = [len(inputs.filled.clients) for inputs in each]
    steps = np.concatenate([inputs.filled.steps for inputs in each])
    clients = np.concatenate([inputs.filled.clients + first for inputs, first in zip(each, firsts, strict=True)])
    rows = [len(inputs.batches.counts) for inputs in each]
    batches = Batches(
        positions=np.concatenate([inputs.batches.positions for inputs in each]),
        counts=np.concatenate([inputs.batches.counts for inputs in each]),
        first=np.concatenate([i.batches.first + b for i, b in zip(each, np.cumsum([0, *rows[:-1]]), strict=True)]),
        per_step=each[0].batches.per_step,
    )
    plan = replace(each[0].filled, clients=clients, steps=steps)
    whole = Stacked(
        plan=plan,
        filled=plan,
        shared={},
        clients=tree_map(lambda *entries: torch.cat(entries), *(inputs.clients for inputs in each)),
        batches=batches,
        kept=each[0].kept,
        keep=each[0].keep,
        runs=tree_stack([inputs.shared for inputs in each]),
        owner=np.repeat(np.arange(len(each)), sizes),
        each=each,
        begins=np.cumsum([0, *sizes[:-1]]).tolist(),
    )
    return replace(whole, kept=whole.own_kept)


def data_of(each: Sequence[DeviceData]) -> DeviceData:
    """Return the clients of several runs, whose stores are the same, as the clients of one data set."""
    first = each[0]
    ends = np.cumsum([0, *(len(own.index) for own in each)])
    offsets = [own.data.offsets[:-1] + begin for own, begin in zip(each, ends[:-1], strict=True)]
    index = torch.cat([own.data.index for own in each])
    whole = FederatedDataset(first.store, index, np.concatenate([*offsets, ends[-1:]]), first.data.take)
    return DeviceData(whole, first.device, first.dtype, lambda store: first.host is not None)


class StackedEngine(LanesEngine):
    """A lanes engine for the cohorts of several runs.

    Its data are theirs (`data_of`), and its functions leave it to `StackedSums` to add up what lanes send.
    """

    def run_all(
        self, inputs: Stacked, visit: Callable[[int, Params, np.ndarray], None] | None, skip: bool
    ) -> list[Outcome]:
        """Train the cohorts of several runs together, and return each run's outcome.

        `visit` is called with the position of a run, and with the arguments of `Visit`.
        """
        steps = inputs.filled.steps
        sums = self.train(pack(steps, min(self.lanes, len(steps))), inputs, visit, skip)
        assert isinstance(sums, StackedSums)
        return [own.outcome() for own in sums.each]

    def sums(self, inputs: RoundInputs) -> StackedSums:
        assert isinstance(inputs, Stacked)
        return StackedSums(self.program, inputs)

    def visit(self, visit: Callable[..., None], params: Params, inputs: RoundInputs, clients: list[int]) -> None:
        assert isinstance(inputs, Stacked)
        for run, where, own in inputs.split(clients):
            super().visit(partial(visit, run), take(params, where), inputs.each[run], own)


class StackedSums(Sums):
    """The sums of several runs, each its own."""

    def __init__(self, program: Program, inputs: Stacked) -> None:
        super().__init__(program, inputs)
        self.stacked, self.each = inputs, [Sums(program, own) for own in inputs.each]

    def take(self, sent: Sent, clients: list[int]) -> None:
        """Take what clients send and keep, each with sums of its own."""
        pieces, begin = list(self.stacked.split(clients)), 0
        ordered = take(sent, [j for _, where, _ in pieces for j in where])  # by run, so that a run's are views
        for run, where, own in pieces:
            mine = take(ordered, range(begin, begin + len(where)))
            self.each[run].take(mine._replace(sums=tree_map(lambda t: t.sum(0), mine.sums)), own)
            begin += len(where)
