"""Calls of hooks: results are checked, and errors in users' hooks are reported with their location."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from numbers import Number
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from undrift.errors import UndriftError, first_line, machine_trouble
from undrift.functional.generators import host_positions, seeded_depth
from undrift.tree import Tree, tree_leaves, tree_map, tree_structure

DRAWS = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.normal, torch.bernoulli, torch.multinomial, torch.poisson,
    torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_, torch.Tensor.random_, torch.Tensor.bernoulli,
    torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.cauchy_, torch.Tensor.log_normal_,
    torch.Tensor.multinomial,
}  # fmt: skip
DROPOUTS = {torch.dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
"""These draw in training only."""
ELSEWHERE = (f"{Path(torch.__file__ or 'torch').parent}{os.sep}", f"{Path(__file__).parent.parent}{os.sep}")
"""Folders of code that is not the user's."""
CHECKS = ("check", "check_model")
"""The hooks that return nothing."""
OTHERS = (*CHECKS, "plan", "history", "update_bytes")
"""The hooks that do not return trees of tensors."""
NUMBERS = (torch.Tensor, Number, np.ndarray, np.generic)
"""What the leaves of trees may be."""
GROWN = ("start", "keep")
"""Hooks that once had fewer arguments; those that were written then are called with as many as they take."""
WATCHED_CALLS = 64
"""How many calls of a hook are watched for draws from the host's generators: those of other threads would be blamed on
the hook, and a hook that draws does so from the first call on."""
_calls: WeakKeyDictionary[type, Counter[str]] = WeakKeyDictionary()


class HookError(UndriftError):
    """A hook of a user's fails, or does what no hook may do."""


class HookFailureError(HookError):
    """A hook of a user's raises an error."""


def call(part: Any, hook: str, *args: Any) -> Any:
    """Call a part's hook. An error in a user's part is reported with the part, the hook, the file and the line."""
    function = getattr(part, hook)
    if hook in GROWN:
        args = args[: arity(getattr(type(part), hook)) - 1]
    if ours(part):
        return function(*args)
    own = f"{name(part)}.{hook}"
    given, draws = Given(args), HostDraws(part, hook)
    try:
        with HookMode(given):
            found = function(*args)
    except ChangedError:
        raise HookError(CHANGED.format(own)) from None
    except GlobalDrawError as error:
        raise HookError(f"{own} draws{place(error)} {error} {ADVICE.get(hook, KEYS)}") from error
    except UndriftError:
        raise
    except Exception as error:  # a user's code may raise anything
        if machine_trouble(error):
            raise
        raise HookFailureError(f"{own} failed{place(error)}: {reason(error)}") from error
    if given.changed():
        raise HookError(CHANGED.format(own))
    if draws.found(lambda: function(*args)):
        raise HookError(f"{own} draws from a global generator of numpy or Python's random, {LOST} {KEYS}")
    if found is None and hook not in CHECKS:
        raise HookError(f"{own} returned nothing; it ends without a `return`.")
    strange = [leaf for leaf in tree_leaves(found) if not isinstance(leaf, NUMBERS)] if hook not in OTHERS else []
    if strange:
        kind = type(strange[0]).__name__
        raise HookError(f"{own} must return trees of tensors and numbers, but has {kind} in them.")
    return found


@contextmanager
def blaming_the_model(where: str = "") -> Iterator[None]:
    """Report an error outside of hooks as the model's or the loss's, with the file and the line if known."""
    try:
        yield
    except UndriftError:
        raise
    except Exception as error:  # a user's model may raise anything
        if machine_trouble(error) or not (where or place(error)):
            raise
        raise UndriftError(f"The model failed{where}{place(error)}: {reason(error)}") from error


def ours(part: Any) -> bool:
    """Return whether the part ships with undrift."""
    return type(part).__module__.startswith("undrift.")


@lru_cache(maxsize=1024)
def arity(function: Any) -> int:
    """Return how many positional arguments a function takes, `self` included."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1 << 16
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


class Given:
    """What a hook is given, which it must not change: the tensors with their versions, and what dicts and lists hold.

    In-place changes would reach other hooks, other clients and the server; the two engines would disagree about which.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self.containers: list[tuple[Any, list[Any]]] = []
        for arg in args:
            self._add(arg)

    def _add(self, thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            if not thing.is_inference():
                self.tensors.append((thing, thing._version))
        elif isinstance(thing, dict | list | tuple):
            children = _children(thing)
            if not isinstance(thing, tuple):
                self.containers.append((thing, children))
            for child in children:
                self._add(child)
        elif dataclasses.is_dataclass(thing) and ours(thing):  # a client, a batch, the server or its totals
            for value in vars(thing).values():
                self._add(value)

    def changed(self) -> bool:
        """Return whether any of it has changed. Under vmap, tensors do not count changes; see `refuse_write`."""
        if any(t._version != before for t, before in self.tensors):
            return True
        for thing, before in self.containers:
            after = _children(thing)
            if len(after) != len(before) or any(a is not b for a, b in zip(after, before, strict=True)):
                return True
        return False

    def refuse_write(self, function: str, args: Any) -> None:
        """Raise if a function of torch, of this name and with these arguments, writes to one of the tensors."""
        in_place = function in WRITES or (function.endswith("_") and not function.startswith("_"))
        if in_place and args and function != "requires_grad_" and any(args[0] is t for t, _ in self.tensors):
            raise ChangedError


class ChangedError(Exception):
    """A hook writes to a tensor that it was given."""


WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
"""Functions of torch that write to their first argument, beside those whose names end in an underscore."""
CHANGED = (
    "{} changes in place what it was given (a tensor, as `add_` and `mul_` do, or a dict); return new ones: "
    "ud.tree_map(lambda d: 0.5 * d, g), or {{**params, name: tensor}}."
)


def _children(thing: Any) -> list[Any]:
    return list(thing.values()) if isinstance(thing, dict) else list(thing)


class HostDraws:
    """The global generators of numpy and Python, in which a hook that draws from them leaves a trace."""

    def __init__(self, part: Any, hook: str) -> None:
        calls = _calls.setdefault(type(part), Counter())
        calls[hook] += 1
        self.before = host_positions() if calls[hook] <= WATCHED_CALLS else None

    def found(self, again: Callable[[], Any]) -> bool:
        """Return whether the hook draws: whether `again`, which calls it once more, leaves a trace like the first call.

        One trace may be another thread's.
        """
        if self.before is None or (middle := host_positions()) == self.before:
            return False
        with contextlib.suppress(Exception):
            again()
        return host_positions() != middle


def name(part: Any) -> str:
    return type(part).__name__


def place(error: BaseException) -> str:
    """Return where a user's code raised: the innermost frame outside of torch and undrift, as " (file.py:12)"."""
    found = traceback.extract_tb(error.__traceback__)
    frames = [f for f in found if not f.filename.startswith((*ELSEWHERE, "<string>", "<eval_with_key>"))]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


VMAP = (
    " In lanes, all clients' hooks run at once under torch.func.vmap: use tensor operations alone, with torch.where in "
    'place of an `if` on their values. engine="plain" runs the hook as it is, for debugging.'
)


def reason(error: BaseException) -> str:
    """Return the error's type and first line, and advice if vmap raised it."""
    text = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
    return f"{text}.{VMAP}" if of_vmap(error) else f"{text}."


def of_vmap(error: BaseException) -> bool:
    """Return whether vmap or tracing refused an operation, rather than the operation itself."""
    said = str(error)
    known = ("vmap", "data-dependent", "Batching rule", "is not tracing", "GuardOnDataDependent")
    kinds = ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException")
    return any(word in said for word in known) or type(error).__name__ in kinds


LOST = "so runs would not repeat and clients would not have draws of their own."
KEYS = (
    "Draw from the key: ud.random.normal(client.key, shape), ud.random.uniform(client.key, shape), or with server.key."
)
ADVICE = {
    "start": "Draw from the key: def start(self, params, server), and ud.random.normal(server.key, shape).",
    "keep": "Draw from the key: def keep(self, params, client), and ud.random.normal(client.key, shape).",
}
"""By hook: what to do instead, where that is not `KEYS`."""


class GlobalDrawError(UndriftError):
    """A hook draws from a global generator."""


class HookMode(TorchFunctionMode):
    """How torch behaves inside a hook: draws from its generators raise, and so do writes to what the hook is given.

    `one_hot` is computed by comparing, because its own check of the labels reads values, which vmap does not allow.
    """

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.depth, self.given = seeded_depth(), given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.given.refuse_write(getattr(func, "__name__", ""), args)
        draws = func in DRAWS or (func in DROPOUTS and _drops(*args, **(kwargs or {})))
        if draws and seeded_depth() == self.depth:  # deeper, it is the model that draws
            own = (kwargs or {}).get("generator") is not None
            why = "whose state is not part of a run and its checkpoints." if own else LOST
            raise GlobalDrawError(f"with {func.__name__}, from a generator of torch, {why}")
        if func is F.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 0:  # as many as the values say
        return F.one_hot(tensor)
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()


def _drops(input: Any, p: float = 0.5, training: bool = True, *rest: Any, **more: Any) -> bool:
    return bool(p > 0 and more.get("train", training))


def aligned(tree: Any, params: Tree, part: Any, hook: str, spread: bool = False) -> Tree:
    """Return a hook's result in the order and the precision of the parameters.

    It must have their names and shapes; with `spread`, shapes that broadcast to theirs.
    """
    if not isinstance(tree, dict) or tree.keys() != params.keys():
        names = ", ".join(list(params)[:20]) + (" …" if len(params) > 20 else "")
        raise UndriftError(f"{name(part)}.{hook} must return a dict with the parameters' own names ({names}).")
    for n, w in params.items():
        if not spread and not isinstance(tree[n], torch.Tensor):
            kind = type(tree[n]).__name__
            raise UndriftError(f"{name(part)}.{hook} must return tensors, but has a value of type {kind} for {n!r}.")
        found = getattr(tree[n], "shape", ())
        if found != w.shape and not (spread and _spreads(found, w.shape)):
            raise UndriftError(
                f"{name(part)}.{hook} returned a value of shape {tuple(found)} for {n!r}, which has shape "
                f"{tuple(w.shape)}; it must not change shapes."
            )
    return {n: _like(tree[n], w) for n, w in params.items()}


def _like(x: Any, w: torch.Tensor) -> torch.Tensor:
    return x.to(w.dtype) if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=w.dtype, device=w.device)


def _spreads(shape: Any, whole: Any) -> bool:
    return len(shape) <= len(whole) and all(
        a in (1, b) for a, b in zip(reversed(tuple(shape)), reversed(tuple(whole)), strict=False)
    )


def pair(found: Any, part: Any, hook: str, first: str, second: str = "state") -> tuple[Any, Any]:
    """Return a hook's result as the pair that it must be."""
    if not isinstance(found, tuple) or len(found) != 2:
        kind = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
        raise UndriftError(f"{name(part)}.{hook} must return a pair, ({first}, {second}), not {kind}.")
    return found


def unchanged_form(new: Tree, old: Tree, part: Any, hook: str, what: str, maker: str) -> Tree:
    """Return `new`, which must have the structure, shapes and dtypes of `old`, first returned by the hook `maker`."""
    if tree_structure(new) != tree_structure(old):
        if not tree_leaves(old):
            raise UndriftError(
                f"{name(part)}.{hook} returns a {what}; add the hook `{maker}`, which returns the first one."
            )
        raise UndriftError(f"{name(part)}.{hook} must not change the structure of its {what}.")
    for a, b in zip(tree_leaves(new), tree_leaves(old), strict=True):
        if getattr(a, "shape", ()) != b.shape or getattr(a, "dtype", b.dtype) != b.dtype:
            raise UndriftError(
                f"{name(part)}.{hook} must not change shapes and types of its {what}: it made "
                f"{tuple(getattr(a, 'shape', ()))} {getattr(a, 'dtype', type(a).__name__)} of a tensor "
                f"{tuple(b.shape)} {b.dtype}."
            )
    return tree_map(lambda a, b: a if isinstance(a, torch.Tensor) else torch.full_like(b, a), new, old)
