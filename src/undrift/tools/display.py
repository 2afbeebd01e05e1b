"""A run in a few words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from undrift.training.rows import number

__all__ = ["left_out", "marks", "number", "score"]


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
