"""A round's cohort as tensors: what both engines start from and what they give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.functional.model import Params
from undrift.method.context import Batch, Plan
from undrift.method.local import Batches
from undrift.method.part import Method
from undrift.random import derive
from undrift.tree import Tree, to_device, tree_add, tree_bytes, tree_map, tree_stack, tree_to

Visit = Callable[[Params, np.ndarray], None]
"""Called with clients that have trained: their weights along a first axis, and their ids."""


MEASURE_BATCH = 256
"""How many samples of a client a batch of a pass without training has at most."""


class Resident:
    """The clients' data on the device: samples are gathered there by index, and only indices travel."""

    def __init__(self, data: FederatedDataset, device: torch.device, dtype: torch.dtype) -> None:
        self.data, self.device, self.dtype = data, device, dtype
        self.store = {name: tensor.to(device) for name, tensor in data.store.items()}
        self.index = data.index.numpy()
        most = max(1, int(data.sizes.max()))
        self.measure_width = -(-most // -(-most // MEASURE_BATCH))  # even pieces of the largest client

    def place(self, rows: Rows) -> Rows:
        """These rows on the device; those of the clients' own store are there already."""
        if rows.store is not self.data.store:
            return rows.to(self.device)
        return Rows(self.store, rows.index.to(self.device), rows.take)

    def rows(self, clients: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows of the store, from positions within each client's own data (clients along the first axis)."""
        offsets = self.data.offsets[clients].reshape(-1, *[1] * (positions.ndim - 1))
        return self.index[offsets + positions]

    def batch(self, rows: Tensor, mask: Tensor) -> Batch:
        """The samples at `rows`, which may have any number of axes."""
        x, y = self.data.take(self.store, rows.reshape(-1))
        x, y = (t.reshape(*rows.shape, *t.shape[1:]) for t in (x, y))
        return Batch(x, y, mask.to(self.dtype))


KEPT_SHARE = 0.25
"""The share of a GPU's memory that all clients' kept state may take before it moves to the host's."""


class Kept:
    """What clients keep between rounds: a tree a part and client, only for those that have taken part.

    `commit` takes the states of all clients of a round at once, and can be undone if the round is not finite. They lie
    where they are used, or in the host's memory if those of all clients might take too much of a GPU's.
    """

    def __init__(self, method: Method, device: torch.device, population: int) -> None:
        self.states: dict[int, dict[int, Tree]] = {i: {} for i, _ in method.overriding("keep")}
        self.device, self.population = device, population
        self.changed: set[int] = set()
        """Whose states are new since somebody last asked."""

    def stack(self, method: Method, clients: np.ndarray, start: Params) -> list[Tree]:
        """These clients' states along a new first axis; what a newcomer has is what `keep` says."""
        found: list[Tree] = [() for _ in method.parts]
        for i, states in self.states.items():
            fresh = tree_to(method.parts[i].keep(start), self.device)
            found[i] = tree_stack([tree_to(states.get(int(c), fresh), self.device) for c in clients])
        return found

    def commit(self, new: dict[int, dict[int, Tree]]) -> Callable[[], None]:
        """Store these states. Returns a function that restores the previous ones."""
        before = {i: {c: self.states[i][c] for c in states if c in self.states[i]} for i, states in new.items()}
        changed = {c for states in new.values() for c in states} - self.changed

        def undo() -> None:
            for i, states in new.items():
                self.states[i] = {c: s for c, s in self.states[i].items() if c not in states} | before[i]
            self.changed -= changed

        home = self._home(new)
        for i, states in new.items():
            self.states[i] |= {client: tree_to(state, home) for client, state in states.items()}
            self.changed |= states.keys()
        return undo

    def take_changed(self) -> set[int]:
        taken, self.changed = self.changed, set()
        return taken

    def restore(self, saved: dict[int, dict[int, Tree]], clients: set[int]) -> None:
        """Put back these clients' states as they were saved."""
        home = self._home(saved)
        for i, states in saved.items():
            self.states[i] |= {client: tree_to(states[client], home) for client in clients & states.keys()}

    def _home(self, new: dict[int, dict[int, Tree]]) -> torch.device:
        if self.device.type == "cpu":
            return self.device
        one = sum(tree_bytes(next(iter(states.values()))) for states in new.values() if states)
        room = KEPT_SHARE * torch.cuda.get_device_properties(self.device).total_memory
        return self.device if one * self.population <= room else torch.device("cpu")


@dataclass(frozen=True)
class Orders:
    """One round's orders to an engine."""

    plan: Plan
    shared: Tree
    """What all clients have in common."""
    lanes: Tree
    """What each has of its own, along a first axis in the order of `plan.clients`."""
    batches: Batches
    """Which samples each of their steps takes."""


def draw_up(
    plan: Plan,
    method: Method,
    data: Resident,
    params: Params,
    received: list[Tree],
    kept: Kept | None,
    seed: int,
    batches: Batches,
    outputs: int,
) -> Orders:
    """The cohort of `plan` as tensors on the device. Without `kept`, clients bring none of their state."""
    sizes, device = data.data.sizes[plan.clients], data.device
    weight = sizes if method.weighting == "samples" else np.ones(len(sizes))
    lanes = {
        "id": torch.as_tensor(plan.clients),
        "n": torch.as_tensor(sizes, dtype=data.dtype),
        "weight": torch.as_tensor(weight, dtype=data.dtype),
        "label_counts": _label_counts(data.data, plan.clients, outputs),
        "steps": torch.as_tensor(plan.steps, dtype=data.dtype),
        "key": torch.as_tensor(np.stack(derive(seed, "client", plan.round, plan.clients), 1)),
    }
    rates = {name: getattr(plan, name) for name in ("lr", "momentum", "weight_decay")}
    numbers = on_device({"rates": rates, "parts": method.numbers(plan.round)}, device)
    start = tree_map(torch.Tensor.contiguous, params)
    lanes = tree_map(lambda t: to_device(t, device), lanes)
    lanes["kept"] = kept.stack(method.bind(numbers["parts"]), plan.clients, start) if kept else [() for _ in received]
    shared = {
        "start": start,
        "received": tree_to(received, device),
        "round": to_device(torch.tensor(plan.round), device),
        "numbers": numbers["parts"],
        **numbers["rates"],
    }
    return Orders(plan, shared, lanes, batches)


def _label_counts(data: FederatedDataset, clients: np.ndarray, outputs: int) -> Tensor:
    """Samples of each of the model's outputs; none where labels are not among them."""
    if data.labels is None or not 0 < data.classes <= outputs:
        return torch.zeros(len(clients), 0, dtype=torch.int64)
    counts = data.label_counts(clients)
    return torch.nn.functional.pad(counts, (0, outputs - counts.shape[1]))


def on_device(numbers: Tree, device: torch.device) -> Tree:
    """Python's numbers as float64 scalars, in one transfer. A scalar never raises a float32 tensor's precision."""
    leaves, spec = torch.utils._pytree.tree_flatten(numbers)
    tensors = to_device(torch.tensor(leaves, dtype=torch.float64), device).unbind() if leaves else ()
    return torch.utils._pytree.tree_unflatten(list(tensors), spec)


class Sums:
    """What clients send, added up in the order it is given, and what they keep."""

    def __init__(self) -> None:
        self.total: Any = None
        self.kept: dict[int, dict[int, Tree]] = {}
        self.noted: list[tuple[Tensor, list[int]]] = []

    def add(self, sent: Tree) -> None:
        """Add what one client, or several lanes' sum, sends."""
        self.total = sent if self.total is None else tree_add(self.total, sent)

    def join(self, other: Sums) -> None:
        """Add what others have added up."""
        self.add(other.total)
        for i, states in other.kept.items():
            self.kept.setdefault(i, {}).update(states)
        self.noted += other.noted

    def note(self, finite: Tensor, clients: list[int]) -> None:
        """Note whether what these clients sent and kept is finite; they are named by their places in the cohort."""
        self.noted.append((finite, clients))

    def finite(self) -> Tensor:
        """What was noted, in the order of the cohort."""
        order = np.argsort([client for _, clients in self.noted for client in clients])
        flags = torch.cat([finite for finite, _ in self.noted])
        return flags[to_device(torch.from_numpy(order), flags.device)]

    def keep(self, kept: list[Tree], which: Kept, clients: list[int]) -> None:
        """Keep the states of `clients`, which lie along the trees' first axis."""
        for i in which.states:
            own = self.kept.setdefault(i, {})
            for j, client in enumerate(clients):
                own[client] = tree_map(lambda t, j=j: t[j].clone(), kept[i])


@dataclass(frozen=True)
class Outcome:
    """A cohort's work: means and sums, never one client's update."""

    update: Params
    sums: list[Tree]
    weight: Tensor
    """The sum of the weights of the clients that count."""
    size: Tensor
    """How many clients count: all of the cohort, or those that were not skipped."""
    statistics: Params
    """Running statistics, averaged with the weights' weights."""
    kept: dict[int, dict[int, Tree]]
    finite: Tensor | None = None
    """By client, whether it counts, where clients may be skipped."""


def outcome(sums: Sums, orders: Orders) -> Outcome:
    """The means over the clients that count; without any, the update is zero."""
    weights, finite = orders.lanes["weight"], sums.finite() if sums.noted else None
    if finite is None:
        size = torch.full((), len(weights), dtype=torch.float64, device=weights.device)
    else:
        weights, size = torch.where(finite, weights, 0), finite.sum(dtype=torch.float64)
    weight = weights.sum()
    whole = weight if finite is None else torch.where(weight > 0, weight, 1)
    updates, own, statistics = sums.total
    update = tree_map(lambda total, w: (total / whole).to(w.dtype), updates, orders.shared["start"])
    statistics = tree_map(lambda total: total / whole, statistics)
    return Outcome(update, own, weight, size, statistics, sums.kept, finite)
