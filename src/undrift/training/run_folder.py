"""A run's folder: its settings, its rows, its model, and what identifies it (`run.json`).

Whoever reads folders finds here what is in them; `Folder` is that of a run under way, and `ReplacedFolder` that of one
which takes the folder of another run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from undrift.engine.ranks import Ranks
from undrift.errors import UndriftError, first_line, quoted
from undrift.files import (
    PARTIAL,
    DamagedError,
    digest,
    lock,
    parse_json,
    read_bytes,
    read_text,
    regular,
    remove_partial,
    replacing,
    seal,
    sync,
    unseal,
    verify,
    write_text,
)
from undrift.training import safetensors_io

log = logging.getLogger("undrift")

STOPPED = "stopped.json"
"""The file that says why a run stopped at a non-finite value."""
RUN = "run.json"
"""The run's identity and when it started and resumed, written first; at the end, the checksums of the results."""
RESULTS = ("model.safetensors", "metrics.jsonl")
OURS = re.compile(r"run\.json|config\.toml|partition\.json|metrics\.jsonl|model\.safetensors|stopped\.json")
"""The files that a run writes. It touches no others."""
CHECKPOINT = "checkpoint"
"""The folder of checkpoints in a run's folder."""
CHECKPOINT_FILES = re.compile(
    r"round-(0|[1-9]\d*)\.(json|safetensors)|(clients|slots)-\d+\.safetensors|rows-\d+\.jsonl|kept-\d+\.bin"
)
"""The names of our files in `checkpoint/`. All others are left alone."""


def as_json(row: dict[str, Any]) -> str:
    """Return a row as one line of JSON, with null for NaN and infinity."""
    try:
        return json.dumps(row, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(row), default=_plain)


def _plain(x: Any) -> Any:
    """Return tensors and arrays, which a part's history may contain, as lists; anything else as a string."""
    return x.tolist() if hasattr(x, "tolist") else str(x)


def _without_nan(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _without_nan(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_without_nan(value) for value in x]
    if hasattr(x, "tolist"):
        return _without_nan(x.tolist())
    return None if isinstance(x, float) and not math.isfinite(x) else x


def stopped(folder: Path) -> str | None:
    """Return why the run in this folder stopped at a NaN or infinite value, or None if it did not.

    Raises:
        DamagedError: If its `stopped.json` cannot be read.
    """
    file = folder / STOPPED
    if not os.path.lexists(file):
        return None
    try:
        return str(parse_json(read_text(file))["why"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedError(f"{file} cannot be read ({first_line(error)}).") from error


def finished(folder: Path) -> bool:
    """Return whether the run in this folder has ended: its model is written last."""
    return (folder / "model.safetensors").exists()


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl` up to the first incomplete one, which a crash or a running run leaves."""
    file = folder / "metrics.jsonl"
    return parse_history(read_bytes(file)) if file.exists() else []


def parse_history(content: bytes) -> list[dict[str, Any]]:
    """Return the rows of a history, up to the first incomplete one. Raises `ValueError` for what no run writes."""
    rows: list[dict[str, Any]] = []
    for line in content.decode("utf-8").splitlines():
        try:
            rows.append(parse_json(line))
        except json.JSONDecodeError:
            break
    return rows


def recorded(folder: Path) -> dict[str, Any] | None:
    """Return the contents of the folder's `run.json`, or None, with a warning, if it cannot be read."""
    try:
        return as_record(unseal(folder / RUN), folder / RUN)
    except DamagedError as error:
        log.warning("%s", error)
        return None


RECORD = {
    "config": str, "identity": dict, "versions": dict, "choices": dict, "started": dict, "resumed": list,
    "results": dict,
}  # fmt: skip
"""What `run.json` and checkpoints have of a run, as far as it is looked at, and its types."""


def as_record(record: Any, file: Path) -> dict[str, Any]:
    """Return what a file has of a run. Raises `DamagedError` if no run can have written it, although it is sealed."""
    if not isinstance(record, dict):
        raise DamagedError(f"{file} holds no record of a run.")
    for name, kind in RECORD.items():
        if record.get(name) is not None and not isinstance(record[name], kind):
            raise DamagedError(f"{file} holds no record of a run: {name} is {quoted(record[name])}.")
    try:
        tomllib.loads(record.get("config") or "")
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{file} holds no record of a run: its config is not TOML.") from error
    return record


def complete(known: dict[str, Any] | None) -> bool:
    """Return whether a record has what a run is resumed by."""
    if known is None or not all(known.get(name) for name in ("config", "identity", "versions")):
        return False
    texts = [*known["identity"].values(), *known["versions"].values()]
    return all(isinstance(text, str) for text in texts) and known["identity"].get("rounds", "").isdecimal()


def intact(folder: Path, known: dict[str, Any]) -> bool:
    """Return whether the results of a finished run match the checksums in `run.json`; warns if they do not."""
    try:
        for name in RESULTS:
            verify(folder / name, (known.get("results") or {}).get(name, "unknown"))
    except DamagedError as error:
        log.warning("%s", error)
        return False
    return True


def _text(file: Path) -> str | None:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError):
        return None


class Folder:
    """A run's folder: settings, the partition, `metrics.jsonl`, which grows with the rounds, and finally the model.

    Without a path, nothing is written. A new run needs an empty or a new folder, so that a run only ever replaces or
    removes its own files.
    """

    def __init__(self, path: str | os.PathLike[str] | None, resume: bool = False) -> None:
        if not (path is None or isinstance(path, str | os.PathLike)) or path == "":
            raise UndriftError(f"out must be the path of a folder, not {path!r}; leave it out to write no files.")
        self.path = None if path is None else Path(path)
        self.resume = resume
        self.metrics: TextIO | None = None
        self.held = ExitStack()
        self.made: list[Path] = []
        """The folders that did not exist before, the run's own first."""
        self.record: dict[str, Any] = {}
        """The contents of `run.json`."""
        if resume and not self.path:
            raise UndriftError("resume=True needs the folder of the run; pass out=….")
        if resume and self.path and not any((self.path / name).exists() for name in (RUN, "config.toml")):
            raise UndriftError(f"{self.path} contains no run to resume; leave resume out to start one there.")

    def __enter__(self) -> Folder:
        if self.path:
            if self.path.exists() and not self.path.is_dir():
                raise UndriftError(f"{self.path} is not a folder; choose another path for this run.")
            self.made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UndriftError(
                    f"The folder {self.path} cannot be created ({error.strerror}); choose another."
                ) from error
            self.held.enter_context(lock(self.path))
            try:
                self.refuse_others()
            except BaseException:
                self.held.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.metrics:
            self.metrics.close()
        if not self.record:  # nothing has been written
            with suppress(OSError):  # somebody else has
                for path in self.made:
                    path.rmdir()
        self.held.close()

    def refuse_others(self) -> None:
        """Raise if a new run's folder is not empty, or if a resumed run's files are not regular files."""
        assert self.path
        present = {file.name: file for file in self.path.iterdir() if not PARTIAL.fullmatch(file.name)}
        if not self.resume:
            if "config.toml" in present:
                raise UndriftError(
                    f"{self.path} already contains a run. Choose another folder, resume that run, or replace it with "
                    "undrift run --force."
                )
            other = sorted(name for name in present if name != RUN)  # which a run that failed at once leaves behind
            if other:
                raise UndriftError(
                    f"{self.path} is not empty: it contains {other[0]!r}. Choose a new or an empty folder for the run."
                )
        for name, file in present.items():
            if OURS.fullmatch(name) and not regular(file):
                raise UndriftError(f"{file} is a link or a folder, not a file of this run; remove it to continue.")
        checkpoint = present.get(CHECKPOINT)
        if checkpoint and (checkpoint.is_symlink() or not checkpoint.is_dir()):
            raise UndriftError(f"{checkpoint} is a link or a file, not a folder of this run; remove it to continue.")

    @property
    def finished(self) -> bool:
        return bool(self.path and finished(self.path))

    def recorded(self) -> dict[str, Any] | None:
        """Return the contents of `run.json`; None if it cannot be read."""
        assert self.path
        return recorded(self.path)

    def config(self, text: str) -> None:
        """Write `config.toml`, from which the run can be repeated, unless it is there."""
        if self.path and _text(self.path / "config.toml") != text:
            write_text(self.path / "config.toml", text)

    def partition(self, summary: dict[str, Any]) -> None:
        """Write a summary of the partition."""
        if self.path:
            write_text(self.path / "partition.json", json.dumps(summary))

    def rows(self) -> list[dict[str, Any]]:
        return history(self.path) if self.path else []

    def note(self, record: dict[str, Any]) -> None:
        """Write the run's identity, before anything else."""
        self.record = record
        if self.path:
            remove_partial(self.path, OURS)
            seal(self.path / RUN, record)

    def begin(self, rows: list[dict[str, Any]]) -> None:
        """Continue after these rounds: later ones are removed, and the run no longer counts as finished."""
        if self.path:
            (self.path / "model.safetensors").unlink(missing_ok=True)
            (self.path / STOPPED).unlink(missing_ok=True)
            with replacing(self.path / "metrics.jsonl") as partial:
                self.metrics = partial.open("a", encoding="utf-8")
                for row in rows:
                    self.row(row)

    def row(self, row: dict[str, Any]) -> None:
        if self.metrics:
            self.metrics.write(as_json(row) + "\n")
            self.metrics.flush()

    def sync(self) -> None:
        """Flush all rows to the disk."""
        if self.metrics and self.path:
            os.fsync(self.metrics.fileno())
            sync(self.path)

    def stopped(self, why: str) -> None:
        """Record why the run stopped; it can still be resumed."""
        if self.path:
            write_text(self.path / STOPPED, json.dumps({"why": why}))

    def model(self, model: nn.Module, diverged: dict[str, str] | None) -> None:
        """Write the trained model, which marks the run as finished, and what is wrong with it, if something is."""
        if self.path:
            self.sync()
            with replacing(self.path / "model.safetensors") as partial:
                safetensors_io.write_model(model, partial)
                sums = {"model.safetensors": digest(partial), "metrics.jsonl": digest(self.path / "metrics.jsonl")}
                seal(self.path / RUN, {**self.record, "results": sums, "diverged": diverged})

    def load(self, model: nn.Module) -> None:
        """Load the finished run's weights into `model`."""
        assert self.path
        safetensors_io.read_model(model, self.path / "model.safetensors")


# ---- a folder that had another run ---------------------------------------------------------------------------------

REMOVED = re.compile(rf"{OURS.pattern}|report\.html")
"""The files of a run, and the one that `undrift report` writes into its folder."""


class ReplacedFolder(Folder):
    """The folder of a new run, in which there may be another: that one is removed before anything is written.

    Only files that undrift wrote are removed. `run.json` stays until the new one takes its place, so a run that is half
    removed is still recognized as one.
    """

    def refuse_others(self) -> None:
        """Raise if the folder is not a run's, or has anything else in it. Nothing is removed yet."""
        assert self.path
        self.old = list(_files(self.path))

    def note(self, record: dict[str, Any]) -> None:
        """Remove the old run and write the new one's identity: everything has been checked, and training can start."""
        assert self.path
        for path in self.old:
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        sync(self.path)
        super().note(record)


def _files(folder: Path) -> Iterator[Path]:
    """What to remove before `run.json` is replaced. Raises for anything that a run does not write."""
    if not any(folder.iterdir()):
        return
    try:
        unseal(folder / RUN)
    except DamagedError as error:
        raise UndriftError(
            f"--force replaces only runs, and {folder} is not one: {error} Choose another --out, or remove it yourself."
        ) from None
    checkpoints = folder / CHECKPOINT
    own = checkpoints.is_dir() and not checkpoints.is_symlink()
    if own:
        files = sorted(checkpoints.iterdir(), key=lambda file: file.suffix != ".json")  # which make a checkpoint one
        yield from (_ours(file, CHECKPOINT_FILES) for file in files)
        yield checkpoints
    for file in folder.iterdir():
        if file.name != RUN and not (own and file == checkpoints):
            yield _ours(file, REMOVED)


def _ours(file: Path, names: re.Pattern[str]) -> Path:
    partial = PARTIAL.fullmatch(file.name)
    if regular(file) and names.fullmatch(partial[1] if partial else file.name):
        return file
    raise UndriftError(
        f"{file} is not one of the files that --force removes: those that a run itself writes. Move it away, or choose "
        "another --out."
    )


# ---- several processes ---------------------------------------------------------------------------------------------


@contextmanager
def enter_folder(files: Folder, ranks: Ranks) -> Iterator[Folder]:
    """Return the folder, which the first process holds. If it cannot, no process continues."""
    ranks.first(files.__enter__)
    try:
        yield files
    finally:
        files.__exit__()
