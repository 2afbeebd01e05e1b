"""A run in a few words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from undrift.columns import reserved
from undrift.metrics import METRICS
from undrift.training.history import number

__all__ = ["left_out", "marks", "number", "score"]


def score(row: dict[str, Any], named: Iterable[str] = ()) -> tuple[str, float] | None:
    """The row's main figure: the run's first metric, or else the loss, on the test set or else on validation data.

    A row has the metrics in the order in which `metrics` lists them. Those with a name of their own are recognized if
    they are among the `named`, or were measured on validation data or on clients' own data as well.
    """
    known = {*METRICS, *named}
    for prefix in ("", "validation_"):
        found = [name for name in row if name.startswith(prefix) and _is_metric(name.removeprefix(prefix), row, known)]
        for name in (*found, f"{prefix}loss"):
            if number(row.get(name)):
                return name, row[name]
    return None


def _is_metric(name: str, row: dict[str, Any], known: set[str]) -> bool:
    twins = (f"validation_{name}", f"client_{name}") if name != "loss" else ()
    return name in known or (not reserved(name) and any(twin in row for twin in twins))


def marks(stopped: int, skipped: int) -> list[str]:
    """Remarks on non-finite values: how many runs stopped, and how many client updates were left out."""
    said = [f"{stopped} stopped"] if stopped else []
    return said + ([f"{skipped} client update{'s' if skipped > 1 else ''} left out"] if skipped else [])


def left_out(rows: Iterable[dict[str, Any]]) -> int:
    """How many client updates these rounds left out."""
    return sum(len(row.get("skipped", ())) + len(row.get("left_out", ())) for row in rows)
