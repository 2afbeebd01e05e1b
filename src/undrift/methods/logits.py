"""Losses that depend on which classes a client holds: FedRS and FedLC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.errors import UndriftError
from undrift.method.context import Client
from undrift.method.part import Part
from undrift.schedule import Number


class ByClass(Part):
    """Base class of parts that need targets that are classes."""

    def check(self, local: Any, data: Any) -> None:
        if data.labels is None:
            raise UndriftError(f"{type(self).__name__} needs labels that are classes, one whole number per sample.")

    def known(self, counts: Tensor, z: Tensor) -> Tensor:
        if counts.shape[-1] != z.shape[-1]:
            raise UndriftError(f"{type(self).__name__} needs a model with an output for every class.")
        return counts


@dataclass(frozen=True)
class FedRS(ByClass):
    """Restricted softmax: scale down the logits of classes that the client does not hold. `alpha=1` is FedAvg.

    Li and Zhan, *FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data* (2021). In
    local training, the logit `z_c` of every class c without a sample at the client becomes `α·z_c`.

    Needs targets that are classes, and a model with one output per class.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedRS(alpha=0.5)

    Args:
        alpha: The factor α.
    """

    alpha: Number

    ranges: ClassVar[dict[str, str]] = {"alpha": "[0, 1]"}

    def logits(self, z: Tensor, client: Client) -> Tensor:
        return torch.where(self.known(client.label_counts, z) > 0, z, self.alpha * z)


@dataclass(frozen=True)
class FedLC(ByClass):
    """Logits calibration: a larger margin for classes that are rare at the client. `tau=0` is FedAvg.

    Zhang, Li, Li, Xu, Wu, Ding and Wu, *Federated Learning with Label Distribution Skew via Logits Calibration* (2022).
    In local training, the logit `z_c` becomes `z_c − τ·n_c^(−1/4)`, where n_c is the client's number of samples of
    class c, and 1e-8 for a class without samples.

    Needs targets that are classes, and a model with one output per class.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedLC(tau=1.0)

    Args:
        tau: The strength τ.
    """

    tau: Number

    def logits(self, z: Tensor, client: Client) -> Tensor:
        margin = client.label_counts.to(client.n.dtype).clamp(min=1e-8) ** -0.25  # 1e-8 would be 0 in float16
        return z - (self.tau * self.known(margin, z)).to(z.dtype)
