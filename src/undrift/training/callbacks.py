"""What a caller may have watch a run, round by round: the argument `callbacks` of `ud.train`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from undrift.errors import quoted, require

if TYPE_CHECKING:
    from undrift.training.result import Result
    from undrift.training.state import State


@dataclass(frozen=True)
class RoundRecord:
    """A finished round, as callbacks see it.

    Example:
        >>> import undrift as ud
        >>> def show(record):
        ...     print(f"{record.round} of {record.rounds}: {record.row['samples']} samples")
        >>> data = ud.load("digits", ud.IID(), clients=10)
        >>> local = ud.Local(steps=2, batch_size=16, lr=0.1)
        >>> result = ud.train("mlp", data, rounds=2, local=local, callbacks=[show])
        1 of 2: 320 samples
        2 of 2: 320 samples

    Args:
        row: A copy of the round's row of the history.
        rounds: The number of rounds that the run was given.
    """

    row: dict[str, Any]
    rounds: int
    _state: State | None = field(default=None, init=False, repr=False)

    @classmethod
    def _of(cls, row: dict[str, Any], rounds: int, state: State | None) -> RoundRecord:
        """Return the record of a round, which shares nothing with the run; `state` is what training has reached."""
        record = cls(copy.deepcopy(row), rounds)
        object.__setattr__(record, "_state", state)
        return record

    @property
    def round(self) -> int:
        """The number of the round, from 1."""
        return int(self.row["round"])

    @property
    def params(self) -> dict[str, Tensor]:
        """A copy of the global weights after the round, by the names of the model's parameters."""
        require(self._state is not None, "Only callbacks that are not `late` see the weights.")
        assert self._state is not None
        return {name: weights.clone() for name, weights in self._state.params.items()}


class Callback:
    """Watches a run, for the argument `callbacks` of `ud.train`. Subclass it, and override what you need.

    Of several processes, all are given the callbacks, and only the first calls them. An exception in `round` ends the
    run, which can be resumed from that round if it has a folder, unless the callback is `late`. Callbacks are not asked
    about rounds that are done: a run that one of them ended goes on when it is resumed. A run that is finished by then
    calls none of their methods.

    Example:
        >>> import undrift as ud
        >>> class Rising(ud.Callback):
        ...     def begin(self, history):
        ...         self.least = min((row["loss"] for row in history), default=float("inf"))
        ...
        ...     def round(self, record):
        ...         before, self.least = self.least, min(self.least, record.row["loss"])
        ...         return "the loss has risen" if record.row["loss"] > before else None
        >>> data = ud.load("digits", ud.IID(), clients=10)
        >>> local = ud.Local(epochs=3, batch_size=32, lr=3.0)
        >>> result = ud.train("mlp", data, rounds=100, local=local, callbacks=[Rising()])
        >>> result.stopped_early
        'the loss has risen'
    """

    late: bool = False
    """Whether it may be told of a round while the next one is under way. Then a GPU never waits for it, but it neither
    sees the weights nor stops the run."""

    def begin(self, history: Sequence[dict[str, Any]]) -> None:
        """Called before the first round, with the rows of the rounds before it if the run is resumed."""

    def round(self, record: RoundRecord) -> Any:
        """Called after every round. True, or a string that says why, ends the run; None and False do not.

        In the last round, the row and the weights are those after the method's `finish`. If the callback ends the run,
        `finish` and the last evaluation follow.
        """

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
    listed = [] if given is None else given if isinstance(given, list | tuple) else [given]
    for one in listed:
        fine = isinstance(one, Callback) or (callable(one) and not isinstance(one, type))
        require(
            fine,
            "callbacks must be a list of objects of classes that inherit from ud.Callback, or of functions of one "
            f"record, not {one!r}.",
        )
    return [one if isinstance(one, Callback) else Function(one) for one in listed]


def reason_to_stop(callback: Callback, record: RoundRecord) -> str | None:
    """Tell a callback of a round. Returns why it ends the run, or None. Raises `UndriftError` for any other answer."""
    answer: Any = callback.round(record)
    named = callback.function if isinstance(callback, Function) else type(callback)
    name = str(getattr(named, "__name__", type(named).__name__))
    if answer is None or answer is False or (isinstance(answer, np.bool_) and not answer):
        return None
    require(
        isinstance(answer, str | bool | np.bool_),
        f"The callback {name} returned {quoted(answer)}. It must return True, or a string that says why, to end the "
        "run, and None or False otherwise.",
    )
    require(not callback.late, f"The callback {name} is late, so it cannot end the run; leave `late` out.")
    return answer if isinstance(answer, str) and answer else f"{name} asked to stop"
