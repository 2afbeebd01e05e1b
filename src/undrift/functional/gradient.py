"""Calls of a module with other weights, and gradients by ordinary autograd, until whose end the weights stay there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from undrift.errors import UndriftError
from undrift.functional.batch_norm import SINGLE

Params = dict[str, Tensor]

Slots = dict[str, list[tuple[dict[str, Any], str]]]
"""By the name of a parameter or buffer: every place in a module that holds it, as a dict and the key in it."""


def slots_of(module: nn.Module) -> Slots:
    """Return where a module holds its parameters and buffers, under the names that `named_parameters` gives them.

    A tied weight has several places. A module that is used under several names is visited once, as its places are the
    same under each of them; torch's `functional_call` visits it once per name, and leaves it with the wrong tensors.
    """
    found: Slots = {}
    names: dict[int, str] = {}
    for prefix, layer in module.named_modules():
        for tensors in (layer._parameters, layer._buffers):
            for attribute, tensor in tensors.items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), f"{prefix}.{attribute}".lstrip("."))
                    found.setdefault(name, []).append((tensors, attribute))
    return found


class Held:
    """Calls a module with other weights, which stay in it while `open` lasts.

    Gradient checkpointing calls the module again in the backward pass, and must find the weights of the forward pass.
    These are the weights of the first call. Calls inside it end when they return, as they do without `open`.
    """

    def __init__(self) -> None:
        self.stack: ExitStack | None = None
        self.taken = False
        self.slots: Slots = {}
        """Those of the module with the weights of the first call in it, among which the same tensor may occur twice."""

    @contextmanager
    def open(self) -> Iterator[None]:
        before = self.stack, self.taken, self.slots
        with ExitStack() as held:
            self.stack, self.taken, self.slots = held, False, {}
            try:
                yield
            finally:
                self.stack, self.taken, self.slots = before

    def gradient(self, loss: Callable[[Params], tuple[Tensor, Params]], params: Params) -> tuple[Params, Params]:
        """Return the gradient of `loss`, whose first call of the module is the one that it is of, and the buffers."""
        with self.open():
            return ordinary_gradient(loss, params)

    def call(
        self,
        module: nn.Module,
        tensors: Params,
        buffers: Params,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: AbstractContextManager[None],
    ) -> Any:
        """Call the module with these tensors and buffers, in `mode`; `buffers` gets those that the module replaces."""
        lasting = self.stack is not None and not self.taken
        slots = self.slots if self.taken else slots_of(module)
        with ExitStack() as here:
            if lasting:
                self.taken, self.slots = True, slots
            stack = self.stack if lasting else here
            assert stack is not None
            stack.enter_context(replaced(slots, {**tensors, **buffers}))
            with mode:
                output = module(*args, **kwargs)
            for name, old in buffers.items():
                (place, attribute), *_ = slots[name]
                if place[attribute] is not old:
                    buffers[name] = place[attribute].detach()
        return output


@contextmanager
def replaced(slots: Slots, tensors: Params) -> Iterator[None]:
    """A context with these tensors in a module's places; those that it had are put back, whatever happens."""
    before = []
    try:
        for name, tensor in tensors.items():
            for place, attribute in slots.get(name, ()):
                before.append((place, attribute, place[attribute]))
                place[attribute] = tensor
        yield
    finally:
        for place, attribute, tensor in reversed(before):
            place[attribute] = tensor


def ordinary_gradient(loss: Callable[[Params], tuple[Tensor, Params]], params: Params) -> tuple[Params, Params]:
    """Return the gradient of `loss` by ordinary autograd, which supports every module, also those that vmap rejects.

    `loss` also returns the buffers that it changed, which are passed on.
    """
    with torch.enable_grad(), explaining():
        leaves = {name: w.detach().requires_grad_() for name, w in params.items()}
        value, buffers = loss(leaves)
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    for name, w in params.items():
        if (
            leaves[name].data_ptr() != w.data_ptr()
        ):  # the forward pass has set its `.data`, as cuDNN's recurrent layers do
            w.copy_(
                leaves[name].detach()
            )  # not before the backward pass, which may need the values of the forward pass
    dense = [g if g.layout is torch.strided else g.to_dense() for g in found]
    return dict(zip(params, dense, strict=True)), {name: b.detach() for name, b in buffers.items()}


@contextmanager
def explaining() -> Iterator[None]:
    """A context that explains some of torch's errors in a forward or backward pass."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        for words, sentence in EXPLAINED.items():
            if words in str(error):
                raise UndriftError(sentence) from error
        raise


EXPLAINED = {
    "more than 1 value per channel": SINGLE,
    "compatible with .grad()": (
        "The model uses the reentrant form of gradient checkpointing, which gives gradients to .backward() alone; pass "
        "use_reentrant=False to torch.utils.checkpoint."
    ),
}
"""Clearer messages for some of torch's errors, by words in them."""
