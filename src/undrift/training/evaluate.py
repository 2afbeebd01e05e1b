"""Evaluation of the global model on held-out data: loss, metrics, and accuracy per class."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from undrift.data.dataset import Rows
from undrift.engine.fallback import out_of_memory
from undrift.functional.model import Params
from undrift.loss_modules import of_batches
from undrift.losses import Loss, accuracy, model_loss
from undrift.metrics import summed
from undrift.metrics.base import Tally
from undrift.training.meeting import meet, result_or_error
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import tree_bytes, tree_map, tree_stack

R = TypeVar("R")
log = logging.getLogger("undrift")
NO_TEST = (
    "The data have no test set, so the history will have no loss and no metrics; hold one out, as with "
    "ud.load(…, test_fraction=0.2)"
)
Columns = Callable[[], dict[str, Any]]
TEST, VALIDATION = "test", "validation"
BATCH = 1000
BATCH_BYTES = 2**25
"""The largest size of a batch's samples in bytes."""
GPU_SHARE = 0.02
"""The share of a GPU's memory for the largest tensor of a forward pass."""


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
    test = evaluate_split(run, state, TEST) if run.test else dict
    held = evaluate_split(run, state, VALIDATION) if run.validation else dict

    def columns() -> dict[str, Any]:
        held_out = {f"validation_{name}": value for name, value in held().items() if name != "class_accuracy"}
        return test() | held_out

    return columns


def evaluate_split(run: Run, state: State, split: str) -> Columns:
    """Evaluate the model: the mean loss, each metric, and with accuracy `class_accuracy`, None for absent classes."""
    if summed(run.measures):
        return partial(
            read_columns, metric_values(run, run.ranks.sum(run.ranks.together(lambda: split_sums(run, state, split))))
        )
    tally, by_class = run.ranks.together(lambda: meet(run, Evaluation(run, state, split), evaluate_all))
    columns = tally.figures() | class_accuracy(by_class)
    return lambda: columns


def split_sums(run: Run, state: State, split: str) -> dict[str, Any]:
    """Return what `figures` makes columns of: `sums` per metric, and `by_class` with accuracy.

    Of several processes, each takes some of the samples. One that has none looks at a sample all the same, for the form
    of the sums.
    """
    whole: Tensor = getattr(run, split).index
    mine = rank_share(run, whole)
    some = None if mine is whole else mine if len(mine) else whole[:1]
    tally, by_class = meet(run, Evaluation(run, state, split, some), evaluate_all)
    if not len(mine):
        tally, by_class = tally.cleared(), torch.zeros_like(by_class)
    return {"sums": tally.sums} | ({"by_class": by_class} if by_class.numel() else {})


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run's model on held-out data."""

    run: Run
    state: State
    split: str
    """`TEST` or `VALIDATION`."""
    index: Tensor | None = None
    """The samples, if not all of the split."""

    @property
    def rows(self) -> Rows:
        rows: Rows = getattr(self.run, self.split)
        return rows if self.index is None else replace(rows, index=self.index)

    @property
    def shareable(self) -> bool:
        """Whether it may be one program with evaluations of other runs on the same samples."""
        return self.index is None and self.run.outputs.traced


Sums = tuple[Tally, Tensor]
"""Sums; with accuracy also correct answers and samples by class."""


def evaluate_all(each: list[Evaluation]) -> list[Sums | BaseException]:
    """Return the sums of each evaluation, or the exception that a metric raised.

    On a GPU, evaluations on the same samples are one program: those of runs side by side, whose models have the same
    shape.
    """
    alike: dict[Any, list[int]] = {}
    for i, one in enumerate(each):
        same = len(each) > 1 and one.shareable
        alike.setdefault(one.run.digests[f"{one.split} data"] if same else i, []).append(i)
    found: dict[int, Sums | BaseException] = {}
    for members in alike.values():
        together = [each[i] for i in members]
        run, samples = together[0].run, len(together[0].rows)
        answers = halve_batches(run, samples, partial(evaluate_together, together), len(together))
        found |= dict(zip(members, answers, strict=True))
    return [found[i] for i in range(len(each))]


@torch.no_grad()
def evaluate_together(each: list[Evaluation], size: int) -> list[Sums | BaseException]:
    """Return the sums of evaluations on the same samples, in batches of this size."""
    run, measures = each[0].run, [Measures(one.run) for one in each]
    states = [(one.state.params, one.state.tracked) for one in each]
    stacked: tuple[Params, Params] | None = tree_stack(states) if len(each) > 1 else None
    failures: dict[int, BaseException] = {}
    for x, y in each[0].rows.batches(size):
        if stacked is None:
            measures[0].add(run.outputs(*states[0], x), y)
            continue
        for i, output in enumerate(run.outputs.of_all(*stacked, x)):
            if i in failures:
                continue
            # A run's metrics must not see what those of another write to the targets.
            failure = result_or_error(partial(measures[i].add, output, tree_map(torch.clone, y)))
            if out_of_memory(failure):
                raise failure  # type: ignore[misc]
            if failure is not None:
                failures[i] = failure
        if len(failures) == len(each):
            break
    return [failures.get(i, (own.tally, own.by_class)) for i, own in enumerate(measures)]


class Measures:
    """Accumulates a run's metrics over the outputs of its model."""

    def __init__(self, run: Run) -> None:
        self.tally = Tally(run.measures)
        self.classes = run.data.classes if run.metrics.get("accuracy") is accuracy else 0
        self.by_class = torch.zeros(2, self.classes, device=run.device)

    def add(self, output: Any, y: Tensor) -> None:
        """Add a batch."""
        self.tally.add(output, y)
        if self.classes:
            for total, own in zip(self.by_class, accuracy(output, y), strict=True):
                total.index_add_(0, y.clamp(min=0), (own * (y >= 0)).to(total.dtype))


def columns_of_sums(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that sums stand for."""
    return read_columns(metric_values(run, found))


def metric_values(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """Return each metric's value on the device, in the place of its sums."""
    return found | {"sums": {name: metric.value(found["sums"][name]) for name, metric in run.measures.items()}}


def read_columns(found: dict[str, Any]) -> dict[str, Any]:
    """Return the columns. They are only copied, so that no kernel has to wait for its turn beside later rounds."""
    row = {name: value.tolist() for name, value in found["sums"].items()}
    return row | (class_accuracy(found["by_class"]) if "by_class" in found else {})


def class_accuracy(by_class: Tensor) -> dict[str, Any]:
    pairs = zip(*by_class.tolist(), strict=True)
    return {"class_accuracy": [right / seen if seen else None for right, seen in pairs]} if by_class.numel() else {}


@torch.no_grad()
def empty_sums(run: Run, state: State) -> dict[str, Tensor]:
    """Return sums of 0 in the form in which they are added up, from a client's sample."""
    tally = Tally(run.measures)
    x, y = tree_map(lambda t: t.to(run.device), run.data.take(run.data.store, run.data.index[:1]))
    tally.add(run.model.at(state.tracked)(state.params, x), y)
    return tally.cleared().sums


def rank_share(run: Run, values: Tensor) -> Tensor:
    """Return what this process evaluates, of one value per sample. Every process must find the same shares."""
    if not run.ranks.several:
        return values
    return torch.cat([values[:0], *values.split(fixed_size(run))[run.ranks.rank :: run.ranks.size]])


def fixed_size(run: Run) -> int:
    """Return the batch size that depends on the size of a sample alone."""
    return min(BATCH, max_samples(run))


def max_samples(run: Run) -> int:
    """Return the largest number of samples in a batch, by their size in bytes."""
    return max(1, BATCH_BYTES // max(1, tree_bytes(run.device_data.sample)))


def batch_size(run: Run, samples: int, runs: int = 1) -> int:
    """Return the batch size for evaluating this many samples, for several runs at once.

    On a GPU, this is limited by the largest tensor of a forward pass, and by the samples themselves, wherever they are.
    A loss of whole batches has batches of a fixed size, on which it depends.
    """
    size = fixed_size(run)
    if run.device.type == "cuda" and run.outputs.sample_bytes and not is_batch_loss(run.loss):
        memory = GPU_SHARE * torch.cuda.get_device_properties(run.device).total_memory
        most = min(max_samples(run), max(1, int(memory / (runs * run.outputs.sample_bytes))))
        batches = -(-samples // most) or 1
        size = -(-samples // batches) or 1  # of nearly the same size
    return min(size, run.outputs.most or size)


def is_batch_loss(loss: Loss) -> bool:
    """Return whether a loss gives one value for a batch."""
    return loss is model_loss or of_batches(loss)


def halve_batches(run: Run, samples: int, work: Callable[[int], R], runs: int = 1) -> R:
    """Return `work(size)` for the batch size of this many samples, halving it while memory runs out."""
    while True:
        size = min(max(1, samples), batch_size(run, samples, runs))
        try:
            return work(size)
        except Exception as error:
            if size == 1 or not out_of_memory(error):
                raise
        # Outside of the handler, whose traceback would keep the batch's tensors alive.
        run.outputs.most = size // 2
        log.warning("evaluation starts again in batches of %d samples: memory ran out with %d", size // 2, size)
        torch.cuda.empty_cache()
