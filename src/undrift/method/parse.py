"""Objects from what users write in strings: methods, local optimizers, and the other values of `[local]`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import undrift
from undrift.errors import UndriftError
from undrift.expressions import parse, parse_number
from undrift.method.groups import Group
from undrift.method.optimizers import Optimizer
from undrift.method.part import Method, Part
from undrift.schedule import StepSchedule, cosine, decay, inverse, warmup


def as_method(method: Any) -> Method:
    """Return a part, a sum of parts, or their expression in a string, as a `Method`."""
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
    example = "FedProx(mu=0.1) + ServerSGD(momentum=0.9)"
    return as_method(parse(text, "method", known_parts(), example, inner, undrift.IN_THE_LITERATURE))


def known_parts() -> dict[str, Callable[..., Any]]:
    """Return every part: the package's own, and those that users have defined or imported, the newest of each name."""
    return _known(Part, [*undrift.METHODS, *undrift.SPELLINGS, *undrift.PARTS])


def known_optimizers() -> dict[str, Callable[..., Any]]:
    """Return every local optimizer, as `known_parts`."""
    return _known(Optimizer, undrift.OPTIMIZERS)


def _known(base: type, ours: Iterable[str]) -> dict[str, Callable[..., Any]]:
    own = (cls for cls in _subclasses(base) if not cls.__module__.startswith("undrift."))
    return {cls.__name__: cls for cls in own} | {name: getattr(undrift, name) for name in ours}


def parse_optimizer(text: str) -> Optimizer:
    """`"Adam(beta2=0.99)"` as an optimizer."""
    found: Optimizer = parse(
        text, "optimizer", known_optimizers(), "Adam(beta2=0.99)", {"decay": decay, "inverse": inverse}
    )
    return found


def parse_step_schedule(text: str) -> StepSchedule:
    """`"warmup(5) * cosine()"` as a step schedule."""
    found: StepSchedule = parse(text, "step schedule", {"warmup": warmup, "cosine": cosine}, "warmup(5) * cosine()")
    return found


def parse_local(key: str, value: Any) -> Any:
    """Return the value of a key of `[local]` as `ud.Local` takes it; most strings are schedules of the round."""
    if key == "groups" and value is not None:
        return {pattern: Group(**factors) for pattern, factors in value.items()}
    if not isinstance(value, str) or key in ("optimizer_state", "sampling"):
        return value
    if key == "optimizer":
        return parse_optimizer(value)
    return parse_step_schedule(value) if key == "step_schedule" else parse_number(value)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield all classes below `cls`, in the order in which they were defined among their siblings."""
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)
