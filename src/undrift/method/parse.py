"""A method from what users write: a part, a sum of parts, or the expression of one in a string."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import undrift
from undrift.errors import UndriftError
from undrift.expressions import parse
from undrift.method.part import Method, Part
from undrift.schedule import decay, inverse


def as_method(method: Any) -> Method:
    """A part, a sum of parts, or their expression in a string, as a `Method`."""
    if isinstance(method, Method):
        return method
    if isinstance(method, Part):
        return Method(method)
    if isinstance(method, str):
        return parse_method(method)
    raise UndriftError(f"method must be a part such as FedAvg(), a sum of parts, or a string, not {method!r}.")


def parse_method(text: str) -> Method:
    """`"FedProx(mu=0.1) + ServerSGD(momentum=0.9)"` as a `Method`."""
    inner = {"decay": decay, "inverse": inverse, "TemporalEnsemble": undrift.TemporalEnsemble}
    return as_method(parse(text, "method", known_parts(), "FedProx(mu=0.1) + ServerSGD(momentum=0.9)", inner))


def known_parts() -> dict[str, Callable[..., Any]]:
    """Every part: the package's own, and those that users have defined or imported, the newest of each name."""
    found: dict[str, Callable[..., Any]] = {}
    for cls in _subclasses(Part):
        if not cls.__module__.startswith("undrift."):  # of ours, METHODS says which are for users
            found[cls.__name__] = cls
    return found | {name: getattr(undrift, name) for name in undrift.METHODS}


def _subclasses(cls: type[Part]) -> Iterator[type[Part]]:
    """All classes below `cls`, in the order in which they were defined among their siblings."""
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)
