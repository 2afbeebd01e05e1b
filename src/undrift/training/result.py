"""What a run gives back, and the folder it may leave behind."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor, nn

from undrift.errors import UndriftError
from undrift.files import (
    PARTIAL,
    DamagedError,
    alone,
    digest,
    regular,
    replacing,
    seal,
    sweep_up,
    sync,
    unseal,
    verify,
    write_text,
)

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("undrift")


@dataclass(frozen=True)
class Result:
    """The trained weights, the model that holds them, one dict per round, and what was chosen automatically."""

    params: dict[str, Tensor]
    model: nn.Module
    history: list[dict[str, Any]]
    choices: dict[str, Any]
    stopped: str | None = None
    """Why the run stopped before its last round, where something became NaN or infinite; the rest is from before."""

    def __repr__(self) -> str:
        evaluated = [row for row in self.history if "loss" in row or "validation_loss" in row]
        last = evaluated[-1] if evaluated else {}
        figures = [
            f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in last.items()
            if name.removeprefix("validation_") in ("loss", "accuracy", "recall_at_5") and isinstance(value, float)
        ]
        weights = sum(w.numel() for w in self.params.values())
        how = f"{self.choices.get('engine')} engine on {self.choices.get('device')}"
        lines = [f"Result: {len(self.history):,} rounds, {weights:,} trained weights, {how}"]
        lines += [f"  round {last['round']:,}: {', '.join(figures)}"] if figures else []
        return "\n".join([*lines, f"  stopped: {self.stopped}"] if self.stopped else lines)

    def frame(self) -> pd.DataFrame:
        """The history as a pandas table, one row per round."""
        import pandas as pd

        return pd.DataFrame(self.history)


def as_json(row: dict[str, Any]) -> str:
    """A row as one line of JSON, which has no NaN and no infinity: they become null."""
    try:
        return json.dumps(row, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(row), default=_plain)


def _plain(x: Any) -> Any:
    """A part's history may hold tensors and arrays."""
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
    """Why the run in this folder stopped, if something in it became NaN or infinite."""
    file = folder / STOPPED
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["why"]) if file.exists() else None
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"{file} cannot be read"


def finished(folder: Path) -> bool:
    """Whether the run in this folder has ended: its model is written last."""
    return (folder / "model.safetensors").exists()


def history(folder: Path) -> list[dict[str, Any]]:
    """The rounds that `metrics.jsonl` has, up to the first that a crash, or a writer at work, left unfinished."""
    rows: list[dict[str, Any]] = []
    file = folder / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


STOPPED = "stopped.json"
"""In the folder of a run that something non-finite stopped: why."""
RUN = "run.json"
"""What run this is, from the first moment on, and at the end the checksums of its results."""
RESULTS = ("model.safetensors", "metrics.jsonl")
OURS = re.compile(r"run\.json|config\.toml|partition\.json|metrics\.jsonl|model\.safetensors|stopped\.json")
"""The files of a run's folder; all others are somebody else's, and are left alone."""


def recorded(folder: Path) -> dict[str, Any] | None:
    """What `run.json` says of the run in this folder; None, with a warning, if it cannot be read."""
    try:
        found: dict[str, Any] = unseal(folder / RUN)
        return found
    except DamagedError as error:
        log.warning("%s", error)
        return None


def intact(folder: Path, known: dict[str, Any]) -> bool:
    """Whether the results of a finished run are what `run.json` says; warns if they are not."""
    try:
        for name in RESULTS:
            verify(folder / name, known.get("results", {}).get(name, "unknown"))
    except DamagedError as error:
        log.warning("%s", error)
        return False
    return True


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


class Folder:
    """A run's folder: settings, who holds what, `metrics.jsonl` that grows with the rounds, the model at the end.

    Without a path it is no folder, and writes nothing. A new run needs a folder that is empty or not there yet, so
    nothing that a run replaces or removes was ever anybody else's.
    """

    def __init__(self, path: str | os.PathLike[str] | None, resume: bool = False) -> None:
        if not (path is None or isinstance(path, str | os.PathLike)) or path == "":
            raise UndriftError(f"out must name a folder, not {path!r}; leave it out for a run without one.")
        self.path = None if path is None else Path(path)
        self.resume = resume
        self.metrics: TextIO | None = None
        self.held = ExitStack()
        self.record: dict[str, Any] = {}
        """What `run.json` says of this run."""
        if resume and not self.path:
            raise UndriftError("resume needs the folder of the run to go on with: out=….")
        if resume and self.path and not any((self.path / name).exists() for name in (RUN, "config.toml")):
            raise UndriftError(f"{self.path} has no run to go on with; leave resume out to start one there.")

    def __enter__(self) -> Folder:
        if self.path:
            if self.path.exists() and not self.path.is_dir():
                raise UndriftError(f"{self.path} is taken; choose another folder for this run, or remove that one.")
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UndriftError(
                    f"The folder {self.path} cannot be made ({error.strerror}); choose another."
                ) from error
            self.held.enter_context(alone(self.path))
            try:
                self._refuse_others()
            except BaseException:
                self.held.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.metrics:
            self.metrics.close()
        self.held.close()

    def _refuse_others(self) -> None:
        """Refuse to start where there is anything, and to resume where one of our names is not a file of ours."""
        assert self.path
        found = {file.name: file for file in self.path.iterdir() if not PARTIAL.fullmatch(file.name)}
        if not self.resume:
            if "config.toml" in found:
                raise UndriftError(f"{self.path} is taken; choose another folder for this run, or remove that one.")
            other = sorted(name for name in found if name != RUN)  # a run that died before its first file has that
            if other:
                raise UndriftError(
                    f"{self.path} holds {other[0]!r}, so it is no folder for a new run; choose an empty or a new one."
                )
        for name, file in found.items():
            if OURS.fullmatch(name) and not regular(file):
                raise UndriftError(f"{file} is a link or a folder, not a file of this run; remove it to go on.")
        checkpoint = found.get("checkpoint")
        if checkpoint and (checkpoint.is_symlink() or not checkpoint.is_dir()):
            raise UndriftError(f"{checkpoint} is not a folder of this run but a link or a file; remove it to go on.")

    @property
    def finished(self) -> bool:
        return bool(self.path and finished(self.path))

    def recorded(self) -> dict[str, Any] | None:
        """What `run.json` says of the run in this folder; None if it cannot be read."""
        assert self.path
        return recorded(self.path)

    def config(self) -> None:
        """The file that repeats the run, unless it is there."""
        if self.path and _text(self.path / "config.toml") != self.record["config"]:
            write_text(self.path / "config.toml", self.record["config"])

    def partition(self, found: dict[str, Any]) -> None:
        """Who holds what."""
        if self.path:
            write_text(self.path / "partition.json", json.dumps(found))

    def rows(self) -> list[dict[str, Any]]:
        return history(self.path) if self.path else []

    def note(self, record: dict[str, Any]) -> None:
        """Note what run this is, before anything else is written."""
        self.record = record
        if self.path:
            sweep_up(self.path, OURS)
            seal(self.path / RUN, record)

    def begin(self, rows: list[dict[str, Any]]) -> None:
        """Go on after these rounds: what was written beyond them is cut off, and the run is no longer finished."""
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
        """See to it that the disk has all rows."""
        if self.metrics and self.path:
            os.fsync(self.metrics.fileno())
            sync(self.path)

    def stopped(self, why: str) -> None:
        """Leave a note of why the run stopped; it may still be resumed."""
        if self.path:
            write_text(self.path / STOPPED, json.dumps({"why": why}))

    def model(self, model: nn.Module) -> None:
        """The trained model, which makes the run a finished one."""
        if self.path:
            from safetensors.torch import save_model

            self.sync()
            with replacing(self.path / "model.safetensors") as partial:
                save_model(model, str(partial))
                sums = {"model.safetensors": digest(partial), "metrics.jsonl": digest(self.path / "metrics.jsonl")}
                seal(self.path / RUN, {**self.record, "results": sums})

    def load(self, model: nn.Module) -> None:
        """The finished run's weights, into `model`."""
        from safetensors.torch import load_model

        assert self.path
        load_model(model, str(self.path / "model.safetensors"))
