"""What a run gives back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor, nn

from undrift.errors import UndriftError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Result:
    """The trained weights, the model that holds them, one dict a round, and what was chosen automatically."""

    params: dict[str, Tensor]
    model: nn.Module
    history: list[dict[str, Any]]
    choices: dict[str, Any]

    def frame(self) -> pd.DataFrame:
        """The history as a pandas table, a row a round."""
        import pandas as pd

        return pd.DataFrame(self.history)


def _plain(x: Any) -> Any:
    """A part's history may hold tensors and arrays."""
    return x.tolist() if hasattr(x, "tolist") else str(x)


class Folder:
    """A run's folder: `metrics.jsonl` grows with the rounds, `model.safetensors` is written at the end.

    Without a path it is no folder, and writes nothing.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.metrics: TextIO | None = None

    def __enter__(self) -> Folder:
        if self.path:
            if self.path.is_file() or (self.path / "metrics.jsonl").exists():
                raise UndriftError(f"{self.path} is taken; choose another folder for this run, or remove that one.")
            self.path.mkdir(parents=True, exist_ok=True)
            self.metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        if self.metrics:
            self.metrics.close()

    def row(self, row: dict[str, Any]) -> None:
        if self.metrics:
            self.metrics.write(json.dumps(row, default=_plain) + "\n")
            self.metrics.flush()

    def model(self, model: nn.Module) -> None:
        if self.path:
            from safetensors.torch import save_model

            partial = self.path / "model.safetensors.partial"
            save_model(model, str(partial))
            partial.replace(self.path / "model.safetensors")
