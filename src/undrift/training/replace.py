"""Removing a run so that another can take its folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from undrift.errors import UndriftError
from undrift.files import PARTIAL, DamagedError, lock, regular, sync, unseal
from undrift.training import checkpoint
from undrift.training.result import OURS, RUN

REPORT = "report.html"
"""Written into the folder of a run by `undrift report`."""


def remove_run(folder: Path) -> None:
    """Remove the run in this folder, if it exists and is not empty; the folder itself stays.

    Only files that undrift wrote are removed, `run.json` last: a run that is half removed is still recognized as one.

    Raises:
        UndriftError: If the folder is not a run's, has anything else in it, or is in use. Then nothing is removed.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        unseal(folder / RUN)
    except DamagedError as error:
        raise UndriftError(
            f"--force replaces only runs, and {folder} is not one: {error} Choose another --out, or remove it yourself."
        ) from None
    with lock(folder):
        files = list(_files(folder))
        for file in files:
            file.unlink()
        if (folder / "checkpoint").exists():
            (folder / "checkpoint").rmdir()
        sync(folder)
        (folder / RUN).unlink()


def _files(folder: Path) -> Iterator[Path]:
    """The files to remove before `run.json`. Raises for anything that a run does not write."""
    checkpoints = folder / "checkpoint"
    if checkpoints.is_dir() and not checkpoints.is_symlink():
        found = sorted(checkpoints.iterdir(), key=lambda file: file.suffix != ".json")  # which make a checkpoint one
        yield from (_ours(file, checkpoint.OURS) for file in found)
    for file in folder.iterdir():
        if file.name not in (RUN, REPORT) and (file != checkpoints or file.is_symlink()):
            yield _ours(file, OURS)
    if (folder / REPORT).exists():
        yield _ours(folder / REPORT, re.compile(re.escape(REPORT)))


def _ours(file: Path, names: re.Pattern[str]) -> Path:
    partial = PARTIAL.fullmatch(file.name)
    if regular(file) and names.fullmatch(partial[1] if partial else file.name):
        return file
    raise UndriftError(
        f"{file} is not one of the files that --force removes: those that a run itself writes. Move it away, or choose "
        "another --out."
    )
