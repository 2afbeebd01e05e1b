"""A run's identity: everything that determines its result, so that any difference between two runs is detected.

It is stored in the run's folder and in every checkpoint, and compared before a resumed run changes anything. Numbers
are written in full, arrays and weights as checksums, and functions as their compiled code, with the values in their
closure and the simple values and functions of their module that they use.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import re
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift import __version__
from undrift.errors import UndriftError
from undrift.training.run import Run
from undrift.training.settings import ROLES, Settings

LIBRARIES = ("undrift", "torch", "numpy", "builtins", "math", "functools")
"""Packages whose version identifies their code."""
SHOWN = 120
"""The most characters of a difference in a message."""


ELSEWHERE = ("participation", "data")
"""Settings that a run's identity has under other names: "clients a round", and what `data` consists of."""


def identity(run: Run, given: Settings) -> dict[str, str]:
    """What must be the same for a run to be the same run: every setting that decides its result."""
    trained = {*run.model.start, *run.model.tracked}
    found = {
        "rounds": str(run.rounds),
        "seed": str(run.seed),
        "method": describe(run.method),
        "local": describe(run.local),
        "loss": describe(run.loss),
        "metrics": describe(run.metrics),
        "clients a round": str(run.cohort_size),
        "precision": str(run.choices["precision"]),
        **{name: describe(value) for name, value in vars(run.conditions).items()},
        "augmentation": describe(run.data.augment),
        "samples": describe(run.data.take),
        **run.data.digests,
        "model": _module(run.model.module, trained),
    }
    decisive = [name for name, role in ROLES.items() if role.resume == "same" and name not in ELSEWHERE]
    return found | {name: describe(getattr(given, name)) for name in decisive if name not in found}


def versions(device: torch.device) -> dict[str, str]:
    """Versions and hardware, which may change a run's last digits but not its identity."""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "undrift": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "Python": python,
        "device": place,
    }


def compare(before: dict[str, str], now: dict[str, str], where: Any) -> None:
    """Raises `UndriftError` unless the run in the folder `where` has the identity `now`."""
    for what in now | before:
        if before.get(what) != now.get(what):
            then, asked = _difference(str(before.get(what)), str(now.get(what)))
            raise UndriftError(
                f"{where} is of a run with {what} {then}, not {asked}; resume it with the same settings, or choose "
                "another folder."
            )


def compare_versions(before: dict[str, str], now: dict[str, str], where: Any) -> None:
    """Raises `UndriftError` unless the run in the folder `where` was started with the same versions."""
    changed = [f"{what} {before.get(what)}, now {now[what]}" for what in now if before.get(what) != now[what]]
    if changed:
        raise UndriftError(
            f"{where} was started with {'; '.join(changed)}. Its results may differ from an uninterrupted run's in "
            "the last digits; to resume anyway: allow_version_change=True, or undrift resume --allow-version-change."
        )


def _difference(a: str, b: str) -> tuple[str, str]:
    """Two long descriptions, cut to the part around their first difference."""
    if max(len(a), len(b)) <= SHOWN:
        return a, b
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, same - SHOWN // 3)
    return tuple(  # type: ignore[return-value]
        ("…" if begin else "") + text[begin : begin + SHOWN] + ("…" if len(text) > begin + SHOWN else "")
        for text in (a, b)
    )


def plainly(x: Any) -> str:
    """`repr(x)` without addresses, which change from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def describe(x: Any, within: tuple[int, ...] = ()) -> str:
    """A complete description of `x`, the same in every process. `within` are the ids of the enclosing objects."""
    if id(x) in within:
        return "…"
    inner = functools.partial(describe, within=(*within, id(x)))
    if isinstance(x, np.generic):
        return repr(x.item())
    if isinstance(x, np.ndarray | Tensor):
        return _array(x)
    if isinstance(x, dict):
        return "{" + ", ".join(f"{inner(k)}: {inner(v)}" for k, v in x.items()) + "}"
    if isinstance(x, list | tuple):
        return "[" + ", ".join(map(inner, x)) + "]"
    if isinstance(x, set | frozenset):
        return "{" + ", ".join(sorted(map(inner, x))) + "}"
    if isinstance(x, nn.Module):
        return _module(x, set())
    if isinstance(x, functools.partial):
        return f"partial({inner(x.func)}, {inner(x.args)}, {inner(x.keywords)})"
    if isinstance(x, types.MethodType):
        return f"{inner(x.__self__)}.{inner(x.__func__)}"
    if isinstance(x, types.FunctionType):
        return x.__qualname__ if _known(x) else f"{x.__qualname__} (code {_digest(_function(x, inner))})"
    if isinstance(x, type):
        return x.__qualname__ + ("" if _known(x) else f" (code {_digest(_class(x, inner))})")
    if hasattr(x, "parts") and isinstance(x.parts, tuple):  # a sum of parts
        return " + ".join(map(inner, x.parts))
    if dataclasses.is_dataclass(x):
        fields = ", ".join(f"{f.name}={inner(getattr(x, f.name))}" for f in dataclasses.fields(x) if not _unused(f, x))
        return f"{inner(type(x))}({fields})"
    if callable(x) and hasattr(x, "__dict__"):
        return f"{inner(type(x))}({inner(vars(x))})"
    return plainly(x)


def _unused(field: dataclasses.Field[Any], owner: Any) -> bool:
    """Whether a field that earlier versions did not have is at its default, so that runs of theirs can be resumed."""
    value = getattr(owner, field.name)
    return "added" in field.metadata and type(value) is type(field.default) and value == field.default


def _known(x: Any) -> bool:
    return str(x.__module__).partition(".")[0] in LIBRARIES


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]


def _array(x: np.ndarray | Tensor) -> str:
    if isinstance(x, np.ndarray):
        data, kind = (repr(x.tolist()).encode() if x.dtype.hasobject else np.ascontiguousarray(x).tobytes()), x.dtype
        return f"array({kind}, {x.shape}, {_digest(data)})"
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"tensor({x.dtype}, {tuple(x.shape)}, {_digest(data)})"


def _function(x: types.FunctionType, inner: Any) -> str:
    """A function's code, defaults, closure, and what it uses of its module."""
    cells = []
    for cell in x.__closure__ or ():
        try:
            cells.append(inner(cell.cell_contents))
        except ValueError:  # still empty, in a function that refers to itself
            cells.append("…")
    used = {name: x.__globals__[name] for name in sorted(_names(x.__code__)) if name in x.__globals__}
    plain = (bool, int, float, complex, str, bytes, tuple, list, dict, np.ndarray, np.generic, Tensor, type(None))
    values = {
        name: inner(value)
        for name, value in used.items()
        if isinstance(value, plain) or (isinstance(value, types.FunctionType) and value.__module__ == x.__module__)
    }
    return repr([_code(x.__code__), inner(x.__defaults__), inner(x.__kwdefaults__), cells, values])


def _class(x: type, inner: Any) -> str:
    """The functions and simple values that a class and its bases define."""
    own = [inner(base) for base in x.__bases__]
    for name, value in sorted(vars(x).items()):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        function = function.fget if isinstance(function, property) else function
        if (
            isinstance(function, types.FunctionType) and function.__code__.co_filename != "<string>"
        ):  # a dataclass's own
            own.append(f"{name}: {inner(function)}")
        elif isinstance(value, bool | int | float | str | tuple):
            own.append(f"{name} = {value!r}" if name not in ("__module__", "__doc__", "__qualname__") else "")
    return repr(own)


def _names(code: types.CodeType) -> set[str]:
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names}.union(*map(_names, inside))


def _code(code: types.CodeType) -> str:
    """Compiled code, without its location."""
    consts = [
        _code(c) if isinstance(c, types.CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    shape = (code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_names, code.co_varnames, code.co_freevars)
    return repr([code.co_code, shape, consts])


def _module(module: nn.Module, trained: set[str]) -> str:
    """A module's layers, the code of its classes from outside the libraries, and its tensors, except `trained`."""
    classes = sorted({describe(type(m)) for m in module.modules()})
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    rest = {name: _array(t) if name not in trained else (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    return f"{type(module).__qualname__} {_digest(repr([plainly(module), classes, rest]))}"
