"""The state of a run between two rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from undrift.engine.client_states import ClientStates
from undrift.functional.model import Params
from undrift.tree import Tree


@dataclass(frozen=True)
class State:
    """Everything that training changes, as one value: exactly what a checkpoint stores.

    A round returns a new one and leaves the old as it was, so that a round is undone by going back to the state before
    it. Only the history is one list for all of a run's states; each state's is its first `round` rows.
    """

    params: Params
    parts: list[Tree]
    """Per part: its state at the server."""
    tracked: Params
    """The buffers that training changes, such as running statistics."""
    clients: ClientStates
    """The state that clients keep between rounds."""
    round: int = 0
    """How many rounds are done."""
    total_steps: int = 0
    constant_steps: int = 0
    """The steps that all sampled clients would have taken with the numbers of `Local` in round 0."""
    total_bytes: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
