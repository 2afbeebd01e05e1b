"""How many of torch's CPU threads a run has: by a rule on the model and its batches, never by timing.

One local step of a small model is thousands of operations of some microseconds. Splitting such an operation over
threads gains little on an idle machine; on a busy one every operation waits until the operating system has scheduled
all of them, which costs multiples. So a run gets one thread, unless a step is large enough.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from undrift.cpus import THREADS, usable_cpus
from undrift.engine.choose import CPU_CONVOLUTION_FLOPS, Choice
from undrift.engine.flops import Flops
from undrift.functional.arguments import batch_size
from undrift.functional.copying import deep_copy
from undrift.functional.draws import Trial
from undrift.functional.model import Model
from undrift.training.torch_flags import LOCK
from undrift.tree import tree_leaves, tree_map

# ---- the rule ------------------------------------------------------------------------------------------------------

log = logging.getLogger("undrift")
FORKED = "a process that is forked from one that has trained can only use one of torch's threads"
STEP_FLOPS = 1e8
"""Work of all lanes' forward passes in one step from which sharing operations pays (`python -m benchmarks.threads`).
Where `choose` trains large convolutions one client at a time, its own limit holds: there threads train a client each
and rarely wait for one another."""


def thread_count(asked: int | None, model: Model, choice: Choice, device: torch.device, width: int) -> tuple[int, str]:
    """Return the number of threads for a run, and why.

    Args:
        asked: What the user asked for.
        model: The model as it is trained.
        choice: The engine, and its number of lanes.
        device: Where the run is trained.
        width: The largest batch.
    """
    present = present_threads()
    if FORKS.forked:
        if asked is not None and asked > 1:
            log.warning('threads=%d: %s; start processes with the method "spawn" instead.', asked, FORKED)
        return 1, FORKED
    if asked is not None:
        return asked, "set by threads"
    for name in THREADS:
        if name in os.environ:
            return present, f"set by {name}"
    if not is_default(present):
        return present, "set by torch.set_num_threads"
    if device.type != "cpu":
        return present, "torch's default"
    limit = min(STEP_FLOPS, CPU_CONVOLUTION_FLOPS) if (choice.engine, choice.lanes) == ("lanes", 1) else STEP_FLOPS
    if forward_flops(model, width) * choice.lanes < limit:
        return 1, "a local step is too small to gain from more"
    return present, "torch's default: a local step is large enough"


def is_default(number: int) -> bool:
    """Return whether torch may have chosen this number by itself: that of logical or of physical cores."""
    logical = {len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, os.cpu_count() or 1}
    logical.add(usable_cpus())  # which a sweep's only process gets
    return number in logical | {count // 2 for count in logical}


def forward_flops(model: Model, width: int) -> float:
    """Return the operations of a forward pass of one batch, counted on the samples of the model's examination."""
    twin = copy.copy(model)  # a forward pass may change buffers, and may draw
    frozen = {id(p): p for name, p in model.module.named_parameters() if name not in model.start}
    twin.module = deep_copy(model.module, frozen)
    x = tree_map(torch.clone, model.sample)
    draws = Trial(tree_leaves(x)[0].device).draws()
    with Flops() as counter, torch.no_grad(), draws:
        twin(twin.trial(), x)
    return float(counter.counts.total()) * width / batch_size(x)


# ---- the setting ---------------------------------------------------------------------------------------------------

_numbers: list[tuple[int, int, int]] = []
"""The active runs' threads, their numbers of torch's CPU threads, and the numbers that they restore."""


def present_threads() -> int:
    """Return torch's number of CPU threads here, without what runs in other threads have set.

    A Python thread that is started while a run is active has that run's number.
    """
    present, me = torch.get_num_threads(), threading.get_ident()
    with LOCK:
        if all(thread != me for thread, *_ in _numbers):
            return next((before for _, number, before in _numbers if number == present), present)
    return present


@dataclass
class Forks:
    """Whether this process was forked from one in which torch had several threads.

    A fork has none of them, and OpenMP would wait for them forever. So such a process gets one thread, as the workers
    of torch's `DataLoader` do.
    """

    several: bool = False
    """Whether torch may have had several threads here."""
    forked: bool = False

    def look(self, *numbers: int) -> None:
        if not self.several and max(numbers) > 1:
            self.several = True
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self.forked = True
        torch.set_num_threads(1)


FORKS = Forks()


@contextlib.contextmanager
def use_threads(number: int | None) -> Iterator[None]:
    """A context with this number of torch's CPU threads; None changes nothing."""
    with LOCK:
        before = present_threads()
        holder = threading.get_ident(), number or before, before
        FORKS.look(*holder[1:])
        _numbers.append(holder)
        torch.set_num_threads(holder[1])
    try:
        yield
    finally:
        with LOCK:
            _numbers.remove(holder)
            torch.set_num_threads(before)
