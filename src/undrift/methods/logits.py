"""Losses that know which classes a client holds: FedRS (Li and Zhan, 2021) and FedLC (Zhang et al., 2022)."""

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
    """What both share: they need classes to count."""

    def check(self, local: Any, data: Any) -> None:
        if data.labels is None:
            raise UndriftError(f"{type(self).__name__} needs labels that are classes: one whole number per sample.")

    def known(self, counts: Tensor, z: Tensor) -> Tensor:
        if counts.shape[-1] != z.shape[-1]:
            raise UndriftError(f"{type(self).__name__} needs a model with an output for every class.")
        return counts


@dataclass(frozen=True)
class FedRS(ByClass):
    """Restricted softmax: logits of classes the client does not hold are multiplied by α. `alpha=1` is FedAvg."""

    alpha: Number

    ranges: ClassVar[dict[str, str]] = {"alpha": "[0, 1]"}

    def logits(self, z: Tensor, client: Client) -> Tensor:
        return torch.where(self.known(client.label_counts, z) > 0, z, self.alpha * z)


@dataclass(frozen=True)
class FedLC(ByClass):
    """Calibrated logits: `z_c − τ·n_c^(−1/4)`, n_c the client's count of class c, at least 1e-8. `tau=0` is FedAvg."""

    tau: Number

    def logits(self, z: Tensor, client: Client) -> Tensor:
        margin = client.label_counts.to(client.n.dtype).clamp(min=1e-8) ** -0.25  # 1e-8 is nothing in float16
        return z - (self.tau * self.known(margin, z)).to(z.dtype)
