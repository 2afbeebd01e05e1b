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
"""Called with clients that have trained: their weights along a first axis, and their ids."""


@dataclass(frozen=True)
class RoundInputs:
    """One round's inputs to an engine. A client's functions see `{**shared, **its own}` and read both alike.

    So what the cohort shares today, the starting weights, say, may be each client's own tomorrow; no engine minds.
    """

    plan: Plan
    shared: dict[str, Tree]
    """What all clients have in common."""
    clients: dict[str, Tree]
    """What each has of its own, along a first axis in the order of `plan.clients`."""
    batches: Batches
    """Which samples each local step takes."""


@dataclass(frozen=True)
class Outcome:
    """What a cohort's training comes to: means and sums, never one client's update."""

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
    """Per client: whether it counts, where clients may be skipped."""


class Engine(Protocol):
    """Trains cohorts. All engines give the same outcome for the same inputs, up to rounding."""

    @property
    def program(self) -> Program:
        """What one client does."""

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        """Train the clients of a round.

        Args:
            inputs: The cohort, its data and everything the clients receive.
            visit: Called with the weights of clients that have trained.
            skip: Leave out clients that send or keep anything that is not finite.
        """

    def measure_all(self, inputs: RoundInputs) -> list[Tree]:
        """Per part: its "finish" measurements, summed over the clients of `inputs`, without training."""
