"""The labels of a study's runs, in a file among their folders, for reports of these."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from undrift.files import parse_json, read_bytes, write_text

FILE = "labels.json"


class Label(NamedTuple):
    """What a study file calls a run."""

    partition: str
    """Empty in a study without partitions."""
    method: str


def write(out: Path, labels: Mapping[str, Label]) -> None:
    """Add the labels of runs, by the names of their folders, to those in the folder of a phase."""
    with contextlib.suppress(OSError):  # runs cannot be written there either, which has an error message of its own
        out.mkdir(parents=True, exist_ok=True)
        found = {**read(out), **labels}
        write_text(out / FILE, json.dumps({name: label._asdict() for name, label in found.items()}, indent=1) + "\n")


def read(out: Path) -> dict[str, Label]:
    """The labels of the runs in a folder; none, if no study has written the file."""
    try:
        found = {name: Label(**label) for name, label in parse_json(read_bytes(out / FILE)).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return found if all(isinstance(text, str) for label in found.values() for text in label) else {}
