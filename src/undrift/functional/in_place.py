"""Calls of a module as ordinary PyTorch makes them: with the weights in its own parameters, and `.backward()`.

`Held` (`gradient.py`) puts other tensors in the place of a module's parameters. Whatever reaches a weight in another
way than by the name under which the module holds it, misses them: a closure or a list that has the parameter itself, a
view made in `__init__`, a hook on the parameter. Here the values are written into the parameters that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from undrift.errors import UndriftError
from undrift.functional.examine import named_tensors
from undrift.functional.gradient import Held, Params, explaining
from undrift.functional.layouts import equal, overwrite

WHY = "the module is trained in place, since it is another function with other tensors in the place of its weights"
HOOKS = "its parameters have hooks, which .backward() calls on the parameters themselves"
"""Reasons to call a module like this."""


class InPlace(Held):
    """Calls a module with values written into its own parameters and buffers, which it keeps.

    Calls within another, such as those of a hook that compares with other weights, leave them as they were.
    """

    def __init__(self, why: str) -> None:
        """`why` is the reason to call a module like this, for the run's choices."""
        super().__init__()
        self.why = why
        self.written: dict[str, tuple[Tensor, int, int]] = {}
        """The parameters that hold the weights of the first call, with what shows whether the module changes them."""
        self.called: nn.Module | None = None
        """The module of the first call."""

    def call(
        self,
        module: nn.Module,
        tensors: Params,
        buffers: Params,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: AbstractContextManager[None],
    ) -> Any:
        first = self.stack is not None and not self.taken
        given = {**tensors, **buffers}
        if not first:
            _refuse_gradients(given)
        own = named_tensors(module)
        before = {name: own[name].detach().clone() for name in given} if self.taken else {}
        _write(own, given)
        if first:
            self.taken, self.called = True, module
            self.written = {n: (p, p._version, p.data_ptr()) for n, p in own.items() if isinstance(p, nn.Parameter)}
        with nullcontext() if first else _constant(own), mode:
            output = module(*args, **kwargs)
        now = named_tensors(module) if buffers else {}
        buffers |= {name: now[name].detach().clone() for name in buffers if name in now}
        _write(own, before)
        return output

    def gradient(self, loss: Callable[[Params], tuple[Tensor, Params]], params: Params) -> tuple[Params, Params]:
        """Return the gradient of `loss`, and the buffers that it changed.

        Weights that the forward pass itself changes are changed in `params`, too.
        """
        before, outer = self.written, {p: p.detach().clone() for p, *_ in self.written.values()}
        with self.open(), torch.enable_grad(), explaining():
            self.written = {}
            leaves = {name: w.detach().clone().requires_grad_() for name, w in params.items()}
            try:
                value, buffers = loss(leaves)
                after = self._buffers(buffers)
                with _without_gradients([p for p, *_ in self.written.values()]):
                    if value.requires_grad:
                        value.backward()
                    found = {name: self._sum(name, leaf) for name, leaf in leaves.items()}
                for name, b in self._buffers(buffers).items():  # gradient checkpointing computes them again
                    if not equal(b, after[name]):
                        buffers[name] = b
                for name, (p, version, place) in self.written.items():
                    if name in params and (p._version, p.data_ptr()) != (version, place):
                        params[name].copy_(p.detach())
            finally:
                self.written = before
                for p, value in outer.items():
                    p.data.copy_(value)
        return found, {name: b.detach() for name, b in buffers.items()}

    def _buffers(self, names: Iterable[str]) -> Params:
        """Return copies of the module's own buffers of these names."""
        own = named_tensors(self.called) if self.called else {}
        return {name: own[name].detach().clone() for name in names if name in own}

    def _sum(self, name: str, leaf: Tensor) -> Tensor:
        """Return the gradient through the module and that through `leaf`, which hooks get."""
        through = self.written[name][0].grad if name in self.written else None
        each = [
            g.detach() if g.layout is torch.strided else g.detach().to_dense()
            for g in (through, leaf.grad)
            if g is not None
        ]
        return sum(each[1:], each[0]) if each else torch.zeros_like(leaf)


def _write(own: dict[str, Tensor], values: Params) -> None:
    """Write values into a module's tensors, such that autograd does not notice."""
    for name, value in values.items():
        if name not in own or own[name] is value:
            continue
        if own[name].shape == value.shape:
            overwrite(own[name], value.detach())
        else:  # a buffer that gets its shape from the first batch
            own[name].data = value.detach().clone()


def _refuse_gradients(tensors: Params) -> None:
    asked = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    if asked or peek_interpreter_stack() is not None:
        raise UndriftError(
            "The method takes a gradient of the model by torch.func or torch.autograd, but this model must be called "
            "with its own parameters; use client.gradient or client.gradients instead, or another method."
        )


@contextmanager
def _constant(own: dict[str, Tensor]) -> Iterator[None]:
    """A context in which a module's parameters are constants, whose gradient nobody asks for."""
    asking = [t for t in own.values() if t.requires_grad] if torch.is_grad_enabled() else []
    for t in asking:
        t.requires_grad_(False)
    try:
        yield
    finally:
        for t in asking:
            t.requires_grad_()


@contextmanager
def _without_gradients(parameters: list[Tensor]) -> Iterator[None]:
    """A context in which these parameters' `.grad` begins as None; afterwards it is what it was."""
    before = [(p, p.grad) for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad
