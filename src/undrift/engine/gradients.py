"""The gradients of a local step's loss: at the client's weights, at others, and per sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from undrift.errors import UndriftError
from undrift.functional.model import Params
from undrift.loss_modules import of_batches
from undrift.method.context import Batch
from undrift.random import Key
from undrift.tree import Tree, tree_flatten, tree_map, tree_stack, tree_unflatten

if TYPE_CHECKING:
    from undrift.engine.client import Clients, Program

Differentiate = Callable[[Callable[[Params], tuple[Tensor, Params]], Params], tuple[Params, Params]]
"""The gradient of a function of the weights, as an engine computes it. The function also returns the buffers that it
changed, which are returned with the gradient."""

MEASURED = "measured in this step: {}"
"""Names that no buffer has: what parts measure leaves the gradient's computation among the buffers."""
AUGMENT = 2**16 - 1
"""The stream of a step's augmentation: the last of the model's own, before those of the parts."""


class StepGradients:
    """Computes gradients of one local step's loss; `client.gradient` and `client.gradients` call it.

    The j-th batch of step k draws with the key of step `k·b + j`, where a step has b batches: as if it were a step of
    its own.
    """

    def __init__(
        self,
        program: Program,
        given: Tree,
        batches: list[Batch],
        k: Tensor,
        differentiate: Differentiate,
        clients: Clients,
    ) -> None:
        self.program, self.differentiate, self.clients = program, differentiate, clients
        count = len(batches)
        self.keys = [Key(given["key"], k if count == 1 else k * count + j) for j in range(count)]
        self.batches = [self._augmented(batch, key) for batch, key in zip(batches, self.keys, strict=True)]
        self.params: Params = {}
        self.g: Params = {}
        self.buffers: Params = {}

    def first(self, params: Params, statistics: Params) -> tuple[Params, Params, list[Tree]]:
        """Return the gradient of the step itself, the buffers after it, and what parts measure in "training".

        The gradient is kept for hooks that ask again, and the buffers before the step, since gradients at other weights
        start from them.
        """
        self.buffers = statistics
        measured: list[Tree] | None = [] if self.program.measuring else None
        g, after = self._at(params, 0, statistics, measured)
        self.params, self.g = params, g
        return g, after, measured or []

    def gradient(self, weights: Tree, batch: int) -> Tree:
        self._check(weights, batch)
        if batch == 0 and all(weights[n] is w for n, w in self.params.items()):
            return dict(self.g)
        return self._at(weights, batch, self.buffers)[0]

    def gradient_and_buffers(self, weights: Tree, buffers: Tree, batch: int) -> tuple[Tree, Tree]:
        self._check(weights, batch)
        if not isinstance(buffers, dict) or buffers.keys() != self.buffers.keys():
            raise UndriftError("client.gradient_and_buffers takes buffers as a dict with the names of client.buffers.")
        g, after = self._at(weights, batch, buffers)
        return g, {**buffers, **after}

    def per_sample(self, weights: Tree, batch: int) -> Tree:
        self._check(weights, batch)
        if of_batches(self.program.loss):
            raise UndriftError("client.gradients needs a loss for every sample, not one for a whole batch.")
        whole, key = self.batches[batch], self.keys[batch]
        rows = len(whole.mask)

        def one(x: Tree, y: Tree, mask: Tensor, row: Tensor) -> Params:
            x, y = tree_map(lambda t: t[None], (x, y))
            sample = Batch(x, y, torch.ones_like(mask)[None])

            def loss(w: Params) -> tuple[Tensor, Params]:
                buffers = tree_map(torch.clone, self.buffers)
                return self.program.objective(w, sample, key, self.clients, buffers, (row, rows)).sum(), {}

            with self.program.model.seeding(key, (row, rows)):
                g, _ = self.differentiate(loss, weights) if obstacle else grad(loss, has_aux=True)(weights)
            return tree_map(lambda t: t * mask.to(t.dtype), g)

        index, obstacle = torch.arange(rows, device=whole.mask.device), self.program.model.obstacle
        samples = (whole.x, whole.y, whole.mask, index)
        if obstacle:  # one by one, for models that vmap does not support
            return tree_stack([one(*tree_map(lambda t, i=i: t[i], samples)) for i in range(rows)])
        return vmap(one)(*samples)

    def _at(
        self, weights: Params, batch: int, before: Params, measured: list[Tree] | None = None
    ) -> tuple[Params, Params]:
        """Return the gradient at `weights`, and the buffers, which are `before` at first; fills in `measured`."""
        data, key = self.batches[batch], self.keys[batch]
        forms: list[Any] = []

        def loss(w: Params) -> tuple[Tensor, Params]:
            buffers = tree_map(torch.clone, before)  # here, since `grad` refuses to write to tensors from outside
            sums: list[Tree] | None = None if measured is None else []
            losses = self.program.objective(w, data, key, self.clients, buffers, measured=sums)
            leaves, form = tree_flatten(sums or [])
            forms.append(form)
            return mean_loss(losses, data.mask), {**buffers, **{MEASURED.format(i): t for i, t in enumerate(leaves)}}

        with self.program.model.seeding(key):
            g, after = self.differentiate(loss, weights)
        if measured is not None:
            names = [name for name in after if name not in before]
            measured += tree_unflatten([after.pop(name) for name in names], forms[-1])
        return g, after

    def _augmented(self, batch: Batch, key: Key) -> Batch:
        augment = self.program.augment
        return replace(batch, x=augment(batch.x, key.stream_at(AUGMENT))) if augment else batch

    def _check(self, weights: Any, batch: int) -> None:
        if not isinstance(weights, dict) or weights.keys() != self.params.keys():
            raise UndriftError("client.gradient takes weights as a dict with the parameters' own names.")
        for n, w in self.params.items():
            if weights[n].shape != w.shape:
                raise UndriftError(
                    f"client.gradient was given {n!r} of shape {tuple(weights[n].shape)}, not {tuple(w.shape)}."
                )
        if not 0 <= batch < len(self.batches):
            raise UndriftError(
                f"client.gradient was asked for batch {batch} of a step with {len(self.batches)}; set the class "
                f"attribute batches = {batch + 1}."
            )


def mean_loss(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the losses over real samples."""
    mask = mask.to(losses.dtype)
    return (losses * mask).sum() / mask.sum()
