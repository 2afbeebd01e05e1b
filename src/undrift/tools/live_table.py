"""The progress of many runs: a live table on a terminal, elsewhere a line every 30 seconds.

It is read from the folders of the runs, so any process may train them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from undrift.files import open_regular, parse_json
from undrift.tools.output import say
from undrift.tools.run_folders import main_figure

EVERY = 30.0
"""Seconds between two lines where there is no terminal."""
SHOWN = 12
"""The most runs in progress that are listed."""
TAIL = 2**16
"""The most bytes of a history that are read to find its last row."""


class LiveTable:
    """The runs of a sweep or a study: how many are done, which are in progress, and the round of each."""

    def __init__(self, console: Console, head: Callable[[], RenderableType] | None = None) -> None:
        self.console, self.head = console, head
        self.began, self.started = time.time(), time.monotonic()
        self.total = self.ended = self.skipped = 0
        self.open: dict[Path, int] = {}
        """The rounds of each run that has not ended, by its folder."""
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=True)
        self.closed = threading.Event()

    def __enter__(self) -> LiveTable:
        if self.console.is_terminal:
            self.live.start()
        else:
            threading.Thread(target=self._lines, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        self.live.stop()

    def add_runs(self, runs: dict[Path, int], done: int) -> None:
        """Add waiting runs, with their rounds by folder, and the number of those that are done already."""
        self.open = {**self.open, **runs}
        self.total += len(runs) + done
        self.ended += done
        self.skipped += done

    def end_run(self, folder: Path) -> None:
        """Note that a run has ended, whether it finished or failed."""
        self.open = {other: rounds for other, rounds in self.open.items() if other != folder}
        self.ended += 1

    def say(self, text: str) -> None:
        """Print a line about a run, above the table."""
        if self.console.is_terminal:
            self.console.print(text)
        else:
            say(text, err=True)

    def running(self) -> Iterable[tuple[Path, int, dict[str, Any]]]:
        """The runs in progress: folder, rounds, and the last row of the history, if there is one."""
        for folder, rounds in self.open.items():
            file = folder / "metrics.jsonl"
            try:
                if file.stat().st_mtime >= self.began:  # otherwise it was left by an earlier command
                    yield folder, rounds, last_row(file)
            except OSError:
                pass

    def time_left(self) -> str:
        """An estimate from the runs that have ended; empty if there are none."""
        own = self.ended - self.skipped
        if not own or self.ended == self.total:
            return ""
        seconds = round((time.monotonic() - self.started) / own * (self.total - self.ended))
        return f"about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"

    def render(self) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            "runs", f"{self.ended}/{self.total}", ProgressBar(max(self.total, 1), self.ended, 20), self.time_left()
        )
        rows = Table.grid(padding=(0, 2))
        running = list(self.running())
        for folder, rounds, row in running[:SHOWN]:
            rows.add_row(f"  {folder.name}", *_describe(rounds, row))
        if len(running) > SHOWN:
            rows.add_row(f"  and {len(running) - SHOWN} more")
        return Group(*([self.head()] if self.head else []), bar, rows)

    def _lines(self) -> None:
        while not self.closed.wait(EVERY):
            say(self.line(), err=True)

    def line(self) -> str:
        running = [f"{folder.name} ({', '.join(filter(None, _describe(n, row)))})" for folder, n, row in self.running()]
        more = f" and {len(running) - 4} more" if len(running) > 4 else ""
        parts = [
            f"{self.ended} of {self.total} runs",
            self.time_left(),
            f"running: {', '.join(running[:4])}{more}" if running else "",
        ]
        return "; ".join(filter(None, parts))


def _describe(rounds: int, row: dict[str, Any]) -> tuple[str, str]:
    figure = main_figure(row)
    text = f"{figure[0].replace('_', ' ')} {figure[1]:.4f}" if figure else ""
    return f"round {row.get('round', 0)} of {rounds}", text


def last_row(file: Path) -> dict[str, Any]:
    """The last complete row of a history; empty if there is none, or if it is very long."""
    with open_regular(file) as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - TAIL))
        lines = opened.read().splitlines(keepends=True)
    for line in reversed(lines[0 if size <= TAIL else 1 :]):
        try:
            row = parse_json(line)
        except ValueError:  # being written just now
            continue
        return row if isinstance(row, dict) else {}
    return {}
