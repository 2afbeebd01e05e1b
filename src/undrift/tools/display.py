"""The progress of a run, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypeGuard

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def score(row: dict[str, Any]) -> tuple[str, float] | None:
    """The row's main figure: a metric, else the loss, on the test set or else on validation data."""
    for name in (f"{prefix}{name}" for prefix in ("", "validation_") for name in ("accuracy", "recall_at_5", "loss")):
        if number(row.get(name)):
            return name, row[name]
    return None


def marks(stopped: int, skipped: int) -> list[str]:
    """Remarks on non-finite values: how many runs stopped, and how many client updates were left out."""
    said = [f"{stopped} stopped"] if stopped else []
    return said + ([f"{skipped} client update{'s' if skipped > 1 else ''} left out"] if skipped else [])


def left_out(rows: Iterable[dict[str, Any]]) -> int:
    """How many client updates these rounds left out."""
    return sum(len(row.get("skipped", ())) + len(row.get("left_out", ())) for row in rows)


class Live:
    """A progress bar with the round, the metrics, samples per second and the time left; only on a terminal."""

    def __init__(self, console: Console, rounds: int, done: int = 0) -> None:
        self.progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=rounds, completed=done, figures="")
        self.quality, self.samples, self.began = "", 0, time.monotonic()

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def __call__(self, row: dict[str, Any]) -> None:
        found = score(row)
        if found:
            loss = f" loss {row['loss']:.4f}" if "loss" in row and found[0] != "loss" else ""
            self.quality = f"{found[0].replace('_', ' ')} {found[1]:.4f}{loss}"
        self.samples += row["samples"]
        speed = self.samples / max(time.monotonic() - self.began, 1e-9)
        self.progress.update(self.task, completed=row["round"], figures=f"{self.quality}  {speed:,.0f} samples/s")
