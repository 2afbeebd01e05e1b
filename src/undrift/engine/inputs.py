"""A round's plan as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from undrift.data.dataset import FederatedDataset
from undrift.engine.base import RoundInputs
from undrift.engine.client import KEEP, Program, as_tensor
from undrift.engine.client_states import ClientStates
from undrift.engine.device_data import DeviceData
from undrift.engine.groups import copied
from undrift.functional.model import Model, Params
from undrift.method.calls import call
from undrift.method.context import Plan
from undrift.method.local import Batches
from undrift.method.part import Method
from undrift.method.work import Momentum
from undrift.random import derive
from undrift.tree import Tree, to_device, tree_clone, tree_leaves, tree_map, tree_structure, tree_to, tree_unflatten


def build_inputs(
    plan: Plan,
    filled: Plan,
    batches: Batches,
    program: Program,
    model: Model,
    data: DeviceData,
    params: Params,
    received: list[Tree] | None,
    states: ClientStates | None,
    seed: int,
    fills: bool,
) -> RoundInputs:
    """Return the cohort of `plan` as tensors on the device. Without `states`, clients have none from earlier rounds.

    `fills` says whether cohorts of this run may be filled up, in this round or in another.
    """
    method = program.method
    real, ids = np.arange(len(filled.clients)) < len(plan.clients), filled.clients
    sizes, device = data.data.sizes_of(ids), data.device
    weight = np.where(real, mean_weights(method, sizes), 0.0)
    clients = {
        "id": torch.as_tensor(ids),
        "n": torch.as_tensor(sizes, dtype=data.dtype),
        "weight": torch.as_tensor(weight, dtype=data.dtype),
        "label_counts": _label_counts(data.data, ids, model.outputs),
        "steps": torch.as_tensor(filled.steps, dtype=data.dtype),
        "key": torch.as_tensor(np.stack(derive(seed, "client", plan.round, ids), 1)),
    }
    if fills:
        clients["real"] = torch.as_tensor(real)
    rates = {name: getattr(plan, name) for name in ("lr", "momentum", "weight_decay")}
    parts = method.numbers(plan.round)
    for part, own in zip(method.parts, parts, strict=True):
        if isinstance(part, Momentum):  # a `plan` hook may have changed it
            own["momentum"] = plan.momentum
    numbers = on_device({"rates": rates, "parts": parts}, device)
    start = tree_map(torch.Tensor.contiguous, params)
    clients = tree_map(lambda t: to_device(t, device), clients)
    shared = {
        "start": start,
        "tracked": model.tracked,
        "round": to_device(torch.tensor(plan.round), device),
        "tuning": to_device(torch.tensor(plan.tuning), device),
        "numbers": numbers["parts"],
        **numbers["rates"],
    }
    kept = states.reader(partial(newcomers, program, shared, clients), ids) if states else lambda _: none_kept(method)
    keep = states.keep if states else lambda _, state: tree_clone(state)
    shared |= {} if received is None else {"received": tree_to(received, device)}
    return RoundInputs(plan, filled, shared, clients, batches, kept, keep)


def none_kept(method: Method) -> list[Tree]:
    return [() for _ in method.parts]


def newcomers(program: Program, shared: Tree, clients: Tree, positions: Sequence[int], part: int) -> Tree:
    """Return the states for a part of clients that take part for the first time, along a first axis."""

    def one(own: Tree) -> Tree:
        given = {**shared, **own}
        bound, client = program.clients(given, KEEP)[part]
        found = call(bound, "keep", shared["start"], client)
        return tree_map(lambda leaf: as_tensor(leaf, given), found)

    if len(positions) == 1:  # needs no vmap, which not every hook and every model supports
        return tree_map(lambda t: t[None], one(tree_map(lambda t: t[positions[0]], clients)))
    own = copied(clients, positions)
    return tree_map(torch.Tensor.contiguous, vmap(one)(own))


def mean_weights(method: Method, sizes: np.ndarray) -> np.ndarray:
    """Return the unnormalized weights in the mean of clients of these sizes: their sizes, or 1 each."""
    return sizes if method.weighting == "samples" else np.ones(len(sizes))


def _label_counts(data: FederatedDataset, clients: np.ndarray, outputs: int) -> Tensor:
    """Return the number of samples per output of the model; without columns if targets are not classes."""
    if data.labels is None or not 0 < data.classes <= outputs:
        return torch.zeros(len(clients), 0, dtype=torch.int64)
    counts = data.label_counts(clients)
    return torch.nn.functional.pad(counts, (0, outputs - counts.shape[1]))


def on_device(numbers: Tree, device: torch.device) -> Tree:
    """Return Python numbers as float64 scalars, in one transfer. A scalar does not promote a float32 tensor."""
    leaves = tree_leaves(numbers)
    tensors = to_device(torch.tensor(leaves, dtype=torch.float64), device).unbind() if leaves else ()
    return tree_unflatten(list(tensors), tree_structure(numbers))
