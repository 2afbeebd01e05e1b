"""Gradients by ordinary autograd, with the weights in the module until the backward pass is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from undrift.errors import UndriftError
from undrift.functional.batch_norm import SINGLE

Params = dict[str, Tensor]


class Held:
    """Calls a module with other weights, which stay in it while `open` lasts.

    Gradient checkpointing calls the module again in the backward pass, and must find the weights of the forward pass.
    These are the weights of the first call. Calls inside it end when they return, as they do without `open`.
    """

    def __init__(self) -> None:
        self.stack: ExitStack | None = None
        self.taken = False

    @contextmanager
    def open(self) -> Iterator[None]:
        before = self.stack, self.taken
        with ExitStack() as held:
            self.stack, self.taken = held, False
            try:
                yield
            finally:
                self.stack, self.taken = before

    def call(
        self, module: nn.Module, tensors: Params, buffers: Params, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module with these tensors and buffers; `buffers` gets those that the module replaces."""
        given = {**tensors, **buffers}
        if self.stack is None or self.taken:
            output = functional_call(module, given, args, kwargs)  # which notes in `given` what was replaced
        else:
            self.taken = True
            self.stack.enter_context(_reparametrize_module(module, given, tie_weights=True))
            output = module(*args, **kwargs)
            given = dict(module.named_buffers()) if buffers else {}
        buffers |= {name: given[name].detach() for name, old in buffers.items() if given.get(name, old) is not old}
        return output


def ordinary_gradient(loss: Callable[[Params], tuple[Tensor, Params]], params: Params) -> tuple[Params, Params]:
    """Return the gradient of `loss` by ordinary autograd, which supports every module, also those that vmap rejects.

    `loss` also returns the buffers that it changed, which are passed on.
    """
    with torch.enable_grad():
        leaves = {name: w.detach().requires_grad_() for name, w in params.items()}
        try:
            value, buffers = loss(leaves)
            found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        except (ValueError, RuntimeError) as error:
            for words, sentence in EXPLAINED.items():
                if words in str(error):
                    raise UndriftError(sentence) from error
            raise
    for name, w in params.items():
        if (
            leaves[name].data_ptr() != w.data_ptr()
        ):  # the forward pass has set its `.data`, as cuDNN's recurrent layers do
            w.copy_(
                leaves[name].detach()
            )  # not before the backward pass, which may need the values of the forward pass
    dense = [g if g.layout is torch.strided else g.to_dense() for g in found]
    return dict(zip(params, dense, strict=True)), {name: b.detach() for name, b in buffers.items()}


EXPLAINED = {
    "more than 1 value per channel": SINGLE,
    "compatible with .grad()": (
        "The model uses the reentrant form of gradient checkpointing, which gives gradients to .backward() alone; pass "
        "use_reentrant=False to torch.utils.checkpoint."
    ),
}
"""Clearer messages for some of torch's errors, by words in them."""
