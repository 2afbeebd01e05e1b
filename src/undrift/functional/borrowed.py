"""The caller's own module, borrowed for a while: whatever passes of it change is put back afterwards."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift.functional.layouts import is_expanded

LENT = RLock()
"""Held while a module is borrowed, and by those who copy or describe one: runs in several threads may have the same
module, which meanwhile has the weights of one of them."""
DEPTH = 4
"""How deep containers within containers are put back."""
ENTRIES = 50_000
"""How many entries of containers are looked at; those with more hold data, not what passes change."""
MEMORY = 2**28
"""How many bytes of tensors and arrays in containers are saved."""


@contextmanager
def borrowed(
    module: nn.Module, device: torch.device, frozen: bool, copied: nn.Module | None = None
) -> Iterator[nn.Module]:
    """A context with the module on `device`, in evaluation mode and without gradients.

    Afterwards it is as it was: its weights, buffers, gradients and modes, and the attributes of its layers, with what
    is in lists, dicts, sets and deques among them, and in those within these. `frozen` says whether its forward pass
    may change frozen parameters, which are saved only then, since a frozen backbone may be large. Otherwise those of
    `copied`, a copy of the module that may be on `device` already, are used there, so that they need memory once.
    """
    # What is put on the stack last is put back first, whatever becomes of the rest: the weights before anything else.
    with LENT, ExitStack() as after:
        there = {} if frozen or copied is None else _frozen_on(device, module, copied)
        attributes = [vars(layer) for layer in module.modules()]
        tensors = {id(t): t for own in attributes for t in own.values() if isinstance(t, Tensor)}
        tensors |= {id(t): t for t in (*module.parameters(), *module.buffers())}
        for back in _containers(attributes, tensors):
            after.callback(back)
        for layer in module.modules():  # scripted ones do not keep their mode among their attributes
            after.callback(_switch, layer, layer.training)
        for own in attributes:
            after.callback(_dict(own))
        for p in module.parameters():
            after.callback(setattr, p, "grad", p.grad)
        for t in tensors.values():
            if t.device != device and t.device.type != "meta":
                after.callback(_put_back, t, t.data, t.data)
                t.data = there[id(t)] if id(t) in there else t.data.to(device)
            elif not isinstance(t, nn.Parameter) or t.requires_grad or frozen:
                after.callback(_put_back, t, t.data, t.data.clone())
        for p in module.parameters():
            p.grad = None
        module.eval()
        yield module


def _frozen_on(device: torch.device, module: nn.Module, copied: nn.Module) -> dict[int, Tensor]:
    """Return the values that a copy on this device has of a module's frozen parameters, by the parameters' ids."""
    others = {name: p.data for name, p in copied.named_parameters() if not p.requires_grad and p.device == device}
    own = {name: p for name, p in module.named_parameters() if not p.requires_grad and name in others}
    return {id(p): others[n] for n, p in own.items() if (p.shape, p.dtype) == (others[n].shape, others[n].dtype)}


def _switch(layer: nn.Module, mode: bool) -> None:
    if layer.training != mode:
        layer.training = mode


def _put_back(t: Tensor, data: Tensor, value: Tensor) -> None:
    t.data = data
    if value is not data and not is_expanded(data):  # a forward pass cannot write into that either
        data.copy_(value)


def _containers(attributes: Iterable[dict[str, Any]], known: dict[int, Tensor]) -> Iterator[Callable[[], None]]:
    """Yield what puts back the contents of the containers among attributes, level by level, and of those in them.

    And the values of tensors in them, except for the known ones.
    """
    level = [x for own in attributes for x in own.values() if not isinstance(x, Tensor)]
    seen, entries, memory = set(known), ENTRIES, MEMORY
    for depth in range(DEPTH):
        inside: list[Any] = []
        for x in level:
            if id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, Tensor | np.ndarray):
                if _writable(x) and x.nbytes <= memory:
                    memory -= x.nbytes
                    yield _values(x)
            elif isinstance(x, _CONTAINERS) and (not depth or len(x) < entries):
                contents, back = _contents(x)
                if back:
                    yield back
                if type(x).__dictoffset__:  # Hugging Face's dicts have their entries as attributes, too
                    yield _dict(object.__getattribute__(x, "__dict__"))
                if len(contents) < entries:
                    entries -= 1 + len(contents)
                    inside += [y for y in contents if isinstance(y, _MUTABLE)]
        level = inside


_CONTAINERS = dict, list, set, deque, tuple
_MUTABLE = *_CONTAINERS, Tensor, np.ndarray


def _contents(x: Any) -> tuple[list[Any], Callable[[], None] | None]:
    """Return what is in a container, and what puts it back.

    Both by the methods of Python's own types: a configuration may have others, which refuse changes.
    """
    if isinstance(x, dict):
        return list(dict.values(x)), _dict(x)
    if isinstance(x, list):
        return list.copy(x), _list(x)
    if isinstance(x, set):
        return list(set.__iter__(x)), _set(x)
    return (list(deque.__iter__(x)), _deque(x)) if isinstance(x, deque) else (list(tuple.__iter__(x)), None)


def _dict(x: dict[Any, Any]) -> Callable[[], None]:
    kind: type[dict[Any, Any]] = OrderedDict if isinstance(x, OrderedDict) else dict  # which keeps an order of its own
    before = list(kind.items(x))

    def back() -> None:
        now = list(kind.items(x))
        if len(before) != len(now) or any(a is not c or b is not d for (a, b), (c, d) in zip(before, now, strict=True)):
            kind.clear(x)
            for key, value in before:
                kind.__setitem__(x, key, value)

    return back


def _list(x: list[Any]) -> Callable[[], None]:
    before = list.copy(x)

    def back() -> None:
        if not _same(before, list.copy(x)):
            list.__setitem__(x, slice(None), before)

    return back


def _set(x: set[Any]) -> Callable[[], None]:
    before = list(set.__iter__(x))

    def back() -> None:
        if set(map(id, before)) != set(map(id, set.__iter__(x))):
            set.clear(x)
            set.update(x, before)

    return back


def _deque(x: deque[Any]) -> Callable[[], None]:
    before = list(deque.__iter__(x))

    def back() -> None:
        if not _same(before, list(deque.__iter__(x))):
            deque.clear(x)
            deque.extend(x, before)

    return back


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _writable(x: Tensor | np.ndarray) -> bool:
    if isinstance(x, Tensor):
        return x.layout is torch.strided and not x.is_meta
    return bool(x.flags.writeable)


def _values(x: Any) -> Callable[[], None]:
    if isinstance(x, Tensor):
        return partial(_put_back, x, x.data, x.data.clone())
    return partial(np.copyto, x, x.copy())
