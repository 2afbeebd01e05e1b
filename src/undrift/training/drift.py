"""Client drift in figures: how far the clients of a round went, and whether they went the same way.

With `u_i` the update of client i, `p_i` its weight in the mean (`Σ p_i = 1`) and `m = Σ p_i u_i`, a round's row has

- `update_norm` = `Σ p_i ‖u_i‖` and `update_norm_max` = `max ‖u_i‖`;
- `mean_update_norm` = `‖m‖`;
- `agreement` = `‖m‖ / Σ p_i ‖u_i‖`: 1 if all updates are alike, near 0 if they cancel out;
- `cosine` = `Σ p_i cos(u_i, m)`, from one more sum of the model's size, `Σ p_i u_i / ‖u_i‖`; an update of zero counts
  as 0;
- `server_step`, the norm of what the server changes in the weights;
- `train_loss_first` and `train_loss` = `Σ p_i ℓ_i`, where `ℓ_i` is the client's loss on the batch of its first and of
  its last local step, before that step, with all terms of the method.

Clients send these as sums, like everything else, so they cost no memory per client, and they are read once the device
is done with the round. They are for whoever studies a simulation: traffic does not count them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undrift.columns import COLUMNS, DRIFT
from undrift.engine.client import Program, Sent
from undrift.errors import UndriftError, quoted
from undrift.tree import Tree, to_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from undrift.engine.base import Outcome, RoundInputs
    from undrift.engine.gradients import Differentiate
    from undrift.functional.model import Params

LAYERS = "layers"
LONGEST = 5
"""How many clients a row names with the norms of their updates, the longest first."""
LEAST = 1e-30
"""The smallest divisor. No weight is as small, and hardly any norm."""
LOSS = "the loss of this step"
"""A buffer's name that no model has: the loss leaves the gradient's computation among the buffers."""

FIGURES = [name for name, column in COLUMNS.items() if column.page == DRIFT]
"""The columns of the history."""


def check(drift: Any, metrics: Iterable[str]) -> None:
    """Refuse what `drift` may not be, and metrics that have the names of its columns."""
    if not isinstance(drift, bool) and drift != LAYERS:
        raise UndriftError(f'drift must be True, False or "{LAYERS}", not {quoted(drift)}.')
    if drift and (taken := sorted(set(FIGURES) & set(metrics))):
        raise UndriftError(f"The metric {taken[0]!r} has the name of a column that drift={drift!r} adds; rename it.")


@dataclass(frozen=True)
class Drifting(Program):
    """A client's program that also sends how far and where its update goes, and its loss."""

    cohort: int = 0
    """The size of a cohort: norms are sent as a vector with the client's own at its place. 0 sends nothing."""
    layers: bool = False
    """Whether to send the norms of each parameter's update, too."""

    @classmethod
    def of(cls, program: Program, **more: Any) -> Drifting:
        """Return the program as one of this class."""
        return cls(**{entry.name: getattr(program, entry.name) for entry in fields(program)} | more)

    def initial(self, given: Tree) -> Tree:
        state = super().initial(given)
        if not self.cohort:
            return state
        zero = torch.zeros_like(given["weight"])
        return state | {"loss_first": zero, "loss": zero.clone()}

    def step(self, state: Tree, given: Tree, batches: Any, k: Tensor, differentiate: Differentiate) -> Tree:
        if not self.cohort:
            return super().step(state, given, batches, k, differentiate)
        losses: list[Tensor] = []
        after = super().step(state, given, batches, k, recording_losses(differentiate, losses))
        loss = losses[0].to(given["weight"].dtype)  # the first one is the step's own
        return after | {"loss_first": torch.where(k == 0, loss, state["loss_first"]), "loss": loss}

    def conclude(self, state: Tree, given: Tree, skip: bool = False) -> Sent:
        sent = super().conclude(state, given, skip)
        if not self.cohort:
            return sent
        weighted, sums, tracked = sent.sums
        weight, whole = given["weight"], flat(weighted)
        length = torch.linalg.vector_norm(whole)
        first, last = state["loss_first"] * weight, state["loss"] * weight
        for counts in (given.get("real"), sent.finite):
            if isinstance(counts, Tensor):
                first, last = torch.where(counts, first, 0), torch.where(counts, last, 0)
        norms = (torch.arange(self.cohort, device=weight.device) == given["place"]) * (length / weight.clamp(LEAST))
        layers = [torch.linalg.vector_norm(t) for t in weighted.values()] if self.layers else []
        direction = whole * (weight / length.clamp(LEAST)).to(whole.dtype)  # zero for an update of zero
        # One vector, so that it is added up by one operation.
        own = torch.cat([torch.stack([first, last, length, *layers]), norms, direction])
        return sent._replace(sums=(weighted, [*sums, own], tracked))

    def split(self, sums: Tensor) -> list[Tensor]:
        """Split what `conclude` put into one vector: losses, lengths (of layers too), norms by place, directions."""
        layers = len(self.model.start) if self.layers else 0
        rest = len(sums) - 3 - layers - self.cohort
        return list(sums.split([2, 1 + layers, self.cohort, rest]))


def flat(tree: dict[str, Tensor]) -> Tensor:
    """Return a tree as one vector, in at least float32: squares of half-precision updates would overflow."""
    return torch.cat([t.flatten().to(torch.promote_types(t.dtype, torch.float32)) for t in tree.values()])


def observe_program(program: Program, drift: bool | str, cohort: int) -> Program:
    """Return the program of clients that send figures of their drift, if asked for."""
    return Drifting.of(program, cohort=cohort, layers=drift == LAYERS) if drift else program


def recording_losses(differentiate: Differentiate, losses: list[Tensor]) -> Differentiate:
    """Return `differentiate`, which also appends the value of each function to `losses`."""

    def noted(loss: Any, params: Params) -> tuple[Params, Params]:
        def with_value(w: Params) -> tuple[Tensor, Params]:
            value, buffers = loss(w)
            return value, {**buffers, LOSS: value.detach()}

        g, buffers = differentiate(with_value, params)
        losses.append(buffers.pop(LOSS))
        return g, buffers

    return noted


def with_places(inputs: RoundInputs) -> RoundInputs:
    """Return the inputs with each client's place in the cohort; clients that fill it up have later places."""
    like = inputs.clients["weight"]
    missing = len(like) - inputs.cohort
    end = len(inputs.plan.clients) + torch.arange(missing)
    places = torch.cat([torch.as_tensor(inputs.places, dtype=torch.int64), end])
    return replace(inputs, clients=inputs.clients | {"place": to_device(places, like.device)})


def split_off_drift(outcome: Outcome) -> tuple[Outcome, Tensor]:
    """Return the outcome without what `Drifting` clients sent about themselves, and what that is."""
    return replace(outcome, sums=outcome.sums[:-1]), outcome.sums[-1]


def figures(program: Drifting, sums: Tensor, outcome: Outcome, before: Params, after: Params) -> dict[str, Tensor]:
    """Return a round's figures, on the device. `before` and `after` are the global weights."""
    losses, lengths, norms, directions = program.split(sums)
    mean, whole = flat(outcome.update), torch.where(outcome.weight > 0, outcome.weight, 1)
    length, step = torch.linalg.vector_norm(mean), torch.linalg.vector_norm(flat(after) - flat(before))
    own = [torch.linalg.vector_norm(t.to(mean.dtype)) for t in outcome.update.values()] if program.layers else []
    numbers = [
        torch.cat([losses, lengths]) / whole,
        torch.stack([length, step, ratio(mean @ directions, length * whole)]),
        ratio(torch.stack([length, *own]) * whole, lengths),
        outcome.weight[None],
    ]
    on_device = {"numbers": torch.cat(numbers), "norms": norms}
    if outcome.finite is not None:
        on_device["counting"] = outcome.finite
    if outcome.updates:
        rows = torch.cat([t.flatten(1) for t in outcome.updates.values()], 1).to(mean.dtype)
        on_device["cosines"] = ratio(rows @ mean, torch.linalg.vector_norm(rows, dim=1) * length)
    return on_device


def ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Return `top / bottom`, and 0 where `bottom` is 0."""
    return torch.where(bottom > 0, top / torch.where(bottom > 0, bottom, 1), 0)


def columns(
    figures: dict[str, Tensor], clients: np.ndarray, excused: np.ndarray, names: list[str], by_layer: bool
) -> dict[str, Any]:
    """Return the figures as columns of the history. Waits for the device.

    Args:
        figures: What the function `figures` returned.
        clients: The cohort.
        excused: By place in it: whether the client is known not to count.
        names: The parameters.
        by_layer: Whether there are figures for each of them.
    """
    layers = len(names) if by_layer else 0
    *values, weight = figures["numbers"].tolist()
    lengths, (mean, step, cosine, agreement, *own) = values[2 : 3 + layers], values[3 + layers :]
    if not weight:  # nobody counts
        return {"server_step": step}
    row: dict[str, Any] = {
        "train_loss_first": values[0], "train_loss": values[1], "update_norm": lengths[0], "mean_update_norm": mean,
        "server_step": step, "cosine": cosine, "agreement": agreement,
    }  # fmt: skip
    if by_layer:  # those that do not move, such as personal ones, neither agree nor disagree
        row["layer_agreement"] = {name: x for name, x, far in zip(names, own, lengths[1:], strict=True) if far}
    counting = ~excused & (figures["counting"].cpu().numpy() if "counting" in figures else True)
    norms, cosines = figures["norms"].tolist(), figures["cosines"].tolist() if "cosines" in figures else []
    if len(clients) <= len(norms):  # a part's plan may have more clients than there are places
        by_client = {c: x for c, x, counts in zip(clients.tolist(), norms, counting, strict=False) if counts}
        longest = sorted(by_client, key=lambda client: -by_client[client])[:LONGEST]
        row |= {"update_norm_max": by_client[longest[0]], "client_norms": {str(c): by_client[c] for c in longest}}
    if len(cosines) == len(clients):
        row["client_cosines"] = {
            str(c): x for c, x, counts in zip(clients.tolist(), cosines, counting, strict=True) if counts
        }
        row["cosine_min"] = min(row["client_cosines"].values())
    return row
