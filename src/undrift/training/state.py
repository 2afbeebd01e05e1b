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

    A round returns a new state and leaves the old one unchanged, so that undoing a round means returning to the state
    before it. Only the history is one list for all states of a run; each state's history is its first `round` rows.
    """

    params: Params
    parts: list[Tree]
    """Per part: its state at the server."""
    tracked: Params
    """The buffers that training changes, such as running statistics."""
    clients: ClientStates
    """The state that clients keep between rounds."""
    round: int = 0
    """The number of rounds done."""
    total_steps: int = 0
    constant_steps: int = 0
    """The steps that all sampled clients would have taken with the numbers of `Local` in round 0."""
    total_bytes: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
