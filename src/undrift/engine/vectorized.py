"""One client's functions (`client.py`) for every lane at once: `vmap` over the lanes.

`lanes` is what each lane's client has of its own, along a first axis; `shared` what all have in common.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from undrift.engine.client import Program
from undrift.engine.device_data import DeviceData
from undrift.functional.model import Params
from undrift.method.context import Batch
from undrift.tree import Tree, tree_map


class Vectorized:
    def __init__(self, program: Program, data: DeviceData) -> None:
        self.program, self.data = program, data

    def start(self, lanes: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """The parts' `prepared`, and the training state before the first step."""

        def one(own: Tree) -> tuple[Tree, Tree]:
            given = {**shared, **own}
            prepared = self.program.prepare(given)
            return prepared, self.program.begin({**given, "prepared": prepared})

        prepared, state = vmap(one)(lanes)
        return contiguous(prepared), state

    def step(self, state: Tree, lanes: Tree, shared: Tree, indices: Tensor, counts: Tensor, k: Tensor) -> Tree:
        """One local step, on the samples at `indices`, of which each lane's first `counts` are real."""
        mask = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
        batch = self.data.batch(indices, mask)

        def one(state: Tree, own: Tree, x: Tensor, y: Tensor, mask: Tensor, k: Tensor) -> Tree:
            given = {**shared, **own}
            g = grad(self.program.objective)(state["params"], given, Batch(x, y, mask), k)
            return self.program.advance(state, g, given, k)

        everything = (state, lanes, batch.x, batch.y, batch.mask, k)
        if len(indices) == 1:  # one lane needs no vmap, whose rule for convolutions costs a CPU a tenth more
            return contiguous(tree_map(lambda t: t[None], one(*tree_map(lambda t: t[0], everything))))
        return contiguous(vmap(one)(*everything))

    def conclude(self, skip: bool, state: Tree, lanes: Tree, shared: Tree) -> tuple[Tree, Tree, Tree]:
        """The sum of what all lanes send; each lane's new state; and with `skip`, whether both are finite, per lane."""

        def one(state: Tree, own: Tree) -> tuple[Tree, Tree, Tree]:
            return self.program.conclude(state, {**shared, **own}, skip=skip)

        sent, keeps, finite = vmap(one)(state, lanes)
        return tree_map(lambda t: t.sum(0), sent), contiguous(keeps), finite

    def measure(
        self, when: str, params: Params, lanes: Tree, shared: Tree, indices: Tensor, mask: Tensor, number: Tensor
    ) -> Any:
        """The parts' measurements on one batch, at each lane's `params`; without any, at the weights it starts from."""
        batch = self.data.batch(indices, mask)

        def one(params: Params, own: Tree, x: Tensor, y: Tensor, mask: Tensor) -> Tree:
            given = {**shared, **own}
            return self.program.measure(params or given["start"], given, Batch(x, y, mask), when, number)

        return vmap(one, (0 if params else None, 0, 0, 0, 0))(params, lanes, batch.x, batch.y, batch.mask)


def contiguous(tree: Tree) -> Tree:
    """A traced program is right only for the strides it was traced with, so what goes round must keep them."""
    return tree_map(torch.Tensor.contiguous, tree)
