"""The state that clients keep between rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from undrift.functional.model import Params
from undrift.method.calls import call
from undrift.method.part import Method
from undrift.tree import Tree, tree_bytes, tree_stack, tree_to

MEMORY_SHARE = 0.25
"""The share of a GPU's memory that all clients' states may take before they move to the host's memory."""


@dataclass(frozen=True)
class ClientStates:
    """The state that clients keep between rounds: a tree per part and client, for the clients that have taken part.

    A value: `updated` returns a new one, which shares the trees that have not changed. States lie where they are used,
    or in the host's memory if those of all clients might take too much of a GPU's.
    """

    parts: dict[int, dict[int, Tree]]
    """By the position of the part in the method, then by client."""
    device: torch.device
    population: int
    changed: dict[int, int] = field(default_factory=dict)
    """By client: how many rounds were done when its states last changed."""

    @classmethod
    def none(cls, method: Method, device: torch.device, population: int) -> ClientStates:
        """Before the first round."""
        return cls({i: {} for i, _ in method.overriding("keep")}, device, population)

    def stacked(self, method: Method, clients: np.ndarray, start: Params) -> list[Tree]:
        """Per part, these clients' states along a new first axis; a newcomer's is what `keep` returns."""
        found: list[Tree] = [() for _ in method.parts]
        for i, states in self.parts.items():
            fresh = tree_to(call(method.parts[i], "keep", start), self.device)
            found[i] = tree_stack([tree_to(states.get(int(c), fresh), self.device) for c in clients])
        return found

    def updated(self, new: dict[int, dict[int, Tree]], rounds: int) -> ClientStates:
        """With these states in the place of what their clients had, after so many `rounds`."""
        home = self._home(new)
        moved = {i: {client: tree_to(state, home) for client, state in states.items()} for i, states in new.items()}
        parts = {i: states | moved.get(i, {}) for i, states in self.parts.items()}
        changed = self.changed | {client: rounds for states in new.values() for client in states}
        return replace(self, parts=parts, changed=changed)

    def changed_since(self, rounds: int) -> set[int]:
        """The clients whose states have changed since so many rounds were done; -1 gives all that have any."""
        return {client for client, when in self.changed.items() if when > rounds}

    def _home(self, new: dict[int, dict[int, Tree]]) -> torch.device:
        if self.device.type == "cpu":
            return self.device
        one = sum(tree_bytes(next(iter(states.values()))) for states in new.values() if states)
        room = MEMORY_SHARE * torch.cuda.get_device_properties(self.device).total_memory
        return self.device if one * self.population <= room else torch.device("cpu")
