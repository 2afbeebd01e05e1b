"""Sums of what clients send, and the outcome of a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.engine.base import Outcome, RoundInputs
from undrift.engine.client import Program
from undrift.tree import Tree, to_device, tree_add, tree_map


class Sums:
    """The sum of what clients send, in the order in which it is added, and what each of them keeps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.total: Any = None
        self.kept: dict[int, dict[int, Tree]] = {}
        self.noted: list[tuple[Tensor, list[int]]] = []

    def add(self, sent: Tree) -> None:
        """Add what one client, or the sum of several lanes, sends."""
        self.total = sent if self.total is None else tree_add(self.total, sent)

    def join(self, other: Sums) -> None:
        """Add what others have added up."""
        self.add(other.total)
        for i, states in other.kept.items():
            self.kept.setdefault(i, {}).update(states)
        self.noted += other.noted

    def note(self, finite: Tensor, clients: list[int]) -> None:
        """Note whether what these clients sent and kept is finite; `clients` are positions in the cohort."""
        self.noted.append((finite, clients))

    def finite(self) -> Tensor:
        """The flags of `note`, in the order of the cohort."""
        order = np.argsort([client for _, clients in self.noted for client in clients])
        flags = torch.cat([finite for finite, _ in self.noted])
        return flags[to_device(torch.from_numpy(order), flags.device)]

    def keep(self, kept: list[Tree], clients: list[int]) -> None:
        """Keep the states of `clients` (ids), which lie along the trees' first axis."""
        for i, _ in self.program.method.overriding("keep"):
            own = self.kept.setdefault(i, {})
            for j, client in enumerate(clients):
                own[client] = tree_map(lambda t, j=j: t[j].clone(), kept[i])

    def outcome(self, inputs: RoundInputs) -> Outcome:
        """The means over the clients that count; if there are none, the update is zero."""
        weights, finite = inputs.clients["weight"], self.finite() if self.noted else None
        if finite is None:
            size = torch.full((), len(weights), dtype=torch.float64, device=weights.device)
        else:
            weights, size = torch.where(finite, weights, 0), finite.sum(dtype=torch.float64)
        weight = weights.sum()
        whole = weight if finite is None else torch.where(weight > 0, weight, 1)
        updates, own, statistics = self.total
        update = tree_map(lambda total, w: (total / whole).to(w.dtype), updates, self.program.model.start)
        statistics = tree_map(lambda total: total / whole, statistics)
        return Outcome(update, own, weight, size, statistics, self.kept, finite)
