"""Whether a run that stayed finite has learned anything: it has not if it diverged, is at chance, or trained nothing.

Whether it diverged is a function of the history. Where it is in doubt, nothing is said: a loss may rise while the
accuracy does, and a model that is bad for all clients may be good for each of them after training on the client's own
data.

Rates of 0, or gradients that are all 0, train nothing: the weights are the same bits after training as before it. After
the first round this is said only of what comes with undrift, without schedules, since other methods may wait for
several rounds before they change the weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from undrift.columns import Directions, directions, lower_is_better
from undrift.errors import quoted
from undrift.functional.model import Params
from undrift.losses import accuracy
from undrift.method.calls import ours
from undrift.schedule import sampled_rounds, value
from undrift.training.evaluation import has_own_models
from undrift.training.history import number
from undrift.training.nonfinite import LOSSES
from undrift.training.nonfinite import log as reported_log
from undrift.training.run import Run
from undrift.training.state import State

log = logging.getLogger("undrift")


# ---- divergence ----------------------------------------------------------------------------------------------------

Row = Mapping[str, Any]
DIVERGED, CHANCE = "diverged", "at chance"
ADVICE = {
    DIVERGED: "Training has diverged: try a smaller learning rate in Local or at the server, or Local(clip_norm=1.0), "
    "and check the scale of the inputs.",
    CHANCE: "The learning rate may be much too large or too small, or the rounds too few. Otherwise check the labels, "
    "the scale of the inputs, and for layers whose output never changes, such as dead ReLUs.",
}
FAR = 100
"""How many times its reference a loss must be to be far above it: the loss at chance, or the first one."""
EARLY, VERY_FAR = 3, 10_000
"""The same after so few rounds, in which a loss may be high and come down again."""
ROUNDS, EVALUATIONS = 10, 5
"""The fewest rounds and evaluations after which a model at chance is worth a warning."""
NEAR = 0.95
"""The fraction of the loss at chance above which a loss is no better."""
GOOD = 0.75
"""An accuracy on clients' own data that is good, whatever share of these is of one class."""
MARGIN = 0.05
"""By how much a metric of which higher values are better must have fallen to be worse than at the first evaluation."""


@dataclass(frozen=True)
class Divergence:
    """What is wrong with the end of a run."""

    kind: str
    """`DIVERGED` or `CHANCE`."""
    what: str

    def __str__(self) -> str:
        return f"{self.what[:1].upper()}{self.what[1:]}. {ADVICE[self.kind]}"


def find_divergence(run: Run, history: Sequence[Row]) -> Divergence | None:
    """Return what is wrong with a run that ends with this history, or None."""
    classes = run.data.classes if run.metrics.get("accuracy") is accuracy else 0
    return divergence(history, run.metrics, directions(run.metrics), classes)


def warn_of_divergence(run: Run, history: Sequence[Row]) -> Divergence | None:
    """Return the same, after a warning."""
    problem = find_divergence(run, history)
    if problem and run.ranks.leads:
        reported_log.warning("%s", problem)  # unless the caller reports it: see `nonfinite.mute`
    return problem


def warn_of_nan_metrics(run: Run, history: Sequence[Row]) -> None:
    """Warn of metrics that are NaN in all evaluations."""
    for name in run.metrics if run.ranks.leads else ():
        for column in (name, f"validation_{name}"):
            values = [row[column] for row in history if column in row]
            if values and all(number(value) and math.isnan(value) for value in values):
                log.warning(
                    "The metric %s is NaN in %s, so it measures nothing; check what it divides by, and whether the "
                    "held-out data have all classes.",
                    quoted(column), f"all {len(values)} evaluations" if len(values) > 1 else "the only evaluation",
                )  # fmt: skip


def divergence(history: Sequence[Row], metrics: Iterable[str], said: Directions, classes: int = 0) -> Divergence | None:
    """Return what is wrong with a run that ends with this history, or None.

    Args:
        history: The rows of all rounds.
        metrics: The names of the run's metrics.
        said: What they say themselves about whether lower values are better.
        classes: The number of classes, if that is known otherwise than from the column `class_accuracy`.
    """
    last = history[-1] if history else {}
    column = next((name for name in LOSSES if is_finite(last.get(name))), None)
    if column is None:
        return None
    prefix = column.removesuffix("loss")
    by_class = [own for own in last.get("class_accuracy") or () if is_finite(own)]
    if is_finite(last.get(f"{prefix}accuracy")) and (count := len(by_class) or classes) > 1:
        return diagnose_accuracy(history, column, count, by_class)
    held = [name for name in metrics if ended_worse(history, f"{prefix}{name}", said) is False]
    return None if held else diagnose_loss(history, column)


def diagnose_accuracy(history: Sequence[Row], column: str, classes: int, by_class: list[float]) -> Divergence | None:
    """Return what is wrong with a run that has an accuracy.

    The mean accuracy over classes is 1/C for any model that ignores its input, however many samples are of one class.
    """
    last, prefix = history[-1], column.removesuffix("loss")
    chance, name = math.log(classes), f"{prefix}accuracy"
    loss, accuracy_now = last[column], last[name]
    mean = sum(by_class) / len(by_class) if by_class and not prefix else accuracy_now
    at_chance = mean <= chance_accuracy(classes)
    best = max((row for row in history if is_finite(row.get(name))), key=lambda row: row[name])
    if good_for_clients(last, classes) or not (at_chance or accuracy_now < best[name] / 2):
        return None
    about = f"with an accuracy of {accuracy_now:.4g}"
    if accuracy_now < best[name] / 2:
        about += f" after {best[name]:.4g} in round {best['round']}"
    if loss > far_above(history) * chance:
        what = f"the {LOSSES[column]} ended at {loss:.4g}, far above the {chance:.4g} of chance, {about}"
        return Divergence(DIVERGED, what)
    if not at_chance or not trained_long_enough(history, column) or loss < NEAR * chance:
        return None
    what = f"after {len(history)} rounds, the model is no better than chance on {classes} classes, {about}"
    return Divergence(DIVERGED if loss > 2 * chance else CHANCE, f"{what} and a {LOSSES[column]} of {loss:.4g}")


def chance_accuracy(classes: int) -> float:
    """Return the accuracy that a model has to exceed to be better than chance."""
    return 1 / classes + min(1 / classes, 0.1)


def good_for_clients(last: Row, classes: int) -> bool:
    """Return whether clients' own models are good, or the shared one after training on the client's own data."""
    own, tuned, loss = (last.get(name) for name in ("client_accuracy", "tuned_accuracy", "client_loss"))
    if is_finite(own) and is_finite(loss) and own > chance_accuracy(classes) and loss < NEAR * math.log(classes):
        return True
    return any(is_finite(found) and found >= GOOD for found in (own, tuned))


def diagnose_loss(history: Sequence[Row], column: str) -> Divergence | None:
    """Return what is wrong with a run of which only the loss tells."""
    last, evaluated = history[-1], [row for row in history if is_finite(row.get(column))]
    first = evaluated[0]
    scale = max(abs(first[column]), abs(min(row[column] for row in evaluated)))  # a loss may be negative
    if last[column] <= far_above(history) * scale:
        return None
    for name in ("client_loss", "tuned_loss"):
        if is_finite(last.get(name)) and last[name] <= far_above(history) * scale:
            return None
    what = f"the {LOSSES[column]} ended at {last[column]:.4g}, and was {first[column]:.4g} in round {first['round']}"
    return Divergence(DIVERGED, what)


def ended_worse(history: Sequence[Row], name: str, said: Directions) -> bool | None:
    """Return whether a metric ended worse than at the first evaluation; None if it has no such figures."""
    values = [row[name] for row in history if is_finite(row.get(name))]
    if not values or not is_finite(history[-1].get(name)):
        return None
    return values[-1] > values[0] if lower_is_better(name, said) else values[-1] < values[0] - MARGIN


def is_finite(value: Any) -> TypeGuard[float]:
    return number(value) and math.isfinite(value)


def far_above(history: Sequence[Row]) -> int:
    return FAR if len(history) > EARLY else VERY_FAR


def trained_long_enough(history: Sequence[Row], column: str) -> bool:
    """Return whether a run has gone on for long enough to have learned something."""
    return len(history) >= ROUNDS and sum(is_finite(row.get(column)) for row in history) >= EVALUATIONS


# ---- training that changes nothing ---------------------------------------------------------------------------------


def weights_unchanged(run: Run, before: Params, after: Params) -> Tensor | None:
    """Return whether the weights are the same, on the device; None if clients may train others than these."""
    if has_own_models(run):
        return None
    return torch.stack([(before[name] == w).all() for name, w in after.items()]).all()


def every_round_must_change(run: Run) -> bool:
    """Return whether every round must change the weights, if any does."""
    scheduled = len({str((run.composed.numbers(t), value(run.local.lr, t))) for t in sampled_rounds(run.rounds)}) > 1
    return all(map(ours, run.method.parts)) and run.local.step_schedule is None and not scheduled


def clients_trained(row: Row) -> bool:
    """Return whether clients have trained in a round, and count."""
    absent = {client for name in ("skipped", "dropped", "left_out") for client in row.get(name, ())}
    return not row.get("round_skipped") and not absent.issuperset(row["clients"])


def warn_nothing_trained(run: Run, rounds: int) -> None:
    if run.ranks.leads:
        log.warning(
            "Nothing has been trained: after %s, the weights are what they were before. Check the learning rates in "
            "Local, in its groups and at the server, and whether the loss depends on the weights.",
            f"{rounds} rounds" if rounds > 1 else "round 1",
        )


def warn_if_nothing_trained(run: Run, state: State) -> None:
    """Warn if all rounds have left the weights as they were, and clients have trained."""
    same = weights_unchanged(run, run.model.start, state.params) if any(map(clients_trained, state.history)) else None
    if same is not None and bool(same):
        warn_nothing_trained(run, state.round)
