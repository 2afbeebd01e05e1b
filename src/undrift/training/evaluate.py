"""Evaluation of the global model on held-out data: loss, metrics, and accuracy per class."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrift.data.dataset import Rows
from undrift.losses import accuracy
from undrift.metrics import summed
from undrift.metrics.base import Tally
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import tree_bytes, tree_map

log = logging.getLogger("undrift")
NO_TEST = (
    "The data have no test set, so the history will have no loss and no metrics; hold one out, as with "
    "ud.load(…, test_fraction=0.2)"
)
Columns = Callable[[], dict[str, Any]]
BATCH = 1000
BATCH_BYTES = 2**25
"""The largest size of a batch in bytes. Large samples come in smaller batches."""


def warn_without_test(run: Run, clients: int) -> None:
    """Warn if a run will have no figures, for lack of any held-out data: here, on nodes, or of clients' own."""
    elsewhere = type(run) is not Run
    if not (run.test or run.validation or clients or elsewhere):
        log.warning(NO_TEST)


def evaluate(run: Run, state: State) -> Columns:
    """Evaluate the model on the test set and, with the prefix `validation_`, on the validation set.

    Returns a function that returns the history's columns, for which it waits for the device. A GPU evaluates while the
    host prepares the next round, unless a metric is an object that sees every batch.
    """
    test = measured(run, state, run.test) if run.test else dict
    held = measured(run, state, run.validation) if run.validation else dict

    def columns() -> dict[str, Any]:
        held_out = {f"validation_{name}": value for name, value in held().items() if name != "class_accuracy"}
        return test() | held_out

    return columns


def measured(run: Run, state: State, data: Rows) -> Columns:
    """Evaluate the model: the mean loss, each metric, and with accuracy `class_accuracy`, None for absent classes."""
    if summed(run.measures):
        return partial(read, values(run, run.ranks.sum(run.ranks.together(lambda: totals(run, state, data)))))
    tally, by_class = run.ranks.together(lambda: passed(run, state, data, data.index))
    found = tally.figures() | class_accuracy(by_class)
    return lambda: found


def totals(run: Run, state: State, data: Rows) -> dict[str, Any]:
    """Return what `figures` makes columns of: `sums` per metric, and `by_class` with accuracy.

    Of several processes, each takes some of the batches. One that has none looks at a sample all the same, for the form
    of the sums.
    """
    mine = own_batches(run, data.index, batch_size(run))
    tally, by_class = passed(run, state, data, mine if len(mine) else data.index[:1])
    if not len(mine):
        tally, by_class = tally.cleared(), torch.zeros_like(by_class)
    return {"sums": tally.sums} | ({"by_class": by_class} if by_class.numel() else {})


@torch.no_grad()
def passed(run: Run, state: State, data: Rows, index: Tensor) -> tuple[Tally, Tensor]:
    """Return the sums over the samples at these indices; with accuracy also correct answers and samples by class."""
    tally = Tally(run.measures)
    by_class = run.metrics.get("accuracy") is accuracy and run.data.classes > 0
    classes = torch.zeros(2, run.data.classes if by_class else 0, device=run.device)
    for x, y in replace(data, index=index).batches(batch_size(run)):
        output = run.outputs(state.params, state.tracked, x)
        tally.add(output, y)
        if by_class:
            for total, own in zip(classes, accuracy(output, y), strict=True):
                total.index_add_(0, y.clamp(min=0), (own * (y >= 0)).to(total.dtype))
    return tally, classes


def figures(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that sums stand for."""
    return read(values(run, found))


def values(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Return each metric's value on the device, in the place of its sums."""
    return found | {"sums": {name: metric.value(found["sums"][name]) for name, metric in run.measures.items()}}


def read(found: dict[str, Any]) -> dict[str, Any]:
    """Return the columns. They are only copied, so that no kernel has to wait for its turn beside later rounds."""
    row = {name: value.tolist() for name, value in found["sums"].items()}
    return row | (class_accuracy(found["by_class"]) if "by_class" in found else {})


def class_accuracy(by_class: Tensor) -> dict[str, Any]:
    pairs = zip(*by_class.tolist(), strict=True)
    return {"class_accuracy": [right / seen if seen else None for right, seen in pairs]} if by_class.numel() else {}


@torch.no_grad()
def forms(run: Run, state: State) -> dict[str, Tensor]:
    """Return sums of 0 in the form in which they are added up, from a client's sample."""
    tally = Tally(run.measures)
    x, y = tree_map(lambda t: t.to(run.device), run.data.take(run.data.store, run.data.index[:1]))
    tally.add(run.model.at(state.tracked)(state.params, x), y)
    return tally.cleared().sums


def own_batches(run: Run, values: Tensor, size: int) -> Tensor:
    """Return the batches that this process evaluates, of all batches of this many values."""
    if not run.ranks.several:
        return values
    return torch.cat([values[:0], *values.split(size)[run.ranks.rank :: run.ranks.size]])


def batch_size(run: Run) -> int:
    """Return how many samples to evaluate at a time: a function of their size, wherever they are."""
    return min(BATCH, max(1, BATCH_BYTES // max(1, tree_bytes(run.device_data.sample))))
