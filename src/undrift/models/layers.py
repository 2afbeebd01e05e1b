"""What a model's neurons do, found by watching its forward pass: no layer needs to be named or wrapped.

A layer is a call of a linear, convolution or recurrent function with one of the model's own weights. Its neurons'
activations are read after the first non-linearity that its output reaches, additions and norms in between included,
or, where it reaches none, from the output itself. Functional calls (`F.relu`) are seen like modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

CONVOLUTIONS = {f"conv{kind}{d}d": axis for d in (1, 2, 3) for kind, axis in (("", 0), ("_transpose", 1))}
"""Where a convolution's weight has its output channels."""
RECURRENT = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}
"""How many gates a recurrent layer stacks in its weights."""
NORMS = ("batch_norm", "instance_norm", "group_norm")
NONLINEAR = frozenset(
    """relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish sigmoid logsigmoid tanh hardtanh hardswish
    hardsigmoid softplus softsign hardshrink softshrink tanhshrink threshold""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Layer:
    """A layer's neurons and the parameters that each of them owns."""

    name: str
    """The module's name: a parameter's without its last word."""
    width: int
    params: tuple[tuple[str, int, int], ...]
    """(parameter, the axis its neurons lie along, how many times over): a recurrent unit owns a row in every gate."""


@dataclass
class Call:
    """One call of a layer, and the activations found for it: samples × neurons."""

    layer: Layer
    input: Tensor
    values: Tensor
    settled: bool = False


class Watch(TorchFunctionMode):
    """Records the layers of a forward pass in their order; `names` tells the model's weights by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.calls: list[Call] = []
        self.norms: dict[str, tuple[tuple[str, int, int], ...]] = {}
        self.sources: dict[int, tuple[Tensor, list[Call]]] = {}  # the tensor is held, or its id would be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").rstrip("_")
        if name in RECURRENT and len(args) == 9 and not args[7]:
            return self._recurrent(func, name, args)
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor | tuple | list):
            return out
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if (name == "linear" or name in CONVOLUTIONS) and id(weight) in self.names:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self._layer(name, args[0] if args else kwargs["input"], weight, bias, out)
            return out
        calls = [call for t in pytree.tree_leaves((args, kwargs)) for call in self.sources.get(id(t), (None, []))[1]]
        if name in NONLINEAR:
            for call in calls:
                _settle(call, out)
            calls = []
        elif name in NORMS and calls:
            owned = [id(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and id(t) in self.names]
            found = tuple((self.names[i], 0, 1) for i in owned)
            self.norms[calls[-1].layer.name] = self.norms.get(calls[-1].layer.name, ()) + found
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self.sources[id(t)] = (t, calls)
        return out

    def _layer(self, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Any) -> None:
        axis = CONVOLUTIONS.get(kind, 0)
        name = self.names[id(weight)]
        params = [(name, axis, 1)] + ([(self.names[id(bias)], 0, 1)] if id(bias) in self.names else [])
        width = out.shape[-1] if kind == "linear" else out.shape[1]
        values = _positions(out.movedim(-1, 1) if kind == "linear" else out, width)
        assert values is not None
        call = Call(Layer(name.rpartition(".")[0] or name, width, tuple(params)), x, values)
        self.calls.append(call)
        self.sources[id(out)] = (out, [call])

    def _recurrent(self, func: Any, kind: str, args: Any) -> Any:
        """Layer by layer, since only the last one's hidden states come out; |h| is averaged over time."""
        x, state, weights, biased, count, _, _, _, batch_first = args
        each = len(weights) // count
        for i in range(count):
            own = weights[i * each : (i + 1) * each]
            part = tuple(s[i : i + 1] for s in state) if isinstance(state, tuple) else state[i : i + 1]
            outs = func(x, part, own, biased, 1, 0.0, False, False, batch_first)
            hidden = outs[0] if batch_first else outs[0].transpose(0, 1)
            named = [self.names[id(w)] for w in own if id(w) in self.names]
            width = hidden.shape[-1]
            layer = Layer(f"{named[0].rpartition('.')[0]}[{i}]", width, tuple((n, 0, RECURRENT[kind]) for n in named))
            self.calls.append(Call(layer, x, hidden.abs().mean(1), settled=True))
            x = outs[0]
        return func(*args)

    def layers(self) -> list[Layer]:
        """Each layer once, in the order of the forward pass, with the affine pairs of the norms that follow it."""
        found = {call.layer.name: call.layer for call in self.calls}
        return [Layer(n, layer.width, layer.params + self.norms.get(n, ())) for n, layer in found.items()]

    def activations(self) -> dict[str, Tensor]:
        """Each layer's activations, samples × neurons; the mean over its calls where it is called more than once."""
        by_layer: dict[str, list[Tensor]] = {}
        for call in self.calls:
            by_layer.setdefault(call.layer.name, []).append(call.values)
        return {name: torch.stack(values).mean(0) for name, values in by_layer.items()}


def _settle(call: Call, out: Any) -> None:
    """The first non-linearity that a layer's output reaches has its activations."""
    linear = out.dim() > 2 and out.shape[1] != call.layer.width and out.shape[-1] == call.layer.width
    values = _positions(out.movedim(-1, 1) if linear else out, call.layer.width)
    if not call.settled and values is not None:
        call.values, call.settled = values, True


def _positions(out: Tensor, width: int) -> Tensor | None:
    """Samples × neurons, averaged over positions; also of a convolution's output that has been flattened."""
    if out.dim() < 2 or out.shape[1] % width:
        return None
    return out.reshape(out.shape[0], width, -1).mean(2)
