"""A module as a function of its parameters, which is how both engines and every hook call it."""

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
from undrift.functional.draws import KeyedDraws, RefuseDraws
from undrift.functional.layers import Layer, Watch
from undrift.functional.per_sample import Uses
from undrift.functional.recurrent.layers import release
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
    copy for all clients, and are never sent. So do buffers; those that training changes, such as a norm's running
    statistics, are `tracked`: the module holds the global ones, and a client trains on a copy.
    """

    def __init__(self, module: nn.Module, device: torch.device, precision: str = "auto") -> None:
        _check_values(module)
        # The caller's module keeps its weights. What is frozen nobody writes, so that is not copied, unless it must
        # move: `to` would move the caller's own.
        shared = {id(p): p for p in module.parameters() if not p.requires_grad and p.device == device}
        self.module = copy.deepcopy(module, shared).to(device)
        self.start: Params = {n: p.detach().clone() for n, p in self.module.named_parameters() if p.requires_grad}
        if not self.start:
            raise UndriftError("The model has no trainable parameters; set requires_grad=True on those to train.")
        self.dtype = next(iter(self.start.values())).dtype
        self.exact = torch.promote_types(self.dtype, torch.float32)
        """The precision of numbers about clients, and of sums."""
        self.compute = torch.bfloat16 if precision == "bfloat16" else self.dtype
        self.norms = _of_norms(self.module)
        self.outputs = 0
        self.tracked: Params = {}
        self.vmaps = True
        """Whether the model runs under vmap; the choice of an engine finds out."""
        self.sample: Tensor | None = None

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
        """Whether one backward pass gives squared per-sample gradients: then how many numbers it makes a sample."""
        assert self.sample is not None
        found = [Uses(3), Uses(5)]  # two numbers of rows, of which one is not by chance the length of another axis
        for uses in found:
            with torch.no_grad():
                self._call(self.start, self.sample[:1].expand(uses.rows, *self.sample.shape[1:]), {}, False, uses)
        return found[0].largest if all(uses.fine(self.start) for uses in found) else None

    def examine(self, x: Tensor) -> Tensor:
        """Run the model once on `x` in each mode, on a copy: refuses draws that no key governs, finds what it tracks.

        Returns the outputs in evaluation mode.
        """
        twin = copy.copy(self)
        twin.module = copy.deepcopy(self.module, {id(p): p for p in self.module.parameters()})
        before = dict(twin.module.named_buffers())
        values = {name: b.clone() for name, b in before.items()}
        key = Key(
            torch.zeros(2, dtype=torch.int64, device=x.device), torch.zeros((), dtype=torch.int64, device=x.device)
        )
        given = x.to(self.dtype) if x.is_floating_point() else x
        with torch.no_grad(), RefuseDraws():
            output = twin(twin.start, x)
            twin.module.train()
            with KeyedDraws(key):
                first = twin.module(given)
            for name, after in twin.module.named_buffers():
                if before[name] is not after:
                    raise UndriftError(
                        f"The model replaces its buffer {name!r}; change it in place instead ({name}.copy_(…))."
                    )
                if not torch.equal(values[name], after):
                    self.tracked[name] = self.module.get_buffer(name)
                    after.copy_(values[name])
            with KeyedDraws(key):
                second = twin.module(given)
        if isinstance(first, Tensor) and not _alike(first, second):
            raise UndriftError(
                "The model gives different outputs for the same samples and the same draws, so runs would not repeat: "
                "its forward pass draws from Python's or numpy's generator, or counts its calls. Use torch.rand or "
                "torch.randn, which undrift draws from the client's key, and buffers for what must change."
            )
        self.outputs = output.shape[-1] if output.dim() > 1 else 0
        self.sample = x
        return output

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Outputs in evaluation mode: no dropout, running statistics as they are."""
        return self._call(params, x, {}, training=False)

    def train(self, params: Params, x: Tensor, key: Key, statistics: Params | None = None) -> Tensor:
        """Outputs in training mode, with every draw from `key`. Writes what it tracks into `statistics`."""
        with KeyedDraws(key):
            return self._call(params, x, statistics or {}, training=True)

    def activations(self, params: Params, x: Tensor) -> dict[str, Tensor]:
        """What each layer's neurons do, in evaluation mode: by layer, samples × neurons."""
        return self.watch(params, x).activations()

    def features(self, params: Params, x: Tensor) -> Tensor:
        """What the last layer is given, in evaluation mode: samples × features."""
        return self.watch(params, x).calls[-1].input

    def watch(self, params: Params, x: Tensor) -> Watch:
        """A forward pass in evaluation mode, watched."""
        seen = Watch()
        self._call(params, x, {}, training=False, watch=seen)
        return seen

    def _call(
        self, params: Params, x: Tensor, statistics: Params, training: bool, watch: Watch | Uses | None = None
    ) -> Tensor:
        if self.module.training != training:
            self.module.train(training)
        x = x.to(self.compute) if x.is_floating_point() else x
        tensors = {**dict(self.module.named_parameters()), **params} if watch else params
        if self.compute != self.dtype:  # activations in low precision, parameters and all after the output in their own
            rest = dict(self.module.named_parameters()) | dict(self.module.named_buffers()) | params
            whole = {n: t for n, t in rest.items() if n in self.norms or not t.is_floating_point()}
            tensors = {n: t.to(self.compute) for n, t in rest.items() if n not in whole} | whole
        if watch:
            watch.names = {id(tensor): name for name, tensor in tensors.items()}
        with watch or contextlib.nullcontext(), self._differentiable(training):
            output = functional_call(self.module, {**tensors, **statistics}, (x,))
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise UndriftError(f"The model must return one tensor, not {kind}; wrap it in a module that does.")
        return output.to(self.dtype) if output.is_floating_point() else output

    def _differentiable(self, training: bool) -> contextlib.AbstractContextManager[Any]:
        """cuDNN has no gradient of recurrent layers in evaluation mode, where FedCurv asks for one; torch has."""
        theirs = any(isinstance(layer, nn.RNNBase) for layer in self.module.modules())
        if training or not theirs or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        cudnn = torch.backends.cudnn
        return cudnn.flags(enabled=False, deterministic=cudnn.deterministic, allow_tf32=cudnn.allow_tf32)

    def track(self, statistics: Params) -> Callable[[], None]:
        """Make these the global running statistics. Returns a function that restores the previous ones."""
        before = {name: self.tracked[name].clone() for name in statistics}

        def undo() -> None:
            for name, value in before.items():
                self.tracked[name].copy_(value)

        for name, value in statistics.items():
            whole = not self.tracked[name].is_floating_point()  # a counter of batches
            self.tracked[name].copy_(value.round() if whole else value)
        return undo

    def load(self, params: Params) -> nn.Module:
        """The module with these weights in it, in evaluation mode."""
        for name, p in self.module.named_parameters():
            if name in params:
                p.copy_(params[name])
        release(self.module)
        return self.module.eval()


def ordinary_gradient(loss: Callable[[Params], Tensor], params: Params) -> Params:
    """The gradient of `loss` by ordinary autograd, which takes every module, also those that vmap refuses."""
    with torch.enable_grad():
        leaves = {name: w.detach().requires_grad_() for name, w in params.items()}
        try:
            value = loss(leaves)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UndriftError(
                "A client's batch has one sample, on which batch norm cannot train; choose a batch_size that "
                "leaves no client a last batch of one, or a norm that does not look across samples (GroupNorm)."
            ) from error
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(params, found, strict=True))


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are the same up to rounding; a GPU may add up in another order."""
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    gap, size = (a - b).nan_to_num().double().norm(), a.nan_to_num().double().norm()
    return bool(gap <= 100 * torch.finfo(a.dtype).eps * size)


NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def _of_norms(module: nn.Module) -> set[str]:
    """The parameters and buffers of batch and instance norms, which keep their precision."""
    layers = {prefix: layer for prefix, layer in module.named_modules() if isinstance(layer, NORMS)}
    return {f"{prefix}.{n}".lstrip(".") for prefix, layer in layers.items() for n in layer.state_dict()}
