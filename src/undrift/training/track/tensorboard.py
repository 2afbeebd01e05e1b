"""TensorBoard: event files in the folder `tensorboard` of the run's own. `tensorboard --logdir runs` shows them."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from undrift.errors import UndriftError
from undrift.training.track import Scalars


class Tracker:
    hint = "see that the run's folder can be written to"

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            raise UndriftError("track='tensorboard' writes into the run's folder; name one: out=….")
        self.folder = folder / "tensorboard"

    def begin(self, config: str, rounds: list[Scalars]) -> None:
        """Rounds beyond the checkpoint that a run goes on from are purged; those before it are there already."""
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
        self.writer.flush()  # what was shown survives a kill

    def end(self, status: str) -> None:
        self.writer.close()
