"""Where what clients keep is stored: in memory, or in files if there may be too much of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undrift.engine.slots import SlotFiles
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import tree_bytes

HOST_SHARE = 0.25
"""The share of host memory that clients' states may take. If they might take more, they go to files."""
LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file with the memory limit of a container, on Linux."""


def choose_client_storage(run: Run, out: Any) -> Run:
    """Return the run, with files for what clients keep if the clients of all rounds might keep too much for memory.

    That is known before the first round: by how much a newcomer's state takes, and how many clients can take part.
    """
    parts = run.composed.overriding("keep")
    if not parts or not hasattr(os, "pwrite") or run.ranks.several:  # each process has only its own clients' states
        return run
    one = run.data.holders(np.zeros(1, np.int64))
    plan = replace(run.plan(0), clients=one, steps=np.ones(1, np.int64))
    with torch.no_grad():
        state = State(run.model.start, [], run.model.tracked, run.no_states())
        fresh = run.inputs(plan, state, None, state.clients).kept([0])
    most = tree_bytes(fresh) * min(run.population, run.cohort_size * run.rounds)
    if most <= HOST_SHARE * host_memory():
        return run
    folder = Path(out) / "checkpoint" if out else None
    run.choices["kept"] = f"in {'the run folder' if out else 'temporary files'}: up to {most / 1e9:.3g} GB of states"
    return replace(run, files=SlotFiles(folder))


def host_memory() -> int:
    """Return the memory of the machine, or the part of it that this process may use, in bytes."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(LIMIT.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # there is no limit, or it is not known
        return whole
