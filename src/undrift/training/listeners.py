"""Who gets each round's row: the run's folder, its checkpoints, trackers, the caller, and the progress display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from undrift.engine.ranks import Ranks
from undrift.training.checkpoint import Checkpoints
from undrift.training.meeting import due
from undrift.training.progress import Progress
from undrift.training.result import Folder
from undrift.training.state import State
from undrift.training.track import Trackers


@dataclass(frozen=True)
class Listeners:
    """The receivers of each round's row: the folder, checkpoints, trackers, `on_round`."""

    folder: Folder
    checkpoints: Checkpoints
    trackers: Trackers
    on_round: Callable[[dict[str, Any]], None] | None
    ranks: Ranks
    """The processes of the run. The first has all of these, and its errors are raised in all processes."""
    impatient: bool
    """Whether one of them needs a round's row at once."""
    progress: Progress | None = None
    """Shows the progress of the run, from rows when they are final; only in the first process."""

    def begin(self, config: str, rows: list[dict[str, Any]], resume: bool) -> None:
        """Start, or continue after these rounds. Trackers start first: if one cannot, the run has written nothing."""
        folder, text = self.folder, self.checkpoints.record.get("config", config)
        sent = rows[:-1] if folder.finished else rows  # in a longer run, the last row is different
        self.trackers.begin(config, sent)
        if resume:  # before `run.json`, so that after a kill in between only the number of rounds in the file matters
            folder.config(text)
        folder.note(self.checkpoints.record)
        for row in rows[len(sent) :]:
            self.trackers.row(row)
        folder.config(text)
        folder.begin(rows)

    def row(self, row: dict[str, Any], state: State) -> None:
        if self.writes:
            self.ranks.first(lambda: self.folder.row(row))
        if self.progress:
            self.progress.row(row)
        if not self.impatient:
            return
        try:
            self.ranks.first(lambda: self._tell(row))
        except BaseException:  # a run that is stopped here, say with Ctrl-C, can be resumed from this round
            self.save(state)
            raise

    @property
    def writes(self) -> bool:
        """Whether the run has a folder, as all of its processes know."""
        return self.checkpoints.folder is not None

    def sync(self) -> None:
        if self.writes:
            self.ranks.first(self.folder.sync)

    def _tell(self, row: dict[str, Any]) -> None:
        self.trackers.row(row)
        if self.on_round:
            self.on_round(row)

    def due(self, state: State) -> bool:
        """Return whether a checkpoint is due; by the first process's clock, where the time decides."""
        checkpoints = self.checkpoints
        if checkpoints.seconds is None:
            return due(checkpoints.run, state.round, checkpoints.due)
        return self.ranks.said(lambda: due(checkpoints.run, state.round, checkpoints.due))

    def save(self, state: State) -> None:
        self.sync()
        self.checkpoints.save(state)

    def close(self, state: State) -> None:
        self.sync()
        self.checkpoints.close(state)

    def stopped(self, state: State, why: str) -> None:
        self.save(state)
        self.ranks.first(lambda: self.folder.stopped(why))
        self.trackers.failed = True
