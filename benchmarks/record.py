"""What a benchmark writes: where and with which code it ran, and its rows, each as soon as it is there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

import undrift
from undrift.tools.info import source


@cache
def commit() -> str:
    """The commit, for readers: UNDRIFT_COMMIT where it is set (a copy of the files has no history), else git's."""
    if given := os.environ.get("UNDRIFT_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def head(benchmark: str, **more: Any) -> dict[str, Any]:
    """What a file says above its rows: the hardware, the versions, and settings that all rows share."""
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} threads of a CPU"
    where = {"gpu": device, "torch": torch.__version__, "commit": commit(), "source": source()}
    return {"benchmark": benchmark, **where, **more}


class Table:
    """A benchmark's file. Rows that it already has stay, if they come from the same hardware, versions and source."""

    def __init__(self, file: Path | None, head: dict[str, Any], *key: str) -> None:
        self.file, self.head, self.key = file, head, key
        self.refused: list[str] = []
        found = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
        same = all(found.get(name) == value for name, value in head.items() if name != "commit")
        self.rows: list[dict[str, Any]] = found.get("rows", []) if same else []

    def add(self, row: dict[str, Any]) -> None:
        """Write the row at once, so that a run that is cut short leaves what it has."""
        places = [[old[name] for name in self.key] for old in self.rows]
        mine = [row[name] for name in self.key]
        if mine in places:
            self.rows[places.index(mine)] = row
        else:
            self.rows.append(row)
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the measuring of one row: if a side is refused there is no row, but the others are still measured."""
        try:
            yield
        except (SystemExit, undrift.UndriftError) as error:
            self.refused.append(str(error))
            print(f"REFUSED: {error}", flush=True)

    def end(self) -> None:
        """Raises `SystemExit` if any row was refused."""
        if self.refused:
            raise SystemExit("\n".join(["No row was written for what was refused:", *self.refused]))
