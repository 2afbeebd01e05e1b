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
PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
"""Backends and operations as torch 2.9 and later name them, from which others that say "none" inherit."""
CHILDREN = tuple((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn"))
BY_OPERATION = hasattr(torch._C, "_get_fp32_precision_getter")
"""Whether this torch has a precision of each of them."""


@dataclass(frozen=True)
class Rounding:
    """What operations may round float32 to.

    torch has this twice, in older settings and in newer ones by operation. Reading the older ones raises if the newer
    ones contradict them, and writing the older ones changes only some of the newer.
    """

    matmul: str
    """That of `torch.set_float32_matmul_precision`."""
    cudnn_tf32: bool
    operations: tuple[str, ...]
    """Those of `PARENTS` and `CHILDREN`, as they were set, not as they were inherited."""

    @classmethod
    def of(cls, tf32: bool) -> Rounding:
        """Return tf32 on a GPU, or no rounding."""
        set_there = {("cuda", operation): "tf32" for operation in ("matmul", "conv", "rnn") if tf32}
        operations = tuple(set_there.get(each, "none") for each in (*PARENTS, *CHILDREN)) if BY_OPERATION else ()
        return cls("high" if tf32 else "highest", tf32, operations)

    @classmethod
    def current(cls) -> Rounding:
        operations = read_operations()
        try:
            return cls(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, operations)
        except RuntimeError:  # the newer settings contradict the older ones
            write_operations(("none",) * len(operations))
            matmul = torch.get_float32_matmul_precision()
            try:
                cudnn_tf32 = torch.backends.cudnn.allow_tf32
            except RuntimeError:  # "none" contradicts only this
                cudnn_tf32 = True
            write_operations(operations)
            return cls(matmul, cudnn_tf32, operations)

    def set(self) -> None:
        now = Rounding.current()
        if now.matmul != self.matmul:
            torch.set_float32_matmul_precision(self.matmul)
        if now.cudnn_tf32 != self.cudnn_tf32:
            torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        write_operations(self.operations)


def read_operations() -> tuple[str, ...]:
    """Return what is set for each backend and operation. Reading gives what is inherited, so parents are cleared."""
    if not BY_OPERATION:
        return ()
    above = []
    for parent in PARENTS:
        above.append(torch._C._get_fp32_precision_getter(*parent))
        if above[-1] != "none":
            torch._C._set_fp32_precision_setter(*parent, "none")
    below = [torch._C._get_fp32_precision_getter(*child) for child in CHILDREN]
    for parent, value in zip(PARENTS, above, strict=True):
        if value != "none":
            torch._C._set_fp32_precision_setter(*parent, value)
    return (*above, *below)


def write_operations(values: tuple[str, ...]) -> None:
    for each, value in zip((*PARENTS, *CHILDREN), values, strict=False):  # there are none before torch 2.9
        torch._C._set_fp32_precision_setter(*each, value)


@dataclass(frozen=True)
class Flags:
    """The switches. `lenient`: only warn about operations that are not deterministic."""

    rounding: Rounding
    deterministic: bool
    lenient: bool
    cublas: str | None

    @classmethod
    def current(cls) -> Flags:
        return cls(
            Rounding.current(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            os.environ.get(CUBLAS),
        )

    def set(self) -> None:
        now = Flags.current()
        if now.rounding != self.rounding:
            self.rounding.set()
        if (now.deterministic, now.lenient) != (self.deterministic, self.lenient):  # torch imports its compiler for it
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.lenient)
        if self.cublas is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = self.cublas


LOCK = threading.RLock()
"""Held while a run changes what applies to the whole process, its number of threads included."""
_before: list[Flags] = []
"""The switches as they were before the first active run."""
_holders: list[tuple[int, Flags]] = []
"""The active runs' threads and switches, in the order in which they started."""


@contextlib.contextmanager
def use_flags(precision: str, deterministic: bool, device: torch.device) -> Iterator[None]:
    """A context with a run's switches, and without autocast and gradients; the last active run restores them.

    Raises `UndriftError` if a run in another thread needs different switches.
    """
    me = threading.get_ident()
    with LOCK:
        before = _before[0] if _before else Flags.current()
        tf32, strict = precision == "tf32", deterministic or before.deterministic
        wanted = Flags(
            Rounding.of(tf32), strict, before.lenient and not deterministic,
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
    """A context in which float32 is not rounded, as convolutions on a GPU are to tf32 by torch's default.

    It is for trials that compare results before a run has its own switches. Runs in other threads that start or end
    meanwhile wait. If one is active, its switches remain.
    """
    with LOCK:
        before = Flags.current()
        alone = all(thread == threading.get_ident() for thread, _ in _holders)
        if alone:
            replace(before, rounding=Rounding.of(tf32=False)).set()
        try:
            yield
        finally:
            if alone:
                before.set()
