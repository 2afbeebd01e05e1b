"""The results of cells: one JSON file each, found by the digest of the cell's settings.

A file has the settings and their digest, the curve at every evaluated round, and where and how the cell ran. A table's
numbers are computed from curves (`figure`), so that several tables can use the same cell.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import statistics
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from undrift.errors import UndriftError, first_line
from undrift.files import parse_json, read_text, write_text
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

    Existing results are not replaced; of a cell that is unfinished here too, the one that has trained for longer stays.
    Nothing is written unless all of the archive is as `pack` writes it.
    """
    for folder in (results, parts):
        folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".unpack-", dir=parts) as name:
        fresh = Path(name)
        found = _extract(archive, fresh)
        for inner in found["results"]:
            _inside(results, results / inner)
        for cell in {inner.parts[0] for inner in found["parts"]}:
            if (parts / cell).is_symlink():
                raise UndriftError(f"{parts / cell} is a link; remove it, or unpack with another --parts.")
        for cell in {inner.parts[0] for inner in found["parts"]}:
            _take_over(fresh / "parts" / cell, parts / cell)
        taken = [inner for inner in found["results"] if not os.path.lexists(results / inner)]
        for inner in taken:
            (results / inner).parent.mkdir(parents=True, exist_ok=True)
            write_text(results / inner, read_text(fresh / "results" / inner))
    return [str(inner) for inner in taken]


def _extract(archive: Path, folder: Path) -> dict[str, list[PurePosixPath]]:
    """Write an archive's files into a new folder. Raises `UndriftError` if they are not what `pack` writes."""
    found: dict[str, list[PurePosixPath]] = {"results": [], "parts": []}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                where = PurePosixPath(member.name)
                safe = member.isfile() and ".." not in where.parts and not where.is_absolute() and len(where.parts) > 1
                if not safe or where.parts[0] not in found:
                    raise UndriftError(f"{archive} contains {member.name!r}, so it is not an archive of results.")
                opened, target = tar.extractfile(member), folder / where
                assert opened is not None
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as out:
                    shutil.copyfileobj(opened, out)
                if where.parts[0] == "results":
                    _check(target, f"{archive}: {where}")
                found[where.parts[0]].append(PurePosixPath(*where.parts[1:]))
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        if isinstance(error, UndriftError):
            raise
        why = getattr(error, "strerror", None) or first_line(error)
        raise UndriftError(f"{archive} is not an archive of results, or is damaged ({why}).") from error
    return found


def _check(file: Path, name: str) -> None:
    try:
        parse(read_text(file))
    except ValueError as error:
        raise UndriftError(f"{name} is not a cell's result ({first_line(error)}); nothing was unpacked.") from None


def _inside(folder: Path, file: Path) -> None:
    """Raise if a file would be written somewhere else, through a link."""
    if not Path(os.path.realpath(file.parent)).is_relative_to(os.path.realpath(folder)):
        raise UndriftError(
            f"{file.parent} is outside of {folder}, by a link; remove the link, or choose another --out."
        )


def _take_over(fresh: Path, there: Path) -> None:
    """Move an unfinished cell to its place, unless the one there has trained for longer."""
    if fresh.is_dir() and there.is_dir():
        if _seconds(there) >= _seconds(fresh):
            return
        shutil.rmtree(there)
    elif there.exists() and (fresh.is_dir() or there.is_dir()):
        raise UndriftError(
            f"{there} is not what the archive has under this name; remove it, or choose another --parts."
        )
    fresh.replace(there)


def _seconds(cell: Path) -> float:
    """How long an unfinished cell has trained."""
    try:
        return float(parse_json(read_text(cell / "part.json"))["seconds"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0
