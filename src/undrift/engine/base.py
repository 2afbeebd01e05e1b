"""The interface of engines, which train the cohort of a round: their inputs and their outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from undrift.engine.client import Program
from undrift.functional.model import Params
from undrift.method.context import Plan
from undrift.method.local import Batches
from undrift.tree import Tree, tree_map

Visit = Callable[[Params, np.ndarray], None]
"""Called with clients that have trained: their weights (and running statistics) along a first axis, and their ids."""


@dataclass(frozen=True)
class RoundInputs:
    """The inputs of an engine for one round.

    The functions of a client (`Program`) get the two trees merged, so an entry may be in either. `inputs.py` fills in

    - per client: `id`, `n` (samples), `weight`, `label_counts`, `steps`, `key`; and `real`, if cohorts may be filled
      up;
    - shared: `start` (weights), `tracked` (running statistics), `received` and `numbers` (per part), `round`, `tuning`,
      `lr`, `momentum`, `weight_decay`.

    Engines add, per part: `kept` when a client starts, so that the states of the cohort need not be in memory together,
    `begun` if a part has `begin`, and `measured` and `prepared`.

    If a part may choose the clients, or processes share them, a small cohort is filled up to the engine's width with
    copies of a client that do not count (`real` is False), so that every round has the same shapes. The copies come
    last.
    """

    plan: Plan
    """The planned cohort."""
    filled: Plan
    """The same, including the clients that fill it up."""
    shared: dict[str, Tree]
    """Common to all clients."""
    clients: dict[str, Tree]
    """Per client, along a first axis in the order of `filled.clients`."""
    batches: Batches
    """Which samples each local step takes."""
    kept: Callable[[Sequence[int]], list[Tree]]
    """Finds the states of clients at given positions in the cohort: per part, along a first axis."""
    keep: Callable[[int, Tree], Any]
    """Stores what a client keeps for a part, given the part's position in the method, and returns a handle."""
    runs: dict[str, Tree] = field(default_factory=dict)
    """If several runs train side by side: what the clients of each share, along a first axis (`stacked.py`)."""
    owner: np.ndarray | None = None
    """Then, per client: the position of its run."""
    mine: np.ndarray | None = None
    """If several processes train the cohort: the positions of the clients that this one trains. `filled`, `clients` and
    `batches` then contain only these."""
    all_counts: np.ndarray | None = None
    """Then also the sizes of the whole cohort's batches."""

    @property
    def cohort(self) -> int:
        """The number of real clients that this process trains."""
        return len(self.plan.clients if self.mine is None else self.mine)

    @property
    def places(self) -> np.ndarray:
        """The positions in the cohort of the clients that this process trains."""
        return np.arange(len(self.plan.clients)) if self.mine is None else self.mine

    @property
    def counts(self) -> np.ndarray:
        """The sizes of the whole cohort's batches, client by client."""
        if self.all_counts is not None:
            return self.all_counts
        return self.batches.counts[: self.plan.steps.sum() * self.batches.per_step]

    def own(self, c: int) -> dict[str, Tree]:
        """Return the own entries of the client at position `c`."""
        alone: dict[str, Tree] = tree_map(lambda t: t[c], self.clients)
        return alone | {"kept": tree_map(lambda t: t[0], self.kept([c]))}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cohort's training: means and sums, and individual updates only if a part aggregates them."""

    update: Params
    sums: list[Tree]
    """Per part: the sum of what its `upload` returned."""
    weight: Tensor
    """The sum of the weights of the clients that count."""
    size: Tensor
    """The number of clients that count: the whole cohort, or those that were not skipped."""
    statistics: Params
    """The weighted mean of running statistics."""
    kept: dict[int, dict[int, Any]]
    """Per part and client: what the client keeps, as `RoundInputs.keep` stored it."""
    finite: Tensor | None = None
    """Per client: whether it counts; None unless clients may be skipped."""
    updates: Tree = ()
    """Every client's own update along a first axis, in the order of the cohort, where a part aggregates them."""
    total: Tree = ()
    """The sums behind the means: weighted updates, each part's sums, weighted statistics."""
    lost: np.ndarray | None = None
    """By position in the cohort, for remote clients: whether a reply is missing or was rejected."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns of the history about them."""


class Engine(Protocol):
    """Trains cohorts. All engines give the same outcome for the same inputs, up to rounding.

    For each client, an engine calls the program's functions in this order: `given`, `measure` "sent", `begin`,
    `measure` "before", `prepare`, `initial`, `step` for every step, then `visit`, `measure` "after", `conclude`. It
    adds up what clients send in `Sums`. `plain.py` is this in its simplest form.
    """

    @property
    def width(self) -> int:
        """The number of clients that train side by side, to which smaller cohorts are filled up if parts choose."""

    @property
    def program(self) -> Program:
        """The functions of one client."""

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        """Train the clients of a round.

        Args:
            inputs: The cohort, its data and everything the clients receive.
            visit: Called with the weights of clients that have trained.
            skip: Leave out clients that send or keep anything that is not finite.
        """

    def measure_all(self, inputs: RoundInputs, when: str) -> list[Tree]:
        """Per part: its "finish" or "cohort" measurements at the weights sent, summed over the clients of `inputs`."""
