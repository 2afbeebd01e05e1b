"""Losses that reduce a batch to one number, as functions with one value per sample.

undrift weighs samples itself (padding, uneven clients, per-sample gradients), so it needs the values before that.
Torch's losses, such as `nn.CrossEntropyLoss()`, and those of libraries that follow it, have them. Others are taken as
they are: Cox's partial likelihood is one of the whole batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.errors import UndriftError

log = logging.getLogger("undrift")

REDUCTIONS = ("none", "mean", "sum", "batchmean")
ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.SoftMarginLoss, nn.PoissonNLLLoss, nn.KLDivLoss,
    nn.BCELoss, nn.BCEWithLogitsLoss,
)  # fmt: skip
"""Those that compare outputs and targets entry by entry; some of them broadcast silently where shapes differ."""
WEIGHTED = (nn.CrossEntropyLoss, nn.NLLLoss)
"""Those whose mean counts labels by their weights, and some of them not at all."""
FUNCTIONS: dict[Any, Callable[[], nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
}
"""Torch's functions that reduce a batch as these modules do."""


@dataclass(eq=False)
class WholeBatch:
    """A loss that returns one number for a batch, as one value per sample: the same for all."""

    function: Callable[[Any, Tensor], Tensor]

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        return self.function(output, target).expand(len(target))

    def couples(self, labels: Tensor) -> bool:
        """Whether a sample's value depends on the others of its batch."""
        return True


@dataclass(eq=False)
class PerSample:
    """A copy of a loss module, called so that it gives one value per sample."""

    module: nn.Module
    total: bool
    """Whether a sample's own values are summed rather than averaged."""
    mean: bool
    """Whether the module takes a mean over the batch."""
    alone: bool
    """Whether the module is called on one sample at a time."""
    original: nn.Module
    """With its own reduction."""
    options: dict[str, Any]
    """The module's settings, of which its own `repr` shows few: they tell one run from another."""
    whole: nn.Module | None = None
    """The module, if its mean over a batch is not that of values per sample; then a batch has one value."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if isinstance(self.module, ELEMENTWISE) and output.shape != target.shape:
            raise ValueError(
                f"outputs of shape {tuple(output.shape)} and targets of shape {tuple(target.shape)} would be "
                "broadcast; give both one shape, for example by y[:, None]"
            )
        if any(t.device != output.device for t in (*self.module.buffers(), *self.module.parameters())):
            self.module.to(output.device)  # in the check before a run, and never again
        if self.whole is not None:
            return self.whole.to(output.device)(output, target).expand(len(target))
        if self.alone:
            pairs = zip(output.split(1), target.split(1), strict=True)
            return torch.stack([self.module(z, y).mean() for z, y in pairs])
        values: Tensor = self.module(output, target)
        if self.weighs(target):
            return self._weighted(values, target)
        if values.dim() < 2:
            return values
        own = values.flatten(1)
        return own.sum(1) if self.total else own.mean(1)

    def _weighted(self, values: Tensor, target: Tensor) -> Tensor:
        """Values whose mean over the batch is torch's: their sum, divided by the weights of the labels that count."""
        own, counted = self._shares(values, target)
        return own * (len(own) / counted.sum().clamp(min=torch.finfo(values.dtype).tiny))

    def _shares(self, values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Per sample: the sum of its values, and of the weights of its labels that count."""
        known = target.ne(self.module.ignore_index)  # type: ignore[arg-type]
        counted = known.to(values.dtype)
        if self.module.weight is not None:
            counted = counted * self.module.weight[torch.where(known, target, 0)]  # type: ignore[index]
        return tuple(t.flatten(1).sum(1) if t.dim() > 1 else t for t in (values, counted))  # type: ignore[return-value]

    def parts(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Numerators and denominators, for a mean over more than one batch."""
        if self.whole is None and self.weighs(target):
            return self._shares(self.module(output, target), target)
        values = self(output, target)
        return values, torch.ones_like(values)

    def weighs(self, target: Tensor) -> bool:
        """Whether the mean over a batch counts labels by their weights."""
        return self.mean and isinstance(self.module, WEIGHTED) and not target.is_floating_point()

    def check(self, output: Tensor, target: Tensor) -> None:
        """See that the mean of the values is the module's own; where it is not, its own is used, for whole batches."""
        if not self.mean or self.whole is not None:
            return
        found, wanted = self(output, target).mean(), self.original(output, target)
        if not bool((found - wanted).abs() <= 1e-3 * wanted.abs() + 1e-6):
            self.whole = self.original

    def couples(self, labels: Tensor) -> bool:
        """Whether a sample's value depends on the others of its batch, with labels like these."""
        if self.whole is not None or not self.weighs(labels):
            return self.whole is not None
        return self.module.weight is not None or bool((labels == self.module.ignore_index).any())


def of_batches(loss: Any) -> bool:
    """Whether a loss is known to have one number for a batch and none for a sample."""
    return isinstance(loss, WholeBatch) or (isinstance(loss, PerSample) and loss.whole is not None)


def module_of(loss: Any) -> Any:
    """The module that reduces a batch as this function of torch does; any other loss as it is."""
    return next((make() for function, make in FUNCTIONS.items() if function is loss), loss)


def reduces(loss: Any) -> bool:
    """Whether this is a loss module that reduces a batch as torch's do."""
    return isinstance(loss, nn.Module) and getattr(loss, "reduction", None) in REDUCTIONS


def per_sample(loss: nn.Module) -> PerSample:
    """The loss module as a function with one value per sample: the mean over a sample's own values.

    With reduction="sum" or "batchmean", their sum. Raises `UndriftError` for modules that cannot be taken apart.
    """
    name = type(loss).__name__
    if any(p.requires_grad for p in loss.parameters()):
        raise UndriftError(f"{name} has parameters of its own, which would not be trained; put them into the model.")
    if getattr(loss, "batch", False) is True:  # as monai's do
        raise UndriftError(f"{name}(batch=True) looks across a batch and has no value per sample; leave batch out.")
    if loss.reduction == "sum":
        log.warning("%s sums over a sample's own values; over the samples of a batch, undrift takes the mean", name)
    module, inner = copy.deepcopy(loss), [m for m in loss.modules() if m is not loss and hasattr(m, "reduction")]
    if not inner:
        module.reduction = "none"  # type: ignore[assignment]
    simple = (bool, int, float, str, type(None), list, tuple)
    options = {
        f"{prefix}.{key}".lstrip("."): value
        for prefix, each in loss.named_modules()
        for key, value in vars(each).items()
        if isinstance(value, simple) and not key.startswith("_") and key != "training"
    }
    kind = loss.reduction
    original = copy.deepcopy(loss)
    return PerSample(module, kind in ("sum", "batchmean"), kind == "mean", bool(inner), original, options)
