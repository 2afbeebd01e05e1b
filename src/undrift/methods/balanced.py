"""BalancedLoss: every class that a client holds counts equally in its loss."""

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
    """Class-balanced loss: weight each sample by how rare its class is at the client. `power=0` is FedAvg.

    Not the method of a paper. A sample of class c has the weight `n·n_c^(−p) / Σ_k n_k^(1−p)`, where n_c is the
    client's number of samples of class c and n that of all its samples. The mean weight over the client's data is 1, so
    the step size stays the same. With `p = 1` the weight is `n / (C·n_c)`, where C is the number of classes that the
    client holds: scikit-learn's `class_weight="balanced"`, per client. Samples with negative labels, which have no
    class, keep the weight 1.

    Needs targets that are classes, and a model with one output per class.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedProx(mu=0.01) + ud.BalancedLoss()

    Args:
        power: The exponent p. 0.5 is halfway between the client's own class distribution and a uniform one.
    """

    power: Number = 1.0

    ranges: ClassVar[dict[str, str]] = {"power": "[0, inf)"}
    needs_losses: ClassVar[bool] = True

    def objective(self, losses: Tensor, z: Tensor, batch: Batch, params: Any, client: Client) -> Tensor:
        counts = client.label_counts.to(client.n.dtype)
        if not counts.shape[-1]:
            raise UndriftError("BalancedLoss needs a model with an output for every class.")
        held = counts > 0
        rarity = torch.where(held, counts.clamp(min=1) ** -self.power, 0)  # a class without samples is never looked up
        weights = rarity * (counts.sum() / (counts * rarity).sum().clamp(min=1e-30))
        own = torch.where(batch.y < 0, 1, weights[batch.y.clamp(min=0)])
        return losses * own.to(losses.dtype)
