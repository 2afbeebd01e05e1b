"""Who is told of each round: the caller's callbacks, the run's folder, its checkpoints, trackers, and the progress."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from undrift.engine.ranks import Ranks
from undrift.training.barrier import checkpoint_due
from undrift.training.callbacks import Callback, RoundRecord, reason_to_stop
from undrift.training.checkpoint import Checkpoints
from undrift.training.progress import Progress
from undrift.training.result import Result
from undrift.training.run_folder import Folder
from undrift.training.state import State
from undrift.training.track import Trackers


@dataclass(frozen=True)
class Observers:
    """Those who are told of each round, in the order in which they are."""

    folder: Folder
    checkpoints: Checkpoints
    trackers: Trackers
    on_round: Callable[[dict[str, Any]], None] | None
    callbacks: list[Callback]
    ranks: Ranks
    """The processes of the run. The first has all observers, and their errors are raised in all processes."""
    impatient: bool
    """Whether one of them needs a round's row at once, as all processes know."""
    progress: Progress | None = None
    """Shows the progress of the run, from rows when they are final; only in the first process."""

    def begin(self, config: str, rows: list[dict[str, Any]], resume: bool) -> None:
        """Start, or continue after these rounds. Trackers and callbacks start first: if one of them cannot, the run has
        written nothing.
        """
        folder, text = self.folder, self.checkpoints.record.get("config", config)
        sent = rows[:-1] if folder.finished else rows  # in a longer run, the last row is different
        self.trackers.begin(config, sent)
        for callback in self.callbacks:
            callback.begin(copy.deepcopy(rows))
        if resume:  # before `run.json`, so that after a kill in between only the number of rounds in the file matters
            folder.config(text)
        folder.note(self.checkpoints.record)
        for row in rows[len(sent) :]:
            self.trackers.row(row)
        folder.config(text)
        folder.begin(rows)

    def asks_to_stop(self, row: dict[str, Any], state: State) -> str | None:
        """Tell the callbacks that may end the run of a round. Returns why one of them does."""
        deciding = [callback for callback in self.callbacks if not callback.late]
        if not deciding:
            return None

        def ask() -> str | None:
            answers = [
                reason_to_stop(callback, RoundRecord._of(row, self.checkpoints.run.rounds, state))
                for callback in deciding
            ]
            return next((why for why in answers if why), None)  # all were told, whoever ends the run

        return self._or_save(lambda: self.ranks.said(ask), state)

    def row(self, row: dict[str, Any], state: State) -> None:
        """Tell all others of a round, whose row is final."""
        if self.writes:
            self.ranks.first(lambda: self.folder.row(row))
        if self.progress:
            self.progress.row(row)
        if late := [callback for callback in self.callbacks if callback.late]:
            self.ranks.first(
                lambda: [
                    reason_to_stop(callback, RoundRecord._of(row, self.checkpoints.run.rounds, None))
                    for callback in late
                ]
            )
        if self.impatient:
            self._or_save(lambda: self.ranks.first(lambda: self._tell(row)), state)

    def _tell(self, row: dict[str, Any]) -> None:
        self.trackers.row(row)
        if self.on_round:
            self.on_round(row)

    def _or_save(self, tell: Callable[[], Any], state: State) -> Any:
        """Tell observers, and save the state if that fails: a run that Ctrl-C ends here, say, continues from here."""
        try:
            return tell()
        except BaseException:
            self.save(state)
            raise

    @property
    def writes(self) -> bool:
        """Whether the run has a folder, as all of its processes know."""
        return self.checkpoints.folder is not None

    def sync(self) -> None:
        if self.writes:
            self.ranks.first(self.folder.sync)

    def due(self, state: State) -> bool:
        """Return whether a checkpoint is due; by the first process's clock, where the time decides."""
        checkpoints = self.checkpoints
        if checkpoints.seconds is None:
            return checkpoint_due(checkpoints.run, state.round, checkpoints.due)
        return self.ranks.said(lambda: checkpoint_due(checkpoints.run, state.round, checkpoints.due))

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

    def end(self, result: Result) -> None:
        """Tell the callbacks that the run is over: all of them, also if one fails."""

        def tell() -> None:
            with ExitStack() as stack:
                for callback in reversed(self.callbacks):
                    stack.callback(callback.end, result)

        if self.callbacks:
            self.ranks.first(tell)
