"""Process-wide switches of torch that decide a run's last digits, set while runs are under way and put back after."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from undrift.errors import UndriftError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""What torch wants set before it takes cuBLAS for deterministic."""


@dataclass(frozen=True)
class Switches:
    """What there is to set. `lenient`: deterministic algorithms are wanted, but only warned about."""

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
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self.matmul_tf32, self.cudnn_tf32
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.lenient)
        if self.cublas is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = self.cublas


LOCK = threading.Lock()
_before: list[Switches] = []
"""How the switches stood before the first run that is under way."""
_holders: list[tuple[int, Switches]] = []
"""Runs under way, by thread, in the order in which they started."""


@contextlib.contextmanager
def arithmetic(precision: str, deterministic: bool, device: torch.device) -> Iterator[None]:
    """The switches of a run, without autocast and gradients; when the last run under way ends, all is as it was.

    Raises `UndriftError` if a run in another thread needs them set differently.
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
                "Another run in this process, in another thread, has another precision or another value of "
                "deterministic. torch has one setting for the whole process: use the same, or separate processes."
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
def threads(number: int | None) -> Iterator[None]:
    """So many of torch's threads on the CPU, as many as before afterwards; `None` changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
