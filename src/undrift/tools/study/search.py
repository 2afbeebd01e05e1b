"""Which settings a method tries on the tuning seeds: all of a grid, or those that Optuna suggests.

A search is a function of its seed and of the values that it was told, in order. So a study that was killed asks for the
same settings again, finds their runs finished, and continues.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol

from undrift.errors import UndriftError
from undrift.tools.study.file import Cell, Plan, Range

if TYPE_CHECKING:
    from optuna.trial import Trial

Values = dict[str, Any]
"""A value for each of a cell's choices."""
STARTUP = 10
"""Trials that Bayesian search draws at random before it has anything to learn from; the sampler's default."""


class Search(Protocol):
    def ask(self) -> list[Values]:
        """The next settings to try; none, once the search is over."""
        ...

    def tell(self, values: list[float]) -> None:
        """The quality of each setting asked for last, higher is better; −∞ if a run diverged."""
        ...


def new_search(cell: Cell, plan: Plan) -> Search:
    """The search that the plan asks for."""
    if plan.search == "grid":
        return Grid(cell)
    assert plan.trials is not None
    return Suggested(cell, plan.search, plan.trials, plan.tuning_seeds[0])


class Grid:
    """All combinations, the last choice varying fastest."""

    def __init__(self, cell: Cell) -> None:
        keys, options = list(cell.choices), [own for own in cell.choices.values() if isinstance(own, list)]
        self.left = [dict(zip(keys, values, strict=True)) for values in itertools.product(*options)]

    def ask(self) -> list[Values]:
        asked, self.left = self.left, []
        return asked

    def tell(self, values: list[float]) -> None:
        pass


class Suggested:
    """What an Optuna sampler suggests: `RandomSampler`, or `TPESampler` for Bayesian search."""

    def __init__(self, cell: Cell, kind: str, trials: int, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise UndriftError(f'search = "{kind}" needs Optuna: pip install "undrift[search]"') from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        samplers: dict[str, Any] = {"random": optuna.samplers.RandomSampler, "bayesian": optuna.samplers.TPESampler}
        self.study = optuna.create_study(sampler=samplers[kind](seed=seed % 2**32), direction="maximize")
        self.cell = cell
        self.asked: list[Trial] = []
        self.batches = iter([trials] if kind == "random" else [min(STARTUP, trials), *[1] * (trials - STARTUP)])

    def ask(self) -> list[Values]:
        self.asked = [self.study.ask() for _ in range(next(self.batches, 0))]
        return [{key: _suggest(t, key, own) for key, own in self.cell.choices.items()} for t in self.asked]

    def tell(self, values: list[float]) -> None:
        for trial, value in zip(self.asked, values, strict=True):
            self.study.tell(trial, value)


def _suggest(trial: Trial, key: str, options: list[Any] | Range) -> Any:
    if isinstance(options, list):  # by position, since Optuna compares and stores plain values alone
        return options[trial.suggest_categorical(key, range(len(options)))] if len(options) > 1 else options[0]
    if isinstance(options.low, int) and isinstance(options.high, int):
        return trial.suggest_int(key, options.low, options.high, log=options.log)
    return trial.suggest_float(key, options.low, options.high, log=options.log)
