"""Federated averaging (McMahan et al., 2017): `w ← w + Σ pᵢ Δᵢ`, `Δᵢ` what client i's local steps did."""

from __future__ import annotations

from dataclasses import dataclass

from undrift.errors import UndriftError
from undrift.method.part import Part


@dataclass(frozen=True)
class FedAvg(Part):
    """The plain mean of the clients' updates. Every method is this plus changes, so it changes nothing.

    `weighting="samples"`: `pᵢ = nᵢ/Σn`, the default unless another part implies uniform; `"uniform"`: `pᵢ = 1/|S|`.
    """

    weighting: str | None = None

    def __post_init__(self) -> None:
        if self.weighting not in (None, "samples", "uniform"):
            raise UndriftError(f'FedAvg(weighting) must be "samples" or "uniform", not {self.weighting!r}.')
        object.__setattr__(self, "implies_weighting", self.weighting)
