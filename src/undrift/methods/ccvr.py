"""CCVR: classifier calibration with virtual representations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad

from undrift.errors import UndriftError, quoted, whole
from undrift.functional.model import Model
from undrift.losses import cross_entropy
from undrift.method.context import Batch, Client, Server
from undrift.method.part import Part
from undrift.random import bits, normal
from undrift.schedule import Number
from undrift.tree import Tree, tree_map

MOST = 1_000_000
"""The largest of its counts. A larger one is taken for a mistake, which would show after all rounds."""


@dataclass(frozen=True)
class CCVR(Part):
    """Calibrate the classifier after the last round, on virtual features drawn from one Gaussian per class.

    Luo, Chen, Hu, Zhang, Liang and Feng, *No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
    Non-IID Data* (2021). Every client sends, per class, the count, the sum and the sum of outer products of its
    penultimate features. From these the server computes the mean `μ_c` and the covariance `Σ_c` of each class (with
    `n_c − 1`), draws virtual features from `N(μ_c, Σ_c)`, and trains only the last layer on them, with SGD.

    Weighting: by samples, since counts, sums and outer products are those of all samples together.

    The paper gives neither the learning rate nor the number of epochs, so the defaults are ours. A class with one
    sample has covariance 0. A class without samples is not drawn.

    Needs targets that are classes, and a model that ends with a trainable linear layer.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedAvg() + ud.CCVR(samples_per_class=100)

    Args:
        samples_per_class: How many virtual features to draw per class.
        lr: The learning rate of the calibration.
        epochs: The number of passes over the virtual features.
        batch_size: The batch size of the calibration.
    """

    samples_per_class: int = 200
    lr: Number = 0.01
    epochs: int = 10
    batch_size: int = 64

    measures: ClassVar[str | None] = "finish"

    def __post_init__(self) -> None:
        for name in ("samples_per_class", "epochs", "batch_size"):
            count = getattr(self, name)
            if not whole(count) or not 1 <= count <= MOST:
                raise UndriftError(f"CCVR({name}) must be a whole number from 1 to {MOST:,}, not {quoted(count)}.")

    def check(self, local: Any, data: Any) -> None:
        if data.labels is None:
            raise UndriftError("CCVR needs labels that are classes, one whole number per sample.")

    def check_model(self, model: Model, rounds: int) -> None:
        if not _ends_with(model, *classifier(model)):
            raise UndriftError("CCVR retrains the last layer, so the model must end with a trainable linear layer.")

    def measure(self, params: Tree, batch: Batch, client: Client) -> Tree:
        # In float64: a covariance is a small difference of large sums.
        features = client.model.features(params, batch.x).double()
        classes = torch.arange(client.model.outputs, device=batch.y.device)
        member = (batch.y[:, None] == classes) * batch.mask[:, None].double()
        outer = torch.einsum("bc,bd,be->cde", member, features, features)
        return {"n": member.sum(0), "sum": member.T @ features, "outer": outer}

    def finish(self, params: Tree, state: Tree, server: Server) -> Tree:
        x, y = self.virtual(server.totals.sums, server)
        layer = server.model.layers[-1]
        head = {"weight": params[layer.weight]}
        _, bias = classifier(server.model)
        rest: dict[str, Any] = {"bias": bias}
        if layer.bias in params:
            head["bias"], rest = params[layer.bias], {}

        def loss(head: Tree, batch: Tensor) -> Tensor:
            return cross_entropy(torch.nn.functional.linear(x[batch], **head, **rest), y[batch]).mean()

        for epoch in range(self.epochs):
            order = torch.argsort(bits(server.key.stream_at(1 + epoch), len(x)), stable=True)
            for batch in order.split(self.batch_size):
                head = tree_map(lambda w, g: w - self.lr * g, head, grad(loss)(head, batch))
        return {**params, **{getattr(layer, kind): w for kind, w in head.items()}}

    def virtual(self, sums: Tree, server: Server) -> tuple[Tensor, Tensor]:
        """Return features drawn from each class's Gaussian, and their classes."""
        n, total, outer = sums["n"], sums["sum"], sums["outer"]
        mean = total / n.clamp(min=1)[:, None]
        scatter = outer - n[:, None, None] * mean[:, :, None] * mean[:, None, :]
        covariance = scatter / (n - 1).clamp(min=1)[:, None, None]
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt()[:, None, :]  # covariance = root·rootᵀ; rounding may leave −ε
        drawn = normal(server.key, (len(n), self.samples_per_class, mean.shape[1]), mean.dtype)
        x = mean[:, None] + drawn @ root.transpose(1, 2)
        held = torch.nonzero(n > 0).flatten()
        return x[held].flatten(0, 1).to(server.model.dtype), held.repeat_interleave(self.samples_per_class)


def classifier(model: Model) -> tuple[Tensor | None, Tensor | None]:
    """Return the last layer's weight, if it is linear and trainable, and its bias, frozen or not."""
    if not model.layers:
        return None, None
    layer, everything = model.layers[-1], dict(model.module.named_parameters())
    weight = model.start.get(layer.weight)
    return weight if weight is not None and weight.dim() == 2 else None, everything.get(layer.bias)


def _ends_with(model: Model, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether the model's outputs are this layer's, or their log-softmax, by trying it on a sample."""
    assert model.sample is not None
    with torch.no_grad():
        features, output = model.features(model.trial(), model.sample), model(model.trial(), model.sample)
        if weight is None or features.dim() != 2:
            return False
        z = torch.nn.functional.linear(features.to(weight.dtype), weight, bias)
    alike = z.shape == output.shape
    return alike and any(torch.allclose(o, output, rtol=1e-2, atol=1e-2) for o in (z, torch.log_softmax(z, -1)))
