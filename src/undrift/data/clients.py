"""Data that are already split into clients: one pair (x, y) per client, by name or number, and perhaps test pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.data import samples
from undrift.data.samples import Samples, Store, as_pair, stored
from undrift.errors import UndriftError, listed

NOTHING: tuple[Samples, Tensor] = (None, torch.empty(0))
"""The pair of a client without data."""


class Joined(NamedTuple):
    """The data of several clients in one store: client i's samples are from `offsets[i]` to `offsets[i + 1]`."""

    store: Store
    offsets: np.ndarray


def named(clients: Any) -> tuple[list[Any], list[str] | None]:
    """Return one entry per client, and the clients' names if these are the keys of a dict."""
    if isinstance(clients, Mapping):
        names = [str(name) for name in clients]
        if len(set(names)) < len(names):
            raise UndriftError(f"Two clients have the same name among {listed(sorted(names))}; names must differ.")
        return list(clients.values()), names
    if isinstance(clients, Tensor | np.ndarray) or not hasattr(clients, "__iter__"):
        raise UndriftError(
            f"from_clients needs a list with one (x, y) per client, or a dict of them, not {type(clients).__name__}."
        )
    return list(clients), None


def joined(pairs: Sequence[Any], who: Sequence[Any], like: Joined | None = None, what: str = "samples") -> Joined:
    """Return the clients' pairs in one store, copied, so that later changes to the caller's arrays have no effect.

    Args:
        pairs: A pair `(x, y)` per client; None for a client without.
        who: What to call each client in messages.
        like: Data that they must be like, if not just like one another.
        what: What to call the data.
    """
    given = zip(pairs, who, strict=True)
    found = [NOTHING if pair is None else as_pair(pair, f"client {name}", copy=False) for pair, name in given]
    full = [(name, pair) for name, pair in zip(who, found, strict=True) if len(pair[1])]
    if not full:
        raise UndriftError("No client has any data; give from_clients at least one (x, y) with samples.")
    first, (x0, y0) = full[0]
    for name, (x, y) in full[1:]:
        if not (samples.alike(x, x0) and samples.alike(y, y0)):
            raise UndriftError(
                f"Client {name}'s {what} are {samples.kind(x)} with targets {samples.kind(y)}, but client {first}'s "
                f"are {samples.kind(x0)} with {samples.kind(y0)}; make them alike."
            )
    flat = [{**stored(x), "y": y} for _, (x, y) in full]
    if like is not None and not samples.alike(flat[0], like.store):
        raise UndriftError(
            f"Client {first}'s {what} are {samples.kind(x0)} with targets {samples.kind(y0)}, unlike those to train "
            "on; make them alike."
        )
    store = {name: torch.cat([each[name] for each in flat]) for name in flat[0]}
    return Joined(store, np.cumsum([0] + [len(y) for _, y in found]))


def by_client(test: Any) -> bool:
    """Return whether this is a test pair for each client rather than one pair `(x, y)` for all."""
    if isinstance(test, Mapping):
        return True
    return isinstance(test, list | tuple) and len(test) > 0 and all(each is None or _is_pair(each) for each in test)


def _is_pair(each: Any) -> bool:
    """Return whether this has arrays x and y; an array of two samples is none, and neither is a list of two numbers."""
    return isinstance(each, list | tuple) and len(each) == 2 and getattr(each[1], "ndim", 0) > 0


def tests_of(test: Any, clients: int, names: list[str] | None) -> list[Any]:
    """Return the clients' test pairs, in the clients' order; None for a client without."""
    if not isinstance(test, Mapping):
        if len(test) != clients:
            raise UndriftError(f"test has {len(test)} pairs for {clients} clients; give one per client, or None.")
        return list(test)
    if names is None:
        raise UndriftError("test names clients, but the clients are a list; give both as dicts, or both as lists.")
    given = {str(name): pair for name, pair in test.items()}
    if strange := [name for name in given if name not in names]:
        raise UndriftError(f"test has data of {listed(strange)}, which no client is called; clients: {listed(names)}.")
    return [given.get(name) for name in names]
