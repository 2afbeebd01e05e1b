"""Process-wide switches of torch that affect a run's last digits: set while runs are active, and restored after."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from undrift.errors import UndriftError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable that torch requires to consider cuBLAS deterministic."""


@dataclass(frozen=True)
class Switches:
    """The switches. `lenient`: only warn about operations that are not deterministic."""

    matmul_tf32: bool
    cudnn_tf32: bool
    deterministic: bool
    lenient: bool
    cublas: str | None

    @classmethod
    def current(cls) -> Switches:
        return cls(
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            os.environ.get(CUBLAS),
        )

    def set(self) -> None:
        now = Switches.current()
        if now.matmul_tf32 != self.matmul_tf32:  # writing it also forgets a precision of "medium"
            torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        if now.cudnn_tf32 != self.cudnn_tf32:
            torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        if (now.deterministic, now.lenient) != (self.deterministic, self.lenient):  # torch imports its compiler for it
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.lenient)
        if self.cublas is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = self.cublas


LOCK = threading.RLock()
_before: list[Switches] = []
"""The switches as they were before the first active run."""
_holders: list[tuple[int, Switches]] = []
"""The active runs' threads and switches, in the order in which they started."""


@contextlib.contextmanager
def arithmetic(precision: str, deterministic: bool, device: torch.device) -> Iterator[None]:
    """A context with a run's switches, and without autocast and gradients; the last active run restores them.

    Raises `UndriftError` if a run in another thread needs different switches.
    """
    me = threading.get_ident()
    with LOCK:
        before = _before[0] if _before else Switches.current()
        tf32, strict = precision == "tf32", deterministic or before.deterministic
        wanted = Switches(
            tf32, tf32, strict, before.lenient and not deterministic,
            before.cublas or (":4096:8" if deterministic else None),
        )  # fmt: skip
        if any(thread != me and switches != wanted for thread, switches in _holders):
            raise UndriftError(
                "A run in another thread of this process has a different precision or value of deterministic. Both "
                "apply to the whole process: use the same values, or separate processes."
            )
        if not _holders:
            _before[:] = [before]
        holder = (me, wanted)
        _holders.append(holder)
        wanted.set()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        with LOCK:
            _holders.remove(holder)
            (_holders[-1][1] if _holders else _before.pop()).set()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """A context in which float32 is not rounded to tf32, which is torch's default for convolutions on a GPU.

    It is for trials that compare results before a run has its own switches. Runs in other threads that start or end
    meanwhile wait. If one is active, its switches remain.
    """
    with LOCK:
        before = Switches.current()
        alone = all(thread == threading.get_ident() for thread, _ in _holders)
        if alone:
            replace(before, matmul_tf32=False, cudnn_tf32=False).set()
        try:
            yield
        finally:
            if alone:
                before.set()


@contextlib.contextmanager
def threads(number: int | None) -> Iterator[None]:
    """A context with this number of torch's CPU threads; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
