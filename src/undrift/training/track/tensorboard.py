"""TensorBoard: event files in `tensorboard/` in the run's folder. `tensorboard --logdir runs` shows them."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from undrift.errors import UndriftError
from undrift.training.track import Scalars


class Tracker:
    hint = "check that the run's folder is writable"
    files = ("tensorboard",)

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            raise UndriftError("track='tensorboard' writes to the run's folder; pass out=….")
        self.folder = folder / "tensorboard"

    def begin(self, config: str, rounds: list[Scalars]) -> None:
        """On resuming, rounds after the checkpoint are purged; those before it are already there."""
        there = any(self.folder.glob("events.*"))
        self.writer = SummaryWriter(self.folder, purge_step=len(rounds) + 1 if there else None)
        if not there:
            self.writer.add_text("config.toml", f"```toml\n{config}```", 0)
            self.add(rounds)

    def add(self, rounds: list[Scalars]) -> None:
        for scalars in rounds:
            for name, value in scalars.items():
                if name != "round":
                    self.writer.add_scalar(name, value, int(scalars["round"]))
        self.writer.flush()  # so that a kill loses nothing

    def end(self, status: str) -> None:
        self.writer.close()
