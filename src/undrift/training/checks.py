"""Checks of a run's arguments. Each refusal says what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undrift.data.dataset import FederatedDataset, Rows
from undrift.errors import UndriftError, first_line, listed, quoted, require, whole
from undrift.functional.arguments import shapes
from undrift.functional.draws import Trial, fixed_key
from undrift.functional.loss_draws import repeating, with_draws_of_loss
from undrift.functional.model import Model
from undrift.losses import Loss, Metric, cross_entropy, squared_hinge
from undrift.method.local import Local
from undrift.random import Key
from undrift.training.settings import Settings
from undrift.tree import Tree, tree_leaves, tree_map, tree_structure


def two_samples(rows: Rows, device: torch.device) -> tuple[Tree, Tensor]:
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
    classes = loss in (cross_entropy, squared_hinge)
    if classes:
        sentence = f"Cross-entropy needs whole-number labels, but the {whose} are floats; convert them with y.long(), "
        require(not y.is_floating_point(), sentence + "or choose another loss.")
        several = f"The {whose} labels have shape {tuple(y.shape)}, but this loss needs one per sample; "
        require(y.dim() == 1, several + 'where a sample has several, choose loss="binary_cross_entropy".')
    x, target = two_samples(rows, device)
    try:
        examined, output = model.examined(tree_map(torch.clone, x))
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's forward pass may raise
        raise UndriftError(
            f"The model does not take the {whose} samples of shape {shapes(x)}: {error}{hint(model, x)}"
        ) from error
    refuse_rounding(model, whose, x, rows)
    if classes and not isinstance(output, Tensor):
        names = listed(output) if isinstance(output, dict) else f'"0" to "{len(output) - 1}"'
        raise UndriftError(
            f'The model returns several outputs ({names}); name the one that the loss is about: output="…", or give '
            "a loss of your own, which takes them all."
        )
    if classes:
        outputs, taken = output.shape[-1], y[rows.index]
        low, high = int(taken.min()), int(taken.max())
        most = 1 if loss is squared_hinge and outputs == 1 else outputs - 1
        require(
            low >= 0 and high <= most,
            f"The {whose} labels run from {low} to {high}, but the model has {outputs} outputs; "
            f"labels must be from 0 to {most}.",
        )
    trial, drew = Trial(device, "the loss"), False
    for name, function in {"loss": loss, **metrics}.items():
        got = f"{tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        given = f"outputs {got} and the {whose} targets {tuple(target.shape)} {target.dtype}"
        try:
            with trial.draws() as draws:
                values = function(output, target)
        except Exception as error:  # whatever a user's function may raise
            raise UndriftError(f"The {name} does not take {given}: {error}") from error
        drew |= draws[0]
        for tensor in values if isinstance(values, tuple) else (values,):
            fine = isinstance(tensor, torch.Tensor) and tensor.shape == (2,)
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            require(
                fine,
                f"The {name} must give one value per sample, shape (2,) for two samples, not {found}; got {given}.",
            )
    return with_draws_of_loss(examined, trial, drew)


def check_gradient(model: Model, rows: Rows, device: torch.device, loss: Loss) -> Model:
    """One backward pass, in evaluation mode: the loss depends on the parameters in a way that a gradient sees.

    Returns the model that knows of draws in the backward pass, which have no key.
    """
    x, target = two_samples(rows, device)
    leaves = {name: w.requires_grad_() for name, w in model.trial().items()}
    with torch.enable_grad():
        output = model(leaves, x)
        value = repeating(model, loss)(output, target).sum()
    if not value.requires_grad:
        known = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output))
        whose = "loss" if known else "model"
        raise UndriftError(
            f"The {whose} has no gradient with respect to the model's parameters, so nothing would be trained; it must "
            "not detach what it computes, nor round, compare or convert it to whole numbers."
        )
    drawn = draws_backward(model, x, target, loss)
    return model._with(unkeyed=model.unkeyed or drawn) if drawn else model


def draws_backward(model: Model, x: Tree, target: Tensor, loss: Loss) -> str:
    """What draws in the backward pass of a step, as gradient checkpointing does, which repeats the forward pass there.

    Torch's generators are set back for that, but keys are not. A sentence, empty if nothing draws.
    """
    key = fixed_key(target.device)
    trial = Trial(target.device, "its backward pass")
    # A pass that fails here fails in training too, where the error says what it is about.
    with contextlib.suppress(Exception), torch.enable_grad(), model.held.open():
        leaves = {name: w.requires_grad_() for name, w in model.trial().items()}
        with model.seeding(key):
            value = repeating(model, loss)(model.train(leaves, x, key), target).sum()
        with trial.draws(keyed=False):
            torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return trial.unkeyed


def check_augment(augment: Callable[[Tensor, Key], Tensor], rows: Rows, device: torch.device) -> None:
    """One call: what changes batches takes these samples and gives as many of the same shape."""
    x, _ = two_samples(rows, device)
    words = torch.zeros(2, dtype=torch.int64, device=device)
    try:
        found = augment(x, Key(words, words[0]))
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's function may raise
        raise UndriftError(f"The augmentation does not take samples of shape {shapes(x)}: {error}") from error
    alike = tree_structure(found) == tree_structure(x)
    pairs = zip(tree_leaves(found), tree_leaves(x), strict=alike)
    if not alike or any(not isinstance(a, Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        raise UndriftError(
            f"The augmentation must keep a batch's shape and type, {described(x)}, not give {described(found)}."
        )


def described(tree: Tree) -> str:
    leaves = [f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else type(t).__name__ for t in tree_leaves(tree)]
    return " and ".join(leaves)


def hint(model: Model, x: Tree) -> str:
    """What may be behind a model's refusal of samples."""
    whole = [t for t in tree_leaves(x) if not t.is_floating_point()]
    if isinstance(x, Tensor) and whole:
        return f" (They are {x.dtype}; numbers that are no tokens want x.float().)"
    hooks = [layer for layer in model.module.modules() if layer._forward_hooks or layer._forward_pre_hooks]
    if hooks:
        return " (undrift trains a copy of the model: a hook must use the module that it is given, not one it knows.)"
    return ""


def refuse_rounding(model: Model, whose: str, x: Tree, rows: Rows) -> None:
    """Refuse whole numbers among floats that the model's precision would round: they are indices."""
    low = torch.finfo(model.compute_dtype).eps > torch.finfo(torch.float32).eps
    if not low or not isinstance(x, Tensor) or not x.is_floating_point():
        return
    values = rows.take(rows.store, rows.index[:1000])[0].double()
    whole = values == values.round()
    rounded = values.to(model.compute_dtype).double() != values
    # Numbers that are measured are whole by chance; indices are whole in every sample, at the same place.
    places = whole.flatten(1).all(0) & rounded.flatten(1).any(0)
    if bool(places.any()):
        first = values.flatten(1)[:, places][rounded.flatten(1)[:, places]][0]
        raise UndriftError(
            f"The {whose} samples hold whole numbers among floats, such as {first:g}, which {model.compute_dtype} "
            "rounds. Give indices as an integer tensor (samples may be tuples or dicts of tensors); scale measurements."
        )


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
