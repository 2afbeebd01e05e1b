"""A run that takes the folder of another, which is removed when the new one is ready to train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError
from undrift.files import PARTIAL, DamagedError, regular, sync, unseal
from undrift.training import checkpoint
from undrift.training.result import OURS, RUN, Folder

REMOVED = re.compile(rf"{OURS.pattern}|report\.html")
"""The files of a run, and the one that `undrift report` writes into its folder."""


class ReplacedFolder(Folder):
    """The folder of a new run, in which there may be another: that one is removed before anything is written.

    Only files that undrift wrote are removed. `run.json` stays until the new one takes its place, so a run that is half
    removed is still recognized as one.
    """

    def refuse_others(self) -> None:
        """Raise if the folder is not a run's, or has anything else in it. Nothing is removed yet."""
        assert self.path
        self.old = list(_files(self.path))

    def note(self, record: dict[str, Any]) -> None:
        """Remove the old run and write the new one's identity: everything has been checked, and training can start."""
        assert self.path
        for path in self.old:
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        sync(self.path)
        super().note(record)


def _files(folder: Path) -> Iterator[Path]:
    """What to remove before `run.json` is replaced. Raises for anything that a run does not write."""
    if not any(folder.iterdir()):
        return
    try:
        unseal(folder / RUN)
    except DamagedError as error:
        raise UndriftError(
            f"--force replaces only runs, and {folder} is not one: {error} Choose another --out, or remove it yourself."
        ) from None
    checkpoints = folder / "checkpoint"
    own = checkpoints.is_dir() and not checkpoints.is_symlink()
    if own:
        found = sorted(checkpoints.iterdir(), key=lambda file: file.suffix != ".json")  # which make a checkpoint one
        yield from (_ours(file, checkpoint.OURS) for file in found)
        yield checkpoints
    for file in folder.iterdir():
        if file.name != RUN and not (own and file == checkpoints):
            yield _ours(file, REMOVED)


def _ours(file: Path, names: re.Pattern[str]) -> Path:
    partial = PARTIAL.fullmatch(file.name)
    if regular(file) and names.fullmatch(partial[1] if partial else file.name):
        return file
    raise UndriftError(
        f"{file} is not one of the files that --force removes: those that a run itself writes. Move it away, or choose "
        "another --out."
    )
