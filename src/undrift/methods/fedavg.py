"""FedAvg: the weighted mean of the clients' updates."""

from __future__ import annotations

from dataclasses import dataclass

from undrift.errors import UndriftError
from undrift.method.part import Part


@dataclass(frozen=True)
class FedAvg(Part):
    """Federated averaging: the weighted mean of the clients' updates.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, *Communication-Efficient Learning of Deep Networks from
    Decentralized Data* (2017). With `Δᵢ` the change of the weights by client i's local steps, `w ← w + Σ pᵢΔᵢ`. Every
    other method adds to this one, so as a part it changes nothing but the weights pᵢ.

    Args:
        weighting: `"samples"` for `pᵢ = nᵢ/Σn`, `"uniform"` for `pᵢ = 1/|S|`, S the cohort. By default by samples,
            unless another part implies uniform weights.
    """

    weighting: str | None = None

    def __post_init__(self) -> None:
        if self.weighting not in (None, "samples", "uniform"):
            raise UndriftError(f'FedAvg(weighting) must be "samples" or "uniform", not {self.weighting!r}.')
        object.__setattr__(self, "implies_weighting", self.weighting)
