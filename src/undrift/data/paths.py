"""Access to paths that a user or a data set names, with errors that name the path."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from undrift import files
from undrift.errors import UndriftError, shortened

MOST_BYTES = 1 << 28
"""The limit for one encoded image or sound."""


def as_path(given: str | Path) -> Path:
    """Return the path with `~` replaced by the home folder."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise UndriftError(f"{shortened(str(given))}: there is no such home folder; write the full path.") from error


def kind(path: Path) -> str | None:
    """Return the kind of a path: a "file", a "folder", "other" (a pipe, a device), or None if it does not exist."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name that no file can have
        return None
    except OSError as error:
        raise unreadable_error(path, error) from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def unreadable_error(path: str | Path, error: OSError) -> UndriftError:
    hint = "; change its permissions, or leave it out of the data" if isinstance(error, PermissionError) else ""
    return UndriftError(f"{shortened(str(path))} cannot be read ({error.strerror}){hint}.")


def folders_in(folder: Path) -> list[Path]:
    """Return the folders directly inside, in order of their names."""
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError as error:
        raise unreadable_error(error.filename or folder, error) from error


def files_below(folder: Path, endings: Collection[str]) -> list[Path]:
    """Return all files with one of these endings, at any depth, in order of their paths."""

    def refuse(error: OSError) -> None:
        raise unreadable_error(error.filename or folder, error) from error

    paths: list[Path] = []
    for where, _, names in os.walk(folder, onerror=refuse):
        paths += [Path(where, name) for name in names if os.path.splitext(name)[1].lower() in endings]
    for file in paths:
        if kind(file) != "file":
            raise UndriftError(f"{file} is not a regular file; remove or replace it.")
    return sorted(paths)


def read_bytes(file: Path) -> bytes:
    """Return the contents of a regular file that holds one image or sound."""
    if kind(file) not in ("file", None):
        raise ValueError(f"{file} is not a regular file")
    with files.open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"{file} has {size:,} bytes; the limit is {MOST_BYTES:,}")
        return stream.read(size)  # not MOST_BYTES, since that much memory would be allocated first
