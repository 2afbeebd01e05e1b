"""A run's identity: everything that determines its result, so that any difference between two runs is detected.

It is stored in the run's folder and in every checkpoint, and compared before a resumed run changes anything. Numbers
are written in full, arrays and weights as checksums. Users' functions and classes are described by a digest of their
code (`code_digest.py`), and by the values in their closure and the simple values of their module that they use.

A run may be continued with more rounds. So a value that is called `rounds`, or something with `rounds` in it, and that
equals the run's number of rounds, is described as just that: such a schedule is the same schedule of a longer run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import re
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from undrift import __version__
from undrift.errors import UndriftError
from undrift.functional.borrowed import LENT
from undrift.functional.layouts import components
from undrift.method.part import Method
from undrift.metrics.base import streams
from undrift.training.code_digest import code_of, from_library
from undrift.training.run import Run
from undrift.training.settings import ROLES, Settings

SHOWN = 120
"""The maximum length of a difference in a message."""
CODE = re.compile(r"([\w.<>]+) \(code ([0-9a-f]{16})\)")
"""How a description names a user's function or class."""

ATTRIBUTES = "attributes of the model, the method, the loss, the metrics or the data"
"""Values that only code uses, such as `self.scale` of a module."""
ELSEWHERE = ("participation", "data")
"""Settings that a run's identity has under other names: "clients a round", and what `data` consists of."""


def identity(run: Run, given: Settings, before: int | None = None) -> dict[str, str]:
    """Return what must be the same for a run to be the same run: every setting that decides its result.

    `before` is the number of rounds that the run was started with, if it is compared with one that has another.
    """
    shown = functools.partial(describe, rounds=possible_lengths(run, before))
    trained = {*run.model.start, *run.model.tracked}
    entries = {
        "rounds": str(run.rounds),
        "seed": str(run.seed),
        "method": shown(run.method),
        "local": shown(run.local),
        "loss": shown(run.loss),
        "metrics": shown(run.metrics),
        "clients a round": str(run.cohort_size),
        "precision": str(given.precision),
        **{name: shown(value) for name, value in vars(run.conditions).items()},
        "augmentation": shown(run.data.augment),
        "samples": shown(run.data.take),
        **run.data.digests,
        "model": _module(run.model.module, trained, shown),
    }
    owners = [given.model, run.method, run.loss, run.metrics, run.data.take, run.data.augment]
    with LENT:
        entries[ATTRIBUTES] = _digest(CODE.sub(r"\1", shown(owners, deep=True)))  # code is compared elsewhere
    decisive = [name for name, role in ROLES.items() if role.resume == "same" and name not in ELSEWHERE]
    return entries | {name: shown(getattr(given, name)) for name in decisive if name not in entries}


def possible_lengths(run: Run, before: int | None) -> frozenset[int]:
    return frozenset({run.rounds, run.rounds if before is None else before})


def depending_on_rounds(run: Run, before: int) -> list[str]:
    """Return the schedules, parts and functions that depend on the number of rounds, by their values' names."""
    shown = functools.partial(describe, rounds=possible_lengths(run, before))
    owners: list[Any] = [run.local, *run.method.parts, *([run.conditions.faults] if run.conditions.faults else [])]
    names = []
    for owner in owners:
        name = type(owner).__name__
        fields = {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner)}
        names += [f"{name}({key})" for key, value in fields.items() if shown({key: value}) != describe({key: value})]
        names += [name] if shown(type(owner)) != describe(type(owner)) else []
    functions = {"the loss": run.loss, "the metrics": run.metrics, "the augmentation": run.data.augment}
    return names + [name for name, function in functions.items() if shown(function) != describe(function)]


def versions(device: torch.device) -> dict[str, str]:
    """Return versions and hardware, which may change a run's last digits but not its identity."""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "undrift": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "Python": python,
        "device": place,
    }


def compare_identities(before: dict[str, str], now: dict[str, str], where: Any, hints: Iterable[str] = ()) -> list[str]:
    """Return the functions and classes whose code is not what it was when the run in the folder `where` was started.

    Raises `UndriftError` if the run has another identity in anything else but its number of rounds; `hints` are
    sentences for another method.
    """
    changed: list[str] = []
    for what in now | before:
        then, asked = str(before.get(what)), str(now.get(what))
        if what == "rounds" or then == asked:
            continue
        others = _changed_code(then, asked)
        if not others:
            then, asked = _difference(then, asked)
            raise UndriftError(
                f"The run in {where} was started with {what} {then}, not {asked}. Resume it with the same settings, or "
                f"choose another folder.{''.join(f' {hint}' for hint in hints if what == 'method')}"
            )
        changed += [f"{name} ({what})" for name in dict.fromkeys(others)]
    return changed


def _changed_code(before: str, now: str) -> list[str]:
    """Return the names of code that two descriptions differ in; none if they also differ in something else."""
    if CODE.sub(r"\1", before) != CODE.sub(r"\1", now):
        return []
    pairs = zip(CODE.findall(before), CODE.findall(now), strict=True)
    return [name for (name, then), (_, asked) in pairs if then != asked]


def version_differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return versions and hardware that differ from those of another session."""
    return [f"{what} {before.get(what)}, now {now[what]}" for what in now if before.get(what) != now[what]]


def _difference(a: str, b: str) -> tuple[str, str]:
    """Return two long descriptions, cut to the part around their first difference."""
    if max(len(a), len(b)) <= SHOWN:
        return a, b
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, same - SHOWN // 3)
    return tuple(  # type: ignore[return-value]
        ("…" if begin else "") + text[begin : begin + SHOWN] + ("…" if len(text) > begin + SHOWN else "")
        for text in (a, b)
    )


def repr_without_addresses(x: Any) -> str:
    """Return `repr(x)` without addresses, which change from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def describe_deeply(x: Any) -> str:
    """Return a description of `x` with the attributes of modules and of objects that do not describe themselves.

    But for the values of weights: two modules that differ in nothing else have the same.
    """
    with LENT:
        return describe(x, deep=True)


def describe(x: Any, within: tuple[int, ...] = (), rounds: frozenset[int] = frozenset(), deep: bool = False) -> str:
    """Return a complete description of `x`, the same in every process.

    `within` are the ids of the enclosing objects; `rounds` is what the run's number of rounds may be. `deep`: see
    `describe_deeply`.
    """
    if id(x) in within:
        return "…"
    inner = functools.partial(describe, within=(*within, id(x)), rounds=rounds, deep=deep)
    if deep and isinstance(x, nn.Parameter):
        return f"parameter({x.dtype}, {tuple(x.shape)})"
    if deep and isinstance(x, nn.Module):
        ids = {i for module in x.modules() for hooks in _hooks(module).values() for i in hooks}
        numbers = {i: number for number, i in enumerate(sorted(ids))}
        return inner([[name, type(module), _plain(module, numbers)] for name, module in x.named_modules()])
    if isinstance(x, RemovableHandle):  # of a hook, with its number
        return "handle"
    if isinstance(x, np.generic):
        return repr(x.item())
    if isinstance(x, np.ndarray | Tensor):
        return _array(x)
    if isinstance(x, dict):
        return "{" + ", ".join(f"{inner(k)}: {_value(k, v, inner, rounds)}" for k, v in x.items()) + "}"
    if isinstance(x, list | tuple):
        return "[" + ", ".join(map(inner, x)) + "]"
    if isinstance(x, set | frozenset):
        return "{" + ", ".join(sorted(map(inner, x))) + "}"
    if isinstance(x, nn.Module):
        return _module(x, set(), inner)
    if isinstance(x, functools.partial):
        return f"partial({inner(x.func)}, {inner(x.args)}, {inner(x.keywords)})"
    if isinstance(x, types.MethodType):
        return f"{inner(x.__self__)}.{inner(x.__func__)}"
    if isinstance(x, types.FunctionType | type):
        return x.__qualname__ if from_library(x) else _code(x, inner)
    if hasattr(x, "parts") and isinstance(x.parts, tuple):  # a sum of parts
        return " + ".join(map(inner, x.parts))
    if dataclasses.is_dataclass(x):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if not _unused(f, x)}
        given = ", ".join(f"{name}={_value(name, value, inner, rounds)}" for name, value in fields.items())
        return f"{inner(type(x))}({given})"
    silent = deep and getattr(type(x), "__repr__", None) is object.__repr__
    if (callable(x) or streams(x) or silent) and hasattr(x, "__dict__"):
        return f"{inner(type(x))}({inner(vars(x))})"
    return repr_without_addresses(x)


def _plain(module: nn.Module, numbers: dict[int, int]) -> dict[str, Any]:
    """Return a module's own attributes, without what every module has: tensors, layers, and empty hooks.

    Torch counts the hooks of a process, so these get `numbers` that count those of the model.
    """
    empty, hooks_by_kind = vars(nn.Module()), _hooks(module)
    renamed = {name: {numbers[i]: hook for i, hook in hooks.items()} for name, hooks in hooks_by_kind.items()}
    own = vars(module).items()
    return {name: renamed.get(name, value) for name, value in own if name not in empty or ("hook" in name and value)}


def _hooks(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the hooks of a module by kind, each by a number of the process."""
    return {
        name: hooks
        for name, hooks in vars(module).items()
        if "hook" in name and isinstance(hooks, dict) and hooks and all(type(i) is int for i in hooks)
    }


def _unused(field: dataclasses.Field[Any], owner: Any) -> bool:
    """Return whether a description leaves a field out: marked as "added", with its default, or as "before", with that.

    So runs that were described without the field can be resumed.
    """
    value = getattr(owner, field.name)
    if "before" in field.metadata:
        return bool(value == field.metadata["before"])
    return "added" in field.metadata and type(value) is type(field.default) and value == field.default


def changed_defaults(method: Method, before: str) -> list[str]:
    """Return what descriptions without some field stand for, for parts that have another value in it now."""
    return [
        f"Written without {f.name}, it stands for {type(part).__name__}({f.name}={f.metadata['before']!r})."
        for part in method.parts
        for f in dataclasses.fields(part)  # type: ignore[arg-type]
        if "before" in f.metadata and not _unused(f, part) and f"{f.name}=" not in before
    ]


def _value(name: Any, x: Any, inner: Any, rounds: frozenset[int]) -> str:
    """Describe a named value; one that equals the run's length is described as such."""
    length = isinstance(name, str) and "rounds" in name.lower() and type(x) is int and x in rounds
    return "the number of rounds" if length else str(inner(x))


def _code(x: types.FunctionType | type, inner: Any) -> str:
    """Return a function or class of the user's: its name, a digest of its code, and the values that it uses."""
    code, values = code_of(x)
    return f"{x.__qualname__} (code {code})" + (f" with {inner(values)}" if values else "")


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]


def _array(x: np.ndarray | Tensor) -> str:
    if isinstance(x, np.ndarray):
        data, kind = (repr(x.tolist()).encode() if x.dtype.hasobject else np.ascontiguousarray(x).tobytes()), x.dtype
        return f"array({kind}, {x.shape}, {_digest(data)})"
    if x.layout is not torch.strided:
        return f"tensor({x.layout}, {tuple(x.shape)}, {', '.join(map(_array, components(x)))})"
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"tensor({x.dtype}, {tuple(x.shape)}, {_digest(data)})"


def _module(module: nn.Module, trained: set[str], inner: Any) -> str:
    """Return a module's layers and tensors, except `trained`, and the code of its classes outside of libraries."""
    classes = sorted({type(m) for m in module.modules()}, key=lambda kind: (kind.__qualname__, kind.__module__))
    names = sorted({kind.__qualname__ for kind in classes})
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    rest = {name: _array(t) if name not in trained else (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    own = [inner(kind) for kind in classes if not from_library(kind)]
    layers = _digest(repr([repr_without_addresses(module), names, rest]))
    return f"{type(module).__qualname__} {layers}" + (f" of {', '.join(own)}" if own else "")
