"""A table's figures over the seeds that have finished, and which of its variants it uses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from papers.catalogue import Cell, Figure, Table
from papers.results import Result, Results, figure, over_seeds, series
from undrift.errors import unknown


@dataclass(frozen=True)
class Measured:
    """A figure of one column and row over the seeds that have finished."""

    mean: float | None = None
    """Over the seeds that have a value; those that diverged or missed their target have none."""
    std: float | None = None
    seeds: int = 0
    """How many have finished, including those that diverged or missed their target."""
    diverged: int = 0
    missed: int = 0
    """Seeds that never reached the target."""

    @property
    def whole(self) -> bool:
        """Whether the mean includes every finished seed."""
        return self.mean is not None and not self.diverged and not self.missed


def chosen_variant(table: Table, results: Results) -> str | None:
    """The variant that a table uses.

    Variants are tried in order. The first whose calibration row reaches the value, on average over all of the table's
    seeds, is used; if none does, the best of them. One seed that diverged rules a variant out, whatever the others do.

    Returns:
        The variant's name, "" for a table without variants, or None while calibration runs are missing.
    """
    if not table.variants:
        return ""
    if len(table.variants) == 1 or table.calibration is None:
        return table.variants[0]
    which = find(table, table.calibration["figure"])
    sign = -1.0 if which.lower else 1.0
    reached: dict[str, float] = {}
    for variant in table.variants:
        if undecided(table, variant, results):
            return None
        found = calibrated(table, variant, results)
        reached[variant] = sign * found.mean if found.whole and found.mean is not None else -math.inf
        if reached[variant] >= sign * table.calibration["reaches"]:
            return variant
    return max(reached, key=lambda variant: reached[variant])


def undecided(table: Table, variant: str, results: Results) -> bool:
    """Whether calibration runs are missing that could still decide how good a variant is."""
    found = calibrated(table, variant, results)
    return found.seeds < len(table.seeds) and not found.diverged and not found.missed


def calibrated(table: Table, variant: str, results: Results) -> Measured:
    """The figure by which variants are chosen. Without a `column`, the table's first is used."""
    calibration = table.calibration
    assert calibration is not None
    column = calibration.get("column", table.columns[0])
    return measured(find(table, calibration["figure"]), table.at(column, calibration["row"], variant), results)


def measured(which: Figure, cells: Iterable[Cell], results: Results) -> Measured:
    """The figure over these cells, which differ in their seeds."""
    found = [result for cell in cells if (result := results.get(cell)) is not None]
    values = [reading(which, result) for result in found]
    good = [result for result, x in zip(found, values, strict=True) if x is not None and math.isfinite(x)]
    mean, std, _ = over_seeds(which, good) or (None, None, 0)
    broken = sum(diverged(which, result) for result in found)
    missed = sum(x is not None and math.isinf(x) for x in values) - broken
    return Measured(mean, std, sum(x is not None for x in values), broken, missed)


def diverged(which: Figure, result: Result) -> bool:
    """Whether the run was stopped, or its figure is not finite."""
    if result.get("stopped"):
        return True
    value = figure(which, result)
    return value is not None and not math.isfinite(value)


def reading(which: Figure, result: Result) -> float | None:
    """One run's figure; infinitely bad if it diverged or missed its target, None if its curve lacks the column."""
    worst = math.inf if which.lower else -math.inf
    if diverged(which, result):
        return worst
    value = figure(which, result)
    if value is None and which.take == "reach" and series(result, which.column):
        return worst
    return value


def published(table: Table, which: Figure, column: str, row: str) -> str:
    """The paper's number as printed, or "" if it has none, as for scaled-down runs."""
    return _entry(table, which.published, column, row)


def calculated(table: Table, which: Figure, column: str, row: str) -> str:
    """The number that we calculated because the paper prints none, or ""."""
    return _entry(table, which.calculated, column, row)


def expected(table: Table, which: Figure, column: str, row: str) -> str:
    """The paper's number, or the one that we calculated in its place, or ""."""
    return published(table, which, column, row) or calculated(table, which, column, row)


def _entry(table: Table, numbers: dict[str, list[str]], column: str, row: str) -> str:
    if quick(table):
        return ""
    entries = numbers.get(row, [])
    place = table.columns.index(column)
    return entries[place] if place < len(entries) else ""


def find(table: Table, name: str) -> Figure:
    """The table's figure of this name."""
    for which in table.figures:
        if which.name == name:
            return which
    raise unknown(f"figure of {table.paper}'s {table.name}", name, [which.name for which in table.figures])


def quick(table: Table) -> bool:
    """Whether this is the scaled-down table."""
    return any(cell.quick for cell in table.cells)


def shortfall(found: Measured) -> str:
    """How many seeds have no value, and why; "" if all have one."""
    said = [("diverged", found.diverged), ("not reached", found.missed)]
    return ", ".join(
        word if count == found.seeds else f"{word} ({count} of {found.seeds} seeds)" for word, count in said if count
    )
