"""Schedules: any number may be a value or a function of the round, counted from 0.

Step schedules are functions of the local step within a round. They multiply the learning rate.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from undrift.errors import UndriftError, first_line, nonnegative, quoted, require, whole

if TYPE_CHECKING:
    # Inside a hook, a number is a tensor with that round's value; outside, it is a float or a callable.
    Number = Any
else:

    class Number:
        """The annotation of fields that may be a number or a schedule, a function of the round counted from 0.

        Inside hooks, such a field has the value of the current round, as a scalar tensor.

        Example:
            >>> import undrift as ud
            >>> method = ud.FedProx(mu=ud.decay(1.0, 0.5))  # annotated `mu: Number`
            >>> method.mu(2)
            0.25
        """


@dataclasses.dataclass(frozen=True)
class decay:  # noqa: N801 - users call it like a function
    """Exponential decay: `initial · rate^t` in round t, counted from 0.

    For decaying numbers of local steps, `ud.Local(steps=ud.decay(50, 0.98))`, see Mills, Hu and Min, *Faster Federated
    Learning with Decaying Number of Local SGD Steps* (2023).

    Example:
        >>> [decay(1.0, 0.5)(t) for t in range(3)]
        [1.0, 0.5, 0.25]

    Args:
        initial: The value in round 0.
        rate: The factor per round.
    """

    initial: float
    rate: float

    def __call__(self, t: int) -> float:
        return float(self.initial * self.rate**t)


@dataclasses.dataclass(frozen=True)
class inverse:  # noqa: N801
    """Inverse decay: `initial · offset / (offset + t)` in round t, counted from 0.

    The schedule of the theory in Mills, Hu and Min, *Faster Federated Learning with Decaying Number of Local SGD Steps*
    (2023).

    Example:
        >>> [inverse(6.0, 2)(t) for t in range(3)]
        [6.0, 4.0, 3.0]

    Args:
        initial: The value in round 0.
        offset: The round in which the value has halved.
    """

    initial: float
    offset: float

    def __call__(self, t: int) -> float:
        return float(self.initial * self.offset / (self.offset + t))


class StepSchedule:
    """Base class of step schedules: a factor of the learning rate in local step k of a round of `steps` steps.

    Steps are counted from 0. Both arguments may be numbers or tensors. The product of two step schedules multiplies
    their factors, step by step. One of the two may be any other function of `(k, steps)`.
    """

    def __call__(self, k: Any, steps: Any) -> Any:
        raise NotImplementedError

    def __mul__(self, other: Any) -> StepSchedule:
        return StepProduct((*_factors(self), *_factors(other))) if callable(other) else NotImplemented

    def __rmul__(self, other: Any) -> StepSchedule:
        return StepProduct((*_factors(other), *_factors(self))) if callable(other) else NotImplemented


@dataclasses.dataclass(frozen=True)
class warmup(StepSchedule):  # noqa: N801
    """Linear warm-up within a round: local step k, counted from 0, has the factor `start + (1−start)·min(1, (k+1)/n)`.

    The n-th step is the first with the factor 1. With `start=0`, the first step has the factor 1/n rather than 0, so
    that it is not wasted.

    Example:
        >>> [warmup(4)(k, 100) for k in range(6)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]

    Args:
        steps: The number n of steps after which the factor is 1.
        start: Where the line starts, one step before the first.

    Raises:
        UndriftError: If `steps` is not an integer from 1, or `start` is negative.
    """

    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        fine = whole(self.steps) and self.steps >= 1
        require(fine, f"warmup(steps) must be a whole number from 1, not {quoted(self.steps)}.")
        require(nonnegative(self.start), f"warmup(start) must be a number from 0, not {quoted(self.start)}.")

    def __call__(self, k: Any, steps: Any) -> Any:
        done = (k + 1) / self.steps
        done = done.clamp(max=1.0) if hasattr(done, "clamp") else min(1.0, done)
        return self.start + (1 - self.start) * done


@dataclasses.dataclass(frozen=True)
class cosine(StepSchedule):  # noqa: N801
    """Cosine decay within a round: local step k of K, counted from 0, has `floor + (1−floor)·(1 + cos(π·k/K))/2`.

    K is the number of local steps that the client takes in this round. The first step has the factor 1. `floor` would
    be the factor of step K, one after the last.

    Example:
        >>> [round(cosine()(k, 4), 3) for k in range(4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> schedule = warmup(2) * cosine()  # the product of both factors
        >>> [round(schedule(k, 4), 3) for k in range(4)]
        [0.5, 0.854, 0.5, 0.146]

    Args:
        floor: The factor at the end of the round.

    Raises:
        UndriftError: If `floor` is negative.
    """

    floor: float = 0.0

    def __post_init__(self) -> None:
        require(nonnegative(self.floor), f"cosine(floor) must be a number from 0, not {quoted(self.floor)}.")

    def __call__(self, k: Any, steps: Any) -> Any:
        angle = math.pi * k / steps
        cos = angle.cos() if hasattr(angle, "cos") else math.cos(angle)
        return self.floor + (1 - self.floor) * (1 + cos) / 2


@dataclasses.dataclass(frozen=True, repr=False)
class StepProduct(StepSchedule):
    """The product of several step schedules, such as `warmup(5) * cosine()`."""

    factors: tuple[Any, ...]

    def __call__(self, k: Any, steps: Any) -> Any:
        return math.prod(factor(k, steps) for factor in self.factors)

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.factors))


def _factors(schedule: Any) -> tuple[Any, ...]:
    return schedule.factors if isinstance(schedule, StepProduct) else (schedule,)


def value(number: Any, t: int) -> float:
    """Return the value of a number or schedule in round `t`."""
    found = number(t) if callable(number) else number
    if isinstance(found, str):
        raise TypeError("a string is not a number")
    return float(found)


def whole_steps(x: float) -> int:
    """Return a number of steps from a schedule's value: `max(1, ⌈x − 1e-9⌉)`, so that 50·0.8² gives 32."""
    return max(1, math.ceil(x - 1e-9))


def number_fields(owner: Any) -> Iterator[str]:
    """Yield the names of a dataclass's fields that are annotated `Number`, except optional ones that are None."""
    for name, may_be_none in _annotated(type(owner)).items():
        if getattr(owner, name) is not None or not may_be_none:
            yield name


_found: weakref.WeakKeyDictionary[type, dict[str, bool]] = weakref.WeakKeyDictionary()


def _annotated(owner: type) -> dict[str, bool]:
    """Return the fields whose annotation contains `Number`, under any alias, and whether each may be None."""
    if owner not in _found:
        _found[owner] = dict(_find(owner))
    return _found[owner]


def _find(owner: type) -> Iterator[tuple[str, bool]]:
    for field in dataclasses.fields(owner):
        hint = _resolved(owner, field)
        if isinstance(hint, str):  # it uses a name that is only imported for type checkers, or in a function
            number, optional = bool(re.search(r"\bNumber\b", hint)), bool(re.search(r"\b(None|Optional)\b", hint))
        else:
            number, optional = _mentions(hint, Number), _mentions(hint, type(None))
        if number:
            yield field.name, optional or field.default is None


def _resolved(owner: type, field: dataclasses.Field[Any]) -> Any:
    """Return the field's annotation as an object, or as a string if it cannot be resolved."""
    home = next(cls for cls in owner.__mro__ if field.name in inspect.get_annotations(cls))
    holder = types.SimpleNamespace(__annotations__={field.name: field.type})
    try:
        return get_type_hints(holder, vars(sys.modules[home.__module__]), dict(vars(home)))[field.name]
    except Exception:  # an unknown name, or not a type
        return field.type if isinstance(field.type, str) else str(field.type)


def _mentions(hint: Any, wanted: type) -> bool:
    """Return whether a type contains `wanted`, as in `Number | None` or `dict[str, Number]`."""
    return hint is wanted or any(_mentions(inner, wanted) for inner in get_args(hint))


def nested(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields whose values may contain numbers themselves, such as FedProx's target."""
    for field in dataclasses.fields(owner):
        inner = getattr(owner, field.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type) and not callable(inner):
            yield field.name, inner


def inside(interval: str, x: float) -> bool:
    """Return whether `x` is in an interval in mathematical notation, such as "[0, 1)"."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = x >= low if interval[0] == "[" else x > low
    below = x <= high if interval[-1] == "]" else x < high
    return above and below


CHECKED = 1000
"""At most this many rounds are checked at each end of a run, and about as many in between."""


def sampled_rounds(rounds: int) -> Iterable[int]:
    """Return the rounds in which to check a schedule: all or, in a very long run, both ends and an even sample."""
    if rounds <= 3 * CHECKED:
        return range(rounds)
    middle = range(CHECKED, rounds - CHECKED, rounds // CHECKED)
    return itertools.chain(range(CHECKED), middle, range(rounds - CHECKED, rounds))


def check_number(number: Any, rounds: int, where: str, interval: str = "[0, inf)") -> None:
    """Raise if the value is not a number or out of range in some round of the run (see `sampled_rounds`)."""
    for t in sampled_rounds(rounds) if callable(number) else (0,):
        try:
            x = value(number, t)
        except Exception as error:  # a user's function may raise anything
            why = f" (in round {t}: {first_line(error)})" if callable(number) else ""
            raise UndriftError(
                f"{where} must be a number or a function of the round that returns one, not {quoted(number)}{why}."
            ) from error
        if not inside(interval, x):
            when = f" in round {t}" if callable(number) else ""
            raise UndriftError(f"{where} is {x:g}{when}; it must be in {interval}.")
