"""One cohort on the engines of several processes: each trains its share, and all get the outcome of the whole.

Every process plans the round, since a plan is a function of the seed and the round. The sums over each share are then
summed over the processes, so that each process has the same sums, bit by bit, and computes the server's side itself.
Weights are never sent.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from undrift.engine.base import Engine, Outcome, RoundInputs, Visit
from undrift.engine.client import Program
from undrift.engine.packing import pack
from undrift.engine.ranks import Ranks
from undrift.engine.sums import means
from undrift.tree import Tree, to_device, tree_map


def shares(clients: np.ndarray, work: np.ndarray, size: int, width: int, owned: bool) -> list[np.ndarray]:
    """Return which clients each of `size` processes trains, as ascending positions in the cohort.

    Clients are assigned to the lanes of all processes as an engine assigns them to its own, the longest first. With
    `owned`, clients keep state between rounds, and each always trains in the process that has its state.
    """
    if owned:
        return [np.flatnonzero(clients % size == rank) for rank in range(size)]
    if not work.any():  # a pass without training
        return [np.arange(rank, len(clients), size) for rank in range(size)]
    queues = pack(work, size * width)
    return [np.array(sorted(chain(*queues[rank::size])), np.int64) for rank in range(size)]


class RankedEngine:
    """The engine of this process as one of several.

    Its inputs are those of this process's share (`RoundInputs.mine`), filled up to the engine's width, so that a
    process without a client has sums of the right form too.
    """

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self.engine, self.ranks = engine, ranks

    @property
    def width(self) -> int:
        return self.engine.width

    @property
    def program(self) -> Program:
        return self.engine.program

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        found = self.ranks.together(lambda: self.engine.run(inputs, visit, skip))
        cohort, device = len(inputs.plan.clients), found.weight.device
        shares = self.ranks.gathered(inputs.places.tolist()) if self.program.using["aggregate"] else []
        flags = torch.zeros(cohort, dtype=torch.int64, device=device)
        if found.finite is not None:
            flags[to_device(torch.from_numpy(inputs.places), device)] = found.finite.long()
        total, weight, flags = self.ranks.sum((found.total, found.weight, flags if skip else ()))
        updates, sums, tracked = total
        finite = flags.bool() if skip else None
        update, statistics = means(self.program, (updates, tracked), weight, finite, cohort)
        return replace(
            found,
            update=update,
            statistics=statistics,
            sums=sums,
            weight=weight,
            size=torch.full_like(found.size, cohort) if finite is None else finite.sum(dtype=torch.float64),
            finite=finite,
            total=total,
            updates=self._updates(found.updates, shares, device) if shares and cohort else (),
        )

    def _updates(self, own: Tree, shares: list[list[int]], device: torch.device) -> Tree:
        """Return every client's update, in the order of the cohort."""
        counts = [len(share) for share in shares]
        if not own:  # no client trained here
            own = tree_map(lambda w: w.new_zeros(0, *w.shape), self.program.model.start)
        order = to_device(torch.tensor(np.argsort(np.concatenate(shares)), dtype=torch.int64), device)

        def whole(rows: Tensor) -> Tensor:
            return self.ranks.rows(rows, counts).index_select(0, order)

        return tree_map(whole, own)

    def measure_all(self, inputs: RoundInputs, when: str) -> list[Tree]:
        found: list[Tree] = self.ranks.sum(self.ranks.together(lambda: self.engine.measure_all(inputs, when)))
        return found
