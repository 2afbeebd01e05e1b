"""Losses, with one value per sample, and the metrics that are functions like them: accuracy and recall.

Such a metric returns one value per sample, to be averaged over the test set, or a pair (numerators, denominators),
whose sums are divided. Others are in `undrift.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.errors import UndriftError
from undrift.loss_modules import WholeBatch, module_of, per_sample, reduces
from undrift.registry import Registry

Loss = Callable[[Tensor, Tensor], Tensor]


IGNORED = -100
"""The label of a sample, or of a position in one, that has none: the default `ignore_index` of torch's losses."""


def class_axis(output: Tensor, target: Tensor) -> int:
    """The axis of the outputs that holds the classes: the last (N×T×C for N×T), or the second (N×C×H×W for N×H×W).

    Raises `ValueError` where neither fits, or both do: with as many classes as positions the shapes do not tell.
    """
    last = output.shape[:-1] == target.shape
    second = output.dim() > 1 and (output.shape[:1], output.shape[2:]) == (target.shape[:1], target.shape[1:])
    if last and second and output.dim() > 2:
        raise ValueError(
            "the classes may be the last axis or the second, since there are as many as positions; give a loss of your "
            "own, such as torch.nn.CrossEntropyLoss(), whose classes are the second"
        )
    if not last and not second:
        raise ValueError("labels need one axis less than outputs, that of the classes (the last or the second)")
    return -1 if last else 1


def binary(output: Tensor, target: Tensor) -> bool:
    """Whether there is one output per sample, in the shape of the label, so that no axis is that of the classes."""
    return output.shape == target.shape and output[:1].numel() == 1


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """`−log softmax(z)_y`, averaged over a sample's labels where it has several; labels of -100 are left out.

    A sample without any other label has the loss 0, and counts in the mean over a batch like every sample.
    """
    if target.dim() > 1:
        return cross_entropy_of_labelled(output, target)
    return -torch.log_softmax(output, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def cross_entropy_of_labelled(output: Tensor, target: Tensor) -> Tensor:
    """The same, where samples may be without a label.

    A function of its own, since looking for -100 adds about a tenth to a small model's step on a CPU.
    """
    axis = class_axis(output, target)
    labelled = target != IGNORED
    index = torch.where(labelled, target, 0).unsqueeze(axis)
    losses = torch.where(labelled, -torch.log_softmax(output, axis).gather(axis, index).squeeze(axis), 0)
    if target.dim() == 1:
        return losses
    return losses.flatten(1).sum(1) / labelled.flatten(1).sum(1).clamp(min=1)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """`‖z − y‖²`, averaged over a sample's targets."""
    return (
        (output.reshape(target.shape) - target).square().flatten(1).mean(1)
        if target.dim() > 1
        else (output.reshape(target.shape) - target).square()
    )


def binary_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """`−y log σ(z) − (1−y) log(1−σ(z))`, averaged over a sample's labels."""
    losses = F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def squared_hinge(output: Tensor, target: Tensor) -> Tensor:
    """`max(0, 1 − s·z)²`, averaged over the outputs: s is +1 for a sample's own class and −1 for the others.

    With a linear model, this is a one-against-the-rest SVM. With one output, labels are 0 and 1.
    """
    if output.shape[-1] == 1:
        own = target.reshape(-1, 1) > 0
    else:
        own = torch.arange(output.shape[-1], device=output.device) == target.unsqueeze(-1)
    return F.relu(1 - torch.where(own, 1.0, -1.0) * output).square().mean(-1)


def recall_at_5(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """True labels among the five highest outputs, as a share of all true labels; summed over samples first."""
    target = target.clamp(min=0)  # labels of -100 are none
    top = output.topk(min(5, output.shape[-1]), -1).indices
    return target.gather(-1, top).sum(-1), target.sum(-1)


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The share of labels that have the highest output; with one output, whether it is above 0 as the label is.

    Labels of -100, and with several outputs all below 0, are not counted.
    """
    if binary(output, target):
        output, target = output.reshape(-1, 1), target.reshape(-1)
    axis = class_axis(output, target)
    if output.shape[axis] == 1:
        labelled = target != IGNORED
        right = (output.squeeze(axis) > 0) == (target > 0)
    else:
        labelled = target >= 0
        right = output.argmax(axis) == target
    right = right & labelled
    return (right, labelled) if target.dim() == 1 else (right.flatten(1).sum(1), labelled.flatten(1).sum(1))


def model_loss(output: Any, target: Tensor) -> Tensor:
    """The loss that the model itself computed: its output's `loss`, per sample or as one number for the batch."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise UndriftError(
            'loss="model" needs a model whose output has a "loss"; a Hugging Face model computes one if x has "labels".'
        )
    if found.dim() == 0:
        return found.expand(len(target))
    return found.flatten(1).mean(1) if found.dim() > 1 else found


CLASSES = (cross_entropy, cross_entropy_of_labelled, squared_hinge)
"""The losses whose targets are classes."""
LOSSES: Registry[Loss] = Registry(
    "loss",
    {f.__name__: f for f in (cross_entropy, mse, binary_cross_entropy, squared_hinge)} | {"model": model_loss},
)


def register_loss(name: str, loss: Loss) -> None:
    """Register a loss under a name that `ud.train`, experiment files and the command line know.

    Example:
        >>> import undrift as ud
        >>> from torch import nn
        >>> ud.register_loss("smooth", nn.CrossEntropyLoss(label_smoothing=0.1))
        >>> data = ud.load("digits", ud.IID(), clients=5)
        >>> result = ud.train("mlp", data, rounds=1, local=ud.Local(steps=1, lr=0.1), loss="smooth")

    Args:
        name: The name.
        loss: A function of `(output, target)` that returns one value per sample, or one for a whole batch; or a loss
            module or function of torch.

    Raises:
        UndriftError: If undrift has a loss of this name, or if the loss is not a function.
    """
    LOSSES.register(name, get_loss(loss))


def get_loss(loss: str | Loss | None) -> Loss:
    if loss is None:
        return cross_entropy
    if isinstance(loss, str):
        return LOSSES.find(loss)
    if not callable(loss):
        raise UndriftError(f"loss must be a name or a function of (output, target), not {loss!r}.")
    found: Any = module_of(loss)
    return per_sample(found) if reduces(found) else found


def for_labels(loss: Loss, unlabelled: bool) -> Loss:
    """The loss for data of which some samples have no label."""
    return cross_entropy_of_labelled if loss is cross_entropy and unlabelled else loss


def name_of(loss: Loss) -> str | None:
    """The name that `get_loss` knows this loss by."""
    loss = cross_entropy if loss is cross_entropy_of_labelled else loss
    loss = loss.function if isinstance(loss, WholeBatch) else loss
    return next((name for name, known in LOSSES.items() if known is loss), None)
