"""Evaluation on each client's own held-out data: of the global model, and after one more local epoch.

For each metric, the history gets the mean and standard deviation over clients, and the mean of the worst 10%.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data.dataset import Rows
from undrift.engine.base import RoundInputs
from undrift.errors import require, whole
from undrift.functional.model import Model, Params
from undrift.loss_modules import PerSample
from undrift.losses import Loss, model_loss
from undrift.method.part import Method
from undrift.random import choose, derive
from undrift.training.evaluate import BATCH, parts_of
from undrift.training.rounds import broadcast
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree, tree_map

MOST = 1000
"""The most clients to evaluate; of more, this many are drawn from the seed, the same ones in every round."""


class Personal:
    """Evaluation on `data.client_test`; without it there are no clients to evaluate."""

    def __init__(self, run: Run) -> None:
        self.run, own = run, run.data.client_test
        if own is None:
            self.clients = np.empty(0, np.int64)
            return
        self.clients = np.intersect1d(own.nonempty, run.data.nonempty)
        if len(self.clients) > MOST:
            self.clients = self.clients[choose(derive(run.seed, "evaluated clients"), len(self.clients), MOST)]
        spans = [own.index[own.offsets[c] : own.offsets[c + 1]] for c in self.clients]
        self.indices = [span.to(run.device) for span in spans]
        sizes = torch.tensor([len(own) for own in self.indices])
        self.whose = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self.store, self.take = run.device_data.place(Rows(own.store, own.index[:0])).store, own.take

    def shared(self, state: State, last: bool) -> dict[str, Any]:
        """The global model on every client's own data; in the last round also per client.

        Where parts have personal parameters or an `own` hook, each client's own model in its place.
        """
        if not len(self.clients):
            return {}
        if has_own_models(self.run):
            found = self._owned(state)
        elif one_number(self.run.loss):  # for a whole batch, so each client's must be its own
            found = self._one_by_one(state)
        else:
            model = self.run.model.at(state.tracked)
            found = self._measured(model, state.params, torch.cat(self.indices), self.whose, len(self.clients))
        row: dict[str, Any] = summary("client", found)
        if last:
            each = {name: values.tolist() for name, values in found.items()}
            names = self.run.data.client_names
            who = {"name": [names[c] for c in self.clients]} if names else {}
            row["by_client"] = {"client": self.clients.tolist(), **who, **each}
        return row

    def sums(self, state: State, models: dict[int, Params]) -> dict[str, Tensor]:
        """Numerators and denominators by client: of its own model if it has one, else of the global one."""
        shared, found = {**state.params, **state.tracked}, []
        for client, indices in zip(self.clients.tolist(), self.indices, strict=True):
            found.append(self._sums(self.run.model, models.get(client, shared), *self._alone(indices)))
        return {name: torch.cat([one[name] for one in found], 1) for name in self.run.measures}

    def _one_by_one(self, state: State) -> dict[str, Tensor]:
        """The global model on every client's own data, in batches of their own."""
        model = self.run.model.at(state.tracked)
        found = [self._measured(model, state.params, *self._alone(indices)) for indices in self.indices]
        return {name: torch.cat([one[name] for one in found]) for name in self.run.measures}

    def _alone(self, indices: Tensor) -> tuple[Tensor, Tensor, int]:
        """One client's samples, and whose they are."""
        return indices, torch.zeros(len(indices), dtype=torch.int64), 1

    def _owned(self, state: State) -> dict[str, Tensor]:
        """The loss and each metric of every client's own model on its own data."""
        run, found = self.run, []
        for begin in range(0, len(self.clients), run.cohort_size):
            for c, own in enumerate(own_models(run, state, self.clients[begin : begin + run.cohort_size])):
                found.append(self._measured(run.model, own, *self._alone(self.indices[begin + c])))
        return {name: torch.cat([one[name] for one in found]) for name in run.measures}

    def tuned(self, state: State, method: Method, t: int) -> dict[str, Any]:
        """Each client's own model: the global one after one more epoch of local training with the method."""
        run, found = self.run, {}
        if not len(self.clients):
            return {}
        server = run.server(t, state)
        plan, _ = method.plan(run.plan(t), state.parts, server)

        def visit(trained: Params, clients: np.ndarray) -> None:
            for i, client in enumerate(clients.tolist()):
                own = tree_map(lambda w, i=i: w[i], trained)
                indices = self.indices[int(np.searchsorted(self.clients, client))]
                found[client] = self._measured(run.model, own, *self._alone(indices))

        received: list[Tree] | None = None
        # One cohort at a time, since the states of all clients may not fit into memory at once.
        for begin in range(0, len(self.clients), run.cohort_size):
            clients = self.clients[begin : begin + run.cohort_size]
            epoch = -(-run.local.per_epoch(run.data.sizes[clients]) // run.composed.batches)
            here = replace(plan, clients=clients, steps=epoch)
            server = replace(server, cohort=clients, client_weights=run.weights(clients))
            if received is None or method.measuring("cohort"):
                received = broadcast(run, method, here, state, server)
            run.engine.run(run.inputs(here, state, received, state.clients), visit)
        return summary("tuned", {name: torch.cat([found[int(c)][name] for c in self.clients]) for name in run.measures})

    def _measured(
        self, model: Model, params: Params, indices: Tensor, whose: Tensor, clients: int
    ) -> dict[str, Tensor]:
        """The loss and each metric, per client."""
        return {name: means(sums) for name, sums in self._sums(model, params, indices, whose, clients).items()}

    def _sums(self, model: Model, params: Params, indices: Tensor, whose: Tensor, clients: int) -> dict[str, Tensor]:
        """Their numerators and denominators."""
        run = self.run
        sums = {name: torch.zeros(2, clients, dtype=torch.float64) for name in run.measures}
        for begin in range(0, len(indices), BATCH):
            part = slice(begin, begin + BATCH)
            x, y = self.take(self.store, indices[part])
            output = model(params, x)
            for name, measure in run.measures.items():
                both = torch.stack(parts_of(measure, output, y)).cpu()
                sums[name].index_add_(1, whose[part], both)
        return sums


def means(sums: Tensor) -> Tensor:
    """Ratios by client. Recall is undefined (NaN) without positive labels; a loss of NaN counts as infinite."""
    top, bottom = sums
    return torch.where(bottom > 0, (top / bottom).nan_to_num(math.inf), math.nan)


def one_number(loss: Loss) -> bool:
    """Whether a loss gives one value for a batch."""
    return loss is model_loss or (isinstance(loss, PerSample) and loss.whole is not None)


def has_own_models(run: Run) -> bool:
    """Whether clients have personal parameters, or the method an `own` hook."""
    return bool(run.engine.program.personal or run.engine.program.using["own"])


def own_models(run: Run, state: State, clients: np.ndarray) -> Iterator[Params]:
    """The weights and running statistics that each of these clients would use."""
    method, t = run.bound(state.round - 1), state.round - 1
    server = replace(run.server(t, state), cohort=clients, client_weights=run.weights(clients))
    plan = replace(run.plan(t), clients=clients, steps=np.ones_like(clients))
    yield from owned(run, run.inputs(plan, state, broadcast(run, method, plan, state, server), state.clients))


def owned(run: Run, inputs: RoundInputs) -> Iterator[Params]:
    """The weights and running statistics that each client of these inputs would use."""
    program = run.engine.program
    for c in range(inputs.cohort):
        given = program.given(inputs.shared, tree_map(lambda t, c=c: t[c], inputs.clients))
        yield {**program.own(given), **given["tracked"]}


def own_model(run: Run, state: State, client: int) -> Params:
    """The same of one client, checked."""
    known = whole(client) and client in run.data.nonempty
    require(known and state.round > 0, f"There is no client {client!r} with data, or no round was trained.")
    with torch.no_grad():
        (found,) = own_models(run, state, np.array([int(client)]))
    return {name: t.clone() for name, t in found.items()}


def summary(prefix: str, found: dict[str, Tensor]) -> dict[str, float]:
    """Mean, standard deviation and mean of the worst 10% over clients; for the loss, the highest are the worst."""
    row: dict[str, float] = {}
    for name, by_client in found.items():
        values = by_client[~by_client.isnan()].sort(descending=name == "loss").values
        worst = values[: math.ceil(len(values) / 10)]
        row |= {
            f"{prefix}_{name}": float(values.mean()),
            f"{prefix}_{name}_std": float(values.std(correction=0)),
            f"{prefix}_{name}_worst": float(worst.mean()),
        }
    return row
