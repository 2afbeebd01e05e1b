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

from undrift.engine.client import Program, Sent
from undrift.errors import UndriftError, quoted
from undrift.tree import Tree, to_device, tree_leaves, tree_map, tree_sub

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from undrift.engine.base import Outcome, RoundInputs
    from undrift.engine.gradients import Differentiate
    from undrift.functional.model import Params

LAYERS = "layers"
LONGEST = 5
"""How many clients a row names with the norms of their updates, the longest first."""
LOSS = "the loss of this step"
"""A buffer's name that no model has: the loss leaves the gradient's computation among the buffers."""


COLUMNS = (
    "train_loss_first", "train_loss", "update_norm", "update_norm_max", "mean_update_norm", "server_step", "cosine",
    "cosine_min", "agreement", "layer_agreement",
)  # fmt: skip
"""The columns of the history, beside those of clients."""


def check(drift: Any, metrics: Iterable[str]) -> None:
    """Refuse what `drift` may not be, and metrics that have the names of its columns."""
    if not isinstance(drift, bool) and drift != LAYERS:
        raise UndriftError(f'drift must be True, False or "{LAYERS}", not {quoted(drift)}.')
    if drift and (taken := sorted(set(COLUMNS) & set(metrics))):
        raise UndriftError(f"The metric {taken[0]!r} has the name of a column that drift={drift!r} adds; rename it.")


@dataclass(frozen=True)
class Drifting(Program):
    """A client's program that also sends how far and where its update goes, and its loss."""

    cohort: int = 0
    """The size of a cohort: norms are sent as a vector with the client's own at its place. 0 sends nothing."""

    @classmethod
    def of(cls, program: Program, **more: Any) -> Drifting:
        """The program as one of this class."""
        return cls(**{entry.name: getattr(program, entry.name) for entry in fields(program)} | more)

    def initial(self, given: Tree) -> Tree:
        state = super().initial(given)
        return state | {"losses": torch.zeros_like(given["weight"]).repeat(2)} if self.cohort else state

    def step(self, state: Tree, given: Tree, batches: Any, k: Tensor, differentiate: Differentiate) -> Tree:
        if not self.cohort:
            return super().step(state, given, batches, k, differentiate)
        losses: list[Tensor] = []
        after = super().step(state, given, batches, k, noting(differentiate, losses))
        latest, before = losses[0].to(given["weight"].dtype), state["losses"]  # the first is the step's own
        return after | {"losses": torch.stack([torch.where(k == 0, latest, before[0]), latest])}

    def conclude(self, state: Tree, given: Tree, skip: bool = False) -> Sent:
        sent = super().conclude(state, given, skip)
        if not self.cohort:
            return sent
        weighted, sums, tracked = sent.sums
        weight = torch.where(given["weight"] > 0, given["weight"], 1)
        layers = torch.stack([torch.linalg.vector_norm(t) for t in weighted.values()])
        length = torch.linalg.vector_norm(layers)
        unit = torch.where(length > 0, weight / torch.where(length > 0, length, 1), 0)
        losses = state["losses"] * given["weight"]
        if "real" in given:
            losses = torch.where(given["real"], losses, 0)
        if isinstance(sent.finite, Tensor):
            losses = torch.where(sent.finite, losses, 0)
        place = torch.arange(self.cohort, device=weight.device) == given["place"]
        own = {
            "norms": torch.where(place, length / weight, 0),
            "lengths": torch.cat([length[None], layers]),
            "losses": losses,
            "directions": tree_map(lambda t: t * unit.to(t.dtype), weighted),
        }
        return sent._replace(sums=(weighted, [*sums, own], tracked))


def noting(differentiate: Differentiate, losses: list[Tensor]) -> Differentiate:
    """`differentiate`, which also appends the value of each function to `losses`."""

    def noted(loss: Any, params: Params) -> tuple[Params, Params]:
        def with_value(w: Params) -> tuple[Tensor, Params]:
            value, buffers = loss(w)
            return value, {**buffers, LOSS: value.detach()}

        g, buffers = differentiate(with_value, params)
        losses.append(buffers.pop(LOSS))
        return g, buffers

    return noted


def with_places(inputs: RoundInputs) -> RoundInputs:
    """The inputs with each client's place in the cohort; those that fill it up have places after it."""
    like = inputs.clients["weight"]
    missing = len(like) - inputs.cohort
    end = len(inputs.plan.clients) + torch.arange(missing)
    places = torch.cat([torch.as_tensor(inputs.places, dtype=torch.int64), end])
    return replace(inputs, clients=inputs.clients | {"place": to_device(places, like.device)})


def taken(outcome: Outcome) -> tuple[Outcome, Tree]:
    """The outcome without what `Drifting` clients sent about themselves, and that."""
    return replace(outcome, sums=outcome.sums[:-1]), outcome.sums[-1]


def figures(sums: Tree, outcome: Outcome, before: Params, after: Params) -> dict[str, Tensor]:
    """A round's figures, on the device. `before` and `after` are the global weights."""
    mean, whole = outcome.update, torch.where(outcome.weight > 0, outcome.weight, 1)
    layers = torch.stack([torch.linalg.vector_norm(t) for t in mean.values()])
    length, lengths = torch.linalg.vector_norm(layers), sums["lengths"] / whole
    along = sum((mean[n] * t).sum() for n, t in sums["directions"].items())
    step = torch.stack([torch.linalg.vector_norm(t) for t in tree_leaves(tree_sub(after, before))])
    found = {
        "losses": sums["losses"] / whole,
        "norms": sums["norms"],
        "lengths": torch.stack([lengths[0], length, torch.linalg.vector_norm(step)]),
        "agreements": ratio(torch.cat([length[None], layers]), lengths),
        "cosine": ratio(along, length * whole),
    }
    if outcome.updates:
        rows = [t.flatten(1) for t in outcome.updates.values()]
        dots = sum(row @ t.flatten() for row, t in zip(rows, mean.values(), strict=True))
        own = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows]), dim=0)
        found["cosines"] = ratio(dots, own * length)
    return found


def ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """`top / bottom`, and 0 where `bottom` is 0."""
    return torch.where(bottom > 0, top / torch.where(bottom > 0, bottom, 1), 0)


def columns(found: dict[str, Tensor], clients: np.ndarray, names: list[str], by_layer: bool) -> dict[str, Any]:
    """The figures as columns of the history. Waits for the device."""
    values: dict[str, Any] = {name: t.tolist() for name, t in found.items()}
    row: dict[str, Any] = dict(zip(("train_loss_first", "train_loss"), values["losses"], strict=True))
    row |= dict(zip(("update_norm", "mean_update_norm", "server_step"), values["lengths"], strict=True))
    if 0 < len(clients) <= len(values["norms"]):  # a part's plan may have more clients than there are places
        norms = dict(zip(clients.tolist(), values["norms"], strict=False))
        longest = sorted(norms, key=lambda client: -norms[client])[:LONGEST]
        row |= {"update_norm_max": norms[longest[0]], "client_norms": {str(c): norms[c] for c in longest}}
    row |= {"cosine": values["cosine"], "agreement": values["agreements"][0]}
    if by_layer:
        row["layer_agreement"] = dict(zip(names, values["agreements"][1:], strict=True))
    if "cosines" in values and len(values["cosines"]) == len(clients) > 0:
        row["cosine_min"] = min(values["cosines"])
        row["client_cosines"] = {str(c): x for c, x in zip(clients.tolist(), values["cosines"], strict=True)}
    return row
