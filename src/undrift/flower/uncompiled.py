"""Torch's compiler takes a second to import. Nodes never compile, and Flower starts a process per message."""

from __future__ import annotations

from undrift.functional.draws import NoticeDraws
from undrift.functional.writes import RefuseWrites
from undrift.models.seeded import Seeded


def leave_compiler_out() -> None:
    """In this process, run undrift's dispatch modes as they are written.

    Torch wraps `__torch_dispatch__` so that its compiler does not trace it, and imports the compiler for that. Once it
    is unwrapped, nothing in this process may be compiled.
    """
    for mode in (NoticeDraws, RefuseWrites, Seeded):
        wrapped = mode.__torch_dispatch__
        mode.__torch_dispatch__ = getattr(wrapped, "__wrapped__", wrapped)  # type: ignore[method-assign]
