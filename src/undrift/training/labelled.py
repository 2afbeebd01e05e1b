"""Data for models that compute their own loss: each sample's target is also its argument `labels`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.samples import Samples, Store, Take
from undrift.functional.arguments import POSITIONAL


@dataclass(frozen=True)
class WithLabels:
    """A `take` whose samples have their targets beside them, unless they have `labels` of their own."""

    take: Take

    def __call__(self, store: Store, indices: Tensor) -> tuple[Samples, Tensor]:
        x, y = self.take(store, indices)
        return {"labels": y, **(x if isinstance(x, dict) else {POSITIONAL: x})}, y


def with_labels(data: FederatedDataset) -> FederatedDataset:
    """The data with labels as arguments, in all splits."""

    def labelled(rows: Rows | None) -> Rows | None:
        return rows and replace(rows, take=WithLabels(rows.take))

    return replace(
        data,
        take=WithLabels(data.take),
        test_rows=labelled(data.test_rows),
        validation_rows=labelled(data.validation_rows),
        server_rows=labelled(data.server_rows),
        client_test=data.client_test and with_labels(data.client_test),
    )
