"""The layers of a model and their activations, found by watching its forward pass: nothing is named or wrapped.

A layer is a call of a linear, convolution or recurrent function with one of the model's own weights. The activations of
its neurons are the output of the first non-linearity that its output reaches; additions, norms and pooling may come in
between. If it reaches none before its channels are moved or concatenated with others, they are its output itself. The
last layer's activations are always its outputs. Functional calls such as `F.relu` count like modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from undrift.errors import UndriftError

CONV_OUTPUT_AXIS = {f"conv{kind}{d}d": axis for d in (1, 2, 3) for kind, axis in (("", 0), ("_transpose", 1))}
"""The axis of the output channels in the weight of each convolution."""
RECURRENT_GATES = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}
"""The number of gates that are stacked in the weights of each recurrent layer."""
NORM_FUNCTIONS = ("batch_norm", "instance_norm", "group_norm")
NONLINEARITIES = frozenset(
    """relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish sigmoid logsigmoid tanh hardtanh hardswish
    hardsigmoid softplus softsign hardshrink softshrink tanhshrink threshold clamp clamp_min maximum""".split()  # noqa: SIM905
)
CHANNEL_MOVES = frozenset("cat concat concatenate stack permute transpose movedim moveaxis swapaxes swapdims".split())  # noqa: SIM905
"""After these functions, channels are no longer on their original axis."""


@dataclass(frozen=True)
class Layer:
    """A layer's neurons, and the parameters that each of them owns."""

    name: str
    """The name of the module, or of its weight if that is not called `weight`."""
    width: int
    params: dict[str, tuple[int, int]]
    """Per parameter, the axis of the neurons and how often they repeat along it (a recurrent unit is in every gate)."""
    weight: str = ""
    bias: str = ""


@dataclass
class Call:
    """One call of a layer, with its outputs (`raw`) and its activations (`values`), both samples × neurons."""

    layer: Layer
    input: Tensor
    output: Tensor
    channels_last: bool
    raw: Tensor
    values: Tensor
    final: bool = False
    """Whether the activations have been found."""

    def set_activations(self, out: Tensor) -> None:
        """Take the output of a non-linearity as the activations; only that of the first counts."""
        values = self.per_neuron(out)
        if not self.final and values is not None:
            self.values, self.final = values, True

    def per_neuron(self, out: Tensor) -> Tensor | None:
        """The layer's output, or what pooling or flattening made of it, averaged over positions: samples × neurons.

        None if its shape is neither.
        """
        shape = self.output.shape
        pooled = not self.channels_last and out.dim() == len(shape) and out.shape[:2] == shape[:2]
        if out.shape != shape and not pooled:
            if out.dim() != 2 or out.shape[0] != shape[0] or out.numel() != self.output.numel():
                return None
            out = out.reshape(shape)
        out = out.movedim(-1, 1) if self.channels_last else out
        return out.flatten(2).mean(2) if out.dim() > 2 else out


class Watch(TorchFunctionMode):
    """Records the layers of a forward pass in their order; `names` are those of the model's parameters, by their id."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.calls: list[Call] = []
        self.norms: dict[str, str] = {}
        """The affine parameters of norms, each with the layer whose channels it scales."""
        # Where each tensor comes from, by its id: the calls that have not reached a non-linearity yet, and the call
        # whose channels it has. The tensor itself is kept too, or its id could be reused.
        self.sources: dict[int, tuple[Tensor, list[Call], Call | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").rstrip("_")
        if name in RECURRENT_GATES and len(args) == 9 and isinstance(args[2], list | tuple) and not args[7]:
            self._recurrent(func, name, args)
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor | tuple | list):
            return out
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        layer = name == "linear" or name in CONV_OUTPUT_AXIS
        if layer and id(weight) in self.names and isinstance(out, Tensor) and out.dim() > 1:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            self._layer(name, args[0] if args else kwargs["input"], weight, bias, out)
            return out
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = [self.sources[id(t)] for t in tensors if id(t) in self.sources]
        calls = [call for _, found, _ in known for call in found]
        owner = next((call for _, _, call in known if call), None)
        if name in NONLINEARITIES:
            for call in calls:
                call.set_activations(pytree.tree_leaves(out)[0])
            calls = []
        elif name in NORM_FUNCTIONS and owner:
            for t in tensors:
                if id(t) in self.names and len(t) == owner.layer.width:
                    self.norms.setdefault(self.names[id(t)], owner.layer.name)
        elif name in CHANNEL_MOVES:
            calls, owner = [], None
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self.sources[id(t)] = (t, calls, owner)
        return out

    def _layer(self, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        last = kind == "linear"
        width, axis = out.shape[-1 if last else 1], CONV_OUTPUT_AXIS.get(kind, 0)
        found = {self.names[id(weight)]: (axis, 1)} if weight.dim() > axis and weight.shape[axis] == width else {}
        named = self.names[id(weight)], self.names.get(id(bias), "")
        found |= {named[1]: (0, 1)} if named[1] else {}
        call = Call(Layer(_layer_name(named[0]), width, found, *named), x, out, last, out, out)
        raw = call.per_neuron(out)
        assert raw is not None
        call.raw = call.values = raw
        self.calls.append(call)
        self.sources[id(out)] = (out, [call], call)

    def _recurrent(self, func: Any, kind: str, args: Any) -> None:
        """Record the layers of a call, run one by one, since it returns the last one's hidden states only.

        The activations are |h|, averaged over time.
        """
        x, state, weights, biased, count, _, _, _, batch_first = args
        each, gates = len(weights) // count, RECURRENT_GATES[kind]
        for i in range(count):
            own = weights[i * each : (i + 1) * each]
            part = tuple(s[i : i + 1] for s in state) if isinstance(state, tuple) else state[i : i + 1]
            hidden = func(x, part, own, biased, 1, 0.0, False, False, batch_first)[0]
            width = hidden.shape[-1]
            named = {self.names[id(w)]: (0, gates) for w in own if id(w) in self.names and len(w) == gates * width}
            module = _layer_name(self.names.get(id(own[0]), kind)).rpartition(".")[0]
            values = (hidden if batch_first else hidden.transpose(0, 1)).abs().mean(1)
            self.calls.append(Call(Layer(f"{module}[{i}]", width, named), x, hidden, True, values, values, final=True))
            x = hidden

    def layers(self, rows: int) -> list[Layer]:
        """Return each layer once, in the order of the forward pass, with the norms' affine parameters on its channels.

        Layers whose first axis is not that of the samples, `rows` of them, are left out, since it is unknown which
        neuron is active for which sample.
        """
        found: dict[str, Layer] = {}
        for call in self._of_samples(rows):
            name, before = call.layer.name, found.get(call.layer.name)
            found[name] = replace(call.layer, params={**(before.params if before else {}), **call.layer.params})
        for param, name in self.norms.items():
            if name in found:
                found[name].params.setdefault(param, (0, 1))
        return list(found.values())

    def _of_samples(self, rows: int) -> list[Call]:
        """Return the calls of layers all of whose calls have that many rows."""
        others = {call.layer.name for call in self.calls if len(call.raw) != rows}
        return [call for call in self.calls if call.layer.name not in others]

    def activations(self, rows: int) -> dict[str, Tensor]:
        """Each layer's activations, samples × neurons; if it is called more than once, the mean over its calls."""
        by_layer: dict[str, list[Tensor]] = {}
        for call in self._of_samples(rows):
            by_layer.setdefault(call.layer.name, []).append(call.raw if call is self.calls[-1] else call.values)
        return {name: torch.stack(values).mean(0) for name, values in by_layer.items()}


class LastInput(TorchFunctionMode):
    """Records only the input of the last linear or convolution layer of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.input: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").rstrip("_")
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if (name == "linear" or name in CONV_OUTPUT_AXIS) and id(weight) in self.names:
            self.input = args[0] if args else kwargs["input"]
        return func(*args, **kwargs)

    def features(self) -> Tensor:
        if self.input is None:
            raise UndriftError("The model has no linear or convolution layer whose input could be its features.")
        return self.input


def _layer_name(weight: str) -> str:
    return weight.removesuffix(".weight") if weight != "weight" else weight
