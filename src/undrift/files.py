"""Files that are whole or not there: written under another name, synced, renamed, and the rename synced too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from undrift.errors import UndriftError

PARTIAL = ".partial"


def write_text(file: Path, text: str) -> None:
    partial = file.with_name(file.name + PARTIAL)
    partial.write_text(text, encoding="utf-8")
    settle(partial, file)


def settle(partial: Path, file: Path) -> None:
    """Make a file that was written under another name the file; a crash leaves the old one or the new one, whole."""
    sync(partial)
    partial.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside it nobody else runs in this folder, on systems that have such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UndriftError(f"Another process runs in {folder}; wait for it, or choose another folder.") from None
        yield
    finally:
        os.close(handle)
