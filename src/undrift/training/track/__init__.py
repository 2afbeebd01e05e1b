"""Trackers: where else a run's figures go. `track="tensorboard"`, `track="mlflow"`, or a list of both.

A tracker is told the settings once, then each round's scalars, then how the run ended. It works in a thread of its
own: rounds take milliseconds, a server's answer may take seconds. What fails there while a run goes on costs a warning,
never the run.
"""

from __future__ import annotations

import importlib
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from undrift.errors import UndriftError, quoted, unknown

log = logging.getLogger("undrift")

KNOWN = ("mlflow", "tensorboard")
BY_CLIENT = ("clients", "by_client", "skipped", "dropped", "stragglers", "left_out")
"""What a row has one entry per client of: ids and figures for `metrics.jsonl`, too many to draw."""

Scalars = dict[str, float]
"""One round's figures by name, `round` first."""


class Tracker(Protocol):
    """What each module here has a class of. `folder` is the run's, if it has one."""

    hint: str
    """What to look at if it cannot begin."""

    def __init__(self, folder: Path | None) -> None: ...

    def begin(self, config: str, rounds: list[Scalars]) -> None:
        """The run's `config.toml`, and the rounds that are done already: more than none when a run is resumed."""

    def add(self, rounds: list[Scalars]) -> None: ...

    def end(self, status: str) -> None:
        """FINISHED, FAILED (it raised, or NaN stopped it) or KILLED (somebody did)."""


def scalars(row: dict[str, Any]) -> Scalars:
    """The numbers of a row, those in dicts and lists by path: `class_accuracy/3`, `temperature/0`."""
    return {
        path: x for name, value in row.items() if name not in BY_CLIENT for path, x in _numbers(name, value).items()
    }


def _numbers(path: str, value: Any) -> Scalars:
    if hasattr(value, "tolist"):  # a part's history may hold tensors
        return _numbers(path, value.tolist())
    if isinstance(value, int | float):
        return {path: float(value)}
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {deeper: x for key, item in inner for deeper, x in _numbers(f"{path}/{key}", item).items()}


def find(track: str | Sequence[str] | None) -> dict[str, type[Tracker]]:
    """The trackers of these names, or a sentence about the first that cannot be had."""
    names = [track] if isinstance(track, str) else track or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UndriftError(f"track must be {' or '.join(map(repr, KNOWN))}, or a list of them, not {quoted(track)}.")
    found: dict[str, type[Tracker]] = {}
    for name in names:
        if name not in KNOWN:
            raise unknown("tracker", name, KNOWN)
        try:
            found[name] = importlib.import_module(f"undrift.training.track.{name}").Tracker
        except ImportError as error:
            raise UndriftError(
                f"track={name!r} needs a package that is not installed ({error}); pip install 'undrift[track]' has it."
            ) from error
    return found


class Trackers:
    """All trackers of a run. On the way out they learn how it ended."""

    def __init__(self, track: str | Sequence[str] | None, folder: Path | None) -> None:
        self.aside = [Aside(name, kind(folder)) for name, kind in find(track).items()]
        self.failed = False
        """Whether the run failed without raising anything."""

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        stopped = kind is not None and not issubclass(kind, Exception)
        for aside in self.aside:
            aside.end("KILLED" if stopped else "FAILED" if kind or self.failed else "FINISHED")

    def __bool__(self) -> bool:
        return bool(self.aside)

    def begin(self, config: str, rows: list[dict[str, Any]]) -> None:
        for aside in self.aside:
            aside.begin(config, [scalars(row) for row in rows])

    def row(self, row: dict[str, Any]) -> None:
        for aside in self.aside:
            aside.add(scalars(row))


class Aside:
    """A tracker in a thread of its own. Rounds that pile up while it is busy go to it together."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self.thread = ThreadPoolExecutor(1, f"undrift-{name}")
        self.waiting: deque[Scalars] = deque()
        self.works = False

    def begin(self, config: str, rounds: list[Scalars]) -> None:
        """Wait for it, so that a wrong address is refused; but a run that is resumed goes on without."""
        try:
            self.thread.submit(self.tracker.begin, config, rounds).result()
            self.works = True
        except Exception as error:
            if not rounds:
                raise UndriftError(
                    f"track={self.name!r} cannot begin ({_line(error)}); {self.tracker.hint}, or leave track out."
                ) from error
            self._give_up(error)

    def add(self, scalars: Scalars) -> None:
        self.waiting.append(scalars)
        self.thread.submit(self._send)

    def end(self, status: str) -> None:
        if self.works:
            self.thread.submit(self._try, self.tracker.end, status)
        self.thread.shutdown()

    def _send(self) -> None:
        rounds = [self.waiting.popleft() for _ in range(len(self.waiting))]
        if rounds:
            self._try(self.tracker.add, rounds)

    def _try(self, call: Any, argument: Any) -> None:
        try:
            if self.works:
                call(argument)
        except Exception as error:  # whatever a server, a disk or a library may come up with
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.works = False
        log.warning("%s tracks this run no longer, which goes on without it: %s", self.name, _line(error))


def _line(error: Exception) -> str:
    """An error's first line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
