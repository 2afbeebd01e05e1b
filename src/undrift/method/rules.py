"""Which parts can be combined, and how a part must be written: checked before anything runs."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from undrift.errors import UndriftError, nearest
from undrift.method.calls import GROWN, name, ours

WHEN = ("cohort", "sent", "before", "training", "after", "finish")
"""When a part may measure."""
STAGES = ("method", "compression", "privacy")
"""Where a part's `update` belongs in the chain of the clients' `update` hooks."""


def base_of(part: Any) -> Any:
    """Return the class `Part`, whose module imports this one."""
    return next(c for c in type(part).__mro__ if (c.__module__, c.__name__) == ("undrift.method.part", "Part"))


def hooks_in(base: type) -> set[str]:
    """Return the names of everything that a part may override, given the class `Part`."""
    return {key for key, value in vars(base).items() if inspect.isfunction(value) and not key.startswith("_")}


def overrides(part: Any, hook: str) -> bool:
    """Return whether a part changes this hook."""
    return getattr(type(part), hook) is not getattr(base_of(part), hook)


def refuse_contradictions(parts: tuple[Any, ...]) -> None:
    """Reject parts that cannot be combined, and parts that contradict themselves."""
    for j, later in enumerate(parts):
        _check_attributes(later)
        for earlier in parts[:j]:
            first, second = name(earlier), name(later)
            if first == second:
                raise UndriftError(f"{first} stands twice in the method; keep one.")
            if _named(later, earlier.contradicts) or _named(earlier, later.contradicts):
                raise UndriftError(f"{first} and {second} contradict each other; keep one of them.")
            if later.replaces_gradient and (overrides(earlier, "gradient") or overrides(earlier, "step")):
                raise UndriftError(
                    f"{second} replaces the gradient, so what {first} does to it would be lost, if anything; write "
                    f"{second} before {first}, if the two can stand together."
                )
            if later.replaces_losses and overrides(earlier, "objective"):
                raise UndriftError(
                    f"{second} replaces the losses, so what {first} does to them would be lost; write {second} before "
                    f"{first}, if the two can stand together."
                )
            both = overrides(later, "update") and overrides(later, "transform")
            if both and later.stage == "method" and not ours(later) and _named(earlier, ("ServerOptimizer",)):
                raise UndriftError(
                    f"{second} changes updates at the client and again at the server, and {first} would come in "
                    f'between; write {second} before {first}, or declare its stage = "privacy" or "compression", which '
                    "always come before server optimizers."
                )
    _check_aggregation(parts)
    for part in parts:
        begins = [name(other) for other in parts if overrides(other, "begin")]
        if part.starts_at_sent and begins:
            raise UndriftError(
                f"{name(part)} assumes that clients start from the weights sent, and {begins[0]} starts them elsewhere."
            )


def _check_attributes(part: Any) -> None:
    own = name(part)
    if not dataclasses.is_dataclass(type(part)) or not type(part).__dataclass_params__.frozen:
        raise UndriftError(
            f"{own} must be a frozen dataclass: put @dataclass(frozen=True) above it. (Hooks run on copies, so what "
            "they store on self would be lost; keep it in the part's state.)"
        )
    shadowing = [f.name for f in dataclasses.fields(part) if f.name in hooks_in(base_of(part))]
    if shadowing:
        raise UndriftError(f"{own} has a field called {shadowing[0]!r}, which is the name of a hook; choose another.")
    if part.measures not in (None, *WHEN):
        ways = ", ".join(f'"{when}"' for when in WHEN)
        raise UndriftError(f"{own}.measures must be one of {ways}, not {part.measures!r}.")
    if part.stage not in STAGES:
        ways = ", ".join(f'"{stage}"' for stage in STAGES)
        raise UndriftError(f"{own}.stage must be one of {ways}, not {part.stage!r}.")
    if part.measures is None and overrides(part, "measure"):
        raise UndriftError(f'{own} has a measure hook; say when: measures = "before", say.')
    if overrides(part, "gradient") and overrides(part, "step"):
        raise UndriftError(f"{own} has both a gradient and a step hook; `step` is `gradient` with a carry. Keep one.")
    if overrides(part, "carry") and not overrides(part, "step"):
        raise UndriftError(f"{own} has a carry but no step hook, which would change it.")
    if not isinstance(part.batches, int) or part.batches < 1:
        raise UndriftError(f"{own}.batches must be a whole number from 1, not {part.batches!r}.")
    if not isinstance(part.personal, tuple | list) or not all(isinstance(p, str) for p in part.personal):
        raise UndriftError(f'{own}.personal must be a tuple of patterns such as ("head.*",), not {part.personal!r}.')


def _check_aggregation(parts: tuple[Any, ...]) -> None:
    aggregating = [name(part) for part in parts if overrides(part, "aggregate")]
    if len(aggregating) > 1:
        raise UndriftError(f"{' and '.join(aggregating)} both aggregate the clients' updates; keep one of them.")
    for part in parts:
        if aggregating and overrides(part, "upload") and not part.harmless_sums and name(part) not in aggregating:
            raise UndriftError(
                f"{aggregating[0]} may reject a client's update, which would stay in what {name(part)} sums over the "
                "cohort; keep one of them."
            )


def weighting(parts: tuple[Any, ...]) -> str:
    """Return the weighting of clients in the mean: by samples, unless parts imply otherwise. Parts must agree."""
    implying = [part for part in parts if part.implies_weighting]
    for part in implying[1:]:
        if part.implies_weighting != implying[0].implies_weighting:
            needs = [f"{name(p)} needs the {p.implies_weighting} mean" for p in (implying[0], part)]
            raise UndriftError(f"{' and '.join(needs)}; they contradict each other.")
    return str(implying[0].implies_weighting) if implying else "samples"


FORMER = {"after": "observe"}
"""Hooks that have been renamed."""


def check_definition(part: Any) -> None:
    """Reject a user's part that changes nothing, old signatures, and methods that are probably meant as hooks."""
    if ours(part):  # tests show that ours have their effect; FedAvg has no hook
        return
    own_name, base = name(part), base_of(part)
    hooks = hooks_in(base)
    classes = [cls for cls in reversed(type(part).__mro__) if cls not in base.__mro__]  # later ones override
    own = {key: value for cls in classes for key, value in vars(cls).items()}
    settings = {key for key, value in vars(base).items() if not callable(value) and not key.startswith("_")}
    fields = {entry.name for entry in dataclasses.fields(part)}
    for key, value in own.items():
        plain = not hasattr(value, "__get__") and key not in fields and not key.startswith("_")
        if plain and key not in settings and (meant := nearest(key, settings, cutoff=0.8)):
            raise UndriftError(
                f"{own_name}.{key} is not an attribute of parts; did you mean {meant}? (If it is your own, begin its "
                "name with _.)"
            )
        if inspect.isfunction(value) and key in hooks:
            _check_signature(own_name, key, value, getattr(base, key))
        if inspect.isfunction(value) and not key.startswith("_") and key not in vars(base):
            if key in FORMER and len(inspect.signature(value).parameters) == 4:
                raise UndriftError(_changed(own_name, key, FORMER[key], getattr(base, FORMER[key])))
            meant = nearest(key, hooks, cutoff=0.8)
            if meant:
                raise UndriftError(
                    f"{own_name}.{key} is not a hook; did you mean {meant}? (If it is a helper, begin its name with _.)"
                )
    if not part.implies_weighting and not part.personal and not own.keys() & hooks:
        raise UndriftError(f"{own_name} overrides no hook, so it would change nothing; docs/hooks.md lists the hooks.")


def _check_signature(part: str, hook: str, found: Any, wanted: Any) -> None:
    """Reject a hook with a wrong signature, or with the arguments of an earlier version."""
    given, new = (list(inspect.signature(f).parameters.values()) for f in (found, wanted))
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given):
        return
    needed = [p for p in given if p.default is p.empty]
    old = (
        hook in ("transform", "finish") and len(given) == 4 and (given[2].name == "totals" or given[3].name == "state")
    )
    least = len(new) - 1 if hook in GROWN else len(new)
    if len(given) < least or len(needed) > len(new) or old:
        raise UndriftError(_changed(part, hook, hook, wanted))
    names = [p.name for p in new]
    moved = [p.name for i, p in enumerate(given[: len(new)]) if p.name in names and names.index(p.name) != i]
    if moved:
        raise UndriftError(
            f"{part}.{hook} has its argument {moved[0]!r} in another place than undrift passes it; write "
            f"def {hook}({', '.join(names)})."
        )


def _changed(part: str, hook: str, new: str, wanted: Any) -> str:
    arguments = ", ".join(p for p in inspect.signature(wanted).parameters)
    return (
        f"{part}.{hook} does not have the arguments of this version of undrift; write "
        f"def {new}({arguments}). docs/upgrading.md shows what has changed."
    )


def _named(part: Any, names: tuple[str, ...]) -> bool:
    return any(base.__name__ in names for base in type(part).__mro__)
