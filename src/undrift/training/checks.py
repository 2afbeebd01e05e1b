"""Checks of a run's arguments. Each refusal says what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.samples import Samples, kind, shape, take
from undrift.errors import UndriftError, first_line, quoted, require, whole
from undrift.functional.model import Model
from undrift.losses import CLASSES, IGNORED, Loss, Metric, class_axis, squared_hinge
from undrift.method.local import Local
from undrift.random import Key
from undrift.training.settings import Settings
from undrift.tree import tree_map


def two_samples(rows: Rows, device: torch.device) -> tuple[Samples, Tensor]:
    """The first sample of a split, twice, with its target."""
    x, target = tree_map(lambda t: t.to(device), rows.take(rows.store, rows.index[:1].repeat(2)))
    return x, target


def check_split(
    model: Model, whose: str, rows: Rows, device: torch.device, loss: Loss, metrics: dict[str, Metric]
) -> Model:
    """One forward pass: the model takes these samples, the loss and the metrics take its outputs and the labels.

    Returns the model with what these samples show of it.
    """
    y = rows.store["y"]
    classes = loss in CLASSES
    if classes:
        sentence = f"Cross-entropy needs whole-number labels, but the {whose} are floats; convert them with y.long(), "
        require(not y.is_floating_point(), sentence + "or choose another loss.")
    x, target = two_samples(rows, device)
    try:
        examined, output = model.examined(x)
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's forward pass may raise
        raise UndriftError(
            f"The model does not take the {whose} samples of shape {shape(x)}: {error}{_hint(rows, x)}"
        ) from error
    if classes:
        check_labels(whose, y[rows.index], output, target, loss)
    for name, function in {"loss": loss, **metrics}.items():
        shapes = f"outputs {tuple(output.shape)} and the {whose} targets {tuple(target.shape)} {target.dtype}"
        try:
            values = function(output, target)
        except Exception as error:  # whatever a user's function may raise
            raise UndriftError(f"The {name} does not take {shapes}: {error}") from error
        for tensor in values if isinstance(values, tuple) else (values,):
            fine = isinstance(tensor, torch.Tensor) and tensor.shape == (2,)
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            require(
                fine,
                f"The {name} must give one value per sample, shape (2,) for two samples, not {found}; got {shapes}."
                + _way_out(tensor),
            )
    return examined


def _way_out(value: Any) -> str:
    """How to get one value per sample from this."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return ' A function of torch\'s gives one with reduction="none".'
    if isinstance(value, Tensor) and value.dim() > 1 and len(value) == 2:
        return " To average over a sample's own values, append .flatten(1).mean(1)."
    return ""


def check_labels(whose: str, taken: Tensor, output: Tensor, target: Tensor, loss: Loss) -> None:
    """The labels fit the outputs: by their axes, and by how many classes the model has."""
    try:
        require(loss is not squared_hinge or target.dim() == 1, "this loss needs one per sample")
        outputs = output.shape[class_axis(output, target)]
    except ValueError as error:
        raise UndriftError(
            f"The {whose} labels have shape {tuple(taken.shape[1:])} per sample and the outputs "
            f"{tuple(output.shape[1:])}: {error}. Where a sample may have several classes, marked by 0s and 1s, "
            'choose loss="binary_cross_entropy".'
        ) from error
    if loss is not squared_hinge:
        taken = taken[taken != IGNORED]
        require(len(taken) > 0, f"The {whose} labels are all {IGNORED}, which stands for none; give some samples one.")
    low, high = int(taken.min()), int(taken.max())
    most = 1 if loss is squared_hinge and outputs == 1 else outputs - 1
    require(
        low >= 0 and high <= most,
        f"The {whose} labels run from {low} to {high}, but the model has {outputs} outputs; "
        f"labels must be from 0 to {most}, or {IGNORED} for none with cross-entropy.",
    )


def _hint(rows: Rows, x: Samples) -> str:
    """What the types of the samples may have to do with a model that does not take them."""
    if not isinstance(x, Tensor):
        return f" (They are {kind(x)}.)"
    if not x.is_floating_point():
        return f" (They are {x.dtype}; numbers that are no tokens want x.float().)"
    if "x" in rows.store and rows.store["x"].dtype == torch.uint8 and rows.take is take:
        return " (They were given as uint8, which stands for pictures and is scaled to [0, 1]; tokens want x.long().)"
    return ""


def check_gradient(model: Model, rows: Rows, device: torch.device, loss: Loss) -> None:
    """One backward pass, in evaluation mode: the loss depends on the parameters in a way that a gradient sees."""
    x, target = two_samples(rows, device)
    leaves = {name: w.detach().clone().requires_grad_() for name, w in model.start.items()}
    with torch.enable_grad():
        output = model(leaves, x)
        value = loss(output, target).sum()
    if not value.requires_grad:
        whose = "loss" if output.requires_grad else "model"
        raise UndriftError(
            f"The {whose} has no gradient with respect to the model's parameters, so nothing would be trained; it must "
            "not detach what it computes, nor round, compare or convert it to whole numbers."
        )


def check_augment(augment: Callable[[Samples, Key], Samples], rows: Rows, device: torch.device) -> None:
    """One call: what changes batches takes these samples and gives as many of the same shape."""
    x, _ = two_samples(rows, device)
    words = torch.zeros(2, dtype=torch.int64, device=device)
    try:
        found = augment(x, Key(words, words[0]))
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's function may raise
        raise UndriftError(f"The augmentation does not take samples of shape {shape(x)}: {error}") from error
    whole = _batch_kind(found)
    require(
        whole == _batch_kind(x),
        f"The augmentation must keep a batch's shape and type, {_batch_kind(x)}, not give {whole}.",
    )


def _batch_kind(x: Any) -> str:
    """The shape and type of a batch, by input where there are several."""
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {x.dtype}"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name}: {_batch_kind(x[name])}" for name in sorted(x, key=str)) + "}"
    return f"({', '.join(map(_batch_kind, x))})" if isinstance(x, tuple) else type(x).__name__


def cohort_size_of(participation: Any, population: int) -> int:
    number = whole(participation) or isinstance(participation, float)
    require(number, f"participation must be a count (an int) or a fraction (a float), not {participation!r}.")
    if whole(participation):
        require(participation >= 1, f"participation must be at least 1 client, not {participation}.")
        require(
            participation <= population,
            f"participation asks for {participation} clients per round, but only {population} have data.",
        )
        return int(participation)
    require(0 < participation <= 1, f"participation as a fraction must be in (0, 1], not {participation}.")
    return max(1, int(participation * population + 0.5))


def find_device(device: Any) -> torch.device:
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UndriftError(
            f"device {quoted(device)} cannot be used here ({first_line(error)}); leave it out to choose by itself."
        ) from error
    require(found.type != "meta", "device 'meta' holds no values, so nothing can be trained there; leave it out.")
    return found


def check_types(given: Settings) -> None:
    data, local, rounds, lanes = given.data, given.local, given.rounds, given.lanes
    engine, precision, compile = given.engine, given.precision, given.compile
    kind = type(data).__name__
    require(isinstance(data, FederatedDataset), f"data must be a FederatedDataset (ud.load, from_clients), not {kind}.")
    require(isinstance(local, Local), f"local must be a ud.Local, not {type(local).__name__}.")
    require(whole(rounds) and rounds >= 1, f"rounds must be a whole number from 1, not {rounds!r}.")
    require(engine in ("auto", "lanes", "plain"), f'engine must be "auto", "lanes" or "plain", not {engine!r}.')
    precisions = ("auto", "tf32", "bfloat16")
    require(precision in precisions, f'precision must be "auto", "tf32" or "bfloat16", not {precision!r}.')
    fine = lanes is None or (whole(lanes) and lanes >= 1)
    require(fine, f"lanes must be a whole number from 1, or None, not {lanes!r}.")
    require(compile in (None, True, False), f"compile must be True, False, or None, not {compile!r}.")


def check_listening(given: Settings) -> None:
    evaluate_every, personalize_every, on_round = given.evaluate_every, given.personalize_every, given.on_round
    fine = whole(evaluate_every) and evaluate_every >= 1
    require(fine, f"evaluate_every must be 1 or more, not {evaluate_every!r}.")
    fine = personalize_every is None or (whole(personalize_every) and personalize_every >= 1)
    require(fine, f"personalize_every must be a whole number from 1, or None, not {personalize_every!r}.")
    require(on_round is None or callable(on_round), f"on_round must be a function of a round's row, not {on_round!r}.")
