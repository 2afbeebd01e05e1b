"""A part's numbers: finding them in its fields, binding them to a round's tensors, and checking them."""

from __future__ import annotations

import copy
from typing import Any

from undrift.schedule import check_number, nested, number_fields, value


def numbers_at(owner: Any, t: int) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for name in number_fields(owner):
        number = getattr(owner, name)
        own[name] = {k: value(v, t) for k, v in number.items()} if isinstance(number, dict) else value(number, t)
    return own | {name: numbers_at(inner, t) for name, inner in nested(owner)}


def bind(owner: Any, numbers: dict[str, Any]) -> Any:
    inners = dict(nested(owner))
    bound = copy.copy(owner)
    for name, number in numbers.items():
        # Not dataclasses.replace: a part's __post_init__ checks what users write, and this is a tensor.
        object.__setattr__(bound, name, bind(inners[name], number) if name in inners else number)
    return bound


def check_numbers(owner: Any, rounds: int, where: str) -> None:
    ranges = getattr(owner, "ranges", {})
    for name in number_fields(owner):
        number, interval = getattr(owner, name), ranges.get(name, "[0, inf)")
        entries = number.items() if isinstance(number, dict) else [(None, number)]
        for key, entry in entries:
            check_number(entry, rounds, f"{where}({name})" if key is None else f"{where}({name}[{key!r}])", interval)
    for name, inner in nested(owner):
        check_numbers(inner, rounds, f"{where}({name}={type(inner).__name__})")
