"""Batch norm in lanes: its statistics are those of the real samples, and nothing is written in place.

A client's batch may be padded in lanes, and torch's batch norm would take padding for samples. So inside `LaneNorms`
calls of `F.batch_norm` (users' modules stay as they are) are computed here. With m_n = 1 for a real sample n and 0 for
padding, S positions per sample, and M = S·Σ m_n real values per channel:

    μ = Σ m_n x_ns / M,   σ² = Σ m_n (x_ns − μ)² / M,   y_ns = γ (x_ns − μ) / √(σ² + ε) + β.

Running statistics become r ← (1 − ρ) r + ρ μ, and likewise with σ² M/(M − 1), as torch has it. Under `vmap` and `grad`
they cannot be written into the module, so the mode collects their new values, which become part of the training state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from undrift.errors import UndriftError
from undrift.vmap import mapped

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
COUNTER = "num_batches_tracked"
"""The buffer in which a batch norm counts batches; it adds 1 in place before it calls `F.batch_norm`."""
SINGLE = (
    "A client's batch has one sample, on which batch norm cannot train; use Local(drop_last=True), choose a batch_size "
    "that leaves no client a last batch of one, or a norm that does not look across samples (GroupNorm)."
)


class Cumulative(float):
    """The momentum of a norm with `momentum=None`: the running statistics are the mean over all batches, ρ = 1/count.

    Torch's layers would read the count as a Python number, which a traced program does not have. So in lanes they are
    given this number, which `LaneNorms` recognises.
    """


class LaneNorms(TorchFunctionMode):
    """Inside it, batch norms take their statistics from the samples that `mask` calls real.

    Args:
        statistics: The buffers that training changes, by name: the very tensors that the module is called with.
        mask: Per sample of the batch 1, or 0 for padding. None: all samples are real.
    """

    def __init__(self, statistics: dict[str, Tensor], mask: Tensor | None) -> None:
        super().__init__()
        self.names, self.mask = {id(tensor): name for name, tensor in statistics.items()}, mask
        self.changed: dict[str, Tensor] = {}
        """New values of the buffers, by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):
            return self._batch_norm(Call.of(func, args, kwargs))
        if func in (F.instance_norm, torch.instance_norm):
            call = Call.of(func, args, kwargs)
            return func(*args, **kwargs) if call.mean is None else self._instance_norm(call)
        if func in (Tensor.add_, Tensor.__iadd__) and self.names.get(id(args[0]), "").endswith(COUNTER):
            name = self.names[id(args[0])]
            self.changed[name] = torch.add(self._current(args[0]), *args[1:], **kwargs)
            return args[0]
        return func(*args, **kwargs)

    def _batch_norm(self, call: Call) -> Tensor:
        x = call.x
        if not call.training:
            return self._fixed(call)
        if x.numel() == x.shape[1]:  # as torch does
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        share, count = self._share(x)
        mean, var = moments(x, share)
        if call.mean is not None:
            self._update(call, mean, var * (count / (count - 1)))
        weight = mean.new_ones(len(mean)) if call.weight is None else call.weight
        bias = mean.new_zeros(len(mean)) if call.bias is None else call.bias
        return Normalize.apply(x, weight, bias, mean, var, share, call.eps)  # type: ignore[no-untyped-call]

    def _instance_norm(self, call: Call) -> Tensor:
        """Normalize each sample by its own statistics; padding affects only the running ones."""
        if not call.training:
            return self._fixed(call)
        out = F.instance_norm(call.x, None, None, call.weight, call.bias, True, 0.0, call.eps)
        wide = call.x.detach().to(_precision(call.x)).flatten(2)
        share = self._share(call.x)[0][:, None] * wide.shape[2]
        self._update(call, (share * wide.mean(2)).sum(0), (share * wide.var(2)).sum(0))
        return out

    def _fixed(self, call: Call) -> Tensor:
        """Apply a norm in evaluation mode: a linear map of every channel, with the running statistics."""
        assert call.mean is not None and call.var is not None
        wide, axes = call.x.to(_precision(call.x)), call.x.dim() - 2
        scale = torch.rsqrt(self._current(call.var) + call.eps)
        scale = scale if call.weight is None else scale * call.weight
        out = (wide - per_channel(self._current(call.mean), axes)) * per_channel(scale, axes)
        return (out if call.bias is None else out + per_channel(call.bias, axes)).to(call.x.dtype)

    def _share(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The share that each value of a sample has in the mean over the batch, and how many real values there are."""
        mask = x.new_ones(len(x)) if self.mask is None else self.mask
        if len(mask) != len(x):
            raise RuntimeError(
                f"batch norm's input has {len(x)} rows for {len(mask)} samples, so it is not known which are padding"
            )
        mask = mask.to(_precision(x))
        count = mask.sum() * (x.numel() // (x.shape[0] * x.shape[1]))
        return mask / count, count

    def _update(self, call: Call, mean: Tensor, var: Tensor) -> None:
        if not isinstance(call.momentum, Cumulative) and call.momentum == 0:
            return
        for buffer, new in ((call.mean, mean), (call.var, var)):
            assert buffer is not None
            if id(buffer) not in self.names:
                raise RuntimeError("a norm's running statistics are not among the buffers that training changes")
            name, old = self.names[id(buffer)], self._current(buffer)
            factor = self._factor(call.momentum, name, new.dtype)
            self.changed[name] = ((1 - factor) * old.to(new.dtype) + factor * new).to(old.dtype)

    def _factor(self, momentum: float, name: str, dtype: torch.dtype) -> float | Tensor:
        if not isinstance(momentum, Cumulative):
            return momentum
        counter = f"{name.rpartition('.')[0]}.{COUNTER}".lstrip(".")
        return 1.0 / self.changed[counter].to(dtype)

    def _current(self, buffer: Tensor) -> Tensor:
        """Return a buffer's current value, since a forward pass may call a norm more than once."""
        return self.changed.get(self.names.get(id(buffer), ""), buffer)


class Call(NamedTuple):
    """The arguments of a norm, in the order of `torch.nn.functional`."""

    x: Tensor
    mean: Tensor | None = None
    var: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    @staticmethod
    def of(func: Any, args: Any, kwargs: dict[str, Any]) -> Call:
        renamed = {OWN_NAMES.get(name, name): value for name, value in kwargs.items()}
        if func in (torch.batch_norm, torch.instance_norm):  # whose arguments are in another order, with one more
            order = ("x", "weight", "bias", "mean", "var", "training", "momentum", "eps", "cudnn_enabled")
            renamed |= dict(zip(order, args, strict=False))
            renamed.pop("cudnn_enabled", None)
            return Call(**renamed)
        return Call(*args, **({"training": func is F.instance_norm} if len(args) < 6 else {}) | renamed)


OWN_NAMES = {"input": "x", "running_mean": "mean", "running_var": "var", "use_input_stats": "training"}


class Normalize(Function):
    """`γ (x − μ) / √(σ² + ε) + β`, where `mean` μ and `var` σ² are those of `x` itself, with the weights `share`.

    The gradient with respect to `x` includes that through μ and σ²; so they must be given detached.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, share: Tensor, eps: float
    ) -> Tensor:
        if _has_kernel(x, weight, bias, mean):
            return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
        axes, scale = x.dim() - 2, weight.to(mean.dtype) * torch.rsqrt(var + eps)
        centred = x.to(mean.dtype) - per_channel(mean, axes)
        return torch.addcmul(per_channel(bias.to(mean.dtype), axes), centred, per_channel(scale, axes)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, mean, var, share, ctx.eps = inputs
        ctx.save_for_backward(x, weight, mean, var, share)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        grads = NormalizeBackward.apply(g, *ctx.saved_tensors, ctx.eps)  # type: ignore[no-untyped-call]
        return *grads, None, None, None, None


class NormalizeBackward(Function):
    """The gradients of `Normalize` with respect to input, weight and bias.

    With r = 1/√(σ² + ε), x̂ = (x − μ) r, and sums over a channel:

        dβ = Σ g,   dγ = Σ g x̂,   dx = γ r (g − share·(dβ + x̂ dγ)).

    A padded sample has no share, so it does not move the statistics; but it is normalised by them, and its g counts.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, share: Tensor, eps: float) -> Any:
        axes, rstd = x.dim() - 2, torch.rsqrt(var + eps)
        scale = weight.to(mean.dtype) * rstd
        if _has_kernel(g, x, weight, mean):  # it treats the statistics as constants, so the result so far is γ r g
            dx, weight_grad, bias_grad = torch.ops.aten.native_batch_norm_backward(
                g, x, weight, mean, var, None, None, False, eps, [True, True, True]
            )
            constant, slope = _through_statistics(scale, rstd, share, weight_grad, bias_grad)
            # In place: on a CPU, memory for another activation costs more than the arithmetic on it.
            dx.addcmul_(x, per_channel(slope, axes), value=-1).sub_(per_channel(constant - slope * mean, axes))
            return dx, weight_grad, bias_grad
        wide, centred = g.to(mean.dtype), x.to(mean.dtype) - per_channel(mean, axes)
        bias_grad, weight_grad = positions_sum(wide).sum(0), positions_sum(wide * centred).sum(0) * rstd
        constant, slope = _through_statistics(scale, rstd, share, weight_grad, bias_grad)
        dx = wide * per_channel(scale, axes)
        dx = dx - torch.addcmul(per_channel(constant, axes), centred, per_channel(slope, axes))
        return dx.to(x.dtype), weight_grad.to(weight.dtype), bias_grad.to(weight.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UndriftError(
            'Batch norm in training mode has no second derivative on the lanes engine; use engine="plain".'
        )


def _through_statistics(
    scale: Tensor, rstd: Tensor, share: Tensor, weight_grad: Tensor, bias_grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what dx loses by the statistics' dependence on x, as c + s (x − μ): c and s, both samples × channels."""
    return share[:, None] * (scale * bias_grad), share[:, None] * (scale * rstd * weight_grad)


def _has_kernel(*tensors: Tensor) -> bool:
    """Whether torch's own kernels, which fuse all of it, can be used: on a CPU without vmap, in one precision."""
    first = tensors[0]
    same = all(t.dtype == first.dtype for t in tensors)
    return first.device.type == "cpu" and same and not any(map(mapped, tensors))


def moments(x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance of each channel, detached: the mean first, since differences of squares cancel."""
    wide = x.detach().to(share.dtype)
    mean = (share[:, None] * positions_sum(wide)).sum(0)
    squares = (wide - per_channel(mean, x.dim() - 2)).square_()
    return mean, (share[:, None] * positions_sum(squares)).sum(0)


def positions_sum(x: Tensor) -> Tensor:
    """Sums over positions: samples × channels."""
    return x.sum(tuple(range(2, x.dim()))) if x.dim() > 2 else x


def per_channel(values: Tensor, axes: int) -> Tensor:
    """Values per channel, or per sample and channel, that broadcast over positions with that many axes."""
    return values.reshape(*values.shape, *[1] * axes)


def _precision(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def adopt_norms(module: nn.Module) -> None:
    """Make cumulative averages known to `LaneNorms`; in place."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
            layer.momentum = Cumulative()


def release_norms(module: nn.Module) -> None:
    """Undo `adopt_norms`."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and isinstance(layer.momentum, Cumulative):
            layer.momentum = None


@contextmanager
def explaining_single_samples() -> Iterator[None]:
    """A context that explains what to change if torch rejects the statistics of a single value."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UndriftError) or "more than 1 value per channel" not in str(error):
            raise
        raise UndriftError(SINGLE) from error
