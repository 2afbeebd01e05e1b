"""Any number may be a schedule: a value, or a function of the round from 0."""

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

from undrift.errors import UndriftError, first_line, quoted

if TYPE_CHECKING:
    # Inside a hook a number is that round's tensor, outside a float or a callable: nothing narrower is true of both.
    Number = Any
else:

    class Number:
        """A value or a schedule. Annotate a part's field with it, and the engine resolves it every round."""


@dataclasses.dataclass(frozen=True)
class decay:  # noqa: N801 - users call it like a function
    """`initial · rate^t`, t the round from 0.

    >>> [decay(1.0, 0.5)(t) for t in range(3)]
    [1.0, 0.5, 0.25]
    """

    initial: float
    rate: float

    def __call__(self, t: int) -> float:
        return float(self.initial * self.rate**t)


@dataclasses.dataclass(frozen=True)
class inverse:  # noqa: N801
    """`initial · offset / (offset + t)`, t the round from 0.

    >>> [inverse(6.0, 2)(t) for t in range(3)]
    [6.0, 4.0, 3.0]
    """

    initial: float
    offset: float

    def __call__(self, t: int) -> float:
        return float(self.initial * self.offset / (self.offset + t))


def value(number: Any, t: int) -> float:
    """What `number` is in round `t`."""
    found = number(t) if callable(number) else number
    if isinstance(found, str):
        raise TypeError("a string is no number")
    return float(found)


def whole_steps(x: float) -> int:
    """A step count from a schedule: `max(1, ⌈x − 1e-9⌉)`, so that 50·0.8² is 32."""
    return max(1, math.ceil(x - 1e-9))


def number_fields(owner: Any) -> Iterator[str]:
    """The names of a dataclass's fields that are annotated `Number`; those that may be None only where they are set."""
    for name, may_be_none in _annotated(type(owner)).items():
        if getattr(owner, name) is not None or not may_be_none:
            yield name


_found: weakref.WeakKeyDictionary[type, dict[str, bool]] = weakref.WeakKeyDictionary()


def _annotated(owner: type) -> dict[str, bool]:
    """The fields of a dataclass whose annotation has `Number` in it, by whatever name, and whether each may be None."""
    if owner not in _found:
        _found[owner] = dict(_find(owner))
    return _found[owner]


def _find(owner: type) -> Iterator[tuple[str, bool]]:
    for field in dataclasses.fields(owner):
        hint = _resolved(owner, field)
        if isinstance(hint, str):  # it names what is only imported for type checkers, or inside a function
            number, optional = bool(re.search(r"\bNumber\b", hint)), bool(re.search(r"\b(None|Optional)\b", hint))
        else:
            number, optional = _mentions(hint, Number), _mentions(hint, type(None))
        if number:
            yield field.name, optional or field.default is None


def _resolved(owner: type, field: dataclasses.Field[Any]) -> Any:
    """The field's annotation as an object, or as its text where that cannot be had."""
    home = next(cls for cls in owner.__mro__ if field.name in inspect.get_annotations(cls))
    holder = types.SimpleNamespace(__annotations__={field.name: field.type})
    try:
        return get_type_hints(holder, vars(sys.modules[home.__module__]), dict(vars(home)))[field.name]
    except Exception:  # a name that is unknown there, or what is no type
        return field.type if isinstance(field.type, str) else str(field.type)


def _mentions(hint: Any, wanted: type) -> bool:
    """Whether `wanted` stands in a type, as in `Number | None` or `dict[str, Number]`."""
    return hint is wanted or any(_mentions(inner, wanted) for inner in get_args(hint))


def nested(owner: Any) -> Iterator[tuple[str, Any]]:
    """The fields that hold further objects with numbers of their own, such as a target inside FedProx."""
    for field in dataclasses.fields(owner):
        inner = getattr(owner, field.name)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type) and not callable(inner):
            yield field.name, inner


def inside(interval: str, x: float) -> bool:
    """Whether `x` lies in an interval written as mathematicians do: "[0, 1)"."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = x >= low if interval[0] == "[" else x > low
    below = x <= high if interval[-1] == "]" else x < high
    return above and below


CHECKED = 1000
"""At most so many rounds at either end of a run are checked one by one, and about as many in between."""


def sampled_rounds(rounds: int) -> Iterable[int]:
    """The rounds in which a schedule is checked: all of them, or of a very long run the ends and an even sample."""
    if rounds <= 3 * CHECKED:
        return range(rounds)
    middle = range(CHECKED, rounds - CHECKED, rounds // CHECKED)
    return itertools.chain(range(CHECKED), middle, range(rounds - CHECKED, rounds))


def check_number(number: Any, rounds: int, where: str, interval: str = "[0, inf)") -> None:
    """Refuse a number that is, in a round of the run, not a number or outside its range (see `sampled_rounds`)."""
    for t in sampled_rounds(rounds) if callable(number) else (0,):
        try:
            x = value(number, t)
        except Exception as error:  # whatever a user's function may raise
            why = f" (in round {t}: {first_line(error)})" if callable(number) else ""
            raise UndriftError(
                f"{where} must be a number or a function of the round that gives one, not {quoted(number)}{why}."
            ) from error
        if not inside(interval, x):
            when = f" in round {t}" if callable(number) else ""
            raise UndriftError(f"{where} is {x:g}{when}; it must be in {interval}.")
