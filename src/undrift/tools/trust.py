"""Which modules may be imported: of those that a run's folder names, only what the user allows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError, quoted


@dataclass
class Gate:
    """What may be imported while it stands."""

    run: Path | None = None
    """A run's folder that the user does not trust; without one, anything may be imported."""
    flag: bool = True
    """Whether the command has `--trust`."""
    allowed: set[str] = field(default_factory=set)
    """The modules that the user has named, on the command line or in experiment files."""


_gates = [Gate()]
"""The gate of this process, and above it those of commands."""


@contextmanager
def gated() -> Iterator[None]:
    """A context with a gate of its own, for one command."""
    _gates.append(Gate())
    try:
        yield
    finally:
        _gates.pop()


def gate() -> Gate:
    """What may be imported now."""
    return _gates[-1]


def stand(other: Gate) -> None:
    """Import no more than another process may."""
    _gates[-1] = other


def check(modules: Iterable[Any]) -> None:
    """Raise unless these modules may be imported. Whatever imports for an experiment asks here first."""
    now = gate()
    strange = [name for name in modules if now.run and name not in now.allowed]
    if strange:
        raise UndriftError(
            f"{now.run}/config.toml asks to import {', '.join(map(quoted, strange))}, which executes that code. If "
            f"you trust it, allow it with {' '.join(f'--import {shlex.quote(str(name))}' for name in strange)}"
            f"{', or with --trust.' if now.flag else '.'}"
        )


def run_folder(file: Path) -> Path | None:
    """The folder of the run that this is, or whose `config.toml` this is; None for other experiment files."""
    from undrift.training.run_folder import RUN

    if file.is_dir():
        return file
    real = file.resolve()
    return real.parent if real.name == "config.toml" and os.path.lexists(real.parent / RUN) else None
