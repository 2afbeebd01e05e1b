"""FedNova: normalized averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from undrift.errors import UndriftError
from undrift.method.context import Client, Server
from undrift.method.part import Part
from undrift.methods.account import refuse_unaccountable
from undrift.tree import Tree, tree_map


@dataclass(frozen=True)
class FedNova(Part):
    """Normalized averaging: clients that take more local steps do not count for more.

    Wang, Liu, Liang, Joshi and Poor, *Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization* (2020). `dᵢ = Δᵢ/aᵢ` and `w ← w + (Σ pᵢaᵢ)·Σ pᵢdᵢ`, where `aᵢ` is client i's effective number of local
    steps: the number of steps for plain SGD, more with momentum, less if the learning rate decays within the round.
    Where learning rates differ by neuron, aᵢ is elementwise.

    Weighting: both sums have the weights pᵢ of the mean, by samples unless `FedAvg(weighting="uniform")` is added.

    Cannot be combined with `FedDyn`, with a part that overrides `begin` or `aggregate`, with clipping
    (`Local(clip_norm)`), with a local optimizer other than SGD without Nesterov's momentum, or with optimizer state
    that outlives a round.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedNova()
    """

    contradicts: ClassVar[tuple[str, ...]] = ("FedDyn",)
    starts_at_sent: ClassVar[bool] = True

    def check(self, local: Any, data: Any) -> None:
        refuse_unaccountable("FedNova", local)
        if local.optimizer_state != "reset":
            raise UndriftError(
                "FedNova cannot account for a velocity of earlier rounds; leave out "
                f'Local(optimizer_state="{local.optimizer_state}").'
            )

    def update(self, delta: Tree, client: Client) -> Tree:
        return tree_map(lambda d, a: d / torch.where(a > 0, a, 1.0), delta, client.work)  # without steps Δ is 0

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        return tree_map(lambda a: client.weight * a, client.work), client.kept

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        weight = torch.where(server.totals.weight > 0, server.totals.weight, 1.0)  # of an empty cohort, all is 0
        return tree_map(lambda d, a: a / weight * d, update, server.totals.sums), state
