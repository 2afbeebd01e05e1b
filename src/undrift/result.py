"""What a run gives back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

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


class Folder:
    """A run's folder: `metrics.jsonl` grows with the rounds, `model.safetensors` is written at the end."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")

    def row(self, row: dict[str, Any]) -> None:
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()

    def close(self, model: nn.Module | None = None) -> None:
        self.metrics.close()
        if model is not None:
            from safetensors.torch import save_model

            temporary = self.path / "model.safetensors.partial"
            save_model(model, str(temporary))
            temporary.replace(self.path / "model.safetensors")
