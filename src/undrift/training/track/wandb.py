"""Weights & Biases: a run in the project WANDB_PROJECT, by default "undrift"; `WANDB_MODE=offline` needs no network.

A point that has been sent cannot be replaced. So the run's folder has W&B's id of the run and the last round that was
sent, and a resumed run sends only what follows: rounds that are trained again have the same bits.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import wandb

from undrift.files import write_text
from undrift.training.track import Scalars

STATE = "wandb.json"
"""The file with W&B's id of the run, and the last round that was sent."""
EXIT = {"FINISHED": 0, "FAILED": 1, "KILLED": 130}


class Tracker:
    hint = "log in with `wandb login`, or set WANDB_MODE=offline"
    files = ("wandb", STATE)

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.latest: Scalars = {}

    def begin(self, config: str, rounds: list[Scalars]) -> None:
        found = self._found()
        self.last = float(found.get("round", 0.0))
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "undrift"),
            name=os.environ.get("WANDB_NAME") or (self.folder.resolve().name if self.folder else None),
            dir=os.environ.get("WANDB_DIR") or self.folder or Path.cwd(),
            id=found.get("id"),
            resume="allow" if found else None,
            config=tomllib.loads(config),
            allow_val_change=True,  # a resumed run may have more rounds
            reinit="create_new",  # alongside other runs of this process
            settings=wandb.Settings(console="off"),  # the terminal belongs to the run
        )
        self._note()
        self.add(rounds)

    def add(self, rounds: list[Scalars]) -> None:
        for scalars in rounds:
            self.latest = self.latest | scalars
            if scalars["round"] > self.last:
                self.last = scalars["round"]
                self.run.log({name: x for name, x in scalars.items() if name != "round"}, step=int(self.last))
        self._note()

    def end(self, status: str) -> None:
        self.run.summary.update({**self.latest, "status": status})
        self.run.finish(exit_code=EXIT[status])

    def _found(self) -> dict[str, Any]:
        """Return what the folder has of an earlier session; nothing if there was none."""
        file = self.folder / STATE if self.folder else None
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file and file.exists() else {}

    def _note(self) -> None:
        if self.folder:
            write_text(self.folder / STATE, json.dumps({"id": self.run.id, "round": self.last}) + "\n")
