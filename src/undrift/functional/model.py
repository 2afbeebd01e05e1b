"""A module as a function of its parameters: how the engines and every hook call it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from undrift.errors import UndriftError
from undrift.functional.batch_norm import NORMS, LaneNorms, adopt_norms, explaining_single_samples, release_norms
from undrift.functional.convolution.lanes import ConvolutionMode, convolutions
from undrift.functional.draws import KeyedDraws, Row
from undrift.functional.examine import examine, find_obstacle
from undrift.functional.layers import LastInput, Layer, Watch
from undrift.functional.norm_trials import refuses_single
from undrift.functional.per_sample import Squares, Uses
from undrift.functional.recurrent.layers import adopt, release
from undrift.random import Key

Params = dict[str, Tensor]


def _check_values(module: nn.Module) -> None:
    """Refuse parameters and buffers that have no values yet."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise UndriftError(
                f"The model's {name!r} has no shape yet (a lazy layer); call the model once on a batch before training."
            )
        if tensor.is_meta:
            raise UndriftError(
                f"The model's {name!r} is on the meta device and has no values; make the model on the CPU instead."
            )


class Model:
    """`model(params, x)` in evaluation mode, `model.train(params, x, key)` in training mode.

    Trainable parameters are the function's argument; frozen ones (`requires_grad=False`) stay in the module, one
    copy for all clients, and are never sent. So do buffers, except for those that training changes, such as a norm's
    running statistics: `tracked` has their values, and `at` gives the same model with others.
    """

    def __init__(self, module: nn.Module, device: torch.device, precision: str = "auto") -> None:
        _check_values(module)
        # The caller's module keeps its weights. Nothing writes to frozen parameters, so these are not copied, unless
        # they have to move: `to` would move the caller's own.
        shared = {id(p): p for p in module.parameters() if not p.requires_grad and p.device == device}
        self.module = copy.deepcopy(module, shared).to(device)
        self.start: Params = {n: p.detach().clone() for n, p in self.module.named_parameters() if p.requires_grad}
        if not self.start:
            raise UndriftError("The model has no trainable parameters; set requires_grad=True on those to train.")
        self.dtype = next(iter(self.start.values())).dtype
        self.accum_dtype = torch.promote_types(self.dtype, torch.float32)
        """The precision of numbers about clients, and of sums."""
        self.compute_dtype = torch.bfloat16 if precision == "bfloat16" else self.dtype
        self.norms = _of_norms(self.module)
        self.outputs = 0
        self.tracked: Params = {}
        self.sample: Tensor | None = None
        self.vectorized = False
        """Whether this is the model as lanes train it."""

    def examined(self, x: Tensor) -> tuple[Model, Tensor]:
        """This model with what a run on `x` shows of it (buffers that training changes, outputs), and its output.

        Runs a copy once in evaluation mode and twice in training mode. Raises `UndriftError` for draws that no key
        governs, and whatever the module itself raises.
        """
        output, changed = examine(self, x)
        outputs = output.shape[-1] if output.dim() > 1 else 0
        tracked = {name: self.module.get_buffer(name).clone() for name in changed}
        return self._with(outputs=outputs, tracked=tracked, sample=x), output

    def in_lanes(self) -> Model:
        """This model with recurrent layers and batch norms that run under vmap, where it has torch's own."""
        module = copy.deepcopy(self.module, {id(t): t for t in (*self.module.parameters(), *self.module.buffers())})
        adopt(module)
        adopt_norms(module)
        return self._with(module=module, vectorized=True)

    def at(self, tracked: Params) -> Model:
        """This model with these running statistics."""
        return self._with(tracked=tracked) if self.tracked else self

    def _with(self, **changes: Any) -> Model:
        """A copy with these attributes changed. What was found out about another module or sample is dropped."""
        other = copy.copy(self)
        if "module" in changes or "sample" in changes:
            for name in ("layers", "squares", "obstacle", "refuses_single"):
                other.__dict__.pop(name, None)
        other.__dict__ |= changes
        return other

    @cached_property
    def layers(self) -> list[Layer]:
        """The model's layers in the order of the forward pass."""
        assert self.sample is not None
        with torch.no_grad():
            seen = self.watch(self.start, self.sample)
        for call in seen.calls:
            if len(call.raw) != len(self.sample):
                raise UndriftError(
                    f"Layer {call.layer.name!r} of the model does not have the samples along its first axis, so its "
                    "neurons' activations cannot be told; put the batch first (batch_first=True)."
                )
        return seen.layers()

    @cached_property
    def squares(self) -> int | None:
        """The most numbers per sample that one backward pass for squared gradients makes; None if it needs several."""
        assert self.sample is not None
        found = [Uses(3), Uses(5)]  # two numbers of rows, of which one is not by chance the length of another axis
        for uses in found:
            with torch.no_grad():
                self._call(self.start, self.sample[:1].expand(uses.rows, *self.sample.shape[1:]), {}, False, uses)
        return found[0].largest if all(uses.fine(self.start) for uses in found) else None

    @cached_property
    def obstacle(self) -> str | None:
        """Why this model cannot run under vmap; None if it can."""
        return find_obstacle(self)

    @cached_property
    def refuses_single(self) -> bool:
        """Whether a batch of one sample cannot train this model: batch norm needs two values per channel."""
        return refuses_single(self)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Outputs in evaluation mode: no dropout, running statistics as they are."""
        return self._call(params, x, {}, training=False)

    def train(
        self, params: Params, x: Tensor, key: Key, statistics: Params | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Outputs in training mode, with every draw from `key`. Writes what it tracks into `statistics`, if given."""
        return self.train_features(params, x, key, statistics, watch=False, mask=mask)[0]

    def train_features(
        self,
        params: Params,
        x: Tensor,
        key: Key,
        statistics: Params | None = None,
        watch: bool = True,
        row: Row | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """`train`, and a function that returns the input of the last layer in that pass; None without `watch`.

        With `row`, `x` is one sample that has the draws of that row of a larger batch. `mask` says which samples are
        real; norms leave the others out. Values in `statistics` are written in place or, in lanes, replaced.
        """
        if statistics is None:
            statistics = {name: value.clone() for name, value in self.tracked.items()}
        seen = LastInput() if watch else None
        norms = LaneNorms(statistics, mask) if self.vectorized else None
        with KeyedDraws(key, row), norms or contextlib.nullcontext():
            output = self._call(params, x, statistics, training=True, watch=seen)
        statistics |= norms.changed if norms else {}
        return output, (lambda: seen.features().to(self.dtype)) if seen else None

    def squared(self, params: Params, x: Tensor) -> Tensor:
        """Outputs in evaluation mode whose gradient is, per parameter, the sum over samples of squared gradients.

        Only where `squares` is not None.
        """
        return self._call(params, x, {}, False, Squares())

    def activations(self, params: Params, x: Tensor) -> dict[str, Tensor]:
        """The activations of each layer's neurons in evaluation mode: by layer, samples × neurons."""
        return self.watch(params, x).activations()

    def features(self, params: Params, x: Tensor) -> Tensor:
        """The input of the last layer in evaluation mode: samples × features."""
        return self.watch(params, x).calls[-1].input

    def watch(self, params: Params, x: Tensor) -> Watch:
        """A forward pass in evaluation mode, watched."""
        seen = Watch()
        self._call(params, x, {}, training=False, watch=seen)
        return seen

    def _call(
        self,
        params: Params,
        x: Tensor,
        statistics: Params,
        training: bool,
        watch: Watch | LastInput | Uses | Squares | None = None,
    ) -> Tensor:
        if self.module.training != training:
            self.module.train(training)
        x = x.to(self.compute_dtype) if x.is_floating_point() else x
        tensors = {**dict(self.module.named_parameters()), **self.tracked, **params} if watch else self.tracked | params
        if self.compute_dtype != self.dtype:  # activations in low precision
            rest = dict(self.module.named_parameters()) | dict(self.module.named_buffers()) | self.tracked | params
            whole = {n: t for n, t in rest.items() if n in self.norms or not t.is_floating_point()}
            tensors = {n: t.to(self.compute_dtype) for n, t in rest.items() if n not in whole} | whole
        if isinstance(watch, Watch | LastInput | Uses):
            own = dict(self.module.named_parameters())
            watch.names = {id(tensor): name for name, tensor in tensors.items() if name in own}
        mode = convolutions(params, x, self.compute_dtype)
        with mode, watch or contextlib.nullcontext(), self._differentiable(training):
            output = functional_call(self.module, {**tensors, **statistics}, (x,))
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise UndriftError(f"The model must return one tensor, not {kind}; wrap it in a module that does.")
        if isinstance(mode, ConvolutionMode):  # its outputs may be strided as nobody outside expects
            output = output.contiguous()
        return output.to(self.dtype) if output.is_floating_point() else output

    def _differentiable(self, training: bool) -> contextlib.AbstractContextManager[Any]:
        """cuDNN has no gradient of recurrent layers in evaluation mode, where FedCurv asks for one; torch has."""
        theirs = any(isinstance(layer, nn.RNNBase) for layer in self.module.modules())
        if training or not theirs or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        cudnn = torch.backends.cudnn
        return cudnn.flags(enabled=False, deterministic=cudnn.deterministic, allow_tf32=cudnn.allow_tf32)

    def track(self, statistics: Params) -> None:
        """Make these this model's running statistics. The server's model is a copy for one round, which keeps them."""
        if statistics:
            new = {name: as_buffer(value, self.tracked[name]) for name, value in statistics.items()}
            self.tracked = self.tracked | new

    def load(self, params: Params) -> nn.Module:
        """The module with these weights and the running statistics in it, in evaluation mode."""
        for name, p in self.module.named_parameters():
            if name in params:
                p.copy_(params[name])
        for name, value in self.tracked.items():
            self.module.get_buffer(name).copy_(value)
        return self.released()

    def released(self) -> nn.Module:
        """The module as users know it, with torch's own layers, in evaluation mode."""
        release(self.module)
        release_norms(self.module)
        return self.module.eval()


def as_buffer(value: Tensor, like: Tensor) -> Tensor:
    """A mean over clients as a buffer's value: a counter of batches stays a whole number."""
    return (value if like.is_floating_point() else value.round()).to(like.dtype)


def ordinary_gradient(loss: Callable[[Params], Tensor], params: Params) -> Params:
    """The gradient of `loss` by ordinary autograd, which takes every module, also those that vmap refuses."""
    return ordinary_gradient_and_buffers(lambda w: (loss(w), {}), params)[0]


def ordinary_gradient_and_buffers(
    loss: Callable[[Params], tuple[Tensor, Params]], params: Params
) -> tuple[Params, Params]:
    """The same for a `loss` that also returns the buffers it changed."""
    with torch.enable_grad():
        leaves = {name: w.detach().requires_grad_() for name, w in params.items()}
        with explaining_single_samples():
            value, buffers = loss(leaves)
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(params, found, strict=True)), {name: b.detach() for name, b in buffers.items()}


def _of_norms(module: nn.Module) -> set[str]:
    """The parameters and buffers of batch and instance norms, which keep their precision."""
    layers = {prefix: layer for prefix, layer in module.named_modules() if isinstance(layer, NORMS)}
    return {f"{prefix}.{n}".lstrip(".") for prefix, layer in layers.items() for n in layer.state_dict()}
