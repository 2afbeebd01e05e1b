"""Archives of results and of unfinished cells, which are complete whenever the call that writes them is killed."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import BinaryIO

from papers.results import parse
from undrift.errors import UndriftError, first_line
from undrift.files import DamagedError, parse_json, read_text, remove_partial, replacing, write_text
from undrift.training.checkpoint import files_of, rounds_in
from undrift.training.run_folder import CHECKPOINT

OFTEN = 60.0
"""The seconds after which the archives are written again if there is anything new."""
BESIDE = ("part.json", "run/run.json", "run/config.toml", "run/partition.json", "run/metrics.jsonl")
"""What a cell continues from, in addition to its checkpoints."""


class Archive:
    """The results of a call in `file`, and all unfinished cells in `parts-` and its name.

    Both files are replaced as a whole, the results first: a cell that has left the unfinished ones is among the results
    by then. So a killed call leaves two archives that have everything up to the last time.
    """

    def __init__(self, file: Path, results: Path, parts: Path) -> None:
        self.file, self.results, self.parts = file, results, parts
        self.more = file.with_name(f"parts-{file.name}")
        self.before = _results_in(results)
        self.seen: object = None
        """What there was when the archives were last written."""
        self.looked = 0.0
        file.parent.mkdir(parents=True, exist_ok=True)
        for name in (self.file.name, self.more.name):
            remove_partial(file.parent, re.compile(re.escape(name)))

    def keep_up(self) -> None:
        """Write both archives if there is a new result or checkpoint, for which this looks once a minute."""
        if time.monotonic() - self.looked >= OFTEN:
            self.looked = time.monotonic()
            if self._now() != self.seen:
                self.write()

    def write(self) -> int:
        """Write both archives. Returns the number of results."""
        self.seen, self.looked = self._now(), time.monotonic()
        with replacing(self.more) as more, replacing(self.file) as results:
            pack(unfinished(self.parts), more)
            new = [file for file, when in _results_in(self.results).items() if self.before.get(file) != when]
            names = [f"results/{file.relative_to(self.results).as_posix()}" for file in new]
            pack(zip(names, (BytesIO(file.read_bytes()) for file in new), strict=True), results)
        return len(new)

    def _now(self) -> object:
        return _results_in(self.results), _rounds_in(self.parts)


def _results_in(folder: Path) -> dict[Path, int]:
    """Return the files of results, and when each was written."""
    return {file: file.stat().st_mtime_ns for file in sorted(folder.rglob("*.json"))}


def _rounds_in(parts: Path) -> dict[Path, list[int]]:
    """Return the folders of unfinished cells, and the rounds of each one's checkpoints."""
    cells = (file for file in sorted(parts.glob("[!.]*")) if file.is_dir())
    return {cell: rounds_in(cell / "run" / CHECKPOINT) for cell in cells}


def unfinished(parts: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Yield the files of cells that have a checkpoint, and the logs of processes. Cells may train or end meanwhile.

    The rounds of all cells are read at once: cells in one program save one after another, and continue from a round of
    which all of them have a checkpoint.
    """
    for cell, rounds in _rounds_in(parts).items():
        with ExitStack() as stack:
            opened = _opened(cell, rounds, stack) or _opened(cell, rounds_in(cell / "run" / CHECKPOINT), stack)
            for name, file in opened.items():
                yield f"parts/{cell.name}/{name}", file
    for log in sorted(parts.glob("[!.]*.log")):
        yield f"parts/{log.name}", BytesIO(log.read_bytes())


def _opened(cell: Path, rounds: list[int], stack: ExitStack) -> dict[str, BinaryIO]:
    """Return a cell's files by name, all of them open, so that none is removed or replaced before it is read.

    A checkpoint that is removed meanwhile is left out. Without any, there are no files.
    """
    found: dict[str, BinaryIO] = {}
    for number in rounds:
        with suppress(DamagedError, FileNotFoundError):
            names = [f"run/{CHECKPOINT}/{name}" for name in files_of(cell / "run" / CHECKPOINT, number)]
            found |= {name: stack.enter_context((cell / name).open("rb")) for name in names}
    for name in BESIDE if found else ():
        with suppress(FileNotFoundError):
            found[name] = stack.enter_context((cell / name).open("rb"))
    return found


def pack(files: Iterable[tuple[str, BinaryIO]], archive: Path) -> None:
    """Write files into one archive, under the given names."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:  # weights hardly compress
        for name, file in files:
            entry = tarfile.TarInfo(name)
            entry.size = file.seek(0, os.SEEK_END)  # a log or a history may grow
            file.seek(0)
            tar.addfile(entry, file)


def unpack(archive: Path, results: Path, parts: Path) -> list[str]:
    """Extract an archive's results and unfinished cells. Returns the names of the results.

    Existing results are not replaced; of a cell that is unfinished here too, the one that has come further stays.
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
    """Move an unfinished cell to its place, unless the one there has come further."""
    if fresh.is_dir() and there.is_dir():
        if _progress(there) >= _progress(fresh):
            return
        shutil.rmtree(there)
    elif there.exists() and (fresh.is_dir() or there.is_dir()):
        raise UndriftError(
            f"{there} is not what the archive has under this name; remove it, or choose another --parts."
        )
    fresh.replace(there)


def _progress(cell: Path) -> tuple[int, float]:
    """Return from which round an unfinished cell can continue, and how long it has trained."""
    rounds = max(rounds_in(cell / "run" / CHECKPOINT), default=0)
    try:
        return rounds, float(parse_json(read_text(cell / "part.json"))["seconds"])
    except (OSError, ValueError, LookupError, TypeError):
        return rounds, 0.0
