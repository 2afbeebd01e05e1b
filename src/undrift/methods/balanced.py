"""A loss in which the classes of each client count equally: BalancedLoss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.method.context import Batch, Client
from undrift.methods.logits import ByClass
from undrift.schedule import Number


@dataclass(frozen=True)
class BalancedLoss(ByClass):
    """Weigh each sample's loss by how rare its class is at the client. `power=0` is FedAvg.

    A sample of class c has the weight `n·n_c^(−p) / Σ_k n_k^(1−p)`, with n_c the client's number of samples of class c
    and n of all classes. Its mean over the client's data is 1, so that the step size stays what it was. With `p = 1`
    it is `n / (C·n_c)`, with C the number of classes that the client holds: all of them count equally. Samples with
    labels below 0, which stand for none, keep the weight 1.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedProx(mu=0.01) + ud.BalancedLoss()

    Args:
        power: The exponent p; 0.5 is halfway between the data's own mix of classes and an even one.
    """

    power: Number = 1.0

    ranges: ClassVar[dict[str, str]] = {"power": "[0, inf)"}

    def objective(self, losses: Tensor, z: Tensor, batch: Batch, params: Any, client: Client) -> Tensor:
        counts = client.label_counts.to(client.n.dtype)
        if not counts.shape[-1]:
            raise UndriftError("BalancedLoss needs a model with an output for every class.")
        held = counts > 0
        rarity = torch.where(held, counts.clamp(min=1) ** -self.power, 0)  # a class without samples is never looked up
        weights = rarity * (counts.sum() / (counts * rarity).sum().clamp(min=1e-30))
        own = torch.where(batch.y < 0, 1, weights[batch.y.clamp(min=0)])
        return losses * own.to(losses.dtype)
