"""Data for models that compute their own loss: each sample's target is also its argument `labels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.samples import Samples, Store, Take
from undrift.functional.arguments import POSITIONAL
from undrift.random import Key

Augment = Callable[[Samples, Key], Samples]


@dataclass(frozen=True)
class WithLabels:
    """A `take` whose samples include their targets as `labels`, unless they already have `labels`."""

    take: Take

    def __call__(self, store: Store, indices: Tensor) -> tuple[Samples, Tensor]:
        return self._labelled(*self.take(store, indices))

    @property
    def gather(self) -> Any:
        """Return the half of the inner `take` that finds rows, if it has halves; see `declare_halves`."""
        return getattr(self.take, "gather", None)

    def finish(self, rows: Store, store: Store) -> tuple[Samples, Tensor]:
        return self._labelled(*self.take.finish(rows, store))  # type: ignore[attr-defined]

    def _labelled(self, x: Samples, y: Tensor) -> tuple[Samples, Tensor]:
        return {"labels": y, **(x if isinstance(x, dict) else {POSITIONAL: x})}, y


@dataclass(frozen=True)
class AroundLabels:
    """An augmentation that leaves the labels of samples out."""

    augment: Augment

    def __call__(self, x: Samples, key: Key) -> Samples:
        rest = {name: t for name, t in x.items() if name != "labels"}
        changed = self.augment(rest.get(POSITIONAL, rest), key)
        return {"labels": x["labels"], **({POSITIONAL: changed} if POSITIONAL in rest else changed)}


def with_label_inputs(data: FederatedDataset) -> FederatedDataset:
    """Return the data with labels as arguments, in all splits."""

    def labelled(rows: Rows | None) -> Rows | None:
        return rows and replace(rows, take=WithLabels(rows.take))

    return replace(
        data,
        take=WithLabels(data.take),
        augment=data.augment and AroundLabels(data.augment),
        test_rows=labelled(data.test_rows),
        validation_rows=labelled(data.validation_rows),
        server_rows=labelled(data.server_rows),
        client_test=data.client_test and with_label_inputs(data.client_test),
    )
