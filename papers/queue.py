"""Which cells to run, in which order, and how long each is expected to take."""

from __future__ import annotations

import statistics
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from papers.catalogue import FOLDER, Cell, Table, cells, papers
from papers.readings import chosen_variant, undecided
from papers.results import Results
from undrift.errors import UndriftError

REFERENCE = "H200"
"""The GPU to which the files' estimates apply."""


def ordered(tables: list[Table], results: Results) -> Iterator[Cell]:
    """Yield the tables' remaining cells, the most valuable first.

    `experiments/queue.toml` lists the most valuable; all others follow in the order of the files. Seeds are in the
    outer loop, so that every row has its first seed before any has its second. For a table with variants, only the
    calibration row is run until a variant is chosen, and then only that variant. A cell that takes its number of
    samples from others comes after them.
    """
    waiting = [cell for cell in _undone(tables, results) if not first_needed(cell, results)]
    seen: set[str] = set()
    for wanted in [*_first(), {}]:
        chosen = [cell for cell in waiting if _fits(cell, wanted)]
        rows = wanted.get("rows", [])
        for cell in sorted(chosen, key=lambda cell: (cell.seed, rows.index(cell.row) if rows else 0)):
            if cell.digest not in seen:
                seen.add(cell.digest)
                yield cell


def first_needed(cell: Cell, results: Results) -> list[Cell]:
    """Return the cells that must finish before this one, since it takes its number of samples from them."""
    return [other for other in _decisive(cell) if results.get(other) is None]


def held_back(tables: list[Table], results: Results) -> dict[str, int]:
    """Return how many cells must wait for another table, by its name."""
    waiting = (cell for cell in _undone(tables, results) if first_needed(cell, results))
    return dict(Counter(cell.options["samples_of"] for cell in waiting))


def with_samples(cell: Cell, results: Results) -> Cell:
    """Return the cell with as many samples as the longest of those that decide it has used."""
    decisive = [(other, results.by_digest[other.digest]) for other in _decisive(cell)]
    for other, result in decisive:
        if result["stopped"] or (result["rounds"] >= int(other.settings["rounds"]) and not cell.quick):
            why = "became non-finite" if result["stopped"] else "reached its last round"
            raise UndriftError(f"{other.key} decides how many samples {cell.key} may use, but it {why}.")
    used = [result["processed"] for _, result in decisive]
    return replace(cell, options={**cell.options, "samples": max(used)}) if used else cell


def _decisive(cell: Cell) -> list[Cell]:
    name = cell.options.get("samples_of")
    table = papers(cell.quick)[cell.paper].tables[name] if name else None
    return [other for other in table.cells if other.column == cell.column] if table else []


@cache
def _first() -> list[dict[str, Any]]:
    with (FOLDER / "queue.toml").open("rb") as opened:
        return list(tomllib.load(opened)["first"])


def _fits(cell: Cell, wanted: dict[str, Any]) -> bool:
    """Return whether an entry of `queue.toml` matches this cell; keys that it does not have match anything."""
    return (
        cell.paper == wanted.get("paper", cell.paper)
        and cell.table == wanted.get("table", cell.table)
        and cell.column in wanted.get("columns", [cell.column])
        and cell.row in wanted.get("rows", [cell.row])
        and cell.seed in wanted.get("seeds", [cell.seed])
    )


def _undone(tables: list[Table], results: Results) -> list[Cell]:
    """Return the cells that are to be run, and have no result yet."""
    return [cell for table in tables for cell in _open(table, results) if results.get(cell) is None]


def _open(table: Table, results: Results) -> list[Cell]:
    """Return the cells that can be run now."""
    if not table.variants or table.calibration is None:
        return table.cells
    variant = chosen_variant(table, results)
    if variant is not None:
        return [cell for cell in table.cells if cell.variant == variant]
    first = next(variant for variant in table.variants if undecided(table, variant, results))
    return [cell for cell in table.cells if cell.row == table.calibration["row"] and cell.variant == first]


def slower(beside: int) -> float:
    """Return how much longer cells in one program are expected to take than one of them alone."""
    return (1 + beside) / 2


class Costs:
    """Seconds per cell, from cells that were run on the same hardware, or from the files' estimates."""

    def __init__(self, results: Results, hardware: str) -> None:
        self.hardware = hardware
        found = ((c, results.get(c)) for paper in papers().values() for c in cells(paper.tables.values()))
        self.measured: list[tuple[Cell, float]] = [
            (cell, result["seconds"] / slower(result.get("beside", 1)))
            for cell, result in found
            if result and result["hardware"] == hardware
        ]

    def seconds(self, cell: Cell) -> float | None:
        """Return the expected time for the cell here, from the most similar cells; None if unknown."""
        for alike in (("paper", "table", "column", "row"), ("paper", "table", "row"), ("paper", "table")):
            same = [
                seconds / float(other.settings["rounds"])
                for other, seconds in self.measured
                if all(getattr(other, name) == getattr(cell, name) for name in alike)
            ]
            if same:
                return statistics.fmean(same) * float(cell.settings["rounds"])
        return 60 * cell.minutes if cell.minutes is not None and REFERENCE in self.hardware else None

    def total(self, cells: Iterable[Cell]) -> float | None:
        """Return the expected time for all these cells; None if one is unknown."""
        found = [self.seconds(cell) for cell in cells]
        return sum(x for x in found if x is not None) if None not in found else None
