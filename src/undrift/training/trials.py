"""Trial passes before a run: the model takes the samples of every split, and loss, metrics and augmentation match them.

Each error says what to change.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from undrift.data.array_ops import label_range
from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.samples import Samples, sample_kind, sample_shape, take
from undrift.errors import UndriftError, listed, require
from undrift.functional.arguments import arguments
from undrift.functional.copying import deep_copy, holds_a
from undrift.functional.draws import Trial, fixed_key
from undrift.functional.loss_draws import repeating, with_draws_of_loss
from undrift.functional.model import Model
from undrift.loss_modules import PerSample, WholeBatch
from undrift.losses import CLASSES, IGNORED, Loss, class_axis, squared_hinge
from undrift.metrics.base import Metric, fresh, plain, streams
from undrift.models.seeded import Seeded
from undrift.random import Key, torch_seed
from undrift.training.loss_trials import check_mean, refuse_broadcasts
from undrift.tree import tree_leaves, tree_map

OF_THE_MODEL = (
    "A loss must not read the model itself, since clients train copies of it: return what the loss needs from forward, "
    'as a tuple or a dict with output="all", or let the model compute its own loss (loss="model").'
)


def with_shapes(module: nn.Module, data: FederatedDataset, seed: int) -> nn.Module:
    """Return the module; if it has lazy layers, a copy that has been called once, so that they have weights.

    The weights depend on the seed, like those of a model given by name.
    """
    if not any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        return module
    made = deep_copy(module, {})
    training = made.training
    args, kwargs = arguments(made, data.take(data.store, data.index[:1].repeat(2))[0])
    try:
        with torch.no_grad(), Seeded(torch_seed(seed, "model")):
            made.eval()(*args, **kwargs)
    except Exception as error:  # whatever a user's forward pass may raise
        raise UndriftError(
            f"The model's lazy layers cannot infer their shapes from the clients' samples: {error}"
        ) from error
    return made.train(training)


def two_samples(rows: Rows, device: torch.device) -> tuple[Samples, Tensor]:
    """Return the first sample of a split, twice, with its target."""
    x, target = tree_map(lambda t: t.to(device), rows.take(rows.store, rows.index[:1].repeat(2)))
    return x, target


def check_split(
    model: Model, whose: str, rows: Rows, device: torch.device, loss: Loss, metrics: dict[str, Any]
) -> tuple[Model, Loss]:
    """Check in one forward pass that model, loss and metrics take these samples, outputs and labels.

    Returns the model with what these samples show of it, and the loss, as one of whole batches if it is.
    """
    y = rows.store["y"]
    classes = loss in CLASSES
    if classes:
        sentence = f"Cross-entropy needs whole-number labels, but the {whose} are floats; convert them with y.long(), "
        require(not y.is_floating_point(), sentence + "or choose another loss.")
    x, target = two_samples(rows, device)
    try:
        examined, output = model.examined(tree_map(torch.clone, x))
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's forward pass may raise
        raise UndriftError(
            f"The model does not take the {whose} samples of shape {sample_shape(x)}: {error}{_hint(model, rows, x)}"
        ) from error
    refuse_rounding(model, whose, x, rows)
    if classes and not isinstance(output, Tensor):
        names = listed(output) if isinstance(output, dict) else f'"0" to "{len(output) - 1}"'
        raise UndriftError(
            f'The model returns several outputs ({names}); choose the one for the loss with output="…", or pass a '
            "loss of your own, which is given all of them."
        )
    if classes:
        check_labels(whose, rows, output, target, loss)
    if isinstance(loss, PerSample) and isinstance(output, Tensor):
        check_mean(examined, loss, rows, device)
    trial, drew, checked = Trial(device, "the loss"), False, loss
    for name, function in {"loss": loss, **metrics}.items():
        got = f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        given = f"outputs {got} and the {whose} targets {tuple(target.shape)} {target.dtype}"
        try:
            with trial.draws() as draws:
                values = _tried(function, output, target)
        except UndriftError:
            raise
        except Exception as error:  # whatever a user's function may raise
            cause = f". {OF_THE_MODEL}" if holds_a(type(model.module), function) else ""
            raise UndriftError(f"The {name} does not take {given}: {error}{cause}") from error
        drew |= draws[0]
        if name == "loss" and isinstance(values, Tensor) and not values.dim():
            checked = WholeBatch(loss)
            continue
        for tensor in () if values is None else values if isinstance(values, tuple) else (values,):
            fine = isinstance(tensor, torch.Tensor) and tensor.shape == (2,)
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            require(
                fine,
                f"The {name} must return one value per sample, shape (2,) for two samples, not {found}; it was given "
                f"{given}." + _way_out(tensor, output, target),
            )
    known = with_draws_of_loss(examined, trial, drew)
    refuse_broadcasts(known, {"loss": loss, **metrics}, rows, device)
    return known, checked


def _tried(function: Any, output: Any, target: Tensor) -> Any:
    """Return what the loss or a metric returns; None of metrics that have no value per sample."""
    if isinstance(function, Metric):
        function.value(function.sums(output, target))
    elif streams(function):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # two equal samples may leave a metric undefined
            copy = fresh(function, target.device)
            copy.update(output, target)
            plain(copy.compute())
    else:
        return function(output, target)
    return None


def _way_out(value: Any, output: Any, target: Tensor) -> str:
    """Return advice on how to get one value per sample."""
    if isinstance(value, Tensor) and isinstance(output, Tensor) and output.numel() == target.numel() < value.numel():
        return " They are broadcast; give both one shape, for example by y[:, None] or output.squeeze(1)."
    if isinstance(value, Tensor) and value.dim() == 0:
        return ' torch\'s functions return one with reduction="none".'
    if isinstance(value, Tensor) and value.dim() > 1 and len(value) == 2:
        return " To average over a sample's own values, append .flatten(1).mean(1)."
    return ""


def check_labels(whose: str, rows: Rows, output: Tensor, target: Tensor, loss: Loss) -> None:
    """Check that the labels match the outputs: in their axes, and in the number of classes."""
    try:
        require(loss is not squared_hinge or target.dim() == 1, "this loss needs one per sample")
        outputs = output.shape[class_axis(output, target)]
    except ValueError as error:
        raise UndriftError(
            f"The {whose} labels have shape {tuple(rows.store['y'].shape[1:])} per sample and the outputs "
            f"{tuple(output.shape[1:])}: {error}. Where a sample may have several classes, marked by 0s and 1s, "
            'choose loss="binary_cross_entropy".'
        ) from error
    found = label_range(rows.store["y"], rows.index, None if loss is squared_hinge else IGNORED)
    if found is None:
        raise UndriftError(f"The {whose} labels are all {IGNORED}, which means no label; give some samples a label.")
    low, high = found
    most = 1 if loss is squared_hinge and outputs == 1 else outputs - 1
    require(
        low >= 0 and high <= most,
        f"The {whose} labels run from {low} to {high}, but the model has {outputs} outputs; "
        f"labels must be from 0 to {most}, or, with cross-entropy, {IGNORED} for no label.",
    )


def _hint(model: Model, rows: Rows, x: Samples) -> str:
    """Return why a model may reject samples: their dtypes, or that it is a copy."""
    if not isinstance(x, Tensor):
        return f" (They are {sample_kind(x)}.)"
    if not x.is_floating_point():
        numbers = (
            "for flattened images, pass x.float() / 255"
            if x.dtype == torch.uint8
            else "for other numbers, pass x.float()"
        )
        return f" (They are {x.dtype}, as tokens are; {numbers}.)"
    if "x" in rows.store and rows.store["x"].dtype == torch.uint8 and rows.take is take:
        return " (They were given as uint8, which means images and is scaled to [0, 1]; for tokens, pass x.long().)"
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.module.modules()):
        return " (undrift trains a copy of the model: a hook must use the module that it is given, not one it knows.)"
    return ""


def refuse_rounding(model: Model, whose: str, x: Samples, rows: Rows) -> None:
    """Reject integers among floats that the model's precision would round, since they are indices."""
    low = torch.finfo(model.compute_dtype).eps > torch.finfo(torch.float32).eps
    if not low or not isinstance(x, Tensor) or not x.is_floating_point():
        return
    values = rows.take(rows.store, rows.index[:1000])[0].double()
    whole = values == values.round()
    rounded = values.to(model.compute_dtype).double() != values
    # Measured values are integers by chance; indices are integers in every sample, at the same position.
    places = whole.flatten(1).all(0) & rounded.flatten(1).any(0)
    if bool(places.any()):
        first = values.flatten(1)[:, places][rounded.flatten(1)[:, places]][0]
        raise UndriftError(
            f"The {whose} samples hold whole numbers among floats, such as {first:g}, which {model.compute_dtype} "
            "rounds. Give indices as an integer tensor (samples may be tuples or dicts of tensors); scale measurements."
        )


def check_gradient(model: Model, rows: Rows, device: torch.device, loss: Loss) -> Model:
    """Check in one backward pass that the loss depends on the parameters differentiably.

    In evaluation mode, which takes any number of samples; where that uses constants that it made of the weights, in
    training mode. Returns the model that knows of draws in the backward pass, which have no key.
    """
    x, target = two_samples(rows, device)
    leaves = {name: w.requires_grad_() for name, w in model.trial().items()}
    with torch.enable_grad():
        output = model(leaves, x)
        value = repeating(model, loss)(output, target).sum()
    if not value.requires_grad and not has_gradient(model, x, target, loss):
        known = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output))
        whose = "loss" if known else "model"
        raise UndriftError(
            f"The {whose} has no gradient with respect to the model's parameters, so nothing would be trained; it must "
            "not detach what it computes, nor round, compare or convert it to whole numbers."
        )
    drawn = draws_backward(model, x, target, loss)
    return model._with(unkeyed=model.unkeyed or drawn) if drawn else model


def has_gradient(model: Model, x: Samples, target: Tensor, loss: Loss) -> bool:
    """Return whether the loss has a gradient in training mode."""
    with contextlib.suppress(Exception), torch.enable_grad(), model.held.open():
        return loss_of_a_step(model, model.trial(), x, target, loss).requires_grad
    return False


def loss_of_a_step(model: Model, leaves: dict[str, Tensor], x: Samples, target: Tensor, loss: Loss) -> Tensor:
    """Return the loss in training mode, of which parameters with these values are leaves."""
    key = fixed_key(target.device)
    for w in leaves.values():
        w.requires_grad_()
    with model.seeding(key):
        return repeating(model, loss)(model.train(leaves, x, key), target).sum()


def draws_backward(model: Model, x: Samples, target: Tensor, loss: Loss) -> str:
    """Return what draws in the backward pass of a step, as gradient checkpointing does by repeating the forward pass.

    Torch's generators are restored for that, but keys are not. A message, empty if nothing draws.
    """
    trial = Trial(target.device, "its backward pass")
    # A pass that fails here fails in training too, where the error says what it is about.
    with contextlib.suppress(Exception), torch.enable_grad(), model.held.open():
        leaves = model.trial()
        value = loss_of_a_step(model, leaves, x, target, loss)
        with trial.draws(keyed=False):
            torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return trial.unkeyed


def check_augment(augment: Callable[[Samples, Key], Samples], rows: Rows, device: torch.device) -> None:
    """Check in one call that the augmentation takes these samples, and returns as many of the same shape."""
    x, _ = two_samples(rows, device)
    trial = Trial(device, "it")
    try:
        with trial.draws(keyed=False):
            found = augment(x, trial.key)
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's function may raise
        raise UndriftError(f"The augmentation does not take samples of shape {sample_shape(x)}: {error}") from error
    source = trial.unkeyed.removeprefix("it draws from ").partition(",")[0]
    require(
        not trial.unkeyed,
        f"The augmentation draws from {source}, so runs would not repeat; draw from the key that it receives "
        "(ud.random.uniform(key, shape)).",
    )
    whole = _batch_kind(found)
    require(
        whole == _batch_kind(x),
        f"The augmentation must keep the shape and type of a batch, {_batch_kind(x)}, not return {whole}.",
    )


def _batch_kind(x: Any) -> str:
    """Return the shape and type of a batch, by input where there are several."""
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {x.dtype}"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name}: {_batch_kind(x[name])}" for name in sorted(x, key=str)) + "}"
    return f"({', '.join(map(_batch_kind, x))})" if isinstance(x, tuple) else type(x).__name__
