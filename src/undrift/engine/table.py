"""A persistent map from clients to values: a changed copy shares with the old one what has not changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BITS = 8
"""The bits of a client's id per level, except for the top level, which has the rest."""
PLACES = (1 << BITS) - 1


class Table(Mapping[int, Any]):
    """Values by client, in a tree of three levels, so that a round costs what its cohort does, whatever the population.

    Example:
        >>> one = Table().updated({3: "a", 70000: "b"})
        >>> two = one.updated({3: "c"})
        >>> one[3], two[3], two[70000], list(two)
        ('a', 'c', 'b', [3, 70000])
    """

    def __init__(self) -> None:
        self._top: dict[int, dict[int, dict[int, Any]]] = {}
        self._length = 0

    def updated(self, new: Mapping[int, Any]) -> Table:
        """Return the table with these values in place of the clients' previous ones."""
        other, mine = Table(), set()
        other._top, other._length = dict(self._top), self._length
        for client, value in new.items():
            high, middle, low = client >> 2 * BITS, client >> BITS, client & PLACES
            if high not in mine:
                other._top[high] = dict(other._top.get(high, ()))
            branch = other._top[high]
            if (high, middle) not in mine:
                branch[middle] = dict(branch.get(middle, ()))
            mine |= {high, (high, middle)}
            other._length += low not in branch[middle]
            branch[middle][low] = value
        return other

    def __getitem__(self, client: int) -> Any:
        return self._top[client >> 2 * BITS][client >> BITS][client & PLACES]

    def __iter__(self) -> Iterator[int]:
        """Yield all clients, ascending."""
        for _, branch in sorted(self._top.items()):
            for middle, twig in sorted(branch.items()):
                yield from (middle << BITS | low for low in sorted(twig))

    def __len__(self) -> int:
        return self._length
