"""Evaluation of the global model on held-out data: loss, metrics, and accuracy per class."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrift.data.dataset import Rows
from undrift.engine.fallback import out_of_memory
from undrift.functional.model import Params
from undrift.losses import accuracy
from undrift.metrics import summed
from undrift.metrics.base import Tally
from undrift.training.meeting import meet
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import tree_bytes, tree_map, tree_stack

log = logging.getLogger("undrift")
NO_TEST = (
    "The data have no test set, so the history will have no loss and no metrics; hold one out, as with "
    "ud.load(…, test_fraction=0.2)"
)
Columns = Callable[[], dict[str, Any]]
TEST, VALIDATION = "test", "validation"
BATCH = 1000
BATCH_BYTES = 2**25
"""The largest size of a batch in bytes. Large samples come in smaller batches."""
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
    test = measured(run, state, TEST) if run.test else dict
    held = measured(run, state, VALIDATION) if run.validation else dict

    def columns() -> dict[str, Any]:
        held_out = {f"validation_{name}": value for name, value in held().items() if name != "class_accuracy"}
        return test() | held_out

    return columns


def measured(run: Run, state: State, split: str) -> Columns:
    """Evaluate the model: the mean loss, each metric, and with accuracy `class_accuracy`, None for absent classes."""
    if summed(run.measures):
        return partial(read, values(run, run.ranks.sum(run.ranks.together(lambda: totals(run, state, split)))))
    tally, by_class = run.ranks.together(lambda: meet(run, Pass(run, state, split), passes))
    found = tally.figures() | class_accuracy(by_class)
    return lambda: found


def totals(run: Run, state: State, split: str) -> dict[str, Any]:
    """Return what `figures` makes columns of: `sums` per metric, and `by_class` with accuracy.

    Of several processes, each takes some of the batches. One that has none looks at a sample all the same, for the form
    of the sums.
    """
    whole: Tensor = getattr(run, split).index
    mine = own_batches(run, whole, batch_size(run, len(whole)))
    tally, by_class = meet(run, Pass(run, state, split, mine if len(mine) else whole[:1]), passes)
    if not len(mine):
        tally, by_class = tally.cleared(), torch.zeros_like(by_class)
    return {"sums": tally.sums} | ({"by_class": by_class} if by_class.numel() else {})


@dataclass(frozen=True)
class Pass:
    """A pass over held-out data."""

    run: Run
    state: State
    split: str
    """The attribute of the run that has the data."""
    index: Tensor | None = None
    """Some of their indices, if not all."""

    @property
    def rows(self) -> Rows:
        rows: Rows = getattr(self.run, self.split)
        return rows if self.index is None else replace(rows, index=self.index)

    def samples(self) -> Any:
        """Identifies the samples: equal for passes over the same ones."""
        whole = self.index is None or len(self.index) == len(getattr(self.run, self.split))
        return self.run.data.digests[f"{self.split} data"] if whole else self


Found = tuple[Tally, Tensor]
"""Sums; with accuracy also correct answers and samples by class."""


def passes(each: list[Pass]) -> list[Found | BaseException]:
    """Return the sums of each pass, or the exception that a metric raised.

    On a GPU, passes over the same samples are one: those of runs side by side, whose models have the same shape.
    """
    alike: dict[Any, list[int]] = {}
    for i, one in enumerate(each):
        alike.setdefault(one.samples() if len(each) > 1 and one.run.outputs.traced else i, []).append(i)
    found: dict[int, Found | BaseException] = {}
    for members in alike.values():
        found |= dict(zip(members, passed([each[i] for i in members]), strict=True))
    return [found[i] for i in range(len(each))]


def passed(each: list[Pass]) -> list[Found | BaseException]:
    """Return the sums of passes over the same samples. If memory runs out, batches are halved until they fit."""
    run, samples = each[0].run, max(1, len(each[0].rows))
    while True:
        size = min(samples, batch_size(run, samples, len(each)))
        try:
            return in_batches(each, size)
        except Exception as error:
            if size == 1 or not out_of_memory(error):
                raise
        run.outputs.most = size // 2
        log.warning("evaluation starts again in batches of %d samples: memory ran out with %d", size // 2, size)
        torch.cuda.empty_cache()


@torch.no_grad()
def in_batches(each: list[Pass], size: int) -> list[Found | BaseException]:
    """Return the sums of passes over the same samples, in batches of this size."""
    run, rows, answers = each[0].run, each[0].rows, [Answers(one.run) for one in each]
    states = [(one.state.params, one.state.tracked) for one in each]
    stacked: tuple[Params, Params] | None = tree_stack(states) if len(each) > 1 else None
    for x, y in rows.batches(size):
        outputs = run.outputs.of_all(*stacked, x) if stacked else [run.outputs(*states[0], x)]
        for own, output in zip(answers, outputs, strict=True):
            own.add(output, y)
    return [own.failure or (own.tally, own.classes) for own in answers]


class Answers:
    """What a run's metrics make of a model's outputs."""

    def __init__(self, run: Run) -> None:
        self.tally = Tally(run.measures)
        self.by_class = run.metrics.get("accuracy") is accuracy and run.data.classes > 0
        self.classes = torch.zeros(2, run.data.classes if self.by_class else 0, device=run.device)
        self.failure: BaseException | None = None

    def add(self, output: Any, y: Tensor) -> None:
        """Add a batch, unless an earlier one failed."""
        if self.failure:
            return
        try:
            self.tally.add(output, y)
            if self.by_class:
                for total, own in zip(self.classes, accuracy(output, y), strict=True):
                    total.index_add_(0, y.clamp(min=0), (own * (y >= 0)).to(total.dtype))
        except BaseException as error:
            if out_of_memory(error):
                raise
            self.failure = error  # of this run alone


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


def batch_size(run: Run, samples: int, runs: int = 1) -> int:
    """Return the size of the equal batches in which so many samples are evaluated, for several runs at once.

    On a GPU, it is chosen such that the largest tensor of a forward pass takes a fixed share of the memory. For samples
    that are on the host, and on a CPU, it is a function of their size.
    """
    most = min(BATCH, max(1, BATCH_BYTES // max(1, tree_bytes(run.device_data.sample))))
    if run.device.type == "cuda" and run.device_data.host is None and run.outputs.sample_bytes:
        memory = GPU_SHARE * torch.cuda.get_device_properties(run.device).total_memory
        most = max(1, int(memory / (runs * run.outputs.sample_bytes)))
        batches = max(-(-samples // most), run.ranks.size)  # equal ones, and at least one per process
        most = max(1, -(-samples // batches))
    return min(most, run.outputs.most or most)
