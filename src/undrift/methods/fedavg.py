"""FedAvg: the weighted mean of the clients' updates."""

from __future__ import annotations

from dataclasses import dataclass

from undrift.errors import UndriftError
from undrift.method.part import Part


@dataclass(frozen=True)
class FedAvg(Part):
    """Federated averaging: the weighted mean of the clients' updates.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, *Communication-Efficient Learning of Deep Networks from
    Decentralized Data* (2017). Let `Δᵢ` be the change of the weights over client i's local steps. Then
    `w ← w + Σ pᵢΔᵢ`. Every other method is added to this one, so as a part of a sum, `FedAvg` only sets the weights pᵢ.

    `FedAvg("samples")` cannot be combined with `FedDyn`, `TwoDLRD`, `AllDecreasing` or `AdditiveTuning`, which need the
    uniform mean.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedAvg(weighting="uniform") + ud.ServerAdam(lr=0.01)

    Args:
        weighting: `"samples"` for `pᵢ = nᵢ/Σn`, or `"uniform"` for `pᵢ = 1/|S|` with S the cohort. By default, samples
            unless another part implies the uniform mean.
    """

    weighting: str | None = None

    def __post_init__(self) -> None:
        if self.weighting not in (None, "samples", "uniform"):
            raise UndriftError(f'FedAvg(weighting) must be "samples" or "uniform", not {self.weighting!r}.')
        object.__setattr__(self, "implies_weighting", self.weighting)
