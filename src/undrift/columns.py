"""The columns of a run's history: what each means, which names are taken, and which direction is the better one.

Documentation, checks, trackers and the report read `COLUMNS`. To add a column, add it here, write it where its value is
known, and run `python -m scripts.columns`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Column:
    """A column of the history that undrift writes itself."""

    name: str
    meaning: str
    """For the documentation, in Markdown."""
    page: str = "runs"
    """The page of the documentation with the table that lists it."""
    kind: type = float
    """The type of its values: a number, a text, a list or a dict."""
    by_client: bool = False
    """Whether it has an entry per client, so that trackers and charts leave it out."""
    equation: str = ""
    label: str = ""
    """What charts call it, if not by its name."""
    reserved: bool = True
    """Whether metrics must not have this name in any run; otherwise only in runs that have the column."""


FAULTS, DRIFT, FEDERATION = "how-to/faulty-clients", "drift", "deploy"


def drift(name: str, equation: str, meaning: str, **more: Any) -> Column:
    """Return a figure of client drift, which only runs that ask for it have."""
    return Column(name, meaning, DRIFT, equation=equation, reserved=False, **more)


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        Column("round", "the round, from 1"),
        Column("clients", "the sampled cohort", kind=list, by_client=True),
        Column("samples", "the samples that the clients which answered trained on"),
        Column("seconds", "the time that training took, without evaluation"),
        Column("steps", "local steps of all clients in this round"),
        Column("total_steps", "the same so far"),
        Column(
            "steps_fraction",
            "`total_steps` relative to the same cohorts with the step counts of the first round throughout",
        ),
        Column(
            "local_steps",
            "the fewest, the mean and the most steps that a client took",
            kind=dict,
            label="local steps per client",
        ),
        Column("lr", "the local learning rate, before factors that parts apply", label="learning rate"),
        Column("bytes_down", "sent to the whole cohort, counted from the tensors"),
        Column("bytes_up", "sent by the clients that answered"),
        Column("total_bytes", "both, so far"),
        Column("loss", "the mean loss on the test set, in evaluated rounds"),
        Column(
            "class_accuracy",
            "with the metric `accuracy`: that of each class, null if it is absent",
            kind=list,
        ),
        Column(
            "by_client",
            "in the last round, the loss and all metrics of each client on its own test data",
            kind=dict,
            by_client=True,
        ),
        Column("lanes", "how many lanes remain after memory ran out"),
        Column("switched", "why the plain engine took over", kind=str),
        Column(
            "stopped_early",
            "why [a rule](#stopping-early) or a [callback](#callbacks) ended the run here",
            kind=str,
        ),
        Column(
            "skipped",
            'with `on_nonfinite="skip"`: the clients with non-finite values',
            page=FAULTS,
            kind=list,
            by_client=True,
        ),
        Column("dropped", "with `faults`: the clients that never answered", page=FAULTS, kind=list, by_client=True),
        Column(
            "stragglers",
            "with `faults`: the clients that answered after fewer steps than planned",
            page=FAULTS,
            kind=list,
            by_client=True,
        ),
        Column(
            "left_out",
            "with `max_norm_ratio`: the clients whose update was too long",
            page=FAULTS,
            kind=list,
            by_client=True,
        ),
        Column("survivors", "with `faults`, `max_norm_ratio` or `min_clients`: how many clients count", page=FAULTS),
        Column("round_skipped", "with the same: whether they were too few", page=FAULTS, kind=bool),
        drift("update_norm", "Σ pᵢ ‖uᵢ‖", "how far clients move from the global model"),
        drift("update_norm_max", "max ‖uᵢ‖", "the same for the client that moves farthest"),
        drift("mean_update_norm", "‖m‖", "how far their mean moves"),
        drift(
            "agreement",
            "‖m‖ / Σ pᵢ ‖uᵢ‖",
            "1 if all updates are equal, near 0 if they cancel out; about 1/√n for n unrelated updates of equal length",
        ),
        drift(
            "cosine",
            "Σ pᵢ cos(uᵢ, m)",
            "mean cosine similarity with the mean update; an update of zero counts as 0",
        ),
        drift(
            "server_step",
            "‖w′ − w‖",
            "how far the server moves the global weights, after server momentum, adaptive learning rates and so on",
        ),
        drift("train_loss_first", "Σ pᵢ ℓᵢ", "loss on the client's first batch, at the weights it received"),
        drift("train_loss", "Σ pᵢ ℓᵢ", "loss on the batch of its last local step, before that step"),
        drift("client_norms", "‖uᵢ‖", "of the five clients that moved farthest", kind=dict, by_client=True),
        drift(
            "layer_agreement",
            "‖mₗ‖ / Σ pᵢ ‖uᵢₗ‖",
            'with `drift="layers"`: the agreement of each parameter tensor l',
            kind=dict,
        ),
        drift(
            "client_cosines",
            "cos(uᵢ, m)",
            "of each client, if a part of the method gathers individual updates (a median, for example)",
            kind=dict,
            by_client=True,
        ),
        drift("cosine_min", "min cos(uᵢ, m)", "the least of these"),
        Column("missing", "the clients of nodes that sent no reply", FEDERATION, list, True),
        Column("refused", "the clients of nodes whose reply was refused", FEDERATION, list, True),
        Column("nodes", "in rounds that lack a node: the name of each, and the reason", FEDERATION, dict),
    )
}
"""The columns by name. Beside them, a history has the run's metrics, with the prefixes below, and what parts add."""

PREFIXES = ("validation_", "client_", "tuned_")
"""What the names of metrics begin with on validation data, and on clients' own data before and after tuning."""
LOWER = ("loss", "error", "mae", "mse", "rmse", "perplexity", "std")
"""The last words of columns of which less is better; the last is a deviation over clients."""
HIGHER = ("accuracy", "auc", "auroc", "f1", "precision", "r2", "recall", "recall_at_5")
"""Those of which more is."""
PREFIX, SUFFIX = re.compile(f"^({'|'.join(PREFIXES)})"), re.compile(r"(_worst|_first)$")

Directions = Mapping[str, bool]
"""Whether lower values are better, of those metrics of a run that say so themselves, by name."""


def reserved(name: str) -> bool:
    """Whether metrics and columns of parts must not have this name."""
    return (name in COLUMNS and COLUMNS[name].reserved) or str(name).startswith(PREFIXES)


def directions(metrics: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether lower values are better, of those metrics that have an attribute `higher_is_better`."""
    found = {name: getattr(metric, "higher_is_better", None) for name, metric in metrics.items()}
    return {name: not higher for name, higher in found.items() if isinstance(higher, bool)}


def direction(name: str, said: Directions = MappingProxyType({})) -> bool | None:
    """Return whether a lower value of a column of a run's history is the better one, or None if nothing says so.

    Args:
        name: The column, such as `validation_mae` or `client_accuracy_worst`.
        said: What the run's metrics say themselves. The name decides for all others.
    """
    whole = PREFIX.sub("", name)
    base = SUFFIX.sub("", whole)
    by_name = True if base.endswith(LOWER) else False if base.endswith(HIGHER) else None
    return said.get(whole, said.get(base, by_name))


def lower_is_better(name: str, said: Directions = MappingProxyType({})) -> bool:
    """Return whether a lower value of a column is the better one; a higher one is where nothing says so."""
    return bool(direction(name, said))
