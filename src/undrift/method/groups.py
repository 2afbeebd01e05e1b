"""Parameter groups: factors of the learning rate and of the weight decay, by patterns of parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from undrift.errors import UndriftError, listed, nonnegative, quoted


@dataclass(frozen=True)
class Group:
    """Factors for the parameters whose names match a pattern, for `Local(groups={pattern: Group(…)})`.

    Example:
        >>> import undrift as ud
        >>> groups = {"*.bias": ud.Group(weight_decay=0.0), "head.*": ud.Group(rate=10.0)}
        >>> local = ud.Local(epochs=1, batch_size=32, lr=0.01, weight_decay=1e-4, groups=groups)

    Args:
        rate: The factor of the learning rate. 0 freezes these parameters.
        weight_decay: The factor of the weight decay.

    Raises:
        UndriftError: If a factor is negative or not finite.
    """

    rate: float = 1.0
    weight_decay: float = 1.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            x = getattr(self, entry.name)
            if not nonnegative(x):
                raise UndriftError(f"Group({entry.name}) must be a number from 0, not {quoted(x)}.")


def check_groups(groups: Any) -> dict[str, Group]:
    """Return the groups as a dict. Raise `UndriftError` unless they are a mapping from patterns to `Group`."""
    if not isinstance(groups, Mapping):
        raise UndriftError(
            'Local(groups) must be a dict from name patterns to groups, such as {"*.bias": ud.Group(weight_decay=0)}, '
            f"not {quoted(groups)}."
        )
    for pattern, group in groups.items():
        if not isinstance(pattern, str):
            raise UndriftError(f'Local(groups) has the key {quoted(pattern)}; write a pattern, such as "head.*".')
        if not isinstance(group, Group):
            raise UndriftError(f"Local(groups[{pattern!r}]) must be a ud.Group, not {quoted(group)}.")
    return dict(groups)


def group_factors(
    groups: Mapping[str, Group] | None, names: Iterable[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the factors of the learning rate and of the weight decay by parameter, without those that are 1.

    Patterns are those of `fnmatch`, and case matters. The first pattern that matches a name applies.

    Args:
        groups: The groups by pattern.
        names: The names of the model's parameters.

    Returns:
        Two dicts by parameter name: factors of the learning rate, and of the weight decay.

    Raises:
        UndriftError: If a pattern matches no parameter, or only parameters that earlier patterns match.
    """
    rates: dict[str, float] = {}
    decays: dict[str, float] = {}
    names = unclaimed = list(names)
    for pattern, group in (groups or {}).items():
        matched = [name for name in unclaimed if fnmatchcase(name, pattern)]
        unclaimed = [name for name in unclaimed if name not in matched]
        if not matched and any(fnmatchcase(name, pattern) for name in names):
            raise UndriftError(
                f"Local(groups): earlier patterns match all parameters that {pattern!r} matches, and the first match "
                "decides; put it before them."
            )
        if not matched:
            raise UndriftError(
                f"Local(groups): no parameter matches {pattern!r}; the model's parameters are {listed(names)}."
            )
        rates |= {name: float(group.rate) for name in matched if group.rate != 1}
        decays |= {name: float(group.weight_decay) for name in matched if group.weight_decay != 1}
    return rates, decays
