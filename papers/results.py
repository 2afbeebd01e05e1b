"""The results of cells: one JSON file each, found by the digest of the cell's settings.

A file has the settings and their digest, the curve at every evaluated round, and where and how the cell ran. A table's
numbers are computed from curves (`figure`), so that several tables can use the same cell.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from papers.catalogue import Cell, Figure
from undrift.errors import UndriftError, first_line
from undrift.files import parse_json, read_text, write_text

CLONE = Path(__file__).parent.parent
"""The clone that this folder belongs to."""
DEFAULT = Path("papers", "results")
"""The folder of results, in the clone."""
Result = dict[str, Any]


class Results:
    """The result files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_digest: dict[str, Result] = {}
        for file in sorted(folder.rglob("*.json")) if folder.exists() else ():
            self._take(file)

    def _take(self, file: Path) -> None:
        try:
            result = parse(read_text(file))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            raise UndriftError(f"{file} is not a cell's result ({why}); remove it, and run the cell again.") from None
        self.by_digest[result["digest"]] = {**result, "file": file.relative_to(self.folder).as_posix()}

    def get(self, cell: Cell) -> Result | None:
        """Return the cell's result, which may come from another table's cell with the same settings."""
        return self.by_digest.get(cell.digest)

    def add(self, cell: Cell, result: Result) -> Path:
        """Write the result of a finished cell."""
        file = self.folder / f"{cell.key}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, render({"cell": cell.key, "digest": cell.digest, **result}))
        self._take(file)
        return file


def parse(content: str | bytes) -> Result:
    """Return the result that a file holds. Raises `ValueError` if it holds none."""
    result = parse_json(content)
    if not isinstance(result, dict) or not isinstance(result.get("digest"), str):
        raise ValueError("it has no digest")
    curve = result.get("curve", {})
    if not isinstance(curve, dict) or not all(isinstance(column, list) for column in curve.values()):
        raise ValueError("its curve has no columns")
    if len({len(column) for column in curve.values()}) > 1 or (curve and "round" not in curve):
        raise ValueError("its curve has no rounds")
    if not isinstance(result.get("seconds", 0.0), int | float):
        raise ValueError("its seconds are no number")
    return result


def render(result: Result) -> str:
    """JSON with one line per entry, and one line per column of the curve."""
    lines = []
    for name, value in result.items():
        if name == "curve":
            inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(column)}" for key, column in value.items())
            lines.append(f' "curve": {{\n{inner}\n }}')
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def series(result: Result, column: str) -> list[tuple[int, float]]:
    """Return a column of the curve as (round, value), without rounds that have no value."""
    curve = result["curve"]
    if column not in curve:
        return []
    return [(t, x) for t, x in zip(curve["round"], curve[column], strict=True) if x is not None]


def figure(which: Figure, result: Result) -> float | None:
    """Return the figure of one cell, in the units of the paper's table; None if the curve does not have it."""
    points = series(result, which.column)
    if not points:
        return None
    values = [which.scale * x for _, x in points]
    if which.smooth > 1:
        values = [statistics.fmean(values[max(0, i + 1 - which.smooth) : i + 1]) for i in range(len(values))]
    if which.take == "last":
        return statistics.fmean(values[-which.rounds :])
    if which.take in ("best", "peak"):
        return max(values)
    if which.take == "least":
        return min(values)
    if which.take == "at":
        return dict(zip((t for t, _ in points), values, strict=True)).get(which.rounds)
    if which.take == "reach":
        assert which.target is not None
        return next((float(t) for (t, _), x in zip(points, values, strict=True) if x >= which.target), None)
    raise UndriftError(f"There is no way to take a figure called {which.take!r}.")


def over_seeds(which: Figure, results: Iterable[Result]) -> tuple[float, float | None, int] | None:
    """Mean, standard deviation and number of seeds; "peak" is that of the mean curve, without a deviation."""
    found = list(results)
    if which.take == "peak" and found:
        curves = [dict(series(result, which.column)) for result in found]
        common = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not common:
            return None
        return which.scale * max(statistics.fmean(curve[t] for curve in curves) for t in common), None, len(found)
    values = [value for result in found if (value := figure(which, result)) is not None]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)
