"""What a caller may have watch a run, round by round: the argument `callbacks` of `ud.train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from undrift.errors import require

if TYPE_CHECKING:
    from undrift.training.result import Result
    from undrift.training.state import State


@dataclass(frozen=True)
class RoundRecord:
    """A finished round, as callbacks see it.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.IID(), clients=5)
        >>> seen = []
        >>> def look(record):
        ...     seen.append((record.round, len(record.params)))
        >>> result = ud.train("logistic", data, rounds=2, local=ud.Local(steps=1, lr=0.1), callbacks=[look])
        >>> seen
        [(1, 2), (2, 2)]

    Args:
        row: The round's row of the history. Do not change it.
        rounds: The number of rounds that the run was given.
        state: The run's state after the round, of which `params` has the weights; None for callbacks that are `late`.
    """

    row: dict[str, Any]
    rounds: int
    state: State | None = field(default=None, repr=False)

    @property
    def round(self) -> int:
        """The number of the round, from 1."""
        return int(self.row["round"])

    @property
    def params(self) -> dict[str, Tensor]:
        """A copy of the global weights after the round, by the names of the model's parameters."""
        require(self.state is not None, "Only callbacks that are not `late` see the weights.")
        assert self.state is not None
        return {name: weights.clone() for name, weights in self.state.params.items()}


class Callback:
    """Watches a run, for the argument `callbacks` of `ud.train`. Subclass it, and override what you need.

    Of several processes, only the first has callbacks. An exception in one ends the run, which can be resumed from that
    round.

    Example:
        >>> import undrift as ud
        >>> class Patience(ud.Callback):
        ...     best = float("inf")
        ...
        ...     def round(self, record):
        ...         worse, self.best = record.row["loss"] > self.best, min(self.best, record.row["loss"])
        ...         return "the loss has risen" if worse else None
        >>> data = ud.load("digits", ud.IID(), clients=10)
        >>> local = ud.Local(epochs=3, batch_size=32, lr=3.0)
        >>> result = ud.train("mlp", data, rounds=100, local=local, callbacks=[Patience()])
        >>> result.stopped_early
        'the loss has risen'
    """

    late: bool = False
    """Whether it may be told of a round while the next one is under way. Then a GPU never waits for it, but it neither
    sees the weights nor stops the run."""

    def begin(self, history: Sequence[dict[str, Any]]) -> None:
        """Called before the first round, with the rows of the rounds before it if the run is resumed."""

    def round(self, record: RoundRecord) -> Any:
        """Called after every round. A true result ends the run; a string says why."""

    def end(self, result: Result) -> None:
        """Called with the result of the run, unless an exception ended it."""


class Function(Callback):
    """A callback that is a function of the record."""

    def __init__(self, function: Callable[[RoundRecord], Any]) -> None:
        self.function = function

    def round(self, record: RoundRecord) -> Any:
        return self.function(record)


def as_callbacks(given: Any) -> list[Callback]:
    """Return what `ud.train` was given as callbacks, of which each may be a function of the record."""
    listed = given if isinstance(given, list | tuple) else [given]
    for one in listed:
        fine = isinstance(one, Callback) or (callable(one) and not isinstance(one, type))
        require(
            fine,
            "callbacks must be objects of classes that inherit from ud.Callback, or functions of a round's record, not "
            f"{one!r}.",
        )
    return [one if isinstance(one, Callback) else Function(one) for one in listed]


def name_of(callback: Callback) -> str:
    """Return what a message calls a callback."""
    named = callback.function if isinstance(callback, Function) else type(callback)
    return str(getattr(named, "__name__", type(named).__name__))
