"""Experiment trackers: `track="tensorboard"`, `track="mlflow"`, `track="wandb"`, or a list of them.

A tracker receives the settings once, then each round's scalars, then how the run ended. It works in a separate thread,
since rounds take milliseconds and a server's response may take seconds. If it fails during a run, it causes a warning,
never an error.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from undrift.columns import COLUMNS
from undrift.errors import UndriftError, quoted, unknown
from undrift.files import untouched

log = logging.getLogger("undrift")

KNOWN = ("mlflow", "tensorboard", "wandb")
BY_CLIENT = {name for name, column in COLUMNS.items() if column.by_client}
"""Columns with one entry per client, which are in `metrics.jsonl` but too many to draw."""

Scalars = dict[str, float]
"""One round's numbers by name, `round` first."""


class Tracker(Protocol):
    """The interface of the class `Tracker` in each module here. `folder` is the run's folder, if it has one."""

    hint: str
    """What to check if `begin` fails."""
    files: tuple[str, ...]
    """The files and folders that it writes into the run's folder. If a tracker cannot start, they are as before."""

    def __init__(self, folder: Path | None) -> None: ...

    def begin(self, config: str, rounds: list[Scalars]) -> None:
        """Start with the run's `config.toml` and, when a run is resumed, the rounds that it has already done."""

    def add(self, rounds: list[Scalars]) -> None: ...

    def end(self, status: str) -> None:
        """`status` is FINISHED, FAILED (by an exception, or stopped by NaN) or KILLED (interrupted)."""


def scalars(row: dict[str, Any]) -> Scalars:
    """Return the numbers in a history row; those in dicts and lists by path: `class_accuracy/3`, `temperature/0`.

    Tables, such as a confusion matrix, are left out: they have too many.
    """
    return {
        path: x for name, value in row.items() if name not in BY_CLIENT for path, x in _numbers(name, value).items()
    }


def _numbers(path: str, value: Any) -> Scalars:
    if hasattr(value, "tolist"):  # a part's history may hold tensors
        return _numbers(path, value.tolist())
    if isinstance(value, int | float):
        return {path: float(value)}
    if isinstance(value, list) and value and all(isinstance(line, list) for line in value):
        return {}
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {deeper: x for key, item in inner for deeper, x in _numbers(f"{path}/{key}", item).items()}


def find(track: str | Sequence[str] | None) -> dict[str, type[Tracker]]:
    """Return the trackers of these names. Raises `UndriftError` if one is unknown or not installed."""
    names = [track] if isinstance(track, str) else track or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UndriftError(f"track must be {', '.join(map(repr, KNOWN))}, or a list of them, not {quoted(track)}.")
    found: dict[str, type[Tracker]] = {}
    for name in names:
        if name not in KNOWN:
            raise unknown("tracker", name, KNOWN)
        try:
            found[name] = importlib.import_module(f"undrift.training.track.{name}").Tracker
        except ImportError as error:
            raise UndriftError(
                f"track={name!r} needs a package that is not installed ({error}); run pip install 'undrift[track]'."
            ) from error
    return found


class Trackers:
    """All trackers of a run, as a context manager that reports to them how the run ended."""

    def __init__(self, track: str | Sequence[str] | None, folder: Path | None) -> None:
        self.folder = folder
        self.trackers = [BackgroundTracker(name, kind(folder)) for name, kind in find(track).items()]
        self.failed = False
        """Whether the run failed without raising an exception."""

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        stopped = kind is not None and not issubclass(kind, Exception)
        while self.trackers:
            self.trackers.pop().end("KILLED" if stopped else "FAILED" if kind or self.failed else "FINISHED")

    def __bool__(self) -> bool:
        return bool(self.trackers)

    def begin(self, config: str, rows: list[dict[str, Any]]) -> None:
        """Start all of them. If one cannot start, the others are ended, and the run's folder is left as it was."""
        names = dict.fromkeys(name for own in self.trackers for name in own.tracker.files)
        with untouched([self.folder / name for name in names] if self.folder else []):
            try:
                for tracker in self.trackers:
                    tracker.begin(config, [scalars(row) for row in rows])
            except BaseException as error:
                self.__exit__(type(error))
                raise

    def row(self, row: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.add(scalars(row))


class BackgroundTracker:
    """A tracker in its own thread. Rounds that arrive while it is busy are passed on together."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self.thread = ThreadPoolExecutor(1, f"undrift-{name}")
        self.waiting: deque[Scalars] = deque()
        self.works = False

    def begin(self, config: str, rounds: list[Scalars]) -> None:
        """Wait for the tracker, so that a wrong address raises an error, or a warning if the run is resumed."""
        try:
            self.thread.submit(self._begin, config, rounds).result()
        except Exception as error:
            if not rounds:
                raise UndriftError(
                    f"track={self.name!r} cannot start ({_line(error)}); {self.tracker.hint}, or leave track out."
                ) from error
            self._give_up(error)

    def add(self, scalars: Scalars) -> None:
        self.waiting.append(scalars)
        self.thread.submit(self._send)

    def end(self, status: str) -> None:
        self.thread.submit(self._try, self.tracker.end, status)
        self.thread.shutdown()

    def _begin(self, config: str, rounds: list[Scalars]) -> None:
        self.tracker.begin(config, rounds)
        self.works = True  # also if nobody waits for it any more, so that it is ended

    def _send(self) -> None:
        rounds = [self.waiting.popleft() for _ in range(len(self.waiting))]
        if rounds:
            self._try(self.tracker.add, rounds)

    def _try(self, call: Any, argument: Any) -> None:
        try:
            if self.works:
                call(argument)
        except Exception as error:  # a server, a disk or a library may raise anything
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.works = False
        log.warning("%s failed and no longer tracks this run; training continues: %s", self.name, _line(error))


def _line(error: Exception) -> str:
    """Return an error's first line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
