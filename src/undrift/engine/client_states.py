"""The state that clients keep between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from undrift.engine.slots import Slot, SlotFiles
from undrift.engine.table import Table
from undrift.method.part import Method
from undrift.tree import Tree, tree_bytes, tree_clone, tree_stack, tree_to, tree_unstack

MEMORY_SHARE = 0.25
"""The share of a GPU's memory that all clients' states may take before they move to the host's memory."""

Kept = dict[int, dict[int, Any]]
"""By part and client: the tree that it keeps, or the slot of a file with the tree."""


@dataclass(frozen=True)
class ClientStates:
    """The state that clients keep between rounds: one tree per part and client, for clients that have taken part.

    A value: `updated` returns a new one, which shares the trees that have not changed. States are on the device; or in
    host memory, if those of all clients might take too much of a GPU's; or in `files`.
    """

    parts: Mapping[int, Table]
    """By the position of the part in the method, then by client: a tree, or the `Slot` that has it."""
    device: torch.device
    population: int
    count: int
    """The number of the method's parts, with and without state."""
    files: SlotFiles | None = None
    """The files for the states; None keeps them in memory."""
    changed: Table = field(default_factory=Table)
    """By client: the number of rounds done when its states last changed."""

    @classmethod
    def none(
        cls, method: Method, device: torch.device, population: int, files: SlotFiles | None = None
    ) -> ClientStates:
        """Return the states before the first round."""
        return cls({i: Table() for i, _ in method.overriding("keep")}, device, population, len(method.parts), files)

    def reader(
        self, newcomers: Callable[[Sequence[int], int], Tree], clients: np.ndarray
    ) -> Callable[[Sequence[int]], list[Tree]]:
        """Return a function from positions in `clients` to these clients' states: per part, along a new first axis.

        So the states of a cohort need not be in memory together. `newcomers` returns the states for a part of clients
        that have none yet, given their positions.
        """

        def found(where: Sequence[int]) -> list[Tree]:
            each: list[Tree] = [() for _ in range(self.count)]
            for i, states in self.parts.items():
                new = [c for c in where if int(clients[c]) not in states]
                fresh = tree_to(newcomers(new, i), self.device) if new else ()
                if len(new) == len(where):
                    each[i] = fresh
                    continue
                first = iter(tree_unstack(fresh) if new else ())
                known = [states.get(int(clients[c])) for c in where]
                each[i] = tree_stack([next(first) if state is None else self._placed(state) for state in known])
            return each

        return found

    def _placed(self, state: Any) -> Tree:
        return tree_to(state.read() if isinstance(state, Slot) else state, self.device)

    def keep(self, part: int, state: Tree) -> Any:
        """Return what to keep of a client's new state of a part: a copy, or the slot that it was written to.

        It is stored at once, since the states of a large cohort may not fit into a GPU's memory together.
        """
        if self.files:
            return self.files.write(part, state)
        home = self._home(tree_bytes(state))
        return tree_clone(state) if home == self.device else tree_to(state, home)

    def updated(self, new: Kept, rounds: int) -> ClientStates:
        """Return the states with these in place of the clients' previous ones, after this number of `rounds`."""
        some = [next(iter(states.values())) for states in new.values() if states]
        home = self._home(sum(tree_bytes(state) for state in some if not isinstance(state, Slot)))
        parts = dict(self.parts)
        for i, states in new.items():
            moved = {c: state if isinstance(state, Slot) else tree_to(state, home) for c, state in states.items()}
            parts[i] = parts[i].updated(moved)
        changed = self.changed.updated({client: rounds for states in new.values() for client in states})
        return replace(self, parts=parts, changed=changed)

    def changed_since(self, rounds: int) -> set[int]:
        """Return the clients whose states have changed since this round; -1 returns all that have states."""
        return {client for client, when in self.changed.items() if when > rounds}

    def slots(self) -> dict[int, dict[int, Slot]]:
        """Return the states in files, by part and client."""
        found = {i: {c: s for c, s in states.items() if isinstance(s, Slot)} for i, states in self.parts.items()}
        return {i: slots for i, slots in found.items() if slots}

    def _home(self, one: int) -> torch.device:
        """Return the device of the states, given the size of one client's in bytes."""
        if self.device.type == "cpu":
            return self.device
        room = MEMORY_SHARE * torch.cuda.get_device_properties(self.device).total_memory
        return self.device if one * self.population <= room else torch.device("cpu")


def in_memory(kept: Kept) -> list[Tree]:
    """Return what clients keep in memory."""
    return [state for states in kept.values() for state in states.values() if not isinstance(state, Slot)]


def finite_in_files(kept: Kept) -> bool:
    """Return whether all that clients keep in files is finite."""
    return all(state.finite for states in kept.values() for state in states.values() if isinstance(state, Slot))
