"""A run in several processes: checks that all have the same settings, and what the first needs from the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from undrift.engine.client_states import ClientStates
from undrift.engine.ranks import Ranks, checksum
from undrift.engine.table import Table
from undrift.errors import UndriftError, listed
from undrift.training.identity import describe
from undrift.training.result import Folder
from undrift.training.run import Run
from undrift.training.settings import Settings
from undrift.tree import tree_to


def check_agreement(run: Run, given: Settings) -> None:
    """Reject a run that is not the same in all processes, each of which has called `ud.train` itself."""
    if not run.ranks.several:
        return
    mine = fingerprint(run, given)
    first, *others = run.ranks.gathered(mine)
    different = [name for name in first if any(other[name] != first[name] for other in others)]
    if "weights" in different or "data" in different:
        raise UndriftError(
            f"The processes that torchrun started differ in their {' and '.join(different)}. Call torch.manual_seed "
            "with the same seed in all of them before the script draws anything at random."
        )
    if different:
        raise UndriftError(
            f"The processes that torchrun started differ in {listed(different)}; call ud.train with the same "
            "arguments in all of them. On different machines, automatic choices may differ: set engine and lanes."
        )


def fingerprint(run: Run, given: Settings) -> dict[str, Any]:
    """Return a short description of what must be the same in all processes."""
    weights = [int(checksum(w)) for w in (*run.model.start.values(), *run.model.tracked.values())]
    data = run.data.digests
    settings = {name: value for name, value in vars(given).items() if name not in ELSEWHERE}
    chosen = {name: run.choices[name] for name in ("engine", "lanes", "compile", "dtype")}
    listening = {name: not getattr(given, name) for name in ("out", "on_round", "callbacks", "stop_when", "track")}
    return {
        "weights": weights,
        "data": data,
        "device": run.device.type,
        **{name: describe(value) for name, value in (settings | chosen).items()},
        **{f"{name} (given or not)": value for name, value in listening.items()},
    }


ELSEWHERE = ("model", "data", "device", "out", "notes", "on_round", "callbacks", "progress", "stop_when", "track")
"""Settings that are compared otherwise, or may differ: the device is each process's own, the folder the first one's."""


@contextmanager
def enter_folder(files: Folder, ranks: Ranks) -> Iterator[Folder]:
    """Return the folder, which the first process holds. If it cannot, no process continues."""
    ranks.first(files.__enter__)
    try:
        yield files
    finally:
        files.__exit__()


def gather_clients(ranks: Ranks, clients: ClientStates, since: int) -> ClientStates:
    """Return, in the first process, all states of clients that changed after `since` rounds, for a checkpoint.

    The first process determines `since`.
    """
    since = ranks.said(lambda: since)
    host = torch.device("cpu")
    changed = clients.changed_since(since)
    own = {i: {c: tree_to(states[c], host) for c in changed & states.keys()} for i, states in clients.parts.items()}
    found = ranks.handed_in((own, {c: clients.changed[c] for c in changed}))
    parts: dict[int, dict[int, Any]] = {i: {} for i in clients.parts}
    when: dict[int, int] = {}
    for states, rounds in found:
        for i, of_part in states.items():
            parts[i] |= of_part
        when |= rounds
    tables = {i: Table().updated(states) for i, states in parts.items()}
    return replace(clients, parts=tables, changed=Table().updated(when), device=host)
