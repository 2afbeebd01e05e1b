"""Metrics by name, and those that a user gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from undrift.columns import reserved
from undrift.errors import UndriftError
from undrift.losses import CLASSES, Loss, accuracy, recall_at_5
from undrift.metrics.base import Metric, Ratio, fresh, streams
from undrift.metrics.classes import BalancedAccuracy, ConfusionMatrix, MacroF1, WeightedF1
from undrift.metrics.numbers import MAE, R2, Perplexity
from undrift.metrics.ranking import AUROC, AveragePrecision
from undrift.registry import Registry

METRICS: Registry[Any] = Registry(
    "metric",
    {
        "accuracy": accuracy,
        "auroc": AUROC(),
        "average_precision": AveragePrecision(),
        "balanced_accuracy": BalancedAccuracy(),
        "confusion_matrix": ConfusionMatrix(),
        "f1": MacroF1(),
        "f1_weighted": WeightedF1(),
        "mae": MAE(),
        "perplexity": Perplexity(),
        "r2": R2(),
        "recall_at_5": recall_at_5,
    },
)


def register_metric(name: str, metric: Any) -> None:
    """Register a metric under a name that `ud.train`, experiment files and the command line know.

    Example:
        >>> import undrift as ud
        >>> ud.register_metric("certain", lambda output, target: (output.softmax(-1).amax(-1) > 0.9).float())
        >>> data = ud.load("digits", ud.IID(), clients=5)
        >>> local = ud.Local(steps=1, lr=0.1)
        >>> result = ud.train("mlp", data, rounds=1, local=local, metrics=["accuracy", "certain"])
        >>> "certain" in result.history[-1]
        True

    Args:
        name: The name, and the column of the history.
        metric: A function of `(output, target)` that returns one value per sample, or an object with `update` and
            `compute`, such as those of torchmetrics.

    Raises:
        UndriftError: If undrift has a metric or a column of this name, or if the metric is neither.
    """
    METRICS.register(name, _found(name, metric))


def get_metrics(metrics: Any, loss: Loss) -> dict[str, Any]:
    """The metrics by name. The default is accuracy if the loss is for classes, otherwise none."""
    if metrics is None:
        return {"accuracy": accuracy} if loss in CLASSES else {}
    if isinstance(metrics, str) or streams(metrics):
        metrics = [metrics]
    if isinstance(metrics, list | tuple):
        metrics = {_name(metric): metric for metric in metrics}
    if not isinstance(metrics, dict):
        raise UndriftError(f"metrics must be names, or a dict of names and functions, not {metrics!r}.")
    return {name: _found(name, metric) for name, metric in metrics.items()}


def _name(metric: Any) -> str:
    """The column of a metric that was given without a name."""
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "__name__", type(metric).__name__))


def _found(name: Any, metric: Any) -> Any:
    if reserved(name):
        raise UndriftError(f"A metric cannot be called {name!r}, which is a column of the history; rename it.")
    if isinstance(metric, str) and metric in METRICS:
        metric = METRICS[metric]
    if isinstance(metric, type) and hasattr(metric, "update") and hasattr(metric, "compute"):
        raise UndriftError(f"The metric {name!r} is a class; give an object of it: {metric.__name__}(…).")
    if streams(metric):
        return fresh(metric)  # the caller's is theirs to use
    if callable(metric) or isinstance(metric, Metric):
        return metric
    raise METRICS.unknown(str(metric))


def measure(metric: Any, prepared: Callable[[Any], Any] = lambda function: function) -> Any:
    """Return what evaluation adds up: a `Metric`, or an object that sees every batch. Functions are `prepared`."""
    if isinstance(metric, Metric) or streams(metric):
        return metric
    return Ratio(prepared(metric), getattr(metric, "higher_is_better", None))


def summed(measures: dict[str, Any]) -> bool:
    """Return whether sums suffice, so that each process or node can add up its own."""
    return all(isinstance(metric, Metric) for metric in measures.values())
