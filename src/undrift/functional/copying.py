"""A copy of the caller's module, which training may change."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from undrift.errors import UndriftError, first_line
from undrift.functional.borrowed import LENT
from undrift.functional.gradient import slots_of
from undrift.models.seeded import Seeded


def copy_of(module: nn.Module, device: torch.device, whole: bool = False) -> nn.Module:
    """Return the module on `device`, with weights of its own, without wrappers for several GPUs or for compiling.

    Frozen parameters that are on `device` already are shared with the caller, so that a large backbone is not copied,
    unless the copy is to be `whole`.
    """
    module = unwrapped(module)
    with LENT:
        _check_values(module)
        memo = {id(p): p for p in module.parameters() if not p.requires_grad and p.device == device and not whole}
        found = deep_copy(module, memo)
    return found.to(device)


def unwrapped(module: nn.Module) -> nn.Module:
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(module, wrappers) or "_orig_mod" in module._modules:
        module = module.module if isinstance(module, wrappers) else module._orig_mod  # type: ignore[assignment]
    if isinstance(module, torch.jit.ScriptModule):
        raise UndriftError(
            "The model is a TorchScript module, whose weights cannot be replaced; give the Python module that it was "
            "made from."
        )
    return module


def _check_values(module: nn.Module) -> None:
    """Reject parameters and buffers that have no values yet, or complex ones."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise UndriftError(
                f"The model's {name!r} has no shape yet (a lazy layer); call the model once on a batch before training."
            )
        if tensor.is_meta:
            raise UndriftError(
                f"The model's {name!r} is on the meta device and has no values; make the model on the CPU instead."
            )
        if tensor.is_complex() and tensor.requires_grad:
            raise UndriftError(
                f"The model's weights {name!r} are complex; keep them as real numbers (torch.view_as_real) and combine "
                "them in forward (torch.view_as_complex)."
            )
    trainable = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad and p.numel()}
    if found := _overlapping(trainable):
        raise UndriftError(
            f"The model's weights {found[0]!r} and {found[1]!r} are two parameters in the same memory, which would be "
            "averaged as two; to share a weight, make them one parameter (decoder.weight = encoder.weight), or use the "
            "one in both places in forward."
        )


def _overlapping(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors that share memory, if there are any."""
    spans = []
    for name, t in tensors.items():
        length = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
        spans.append((str(t.device), t.data_ptr(), t.data_ptr() + length * t.element_size(), name))
    spans.sort()
    for before, after in itertools.pairwise(spans):
        if before[0] == after[0] and after[1] < before[2]:
            return before[3], after[3]
    return None


class Factory:
    """Makes copies of a module by calling the function that made it, and giving what it returns the same values.

    So a module can be copied that `copy.deepcopy` cannot copy, or not faithfully.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.parts: MutableMapping[Any, None] = WeakIdKeyDictionary()
        """The layers, parameters and buffers of all modules that the function has made."""

    def made(self, seed: int) -> Any:
        """Return what the function makes; its initial weights depend on the seed alone."""
        return self._made(seed)[0]

    def _made(self, seed: int) -> tuple[Any, set[int]]:
        """Return what the function makes, and the ids of buffers that it has used before, such as a constant table."""
        with Seeded(seed):
            module = self.make()
        if not isinstance(module, nn.Module):
            return module, set()
        self._refuse_parts_again(module)
        again = {id(b) for b in module.buffers() if b in self.parts}
        self.parts.update(dict.fromkeys([*module.modules(), *module.parameters(), *module.buffers()]))
        _factories[module] = self
        return module, again

    def _refuse_parts_again(self, module: nn.Module) -> None:
        rule = "The function given as model must make another module, with weights of its own, at every call"
        if module in self.parts:
            raise UndriftError(
                f"{rule}, but it returns the same one. Make the module in it, model=lambda: Net(…), or give the module "
                "itself, model=net."
            )
        layers = [(name, x) for name, x in module.named_modules() if x._parameters or x._buffers]
        for name, x in [*module.named_parameters(), *layers]:
            if x in self.parts:
                raise UndriftError(
                    f"{rule}, but {name!r} is the same in several. Make it in the function, too, or copy it there "
                    "(copy.deepcopy)."
                )

    def copy(self, old: nn.Module, memo: dict[int, Any]) -> nn.Module:
        new, again = self._made(0)
        pairs = list(zip(old.modules(), new.modules(), strict=False))
        slots, places = slots_of(old), slots_of(new)
        if slots.keys() != places.keys() or len(pairs) != len(list(old.modules())):
            raise UndriftError(
                "The function given as model returns another model every time, with other names of weights or layers; "
                "undrift calls it for every copy that it needs."
            )
        for name, [(tensors, attribute), *_] in slots.items():
            t = tensors[attribute]
            own = places[name][0][0][places[name][0][1]]
            if id(t) not in memo:
                if id(own) in again:
                    own = t.detach().clone()
                else:  # the same tensor, which the module may also have elsewhere
                    own.data = t.detach().clone()
                memo[id(t)] = own.requires_grad_(t.requires_grad)
            for place, key in places[name]:
                place[key] = memo[id(t)]
        for before, after in pairs:
            memo[id(before)] = after
            after.training, after.__class__ = before.training, before.__class__  # which lanes may have changed
            if isinstance(before, nn.modules.batchnorm._BatchNorm):
                after.momentum = before.momentum
        return new


_factories: MutableMapping[Any, Factory] = WeakIdKeyDictionary()
"""By module: who has made it. Not its attribute, which would stay in a module that the caller keeps."""


def has_factory(module: nn.Module) -> bool:
    """Return whether copies of a module come from a function that makes it."""
    return module in _factories


def without_factory(module: nn.Module) -> nn.Module:
    """Return the module, which is from now on copied like any other."""
    _factories.pop(module, None)
    return module


def deep_copy(module: nn.Module, memo: Mapping[int, object]) -> nn.Module:
    """Return `copy.deepcopy` with this memo, or raise an error that explains why it fails.

    Unlike it, this also copies functions that close over the module or parts of it, such as a `forward` that was put in
    place of another, keeps views of parameters views, and registers hooks on parameters again.
    """
    with LENT:
        return _deep_copy(module, dict(memo))


def _deep_copy(module: nn.Module, known: dict[int, Any]) -> nn.Module:
    try:
        if factory := _factories.get(module):
            return factory.copy(module, known)
        if "__deepcopy__" in vars(module):  # which knows better
            return copy.deepcopy(module, known)
        held = _reached(module)
        functions = [_Function(f, reaching) for f, reaching in _closures(module, held)]
        known |= {id(f.original): f.copy for f in functions}
        # Other tensors with a history cannot be copied. Older forms of weight norm and pruning keep a weight that they
        # computed as an attribute, and deep supervision and spiking layers what they computed last in a list or a dict;
        # the next forward pass computes them anew. Nor can some sparse and lazy buffers.
        for t, _ in held.values():
            if isinstance(t, Tensor) and t.grad_fn is not None:
                known[id(t)] = _view(t, known) if _is_view_of_parameter(t) else t.detach().clone()
        for layer in module.modules():
            for b in (*layer._buffers.values(), *vars(layer).values()):
                if isinstance(b, UninitializedBuffer):
                    new = UninitializedBuffer(device=b.device, dtype=b.dtype)  # type: ignore[call-arg]
                    known.setdefault(id(b), new)
                elif isinstance(b, Tensor) and b.layout is not torch.strided:
                    known.setdefault(id(b), b.detach().clone())
        found = copy.deepcopy(module, known)
        for function in functions:
            function.fill(known)
        for layer in found.modules():  # torch copies the parameters of scripted ones as results of a computation
            for name, p in list(layer._parameters.items()) if isinstance(layer, torch.jit.ScriptModule) else ():
                if p is not None:
                    layer._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)
        parts = _parts(module)
        for p in module.parameters():
            _copy_hooks(p, known, parts)
    except UndriftError:
        raise
    except Exception as error:  # a user's attribute may raise anything
        raise UndriftError(
            f"The model cannot be copied ({first_line(error)}). undrift trains a copy, so that yours stays as it is: "
            "give a function that makes the model instead, model=lambda: Net(…), or keep locks, open files and "
            "generators out of the module."
        ) from error
    return found


def has_hooks(p: Tensor) -> bool:
    """Return whether a parameter has hooks of its own, which only `.backward()` on the parameter itself calls."""
    return any(_hooks(p))


def _hooks(p: Tensor) -> tuple[list[Any], list[Any]]:
    """Return the hooks of a tensor: those that get its gradient, and those that it has once that is accumulated."""
    after = getattr(p, "_post_accumulate_grad_hooks", None)
    return list((p._backward_hooks or {}).values()), list((after or {}).values())


def _copy_hooks(p: Tensor, known: dict[int, Any], parts: set[int]) -> None:
    other = known.get(id(p))
    if isinstance(other, Tensor) and other is not p and other.requires_grad and not has_hooks(other):
        # A hook that leads to the module leads to the copy; any other may collect what the caller reads.
        def own(hook: Any) -> Any:
            return copy.deepcopy(hook, known) if leads_to(hook, parts, everywhere=True) else hook

        first, after = _hooks(p)
        for hook in first:
            other.register_hook(own(hook))
        for hook in after:
            other.register_post_accumulate_grad_hook(own(hook))


def _is_view_of_parameter(t: Tensor) -> bool:
    return t._is_view() and isinstance(t._base, nn.Parameter)


def _view(t: Tensor, known: dict[int, object]) -> Tensor:
    """Return the same view of the copy of its parameter."""
    base = copy.deepcopy(t._base, known)
    assert isinstance(base, Tensor)
    with torch.enable_grad():
        return base.as_strided(t.shape, t.stride(), t.storage_offset())


class _Function:
    """A function that closes over parts of a module, and its copy, which closes over those of the module's copy."""

    def __init__(self, original: FunctionType, reaching: set[int]) -> None:
        """`reaching`: the ids of what leads from the function to the module."""
        self.original, self.reaching = original, reaching
        cells = tuple(CellType() if self._leads(cell) else cell for cell in original.__closure__ or ())
        self.copy = FunctionType(
            original.__code__, original.__globals__, original.__name__, original.__defaults__, cells or None
        )
        self.copy.__kwdefaults__, self.copy.__qualname__ = original.__kwdefaults__, original.__qualname__
        self.copy.__dict__.update(original.__dict__)

    def _leads(self, cell: CellType) -> bool:
        return id(_contents(cell)) in self.reaching

    def fill(self, known: dict[int, Any]) -> None:
        """Close over the copies, once they are there."""
        for old, new in zip(self.original.__closure__ or (), self.copy.__closure__ or (), strict=True):
            if new is not old:
                new.cell_contents = copy.deepcopy(_contents(old), known)
        if id(self.original.__defaults__) in self.reaching:
            self.copy.__defaults__ = copy.deepcopy(self.original.__defaults__, known)
        if id(self.original.__kwdefaults__) in self.reaching:
            self.copy.__kwdefaults__ = copy.deepcopy(self.original.__kwdefaults__, known)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _closures(module: nn.Module, held: dict[int, tuple[Any, list[Any]]]) -> list[tuple[FunctionType, set[int]]]:
    """Return the functions that close over parts of a module which holds them, and what leads to these."""
    parts = _parts(module)
    # Backwards from the module's parts, through everything but modules: those are copied as attributes anyway.
    users: dict[int, list[int]] = {}
    for holder, (x, content) in held.items():
        for inner in content if not isinstance(x, nn.Module) else ():
            users.setdefault(id(inner), []).append(holder)
    leading, ahead = set(parts), list(parts)
    while ahead:
        for holder in users.get(ahead.pop(), ()):
            if holder not in leading:
                leading.add(holder)
                ahead.append(holder)
    return [(x, leading) for x, _ in held.values() if isinstance(x, FunctionType) and id(x) in leading]


def _parts(module: nn.Module) -> set[int]:
    return {id(x) for x in (*module.modules(), *module.parameters(), *module.buffers())}


def leads_to(x: Any, parts: set[int], everywhere: bool = False) -> bool:
    """Return whether a function or a container holds one of the objects with these ids.

    With `everywhere`, also in the attributes of any object, and by the name of a global variable.
    """
    if isinstance(x, nn.Module | Tensor) and id(x) in parts:
        return False  # it is one of them
    return not parts.isdisjoint(_reached(x, everywhere))


def holds_a(kind: type, x: Any) -> bool:
    """Return whether a function holds an object of exactly this type, in any way."""
    return any(type(held) is kind for held, _ in _reached(x, everywhere=True).values())


def _reached(x: Any, everywhere: bool = False) -> dict[int, tuple[Any, list[Any]]]:
    """Return everything that is held by `x`, and what each of these holds, by id; without numbers and text.

    Containers in containers come last, and not all of them if there are many.
    """
    found: dict[int, tuple[Any, list[Any]]] = {}
    ahead, nested, left = [x], list[Any](), MANY
    while ahead or nested:
        if ahead:
            one = ahead.pop()
        else:
            one = nested.pop()
            if id(one) in found or len(one) >= left:
                continue
            left -= 1 + len(one)
        if id(one) in found:
            continue
        content = _content(one)
        if everywhere and isinstance(one, FunctionType):
            content += [one.__globals__[n] for n in one.__code__.co_names if n in one.__globals__]
        elif everywhere and not content and not isinstance(one, type | ModuleType):
            content = list(getattr(one, "__dict__", {}).values())
        content = [y for y in content if type(y) not in ATOMS]
        found[id(one)] = one, content
        within = isinstance(one, CONTAINERS)
        for y in content:
            (nested if within and isinstance(y, CONTAINERS) else ahead).append(y)
    return found


LONG = 10_000
"""Containers with more entries hold data, not parts of a model."""
MANY = 100_000
"""So do containers in containers with more entries in total."""
CONTAINERS = dict, list, tuple, set, frozenset
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, np.ndarray, torch.dtype, torch.device})
"""The types of what holds nothing."""


def _content(x: Any) -> list[Any]:
    """Return what a module, a container, a function or a parameter with hooks holds."""
    if isinstance(x, nn.Module):
        return list(vars(x).values())
    if isinstance(x, dict):
        return list(x.values()) if len(x) <= LONG else []
    if isinstance(x, list | tuple | set | frozenset):
        return list(x) if len(x) <= LONG else []
    if isinstance(x, FunctionType):
        return [*map(_contents, x.__closure__ or ()), x.__defaults__, x.__kwdefaults__]
    if isinstance(x, MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, nn.Parameter):
        return [hook for hooks in _hooks(x) for hook in hooks]
    return [x.func, x.args, x.keywords] if isinstance(x, partial) else []
