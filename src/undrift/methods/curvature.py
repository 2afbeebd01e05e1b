"""Penalties weighted by curvature: FedCurv and FedCL.

Both use the diagonal of the empirical Fisher information: the mean over samples of the squared per-sample gradients of
the true label's log-likelihood, which is the negative loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad, vmap

from undrift.data.samples import Samples, split
from undrift.errors import UndriftError, quoted
from undrift.functional.model import Model
from undrift.method.context import Batch, Client, Server
from undrift.method.local import ADDED
from undrift.method.part import Part
from undrift.methods.temporal import Targeted, TemporalEnsemble
from undrift.schedule import Number
from undrift.tree import Tree, tree_add, tree_map, tree_zeros

BATCH = 64
"""The size of batches in FedCL's authors' code."""
ELEMENTS, ON_GPU = 2**26, 2**29
"""The most elements that the per-sample gradients of one chunk may have, on a CPU and on a GPU."""


def squared_gradients(model: Model, loss: Callable[[Tensor, Tensor], Tensor], params: Tree, batch: Batch) -> Tree:
    """Return the sum of squared per-sample gradients over a batch, padding excluded."""
    compute = _one_by_one if model.obstacle else _vmapped if model.squares is None else _one_pass
    # One pass needs memory for one layer's per-sample gradients at a time, the others for those of all layers.
    each = model.squares if compute is _one_pass else sum(w.numel() for w in params.values())
    size = max(1, (ON_GPU if batch.mask.is_cuda else ELEMENTS) // max(1, each or 0))
    total = None
    for x, y, mask in zip(split(batch.x, size), batch.y.split(size), batch.mask.split(size), strict=True):
        sums = compute(model, loss, params, Batch(x, y, mask))
        total = sums if total is None else tree_add(total, sums)
    return total


def _one_pass(model: Model, loss: Callable[[Tensor, Tensor], Tensor], params: Tree, batch: Batch) -> Tree:
    return grad(lambda p: (loss(model.squared(p, batch.x), batch.y) * batch.mask).sum())(params)


def _vmapped(model: Model, loss: Callable[[Tensor, Tensor], Tensor], params: Tree, batch: Batch) -> Tree:
    def one(x: Samples, y: Tensor, real: Tensor) -> Tree:
        alone = tree_map(lambda t: t[None], x)
        g = grad(lambda p: loss(model(p, alone), y[None]).sum())(params)
        return tree_map(lambda g: g.square() * real, g)

    return tree_map(lambda f: f.sum(0), vmap(one)(batch.x, batch.y, batch.mask))


def _one_by_one(model: Model, loss: Callable[[Tensor, Tensor], Tensor], params: Tree, batch: Batch) -> Tree:
    """Compute the same with ordinary autograd, for models that `vmap` does not support."""
    total = tree_zeros(params)
    for x, y, real in zip(split(batch.x, 1), batch.y.split(1), batch.mask, strict=True):

        def one(params: Tree, x: Samples = x, y: Tensor = y) -> Tensor:
            return loss(model(params, x), y).sum()

        g = model.gradient(one, params)
        total = tree_map(lambda t, g, real=real: t + g.square() * real, total, g)
    return total


def squared_per_tensor(
    model: Model, loss: Callable[[Tensor, Tensor], Tensor], params: Tree, x: Samples, y: Tensor, size: int
) -> Tree:
    """Return `Σ_b ‖∇ℓ_b‖² / n` of every tensor, where ℓ_b is the mean loss of a batch of this size."""
    total = tree_map(lambda w: w.new_zeros(()), params)
    for some, labels in zip(split(x, size), y.split(size), strict=True):

        def mean(params: Tree, some: Samples = some, labels: Tensor = labels) -> Tensor:
            return loss(model(params, some), labels).mean()

        total = tree_map(lambda t, g: t + g.square().sum(), total, model.gradient(mean, params))
    return tree_map(lambda t: t / len(y), total)


@dataclass(frozen=True)
class FedCurv(Part):
    """Curvature penalty: stay close to the previous cohort's models where their Fisher information is large.

    Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef and Zeitak, *Overcoming Forgetting in Federated Learning on
    Non-IID Data* (2019). The loss of client i gets the penalty `λ·Σ_{j≠i}(w − ŵⱼ)ᵀ diag(Fⱼ)(w − ŵⱼ)`, over the clients
    j of the previous round with their local models ŵⱼ and diagonal Fisher information Fⱼ. The first round has no
    penalty. `weight=0` is FedAvg.

    Only `ΣFⱼ` and `ΣFⱼŵⱼ` are sent. The gradient of the penalty is `2λ(w·ΣF − ΣFŵ)`, from which a client that was in
    the previous cohort subtracts its own terms. The sum covers the previous round only, since earlier clients' models
    would need per-client state at the server.

    Weighting: every Fⱼ is a mean over the client's samples and counts once in the penalty, whatever the client's weight
    in the mean of the updates.

    Cannot be combined with a part that overrides `aggregate`.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedCurv(weight=1.0)

    Args:
        weight: The strength λ.
    """

    weight: Number

    measures: ClassVar[str | None] = "after"
    reads_rates: ClassVar[bool] = False
    needs_losses: ClassVar[bool] = True

    def start(self, params: Tree, server: Server) -> Tree:
        return {"F": tree_zeros(params), "Fw": tree_zeros(params)}

    def keep(self, params: Tree, client: Client) -> Tree:
        return {"F": tree_zeros(params), "Fw": tree_zeros(params), "round": torch.tensor(-2)}

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        return state

    def measure(self, params: Tree, batch: Batch, client: Client) -> Tree:
        return squared_gradients(client.model, client.loss, params, batch)

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        own = torch.where(client.kept["round"] == client.round - 1, 1.0, 0.0)

        def penalized(g: Tensor, w: Tensor, f: Tensor, fw: Tensor, own_f: Tensor, own_fw: Tensor) -> Tensor:
            return g + 2 * self.weight * ((f - own * own_f) * w - (fw - own * own_fw))

        all_, kept = client.received, client.kept
        return tree_map(penalized, g, params, all_["F"], all_["Fw"], kept["F"], kept["Fw"])

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        fisher = client.shared(tree_map(lambda f: f / client.n, client.measured))
        sums = {"F": fisher, "Fw": tree_map(lambda f, w, d: f * (w + d), fisher, client.begun, delta)}
        return sums, {**sums, "round": client.round}

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        return update, server.totals.sums


@dataclass(frozen=True)
class FedCL(Targeted):
    """Proximal term weighted by the Fisher information of the server's proxy data. `weight=0` is FedAvg.

    Yao and Sun, *Continual Local Training for Better Initialization of Federated Models* (2020). The loss gets the
    penalty `α·(w − w₀)ᵀ diag(F)(w − w₀)`, so the gradient becomes `g + 2α·F·(w − w₀)`, where w₀ are the weights
    received. The server computes F at the global model, on its own data (`data.server`).

    Averaged over samples, F is so small in a trained network that a weight of 0.1 is next to no penalty, and summed it
    is too large. The paper does not say how it scales F. Its authors' code has one number per tensor instead of one per
    weight, `F = Σ_b ‖∇ℓ_b‖² / n` with the gradients of the tensor for the mean losses of batches b of the n samples,
    labelled or not; `fisher="tensor"` is that.

    Needs data at the server: `ud.load(…, server_fraction=0.01)`.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedCL(weight=1.0)

    Args:
        weight: The strength α.
        target: With `TemporalEnsemble(beta)`, w₀ is an average of the global models. F is still computed at the latest.
        fisher: `"mean"` or `"sum"`: F is the mean or the sum of the squared gradients of the server's samples;
            `"tensor"`: it is one number per tensor, as above.
        batch_size: With `fisher="tensor"`, the size of the batches.
    """

    weight: Number
    target: TemporalEnsemble | None = None
    fisher: str = field(default="mean", metadata=ADDED)
    batch_size: int = field(default=BATCH, metadata=ADDED)

    needs_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.fisher, str) or self.fisher not in ("mean", "sum", "tensor"):
            raise UndriftError(f'FedCL(fisher) must be "mean", "sum" or "tensor", not {quoted(self.fisher)}.')
        if not isinstance(self.batch_size, int) or isinstance(self.batch_size, bool) or self.batch_size < 1:
            raise UndriftError(f"FedCL(batch_size) must be a whole number from 1, not {quoted(self.batch_size)}.")
        if self.batch_size != BATCH and self.fisher != "tensor":
            raise UndriftError('FedCL(batch_size) is for fisher="tensor"; leave it out.')

    def check(self, local: Any, data: Any) -> None:
        if data.server_rows is None:
            raise UndriftError("FedCL needs proxy data at the server; load with server_fraction=0.01, for example.")

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        assert server.data is not None
        x, y = server.data
        if self.fisher == "tensor":
            fisher = squared_per_tensor(server.model, server.loss, params, x, y, self.batch_size)
        else:
            batch = Batch(x, y, torch.ones(len(y), device=y.device))
            sums = squared_gradients(server.model, server.loss, params, batch)
            fisher = tree_map(lambda f: f / len(y), sums) if self.fisher == "mean" else sums
        return {**super().broadcast(params, state, server), "F": fisher}

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        fisher, anchor = client.received["F"], self.anchor(client)
        return tree_map(lambda g, w, w0, f: g + 2 * self.weight * f * (w - w0), g, params, anchor, fisher)
