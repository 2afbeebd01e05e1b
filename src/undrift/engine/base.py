"""The interface of an engine, which trains a round's cohort: what it is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from undrift.engine.client import Program
from undrift.functional.model import Params
from undrift.method.context import Plan
from undrift.method.local import Batches
from undrift.tree import Tree

Visit = Callable[[Params, np.ndarray], None]
"""Called with clients that have trained: their weights (and running statistics) along a first axis, and their ids."""


@dataclass(frozen=True)
class RoundInputs:
    """One round's inputs to an engine.

    The functions of a client (`Program`) are given the two trees merged, so an entry may stand in either: the starting
    weights are shared in every method of today, and could be one per client. `inputs.py` fills in

    - per client: `id`, `n` (samples), `weight`, `label_counts`, `steps`, `key`, `kept` (per part);
    - shared: `start` (weights), `tracked` (running statistics), `received` and `numbers` (per part), `round`, `lr`,
      `momentum`, `weight_decay`.

    Engines add `measured` and `prepared`, per part.
    """

    plan: Plan
    shared: dict[str, Tree]
    """Common to all clients."""
    clients: dict[str, Tree]
    """Per client, along a first axis in the order of `plan.clients`."""
    batches: Batches
    """Which samples each local step takes."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cohort's training: means and sums, never one client's update."""

    update: Params
    sums: list[Tree]
    """Per part: the sum of what its `upload` returned."""
    weight: Tensor
    """The sum of the weights of the clients that count."""
    size: Tensor
    """How many clients count: the whole cohort, or those that were not skipped."""
    statistics: Params
    """The weighted mean of running statistics."""
    kept: dict[int, dict[int, Tree]]
    """Per part and client: what the client keeps."""
    finite: Tensor | None = None
    """Per client: whether it counts; None unless clients may be skipped."""


class Engine(Protocol):
    """Trains cohorts. All engines give the same outcome for the same inputs, up to rounding.

    For each client, an engine calls the program's functions in this order: `measure` "before", `prepare`, `begin`, then
    for every step the gradient of `objective` and `advance`, then `visit`, `measure` "after", `latest`, `conclude`. It
    adds up what clients send in `Sums`. `plain.py` is this in its simplest form.
    """

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

    def measure_all(self, inputs: RoundInputs) -> list[Tree]:
        """Per part: its "finish" measurements at the starting weights, summed over the clients of `inputs`."""
