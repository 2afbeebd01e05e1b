"""The results of cells: one JSON file each, found by the digest of the cell's settings.

A file has the settings and their digest, the curve at every evaluated round, and where and how the cell ran. A table's
numbers are computed from curves (`figure`), so that several tables can use the same cell.
"""

from __future__ import annotations

import json
import statistics
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from undrift.errors import UndriftError
from undrift.files import write_text
from undrift.reproduce.catalogue import Cell, Figure

DEFAULT = Path("papers", "results")
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
            result = json.loads(file.read_text(encoding="utf-8"))
            self.by_digest[result["digest"]] = {**result, "file": file.relative_to(self.folder).as_posix()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UndriftError(f"{file} is not a cell's result ({error}); remove it, and run the cell again.") from None

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


def pack(files: Iterable[tuple[str, Path]], archive: Path) -> int:
    """Write files into one archive, under the given names. Returns how many."""
    count = 0
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
        for name, file in files:
            tar.add(file, name, recursive=False)
            count += 1
    return count


def unpack(archive: Path, results: Path, parts: Path) -> list[str]:
    """Extract an archive's results and unfinished cells. Returns the names of the results.

    Existing results are not replaced.
    """
    taken = []
    with tarfile.open(archive) as tar:
        for member in tar:
            where = PurePosixPath(member.name)
            safe = member.isfile() and ".." not in where.parts and not where.is_absolute() and len(where.parts) > 1
            if not safe or where.parts[0] not in ("results", "parts"):
                raise UndriftError(f"{archive} contains {member.name!r}, so it is not an archive of results.")
            opened = tar.extractfile(member)
            assert opened is not None
            content = opened.read()
            target = (results if where.parts[0] == "results" else parts).joinpath(*where.parts[1:])
            if where.parts[0] == "results":
                json.loads(content)
                if target.exists():
                    continue
                taken.append(str(PurePosixPath(*where.parts[1:])))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return taken
