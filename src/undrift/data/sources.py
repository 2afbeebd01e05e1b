"""Where data come from: `ud.load` finds a source by name, holds some of it back, and deals the rest out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from undrift.data.dataset import FederatedDataset, Rows, Store, Take, Task, take
from undrift.data.partition import ByKey, Partition
from undrift.errors import UndriftError, unknown
from undrift.random import host_generator


@dataclass(frozen=True)
class Source:
    """A data set before it is dealt out: a store, a class for each row, and where it has them natural clients."""

    store: Store
    labels: np.ndarray
    test: Rows | None = None
    keys: np.ndarray | None = None
    take: Take = take
    task: Task = field(default_factory=Task)


def digits() -> Source:
    """1,797 hand-written digits of 8×8 pixels (UCI, as scikit-learn ships them), a fifth of them for testing."""
    file = load_file(Path(__file__).parent / "digits.safetensors")
    store = {"x": file["x"].float() / 16, "y": file["y"].long()}
    labels = store["y"].numpy()
    # The data have no test set of their own; this one is the same in every run, whatever its seed.
    held = stratified(labels, 0.2, host_generator(0, "digits test set"))
    train = torch.from_numpy(np.flatnonzero(~held))
    test = torch.from_numpy(np.flatnonzero(held))
    return Source(
        {name: t[train] for name, t in store.items()},
        labels[~held],
        test=Rows({name: t[test] for name, t in store.items()}, torch.arange(len(test))),
    )


SOURCES: dict[str, Callable[[], Source]] = {"digits": digits}


def load(
    name: str,
    partition: Partition | str,
    clients: int | None = None,
    seed: int = 0,
    server_fraction: float = 0.0,
    validation_fraction: float = 0.0,
    client_test_fraction: float = 0.0,
) -> FederatedDataset:
    """A data set by name, dealt out to `clients` by `partition`.

    The fractions are class-balanced and taken out of training: for the server, for validation, and of each
    client's own share for testing that client.
    """
    if name not in SOURCES:
        raise unknown("data set", str(name), SOURCES)
    partition = _partition(partition)
    natural = isinstance(partition, ByKey)
    if natural and clients is not None:
        raise UndriftError("ByKey() takes the data's own clients; leave `clients` out.")
    if not natural and (isinstance(clients, bool) or not isinstance(clients, int | np.integer) or clients < 1):
        raise UndriftError(f"clients must be a whole number from 1, not {clients!r}.")
    fractions = {
        "server_fraction": server_fraction,
        "validation_fraction": validation_fraction,
        "client_test_fraction": client_test_fraction,
    }
    for argument, fraction in fractions.items():
        if not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise UndriftError(f"{argument} must be in [0, 1), not {fraction!r}.")
    if server_fraction + validation_fraction >= 1:
        raise UndriftError(
            "server_fraction and validation_fraction leave nothing to train on; they must sum to less than 1."
        )

    source = SOURCES[name]()
    rows = np.arange(len(source.labels))
    server, rows = _hold_back(source, rows, server_fraction, seed, "server data")
    # A fraction is of the whole training set, also for the second that is taken.
    validation, rows = _hold_back(source, rows, validation_fraction / (1 - server_fraction), seed, "validation data")
    keys = source.keys[rows] if source.keys is not None else None
    owner = np.asarray(partition(source.labels[rows], clients or 0, host_generator(seed, "partition"), keys))
    count = int(owner.max()) + 1 if natural else int(clients or 0)
    if owner.shape != rows.shape or owner.min() < 0 or owner.max() >= count:
        raise UndriftError(f"{partition!r} must give every one of the {len(rows)} rows an owner from 0 to {count - 1}.")
    common: dict[str, Any] = {"take": source.take, "task": source.task}
    own = None
    if client_test_fraction:
        held = stratified(source.labels[rows], client_test_fraction, host_generator(seed, "client test data"), owner)
        own = FederatedDataset.from_owners(source.store, rows[held], owner[held], count, **common)
        rows, owner = rows[~held], owner[~held]
    return FederatedDataset.from_owners(
        source.store,
        rows,
        owner,
        count,
        test_rows=source.test,
        server_rows=server,
        validation_rows=validation,
        client_test=own,
        **common,
    )


def stratified(
    labels: np.ndarray, fraction: float, rng: np.random.Generator, groups: np.ndarray | None = None
) -> np.ndarray:
    """Which rows a class-balanced fraction takes, of each group where groups are given: a mask.

    Along an order by group and class, every 1/fraction-th row: each class is met to within one.
    """
    groups = np.zeros(len(labels), np.int64) if groups is None else groups
    order = np.lexsort((rng.random(len(labels)), labels, groups))
    sizes = np.bincount(groups)
    position = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.empty(len(labels), bool)
    mask[order] = np.floor((position + 1) * fraction + 1e-9) > np.floor(position * fraction + 1e-9)
    return mask


def _hold_back(
    source: Source, rows: np.ndarray, fraction: float, seed: int, purpose: str
) -> tuple[Rows | None, np.ndarray]:
    if not fraction:
        return None, rows
    held = stratified(source.labels[rows], fraction, host_generator(seed, purpose))
    return Rows(source.store, torch.from_numpy(rows[held]), source.take), rows[~held]


def _partition(partition: Any) -> Partition:
    if isinstance(partition, str):
        from undrift.registry import parse_partition

        return parse_partition(partition)
    if not callable(partition) or isinstance(partition, type):
        raise UndriftError(f"partition must be one such as Dirichlet(0.1), or its name in a string, not {partition!r}.")
    return partition
