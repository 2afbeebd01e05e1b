"""The progress of a run: a line that is updated on a terminal and in a notebook, log lines anywhere else.

It is given rows as they settle, which may be one round late, and never makes a round wait for the device. Plain text is
all it needs; where Rich is installed, it keeps warnings and the line apart on a terminal.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from undrift.errors import first_line
from undrift.training.history import number
from undrift.training.run import Run

log = logging.getLogger("undrift")

SHARE = 0.05
"""The fraction of the rounds between two log lines."""
SECONDS = 30.0
"""The largest number of seconds between two log lines, if rounds are that short."""
REDRAW = {"terminal": 0.1, "notebook": 0.5}
"""Seconds between two updates of a line; a notebook keeps all of them in its file."""
BAR = 20
"""The width of the bar."""


class Screen(Protocol):
    """Where progress is shown. `show` replaces the previous line, `close` leaves the last one in place."""

    def show(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Reports the progress of one run to its user.

    Args:
        rounds: How many rounds the run has.
        done: How many of them were trained before, by a run that is resumed.
        about: One line about the run, shown first.
        metrics: The names of its metrics, the leading one first.
        stream: Where to write, by default the standard output.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        rounds: int,
        done: int,
        about: str,
        metrics: Sequence[str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rounds, self.done, self.about, self.clock = rounds, done, about, clock
        self.names = [f"{prefix}{name}" for prefix in ("", "validation_", "client_") for name in metrics]
        self.losses = ["loss", "validation_loss", "client_loss"]
        self.stream = stream or sys.stdout
        self.kind = kind_of(self.stream) if self.stream else "nothing"  # a program without a standard output
        self.screen: Screen | None = None
        self.figures: list[str] = []
        self.samples = 0
        self.latest = done
        self.last: int | None = None
        """The round of the latest line."""

    def __enter__(self) -> Progress:
        self.began = self.shown = self.clock()
        with self._optional():
            if self.kind != "nothing":
                print(self.about, file=self.stream, flush=True)
            if self.kind == "terminal":
                self.screen = RichLine(self.stream) if importlib.util.find_spec("rich") else PlainLine(self.stream)
            elif self.kind == "notebook":
                self.screen = PlainLine(self.stream)
        return self

    def __exit__(self, *error: object) -> None:
        if self.last not in (None, self.latest):  # a run that ends early
            self._show(self.latest, self.clock())
        if self.screen:
            with self._optional():
                self.screen.close()

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """A context that writes to the stream. If that fails, such as in a pipe that nobody reads any more, training
        goes on without progress.
        """
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a stream that was closed
            self.kind, self.screen = "nothing", None
            log.warning("progress is no longer shown (%s), but training goes on", first_line(error))

    def row(self, row: dict[str, Any]) -> None:
        """Note that a round is over, and show a line if one is due."""
        self.figures = self._figures(row) or self.figures
        self.samples += row["samples"]
        now, self.latest = self.clock(), row["round"]
        if self._due(self.latest, now):
            self._show(self.latest, now)

    def _show(self, t: int, now: float) -> None:
        self.shown, self.last = now, t
        with self._optional():
            if self.screen:
                self.screen.show(self.line(t, now, width_of(self.stream)))
            elif self.kind != "nothing":
                print(self.log_line(t, now), file=self.stream, flush=True)

    def _due(self, t: int, now: float) -> bool:
        if self.last is None or t >= self.rounds:
            return True
        if self.screen:
            return now - self.shown >= REDRAW[self.kind]
        return t - self.last >= SHARE * self.rounds or now - self.shown >= SECONDS

    def _figures(self, row: dict[str, Any]) -> list[str]:
        """Return the leading metric and the loss, as far as the row has them."""
        leading = [next((name for name in names if number(row.get(name))), None) for names in (self.names, self.losses)]
        return [f"{name.replace('_', ' ')} {row[name]:.4f}" for name in leading if name]

    def _left(self, t: int, now: float) -> str:
        trained = t - self.done
        if t >= self.rounds:
            return f"{format_duration(now - self.began)} in all"
        return f"{format_duration((now - self.began) / trained * (self.rounds - t))} left" if trained > 0 else ""

    def log_line(self, t: int, now: float) -> str:
        """Return a line for a file: the round, the leading metric, the loss, and the time left."""
        return ", ".join(part for part in (f"round {t}/{self.rounds}", *self.figures, self._left(t, now)) if part)

    def line(self, t: int, now: float, width: int) -> str:
        """Return a line for a terminal: of what fits into `width` columns, the round and the time left come first."""
        full = int(BAR * t / self.rounds)
        speed = self.samples / max(now - self.began, 1e-9)
        count = f"round {t:>{len(str(self.rounds))}}/{self.rounds}"
        parts = {"count": count, "bar": "━" * full + "─" * (BAR - full)}
        parts |= dict(zip(("metric", "loss"), self.figures, strict=False))
        parts |= {"speed": f"{speed:,.0f} samples/s", "left": self._left(t, now)}
        for name in ("speed", "bar", "loss", "metric", "left"):
            text = "  ".join(part for part in parts.values() if part)
            if len(text) < width:
                return text
            parts.pop(name, None)
        return count[: width - 1]


class PlainLine:
    """A line that carriage returns overwrite, on a terminal without Rich and in notebooks."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.length = stream, 0

    def show(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self.length))
        self.stream.flush()
        self.length = len(text)

    def close(self) -> None:
        if self.length:
            self.stream.write("\n")
            self.stream.flush()


class RichLine:
    """The same with Rich, which prints warnings and other output above the line."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.stream, self.console = stream, Console(file=stream, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False)
        self.live.start()

    def show(self, text: str) -> None:
        from rich.text import Text

        self.console.width = width_of(self.stream)
        self.live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)

    def close(self) -> None:
        self.live.stop()


def progress_of(run: Run, done: int) -> Progress:
    """Return the display of a run's progress."""
    clients = f"{run.cohort_size:,} of {run.data.population:,} clients per round"
    again = f", resumed after round {done:,}" if done else ""
    many = f", in {run.ranks.size} processes" if run.ranks.several else ""
    about = f"{run.rounds:,} rounds, {clients}, {run.choices['engine']} engine on {run.choices['device']}{many}{again}"
    return Progress(run.rounds, done, about, list(run.metrics))


def kind_of(stream: TextIO) -> str:
    """Return whether a stream is a "terminal", a "notebook"'s, or a "file"."""
    if stream.isatty():
        return "terminal"
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "notebook" if stream is sys.stdout and hasattr(shell, "kernel") else "file"


def width_of(stream: TextIO) -> int:
    return shutil.get_terminal_size((100, 24)).columns if stream.isatty() else 100


def format_duration(seconds: float) -> str:
    """Return `1:05`, `2:03:04`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
