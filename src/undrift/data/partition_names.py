"""Partitions by name, for strings such as `"Dirichlet(0.1)"` in experiment files and on the command line."""

from __future__ import annotations

from collections.abc import Callable

import undrift
from undrift.data.partition import Partition
from undrift.errors import UndriftError
from undrift.expressions import parse

OWN: dict[str, Callable[..., Partition]] = {}
"""The partitions that users have registered."""


def register_partition(name: str, function: Callable[..., Partition]) -> None:
    """Register a partition under a name that experiment files and the command line know.

    Example:
        >>> import undrift as ud
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class ByParity:
        ...     even: int = 0
        ...
        ...     def __call__(self, labels, clients, rng, keys):
        ...         return (labels + self.even) % 2
        >>> ud.register_partition("ByParity", ByParity)
        >>> len(ud.load("digits", "ByParity(even=1)", clients=2))
        2

    Args:
        name: The name.
        function: A frozen dataclass, or another function of the arguments in parentheses, which returns a partition: a
            function of `(labels, clients, rng, keys)` that returns the owner of each sample.

    Raises:
        UndriftError: If undrift has a partition of this name, or if the name cannot be called.
    """
    if name in undrift.PARTITIONS or not name.isidentifier():
        raise UndriftError(f"A partition of your own cannot be called {name!r}; choose another name.")
    OWN[name] = function


def parse_partition(text: str) -> Partition:
    """Return the partition that a string such as `"Dirichlet(0.1)"` describes."""
    known = {name: getattr(undrift, name) for name in undrift.PARTITIONS} | OWN
    found: Partition = parse(text, "partition", known, "Dirichlet(0.1)")
    return found


def text_of(partition: Partition, given: Partition | str) -> str | None:
    """Return a string that describes the partition, `given` as it is or as a string; None if there is none."""
    if type(partition).__module__ == "undrift.data.partition":
        return repr(partition)
    if isinstance(given, str):
        return given
    try:
        return repr(partition) if parse_partition(repr(partition)) == partition else None
    except UndriftError:
        return None
