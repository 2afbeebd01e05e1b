"""Evaluation on each client's own held-out data: of the global model, and after one more local epoch.

For each metric, the history gets the mean and standard deviation over clients, and the mean of the worst 10%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.columns import directions, lower_is_better
from undrift.data.dataset import Rows
from undrift.engine.base import RoundInputs
from undrift.engine.ranks import ALONE
from undrift.errors import require, whole
from undrift.functional.model import Model, Params
from undrift.method.part import Method
from undrift.metrics import summed
from undrift.metrics.base import Tally, streams, valued_by_client
from undrift.random import choose, derive
from undrift.training.evaluate import halve_batches, is_batch_loss, rank_share
from undrift.training.rounds import broadcast
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree, tree_unstack

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
            found = self._owned(state)
        elif is_batch_loss(self.run.loss):  # for a whole batch, so each client needs its own batches
            found = self._one_by_one(state)
        else:
            found = self._at_once(state)
        row: dict[str, Any] = summarize("client", found, self.run.measures)
        if last:
            each = {name: values.tolist() for name, values in found.items()}
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
        shared, found = {**state.params, **state.tracked}, []
        for client, indices in zip(self.clients.tolist(), self.indices, strict=True):
            whose = torch.zeros(len(indices), dtype=torch.int64)
            found.append(self._tally(self.run.model, models.get(client, shared), indices, whose, 1).sums)
        return {name: torch.cat([one[name] for one in found], 1) for name in self.run.measures}

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
            found = {}
            for begin in range(0, len(self.clients), run.cohort_size):
                for c, own in own_models(run, state, self.clients[begin : begin + run.cohort_size]):
                    found[begin + c] = self._alone(run.model, own, begin + c)
            return found

        return self._by_place(work)

    def _by_place(self, work: Callable[[], dict[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
        """Return the measures of all clients, from those that each process finds, by place."""
        found = self.run.ranks.together(work)
        names = [name for name, measure in self.run.measures.items() if getattr(measure, "scalar", True)]
        sums = {name: torch.zeros(len(self.clients), dtype=torch.float64) for name in names}
        for place, one in found.items():
            for name, value in one.items():
                sums[name][place] = value[0]
        all_of_them: dict[str, Tensor] = self.run.ranks.sum(sums)
        return all_of_them

    def tuned(self, state: State, method: Method, t: int) -> dict[str, Any]:
        """Evaluate each client's own model: the global one after one more epoch of local training with the method."""
        run, found = self.run, {}
        if not len(self.clients):
            return {}
        server = run.server(t, state)
        plan, _ = method.plan(run.plan(t), state.parts, server)

        def visit(trained: Params, clients: np.ndarray) -> None:
            for client, own in zip(clients.tolist(), tree_unstack(trained), strict=True):
                place = int(np.searchsorted(self.clients, client))
                found[place] = self._alone(run.model, own, place)

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
        return summarize("tuned", self._by_place(lambda: found), run.measures)

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
    """Yield the same of the clients of these inputs. Of several processes, each has its share of them."""
    program = run.engine.program
    for c, place in enumerate(inputs.places.tolist()):
        given = program.given(inputs.shared, inputs.own(c))
        yield place, program.own(given)


def own_model(run: Run, state: State, client: int) -> Params:
    """Return the same of one client, checked."""
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
        ((_, found),) = own_models(run, state, np.array([int(client)]))
    return {name: t.clone() for name, t in found.items()}


def summarize(
    prefix: str, found: dict[str, Tensor], measures: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, float]:
    """Return mean, standard deviation and mean of the worst 10% over the clients with a value."""
    row: dict[str, float] = {}
    said = directions(measures)
    for name, by_client in found.items():
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
