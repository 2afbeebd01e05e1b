"""FedNLR: neuron-wise learning rates; and `bound_neurons`."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from undrift.errors import UndriftError, unknown
from undrift.functional.layers import Layer
from undrift.functional.model import Model
from undrift.method.context import Batch, Client, Server
from undrift.method.part import Part
from undrift.schedule import Number, sampled_rounds, value
from undrift.tree import Tree, tree_map

log = logging.getLogger("undrift")


@dataclass(frozen=True)
class FedNLR(Part):
    """Neuron-wise learning rates, from each neuron's mean activation on the client's data. `ratio=1` is FedAvg.

    Wang, Zheng, Han, Xu, Li and Zhang, *FedNLR: Federated Learning with Neuron-wise Learning Rates* (2024). Before its
    first step, a client runs the global model over all its data and averages the activation of each neuron, h̄, that
    is, its output after the non-linearity. A softmax turns the averages of a layer into factors s of mean 1, with a
    given ratio of the largest to the smallest. For layer l = 1, …, L, with M_l neurons:

    - the ratio `μ_l = base + depth·l/L + width·log₁₀ M_l`,
    - the temperature `T_l = (max h̄ − min h̄) / ln μ_l`,
    - the factors `s = M_l · softmax(h̄ / T_l)`.

    The learning rate of a neuron's incoming weights and bias is multiplied by its s. A neuron is an output of a linear
    layer, a channel of a convolution, or a hidden unit of a recurrent layer.

    Weighting: the history has, by layer, μ_l and T_l averaged over the cohort, in which every client counts once.

    Needs a model with such layers. Weights that belong to none of them are not scaled, which a warning says.

    Example:
        >>> import undrift as ud
        >>> method = ud.FedDyn(alpha=0.1) + ud.FedNLR(base=1.0, depth=0.45, width=0.3)

    Args:
        base: The constant term of the ratio.
        depth: How much the ratio grows from the first layer to the last.
        width: How much the ratio grows with the logarithm of the layer's width.
        ratio: The ratio μ_l itself, in place of the three: a number, or a dict by layer name (1 for other layers).
    """

    base: Number = 1.0
    depth: Number = 1.0
    width: Number = 1.0
    ratio: Number | None = None

    measures: ClassVar[str | None] = "before"
    reads_rates: ClassVar[bool] = False
    harmless_sums: ClassVar[bool] = True
    ranges: ClassVar[dict[str, str]] = {"ratio": "[1, inf)"} | dict.fromkeys(("base", "depth", "width"), "(-inf, inf)")

    def ratios(self, layers: list[Layer]) -> dict[str, Any]:
        """Return the ratio μ_l by layer."""
        if self.ratio is not None:
            by_name = (
                self.ratio if isinstance(self.ratio, dict) else dict.fromkeys((x.name for x in layers), self.ratio)
            )
            return {layer.name: by_name.get(layer.name, 1.0) for layer in layers}
        return {
            layer.name: self.base + self.depth * (i + 1) / len(layers) + self.width * math.log10(layer.width)
            for i, layer in enumerate(layers)
        }

    def check_model(self, model: Model, rounds: int) -> None:
        if not model.layers:
            raise UndriftError(
                "FedNLR found no linear, convolution or recurrent layer in the model's forward pass that has the "
                "samples along its first axis; put the batch first (batch_first=True)."
            )
        _warn_of_unscaled(model)
        if isinstance(self.ratio, dict) and (strange := self.ratio.keys() - {layer.name for layer in model.layers}):
            raise unknown("layer", min(strange), [layer.name for layer in model.layers])
        scheduled = any(callable(n) for n in (self.base, self.depth, self.width))
        for t in sampled_rounds(rounds) if scheduled else (0,):
            numbers = {n: value(getattr(self, n), t) for n in ("base", "depth", "width")}
            for name, mu in FedNLR(**numbers).ratios(model.layers).items() if self.ratio is None else ():
                if mu < 1:
                    raise UndriftError(
                        f"FedNLR(base, depth, width) gives layer {name!r} a ratio of {mu:g}; it must be at least 1."
                    )

    def measure(self, params: Tree, batch: Batch, client: Client) -> Tree:
        found = client.model.activations(params, batch.x)
        return {name: (h.to(batch.mask.dtype) * batch.mask[:, None]).sum(0) for name, h in found.items()}

    def prepare(self, client: Client) -> Tree:
        scales = tree_map(lambda w: w.new_ones([1] * w.dim()), client.start)  # broadcast over each neuron's weights
        temperatures = {}
        ratios = self.ratios(client.model.layers)
        for layer in client.model.layers:
            s, temperatures[layer.name] = neuron_scales(client.measured[layer.name] / client.n, ratios[layer.name])
            for name, (axis, gates) in layer.params.items():
                if name in scales:  # frozen parameters are not in it
                    shape = [-1 if a == axis else 1 for a in range(scales[name].dim())]
                    scales[name] = scales[name] * s.repeat(gates).reshape(shape).to(scales[name].dtype)
        return {"scales": scales, "temperatures": temperatures}

    def rate(self, k: Tensor, client: Client) -> Tree:
        return client.prepared["scales"]

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        ratios = {name: torch.as_tensor(mu) + 0.0 for name, mu in self.ratios(client.model.layers).items()}
        return {"temperature": client.prepared["temperatures"], "ratio": ratios}, client.kept

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        size = server.totals.size.clamp(min=1)
        return update, tree_map(lambda total: total / size, server.totals.sums)

    def history(self, state: Tree) -> dict[str, Any]:
        return {name: {layer: float(x) for layer, x in by.items()} for name, by in state.items()}


def neuron_scales(h: Tensor, ratio: Any) -> tuple[Tensor, Tensor]:
    """Return `M·softmax(h/T)` and `T = (max h − min h)/ln μ`; 1 and 0 if all averages are equal or μ is 1."""
    log_ratio = torch.log(torch.as_tensor(ratio, dtype=torch.float64, device=h.device))
    spread = h.max() - h.min()
    flat = (spread <= 0) | (log_ratio <= 0)
    temperature = torch.where(flat, 0.0, spread / torch.where(flat, 1.0, log_ratio))
    s = len(h) * torch.softmax((h - h.max()) / torch.where(flat, 1.0, temperature), 0)
    return torch.where(flat, 1.0, s), temperature


def _warn_of_unscaled(model: Model) -> None:
    owned = {name for layer in model.layers for name in layer.params}
    tables = {f"{n}.weight".lstrip(".") for n, m in model.module.named_modules() if isinstance(m, nn.Embedding)}
    if rest := [n for n, w in model.start.items() if w.dim() > 1 and n not in owned | tables]:
        log.warning("FedNLR does not scale %s: they belong to no layer that it knows", ", ".join(rest))


def bound_neurons(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, dict[int, int]]:
    """Find the neurons that are bound to one class.

    Definition 1 of Wang, Zheng, Han, Xu, Li and Zhang, *FedNLR: Federated Learning with Neuron-wise Learning Rates*
    (2024): a neuron is bound to class c if its smallest activation over the samples of c exceeds its largest over all
    other samples.

    Example:
        >>> import undrift as ud
        >>> model = nn.Sequential(nn.Linear(1, 2))
        >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0], [0.0]])), model[0].bias.data.zero_()
        >>> ud.bound_neurons(model, torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 0, 1]))
        {'0': {0: 1}}

    Args:
        model: The model. It is not changed.
        x: Samples, on the model's device.
        y: Their classes.

    Returns:
        By layer name, a dict from each bound neuron to its class.
    """
    function = Model(copy.deepcopy(model).requires_grad_(True), x.device)
    with torch.no_grad():
        found = function.activations(function.start, x)
    bound: dict[str, dict[int, int]] = {}
    for name, h in found.items():
        bound[name] = {}
        for c in y.unique().tolist():
            own, rest = h[y == c], h[y != c]
            if len(rest):
                neurons = torch.nonzero(own.amin(0) > rest.amax(0)).flatten().tolist()
                bound[name] |= dict.fromkeys(neurons, c)
    return bound
