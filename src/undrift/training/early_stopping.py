"""Early stopping: ending a run before its last round, by its history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from undrift.columns import COLUMNS, Directions, directions, lower_is_better, reserved
from undrift.errors import UndriftError, listed, quoted, require, whole
from undrift.expressions import parse
from undrift.metrics import METRICS
from undrift.training.run import Run
from undrift.training.settings import Settings

log = logging.getLogger("undrift")

History = Sequence[dict[str, Any]]
Rule = Callable[[History], Any]
"""A function of the history so far, including the latest round. A true result ends the run."""

COLUMN = "stopped_early"
"""The column of the last row with the reason why the run ended."""
FIGURES = ("", "_std", "_worst")
"""How the columns of clients' own test data end."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a run when a figure of its history has stopped improving, for the argument `stop_when` of `ud.train`.

    Example:
        >>> import undrift as ud
        >>> data = ud.load("digits", ud.Dirichlet(0.3), clients=10, validation_fraction=0.1)
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.2)
        >>> rule = ud.EarlyStopping("validation_loss", patience=2, min_delta=0.5)
        >>> result = ud.train("mlp", data, rounds=100, local=local, stop_when=rule)
        >>> len(result.history) < 100
        True

    Args:
        column: The column of the history. Those of the validation data begin with `validation_`. Do not stop by test
            figures: the test data would become part of the training.
        patience: Stop once this many rounds have passed since the best one.
        min_delta: The smallest change that counts as an improvement.
        better: `"lower"` or `"higher"`. By default, what the metric's own `higher_is_better` says, if it has one;
            otherwise lower for losses and errors, and higher for everything else. A function of your own that calls
            this rule must set it where that differs for a metric that `ud.register_metric` does not know, since the
            history alone does not tell.

    Raises:
        UndriftError: If an argument is invalid.
    """

    column: str = "validation_loss"
    patience: int = 10
    min_delta: float = 0.0
    better: str | None = None

    def __post_init__(self) -> None:
        require(
            isinstance(self.column, str), f"EarlyStopping(column) must be the name of a column, not {self.column!r}."
        )
        fine = whole(self.patience) and self.patience >= 1
        require(fine, f"EarlyStopping(patience) must be a whole number from 1, not {self.patience!r}.")
        number = whole(self.min_delta) or isinstance(self.min_delta, float)
        require(number and self.min_delta >= 0, f"EarlyStopping(min_delta) must be at least 0, not {self.min_delta!r}.")
        ways = (None, "lower", "higher")
        require(self.better in ways, f'EarlyStopping(better) must be "lower" or "higher", not {self.better!r}.')

    def __call__(self, history: History) -> str | None:
        """Return why to stop now, or None. Depends on the history alone, so a resumed run stops in the same round."""
        lower = self.better == "lower" if self.better else lower_is_better(self.column, directions(METRICS))
        sign = -1 if lower else 1
        best, since = None, 0
        for row in history:
            if self.column in row:
                value = sign * row[self.column]
                if best is None or value > best + self.min_delta:
                    best, since = value, row["round"]
        if best is None or history[-1]["round"] - since < self.patience:
            return None
        rounds = "round" if self.patience == 1 else f"{self.patience} rounds"
        return f"{self.column} has not improved for {rounds}; it was {sign * best:.4g} in round {since}"


def as_rule(stop_when: Any, known: Directions = MappingProxyType({})) -> Rule | None:
    """Return the rule that `ud.train` was given: a function, or an expression in a string.

    `known` is what the run's metrics say themselves about whether lower values are better.
    """
    if isinstance(stop_when, str):
        example = "EarlyStopping('validation_loss', patience=10)"
        stop_when = parse(stop_when, "rule", {"EarlyStopping": EarlyStopping}, example)
    if isinstance(stop_when, EarlyStopping) and stop_when.better is None:
        return replace(stop_when, better="lower" if lower_is_better(stop_when.column, known) else "higher")
    require(
        stop_when is None or callable(stop_when),
        f"stop_when must be a function of the history, such as ud.EarlyStopping(…), not {stop_when!r}.",
    )
    return stop_when


def stop_reason(rule: Rule | None, history: History) -> str | None:
    """Return why the rule ends a run with this history, or None if it does not."""
    if rule is None or not history:
        return None
    check_column(rule, history)
    why = rule(history)
    if not why:
        return None
    return why if isinstance(why, str) else f"stop_when returned {quoted(why)}"


def check_column(rule: Rule, history: History) -> None:
    """Raise if an evaluated round does not have the rule's column, since the rule would never stop the run."""
    row = history[-1]
    if isinstance(rule, EarlyStopping) and rule.column not in row and ("loss" in row or "validation_loss" in row):
        raise missing_column(rule, [name for name, value in row.items() if isinstance(value, float)])


def check_possible(rule: Rule | None, run: Run) -> None:
    """Raise before the first round if no round can have the rule's column, as far as that is known by then.

    Parts and figures of drift may add columns, and a federation's held-out data are on its nodes.
    """
    if not isinstance(rule, EarlyStopping) or run.drift or type(run) is not Run:
        return
    if run.composed.overriding("history") and not reserved(rule.column):
        return
    names = ["loss", *run.metrics]
    known = [*(names if run.test else ()), *(f"validation_{name}" for name in names if run.validation)]
    if run.data.client_test is not None:
        endings = [f"{name}{figure}" for name in names for figure in FIGURES]
        known += [f"{prefix}_{name}" for prefix in ("client", "tuned") for name in endings]
    if rule.column not in known and rule.column not in {name for name in COLUMNS if reserved(name)} - {"loss"}:
        raise missing_column(rule, known)


def warn_if_late(rule: Rule | None, run: Run, given: Settings) -> None:
    """Warn if only the last round has the rule's column, so that the rule cannot end the run before it."""
    if not isinstance(rule, EarlyStopping) or run.rounds == 1 or not run.ranks.leads:
        return
    names = ["loss", *run.metrics]
    of_clients = [f"{name}{figure}" for name in names for figure in FIGURES]
    evaluated = {*names, *(f"validation_{name}" for name in names), *(f"client_{name}" for name in of_clients)}
    tuned = rule.column in {f"tuned_{name}" for name in of_clients}
    setting = "personalize_every" if tuned else "evaluate_every"
    every = getattr(given, setting)
    if (tuned or rule.column in evaluated) and (every is None or every >= run.rounds):
        log.warning(
            "EarlyStopping cannot end the run early: only its last round, %d, has %s. Choose a smaller %s, which is "
            "now %s.", run.rounds, rule.column, setting, every,
        )  # fmt: skip


def missing_column(rule: EarlyStopping, known: Sequence[str]) -> UndriftError:
    hint = " Hold data out for it: ud.load(…, validation_fraction=0.1)." if "validation" in rule.column else ""
    has = f" It has {listed(known)}." if known else ""
    return UndriftError(f"The history has no column {rule.column!r} to stop by.{hint}{has}")
