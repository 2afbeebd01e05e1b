"""The result of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from undrift.errors import UndriftError
from undrift.metrics import METRICS

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("undrift")


class NoRoundsError(UndriftError, IndexError):
    """Raised for a row of a history that has none, as the run stopped in its first round."""


class NoRounds(list[dict[str, Any]]):
    """The history of a run that stopped in its first round. Whoever asks for its last row learns why there is none."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return super().__getitem__(index)
        raise NoRoundsError(f"The history has no rounds, because the run stopped in its first one. {self.why}")

    def __reduce__(self) -> Any:
        return NoRounds, (self.why,)


@dataclass(frozen=True)
class Result:
    """The result of `ud.train`: the trained model and its history.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.Dirichlet(0.3), clients=10)
        >>> result = ud.train("mlp", data, rounds=3, local=ud.Local(epochs=1, batch_size=32, lr=0.1))
        >>> len(result.history), "accuracy" in result.frame()
        (3, True)
    """

    params: dict[str, Tensor]
    """The trained weights by name."""
    model: nn.Module
    """The model, with these weights."""
    history: list[dict[str, Any]]
    """One dict per round, with the columns of `metrics.jsonl`."""
    choices: dict[str, Any]
    """The settings that were chosen automatically, such as the engine and the device."""
    stopped: str | None = None
    """Why the run stopped at a NaN or infinite value, or None. Weights and history are those before that round. If it
    was the first one, the history is empty, and asking for its last row raises an error with this reason."""
    stopped_early: str | None = None
    """Why `stop_when` ended the run early, or None."""
    diverged: str | None = None
    """What is wrong, and what to try, if the run stayed finite but its loss ended far above where it began, or its
    accuracy is still at chance; or None."""
    find_own: Callable[[int], dict[str, Tensor]] | None = field(default=None, repr=False, compare=False)
    """Finds a client's own weights. None if clients have none, so that a result does not keep its run alive."""

    def __post_init__(self) -> None:
        if self.stopped and not self.history:
            object.__setattr__(self, "history", NoRounds(self.stopped))

    def own_params(self, client: int) -> dict[str, Tensor]:
        """Return the weights that a client would use: the trained weights, with the client's own where it has any.

        A client's own weights are its personal parameters and buffers (as in FedPer), or what the method's `own` hook
        returns (as in Ditto).

        Args:
            client: The client's id.

        Returns:
            Weights and running statistics by name, for `model.load_state_dict(…, strict=False)`.

        Raises:
            UndriftError: If there is no such client, or if the result was read from the folder of a finished run.
        """
        return dict(self.params) if self.find_own is None else self.find_own(client)

    def __repr__(self) -> str:
        evaluated = [row for row in self.history if "loss" in row or "validation_loss" in row]
        last = evaluated[-1] if evaluated else {}
        figures = [
            f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in last.items()
            if name.removeprefix("validation_") in ("loss", *METRICS) and isinstance(value, float)
        ]
        weights = sum(w.numel() for w in self.params.values())
        how = f"{self.choices.get('engine')} engine on {self.choices.get('device')}"
        lines = [f"Result: {len(self.history):,} rounds, {weights:,} trained weights, {how}"]
        lines += [f"  round {last['round']:,}: {', '.join(figures)}"] if figures else []
        lines += [f"  stopped early: {self.stopped_early}"] if self.stopped_early else []
        lines += [f"  warning: {self.diverged}"] if self.diverged else []
        return "\n".join([*lines, f"  stopped: {self.stopped}"] if self.stopped else lines)

    def frame(self) -> pd.DataFrame:
        """Return the history as a `pandas.DataFrame`, one row per round.

        Returns:
            The data frame. Columns that a round does not have are NaN there.
        """
        import pandas as pd

        return pd.DataFrame(self.history)
