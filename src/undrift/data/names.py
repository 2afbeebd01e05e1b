"""Names of clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Numbered(Sequence[str]):
    """The names of clients that have numbers. Each is created on demand, as there may be millions."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> Any:
        found = self.numbers[place]
        return Numbered(found) if isinstance(place, slice) else str(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def names_of(known: np.ndarray, names: Sequence[str] | None) -> Sequence[str]:
    """Return the names of the clients with these keys, of all clients' names by key; their keys if they have none."""
    if not names:
        return Numbered(known)
    return names if len(known) == len(names) else np.array(names, object)[known].tolist()
