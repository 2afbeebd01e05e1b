"""Sums of what clients send, and the outcome of a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.engine.base import Outcome, RoundInputs
from undrift.engine.client import Program, Sent
from undrift.functional.model import Params
from undrift.tree import Tree, to_device, tree_add_, tree_clone, tree_map, tree_stack


class Sums:
    """The sum of what clients send, in the order in which it is added, and what each of them keeps."""

    def __init__(self, program: Program, inputs: RoundInputs) -> None:
        self.program, self.inputs = program, inputs
        self.total: Any = None
        self.kept: dict[int, dict[int, Any]] = {}
        self.noted: list[tuple[Tensor, list[int]]] = []
        self.updates: dict[int, Tree] = {}

    def add(self, sent: Tree) -> None:
        """Add what one client, or the sum of several lanes, sends."""
        if self.total is None:
            self.total = tree_clone(sent)  # a copy, since it is added to in place and a part may send what it was given
        else:
            tree_add_(self.total, sent)

    def take(self, sent: Sent, clients: list[int]) -> None:
        """Take what clients, at these positions of the cohort, send and keep; `sent.sums` is of all of them."""
        self.add(sent.sums)
        self.collect(sent, clients)

    def join(self, other: Sums) -> None:
        """Add the sums of others."""
        self.add(other.total)
        for i, states in other.kept.items():
            self.kept.setdefault(i, {}).update(states)
        self.noted += other.noted
        self.updates |= other.updates

    def collect(self, sent: Sent, clients: list[int]) -> None:
        """Collect what clients that have trained send and keep, along a first axis, except for their sums.

        `clients` are positions in the cohort; those that only fill it up are left out.
        """
        real = [(j, c) for j, c in enumerate(clients) if c < self.inputs.cohort]
        for i, _ in self.program.method.overriding("keep"):
            own = self.kept.setdefault(i, {})
            for j, c in real:
                own[int(self.inputs.filled.clients[c])] = self.inputs.keep(
                    i, tree_map(lambda t, j=j: t[j], sent.kept[i])
                )
        if sent.update:
            self.updates |= {c: tree_clone(tree_map(lambda t, j=j: t[j], sent.update)) for j, c in real}
        if isinstance(sent.finite, Tensor):
            self.noted.append((sent.finite, clients))

    def finite(self) -> Tensor:
        """Return whether what each client sent and kept is finite, in the order of the cohort."""
        order = np.argsort([client for _, clients in self.noted for client in clients])[: self.inputs.cohort]
        flags = torch.cat([finite for finite, _ in self.noted])
        return flags[to_device(torch.from_numpy(order), flags.device)]

    def outcome(self) -> Outcome:
        """Return the means over the clients that count; if there are none, the update is zero."""
        cohort = self.inputs.cohort
        weights, finite = self.inputs.clients["weight"][:cohort], self.finite() if self.noted else None
        if finite is None:
            size = torch.full((), cohort, dtype=torch.float64, device=weights.device)
        else:
            weights, size = torch.where(finite, weights, 0), finite.sum(dtype=torch.float64)
        weight = weights.sum()
        updates, own, tracked = self.total
        update, statistics = means(self.program, (updates, tracked), weight, finite, cohort)
        each = tree_stack([self.updates[c] for c in range(cohort)]) if self.updates else ()
        return Outcome(update, own, weight, size, statistics, self.kept, finite, each, self.total)


def means(program: Program, totals: Tree, weight: Tensor, finite: Tensor | None, cohort: int) -> tuple[Params, Params]:
    """Return the mean update and the mean running statistics of a cohort, whose clients that count have this weight."""
    whole = weight if finite is None and cohort else torch.where(weight > 0, weight, 1)
    update = tree_map(lambda total, w: (total / whole).to(w.dtype), totals[0], program.model.start)
    return update, tree_map(lambda total: total / whole, totals[1]) if cohort else {}


def only_real(found: Tree, clients: Tree) -> Tree:
    """Return sums per client along a first axis, with zeros for clients that only fill up the cohort."""
    if "real" not in clients:
        return found
    real: Tensor = clients["real"]
    return tree_map(lambda t: torch.where(real.reshape(-1, *[1] * (t.dim() - 1)), t, 0).to(t.dtype), found)
