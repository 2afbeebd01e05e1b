"""One client's functions (`client.py`) for all lanes at once, by `vmap` over the lanes.

`lanes` has the entries of each lane's client, along a first axis; `shared` has what all clients have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from undrift.engine.client import Program, Sent
from undrift.engine.device_data import DeviceData
from undrift.engine.trace import RefuseLists
from undrift.functional.batch_norm import explaining_single_samples
from undrift.functional.model import Params
from undrift.method.context import Batch
from undrift.tree import Tree, tree_leaves, tree_map, tree_structure, tree_unflatten


class Vectorized:
    """The functions of all lanes. With `apart`, the caller adds up what lanes send."""

    def __init__(self, program: Program, data: DeviceData, apart: bool = False) -> None:
        self.program, self.data, self.apart = program, data, apart

    def begin(self, lanes: Tree, shared: Tree) -> Params:
        """Return the weights that each lane's client starts from."""
        return contiguous(vmap(lambda own: self.program.begin(self.program.given(shared, own)))(lanes))

    def start(self, lanes: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Return the parts' `prepared`, and the training state before the first step."""

        def one(own: Tree) -> tuple[Tree, Tree]:
            given = self.program.given(shared, own)
            prepared = self.program.prepare(given)
            return prepared, self.program.initial({**given, "prepared": prepared})

        prepared, state = vmap(one)(lanes)
        return contiguous(prepared), state

    def step(self, state: Tree, lanes: Tree, shared: Tree, rows: Tree, counts: Tensor, k: Tensor) -> Tree:
        """Take one local step, on the samples of `rows` (lanes × batches × samples).

        Of each batch the first `counts` (lanes × batches) are real.
        """
        mask = torch.arange(tree_leaves(rows)[0].shape[2], device=counts.device) < counts[:, :, None]
        split = [tree_map(lambda t, j=j: t[:, j], rows) for j in range(counts.shape[1])]
        batches = [self.data.batch(part, mask[:, j]) for j, part in enumerate(split)]

        def one(state: Tree, own: Tree, batches: list[tuple[Tree, Tree, Tensor]], k: Tensor) -> Tree:
            given = self.program.given(shared, own)
            return self.program.step(state, given, [Batch(*batch) for batch in batches], k, functional_gradient)

        everything = (state, lanes, [(batch.x, batch.y, batch.mask) for batch in batches], k)
        if len(counts) == 1:  # one lane needs no vmap, whose rule for convolutions costs a CPU a tenth more
            with RefuseLists():  # which vmap does otherwise
                after = tree_map(lambda t: t[None], one(*tree_map(lambda t: t[0], everything)))
        else:
            after = vmap(one)(*everything)
        return distinct(contiguous(after), (state, lanes, shared, rows))

    def conclude(self, skip: bool, state: Tree, lanes: Tree, shared: Tree) -> Sent:
        """Return what each lane's client sends and keeps, along a first axis; sums are of all lanes unless `apart`."""

        def one(state: Tree, own: Tree) -> Sent:
            return self.program.conclude(state, self.program.given(shared, own), skip=skip)

        sent = vmap(one)(state, lanes)
        sums = contiguous(sent.sums) if self.apart else tree_map(lambda t: t.sum(0), sent.sums)
        return Sent(sums, contiguous(sent.kept), sent.finite, contiguous(sent.update))

    def measure(
        self, when: str, params: Params, lanes: Tree, shared: Tree, rows: Tree, mask: Tensor, number: Tensor
    ) -> Any:
        """Return the parts' measurements on one batch, at each lane's `params`, or at the weights it starts from."""
        batch = self.data.batch(rows, mask)

        def one(params: Params, own: Tree, x: Tree, y: Tree, mask: Tensor) -> Tree:
            given = self.program.given(shared, own)
            return self.program.measure(params or self.program.starting(given), given, Batch(x, y, mask), when, number)

        return vmap(one, (0 if params else None, 0, 0, 0, 0))(params, lanes, batch.x, batch.y, batch.mask)


def functional_gradient(loss: Callable[[Params], tuple[Tensor, Params]], params: Params) -> tuple[Params, Params]:
    """Return the gradient of `loss` by `torch.func`, which works under vmap, and the buffers that it changed."""
    with explaining_single_samples():
        found: tuple[Params, Params] = grad(loss, has_aux=True)(params)
    return found


def distinct(new: Tree, given: Tree) -> Tree:
    """Return `new` with every tensor in memory of its own, separate from `given`.

    A carry may pass on the weights of the previous step, or the same gradient twice. But graphs copy the new state into
    the old one tensor by tensor, and lanes that take their next client are written in place.
    """
    taken = {t.untyped_storage().data_ptr() for t in tree_leaves(given)}
    leaves = []
    for t in tree_leaves(new):
        place = t.untyped_storage().data_ptr()
        leaves.append(t.clone() if place in taken else t)
        taken.add(place)
    return tree_unflatten(leaves, tree_structure(new))


def contiguous(tree: Tree) -> Tree:
    """Return contiguous tensors: a traced program is correct only for the strides it was traced with."""
    return tree_map(torch.Tensor.contiguous, tree)
