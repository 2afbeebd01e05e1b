"""Evaluation on held-out data: of the global model, and of clients' models on their own data.

Of the global model there are the loss, metrics, and accuracy per class. Of clients' own data, the history gets for each
metric the mean and standard deviation over clients, and the mean of the worst 10%: for the global model, and for each
client's model after one more local epoch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from undrift.columns import directions, lower_is_better
from undrift.data.dataset import Rows
from undrift.engine.base import RoundInputs
from undrift.engine.fallback import out_of_memory
from undrift.engine.ranks import ALONE
from undrift.errors import require, whole
from undrift.functional.model import Model, Params
from undrift.loss_modules import of_batches
from undrift.losses import Loss, accuracy, model_loss
from undrift.method.part import Method
from undrift.metrics import summed
from undrift.metrics.base import Tally, streams, valued_by_client
from undrift.random import choose, derive
from undrift.training.barrier import meet, result_or_error
from undrift.training.rounds import broadcast
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree, tree_bytes, tree_map, tree_stack, tree_unstack

# ---- the global model ----------------------------------------------------------------------------------------------

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
    """Return what `columns_of_sums` makes columns of: `sums` per metric, and `by_class` with accuracy.

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
    results: dict[int, Sums | BaseException] = {}
    for members in alike.values():
        together = [each[i] for i in members]
        run, samples = together[0].run, len(together[0].rows)
        answers = halve_batches(run, samples, partial(evaluate_together, together), len(together))
        results |= dict(zip(members, answers, strict=True))
    return [results[i] for i in range(len(each))]


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


def columns_of_sums(run: Run, sums: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that sums stand for."""
    return read_columns(metric_values(run, sums))


def metric_values(run: Run, sums: dict[str, Any]) -> dict[str, Any]:
    """Return each metric's value on the device, in the place of its sums."""
    return sums | {"sums": {name: metric.value(sums["sums"][name]) for name, metric in run.measures.items()}}


def read_columns(values: dict[str, Any]) -> dict[str, Any]:
    """Return the columns. They are only copied, so that no kernel has to wait for its turn beside later rounds."""
    row = {name: value.tolist() for name, value in values["sums"].items()}
    return row | (class_accuracy(values["by_class"]) if "by_class" in values else {})


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


# ---- clients' own data ---------------------------------------------------------------------------------------------

MAX_CLIENTS = 1000
"""The largest number of clients to evaluate. Of more, this many are drawn, the same ones in every round."""


class Personal:
    """Evaluation on `data.client_test`; without it there are no clients to evaluate."""

    def __init__(self, run: Run) -> None:
        self.run, own = run, run.data.client_test
        if own is None:
            self.clients = np.empty(0, np.int64)
            return
        self.clients = np.flatnonzero((np.diff(own.offsets) > 0) & (np.diff(run.data.offsets) > 0))
        if len(self.clients) > MAX_CLIENTS:
            self.clients = self.clients[choose(derive(run.seed, "evaluated clients"), len(self.clients), MAX_CLIENTS)]
        self.rows = run.device_data.place(Rows(own.store, own.index[:0], own.take))
        spans = [own.index[own.offsets[c] : own.offsets[c + 1]] for c in self.clients]
        self.indices = [span.to(self.rows.index.device) for span in spans]
        sizes = torch.tensor([len(own) for own in self.indices], dtype=torch.int64)
        self.whose = torch.repeat_interleave(torch.arange(len(sizes)), sizes)

    def shared(self, state: State, last: bool) -> dict[str, Any]:
        """Evaluate the global model on every client's own data; in the last round also per client.

        If parts have personal parameters or an `own` hook, each client's own model takes its place.
        """
        if not len(self.clients):
            return {}
        if has_own_models(self.run):
            figures = self._owned(state)
        elif is_batch_loss(self.run.loss):  # for a whole batch, so each client needs its own batches
            figures = self._one_by_one(state)
        else:
            figures = self._at_once(state)
        row: dict[str, Any] = summarize("client", figures, self.run.measures)
        if last:
            each = {name: values.tolist() for name, values in figures.items()}
            names = self.run.data.client_names
            who = {"name": [names[c] for c in self.clients.tolist()]} if names else {}
            row["by_client"] = {"client": self.clients.tolist(), **who, **each}
        return row

    def _at_once(self, state: State) -> dict[str, Tensor]:
        """Evaluate the global model on all clients' own data, in common batches that processes share."""
        ranks, model, indices = self.run.ranks, self.run.model.at(state.tracked), torch.cat(self.indices)
        if not summed(self.run.measures):
            every = ranks.together(lambda: self._tally(model, state.params, indices, self.whose, len(self.clients)))
            return every.by_client()

        def work() -> dict[str, Tensor]:
            mine, whose = (rank_share(self.run, t) for t in (indices, self.whose))
            if len(mine):
                return self._tally(model, state.params, mine, whose, len(self.clients)).sums
            one = self._tally(model, state.params, indices[:1], self.whose[:1], len(self.clients))  # for its form
            return one.cleared().sums

        return values_by_client(self.run.measures, ranks.sum(ranks.together(work)))

    def sums(self, state: State, models: dict[int, Params]) -> dict[str, Tensor]:
        """Return numerators and denominators by client: of its own model if it has one, else of the global one."""
        shared, each = {**state.params, **state.tracked}, []
        for client, indices in zip(self.clients.tolist(), self.indices, strict=True):
            whose = torch.zeros(len(indices), dtype=torch.int64)
            each.append(self._tally(self.run.model, models.get(client, shared), indices, whose, 1).sums)
        return {name: torch.cat([one[name] for one in each], 1) for name in self.run.measures}

    def _one_by_one(self, state: State) -> dict[str, Tensor]:
        """Evaluate the global model on every client's own data, in batches per client."""
        ranks, model = self.run.ranks, self.run.model.at(state.tracked)
        mine = range(ranks.rank, len(self.clients), ranks.size)
        return self._by_place(lambda: {place: self._alone(model, state.params, place) for place in mine})

    def _alone(self, model: Model, params: Params, place: int) -> dict[str, Tensor]:
        """Return the measures of weights on the own data of the client at this place among those that are evaluated."""
        indices = self.indices[place]
        return self._tally(model, params, indices, torch.zeros(len(indices), dtype=torch.int64), 1).by_client()

    def _owned(self, state: State) -> dict[str, Tensor]:
        """Return the loss and each metric of every client's own model on its own data."""
        run = self.run

        def work() -> dict[int, dict[str, Tensor]]:
            figures = {}
            for begin in range(0, len(self.clients), run.cohort_size):
                for c, own in own_models(run, state, self.clients[begin : begin + run.cohort_size]):
                    figures[begin + c] = self._alone(run.model, own, begin + c)
            return figures

        return self._by_place(work)

    def _by_place(self, work: Callable[[], dict[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
        """Return the measures of all clients, from those that each process finds, by place."""
        figures = self.run.ranks.together(work)
        names = [name for name, measure in self.run.measures.items() if getattr(measure, "scalar", True)]
        sums = {name: torch.zeros(len(self.clients), dtype=torch.float64) for name in names}
        for place, one in figures.items():
            for name, value in one.items():
                sums[name][place] = value[0]
        all_of_them: dict[str, Tensor] = self.run.ranks.sum(sums)
        return all_of_them

    def tuned(self, state: State, method: Method, t: int) -> dict[str, Any]:
        """Evaluate each client's own model: the global one after one more epoch of local training with the method."""
        run, figures = self.run, {}
        if not len(self.clients):
            return {}
        server = run.server(t, state)
        plan, _ = method.plan(run.plan(t), state.parts, server)

        def visit(trained: Params, clients: np.ndarray) -> None:
            for client, own in zip(clients.tolist(), tree_unstack(trained), strict=True):
                place = int(np.searchsorted(self.clients, client))
                figures[place] = self._alone(run.model, own, place)

        received: list[Tree] | None = None
        # One cohort at a time, since the states of all clients may not fit into memory at once.
        for begin in range(0, len(self.clients), run.cohort_size):
            clients = self.clients[begin : begin + run.cohort_size]
            epoch = -(-run.local.per_epoch(run.data.sizes_of(clients)) // run.composed.batches)
            here = replace(plan, clients=clients, steps=epoch, tuning=True)
            server = replace(server, cohort=clients, client_weights=run.weights(clients))
            if received is None or method.measuring("cohort"):
                received = broadcast(run, method, here, state, server)
            run.engine.run(run.inputs(here, state, received, state.clients), visit)
        return summarize("tuned", self._by_place(lambda: figures), run.measures)

    def _tally(self, model: Model, params: Params, indices: Tensor, whose: Tensor, clients: int) -> Tally:
        """Return what the loss and each metric add up to, per client."""

        def work(size: int) -> Tally:
            tally = Tally(self.run.measures, clients)
            batches = replace(self.rows, index=indices).batches(size)
            for (x, y), owners in zip(batches, whose.split(size), strict=True):
                tally.add(model(params, x), y, owners)
            return tally

        return halve_batches(self.run, len(indices), work)


def values_by_client(measures: dict[str, Any], sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss and each metric that is one number, by client, from sums."""
    scalar = {name: measure for name, measure in measures.items() if measure.scalar}
    return {name: valued_by_client(name, measure, sums[name]) for name, measure in scalar.items()}


def has_own_models(run: Run) -> bool:
    """Return whether clients have personal parameters, or the method an `own` hook."""
    return bool(run.engine.program.personal or run.engine.program.using["own"])


def own_models(run: Run, state: State, clients: np.ndarray) -> Iterator[tuple[int, Params]]:
    """Yield the weights and running statistics that each of these clients would use, and its place among them."""
    method, t = run.bound(state.round - 1), state.round - 1
    server = replace(run.server(t, state), cohort=clients, client_weights=run.weights(clients))
    plan = replace(run.plan(t), clients=clients, steps=np.ones_like(clients))
    yield from own_models_of(run, run.inputs(plan, state, broadcast(run, method, plan, state, server), state.clients))


def own_models_of(run: Run, inputs: RoundInputs) -> Iterator[tuple[int, Params]]:
    """Yield these for the clients of these inputs. Of several processes, each yields its own share."""
    program = run.engine.program
    for c, place in enumerate(inputs.places.tolist()):
        given = program.given(inputs.shared, inputs.own(c))
        yield place, program.own(given)


def own_model(run: Run, state: State, client: int) -> Params:
    """Return the weights and running statistics that one client would use. Raises if there is no such client."""
    known = whole(client) and 0 <= client < len(run.data) and run.data.sizes_of(np.array([client]))[0] > 0
    require(known and state.round > 0, f"There is no client {client!r} with data, or no round was trained.")
    if run.ranks.several:
        owner, here = int(client) % run.ranks.size, run.ranks.owns(int(client)) or not run.keeps
        require(here, f"The state of client {client} is in process {owner}; call own_params there.")
        fine = not run.method.measuring("cohort")
        require(
            fine, "With this method, a client's own weights depend on its whole cohort; resume the run in one process."
        )
        run = replace(run, ranks=ALONE)
    with torch.no_grad():
        ((_, own),) = own_models(run, state, np.array([int(client)]))
    return {name: t.clone() for name, t in own.items()}


def summarize(
    prefix: str, figures: dict[str, Tensor], measures: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, float]:
    """Return mean, standard deviation and mean of the worst 10% over the clients with a value."""
    row: dict[str, float] = {}
    said = directions(measures)
    for name, by_client in figures.items():
        values = by_client[~by_client.isnan()].sort(descending=lower_is_better(name, said)).values
        if not len(values) and streams(measures.get(name)):  # such as a matrix, which has no mean over clients
            continue
        worst = values[: math.ceil(len(values) / 10)]
        row |= {
            f"{prefix}_{name}": float(values.mean()),
            f"{prefix}_{name}_std": float(values.std(correction=0)),
            f"{prefix}_{name}_worst": float(worst.mean()),
        }
    return row
