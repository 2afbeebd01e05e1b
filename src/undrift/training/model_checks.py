"""Checks of the model, the loss, the metrics and the samples on a few of these, before a run.

The model must take the samples of every split, and loss, metrics and augmentation must match them: each error says what
to change. Warnings are about what a run would train on without an error, and learn little or nothing from: digits that
the model's precision does not have, pixels that nobody scales, test samples that clients train on or of classes that
none of them has, numbers taken for classes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from undrift.data.array_ops import first_occurrences, label_range
from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.labels import MANY_CLASSES as MANY
from undrift.data.labels import labels_are_sparse
from undrift.data.normalize import loses_precision, rounding_example
from undrift.data.samples import Samples, Store, sample_kind, sample_shape, take, to_store
from undrift.errors import UndriftError, listed, quoted, require
from undrift.functional.arguments import arguments, floats_to
from undrift.functional.copying import deep_copy, holds_a
from undrift.functional.draws import Trial, fixed_key
from undrift.functional.loss_draws import repeating, with_draws_of_loss
from undrift.functional.model import Model
from undrift.loss_modules import PerSample, WholeBatch
from undrift.losses import CLASSES, IGNORED, Loss, class_axis, squared_hinge
from undrift.metrics.base import Metric, fresh, plain, streams
from undrift.models.seeded import Seeded
from undrift.random import Key, torch_seed
from undrift.tree import Tree, tree_leaves, tree_map

# ---- the model, the loss and the metrics ---------------------------------------------------------------------------

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
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            require(
                fine,
                f"The {name} must return one value per sample, shape (2,) for two samples, not {shape}; it was given "
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
    span = label_range(rows.store["y"], rows.index, None if loss is squared_hinge else IGNORED)
    if span is None:
        raise UndriftError(f"The {whose} labels are all {IGNORED}, which means no label; give some samples a label.")
    low, high = span
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
            augmented = augment(x, trial.key)
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
    whole = _batch_kind(augmented)
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


# ---- a value per sample --------------------------------------------------------------------------------------------

FEW = 8
"""The number of samples on which a model, a loss or a metric is tried."""
PAIRED = 4
"""The number of samples of which all pairs of an output and a target are tried."""
SEARCHED = 1000
"""The number of samples among which different targets are looked for."""


def different_samples(rows: Rows, device: torch.device) -> tuple[Samples, Tensor]:
    """Return a few samples, of different classes as far as that goes."""
    y, last = rows.store["y"], len(rows) - 1
    some = first_occurrences(y, rows.index)[:FEW] if y.dim() == 1 else np.arange(min(FEW, len(rows)))
    chosen = rows.index[torch.from_numpy(np.union1d(some, [0, last]))]
    x, target = tree_map(lambda t: t.to(device), rows.take(rows.store, chosen))
    return x, target


def check_mean(model: Model, loss: PerSample, rows: Rows, device: torch.device) -> None:
    """Let a loss module compare its values with its own mean, on samples of different classes."""
    x, target = different_samples(rows, device)
    with torch.no_grad(), contextlib.suppress(Exception):  # other checks report what does not match
        loss.check(model(model.perturbed(), x), target)


def refuse_broadcasts(model: Model, functions: dict[str, Any], rows: Rows, device: torch.device) -> None:
    """Reject a loss or a metric that compares each sample's output with the targets of all others.

    That is what torch makes of outputs N×1 and targets N, and the result may look like one value per sample. A loss
    that is meant to couple samples, such as a contrastive one, is no mean over pairs of an output and a target.
    """
    theirs = {name: function for name, function in functions.items() if not _is_ours(function)}
    if not theirs or rows.store["y"].shape[1:].numel() != 1:
        return
    some = rows.index[np.linspace(0, len(rows) - 1, SEARCHED).astype(np.int64)]
    first = np.unique(rows.store["y"][some].flatten().cpu().numpy(), return_index=True)[1]
    chosen = some[first[np.linspace(0, len(first) - 1, PAIRED).astype(np.int64)]]  # of different targets
    broadcasting: list[tuple[str, Tensor, Tensor]] = []
    with torch.no_grad(), warnings.catch_warnings(), contextlib.suppress(Exception):  # that is for other checks
        warnings.simplefilter("ignore")  # torch warns of some of these shapes
        x, y = tree_map(lambda t: t.to(device), rows.take(rows.store, chosen))
        z = model(model.perturbed(), x)
        if isinstance(z, Tensor) and z[:1].numel() == 1:
            broadcasting += [(name, z, y) for name, f in theirs.items() if broadcasts(repeating(model, f), z, y)]
    for name, z, y in broadcasting:
        raise UndriftError(
            f"The {name} broadcasts outputs of shape {_shape(z)} against targets of shape {_shape(y)}, so that each "
            "sample is compared with the targets of all others; give both one shape, for example by y[:, None] or "
            "output.squeeze(1)."
        )


def _is_ours(function: Any) -> bool:
    where = getattr(function, "__module__", type(function).__module__)
    return streams(function) or (str(where).startswith("undrift.") and not isinstance(function, PerSample))


def _shape(t: Tensor) -> str:
    return f"({', '.join(['N', *map(str, t.shape[1:])])}{',' if t.dim() == 1 else ''})"


def broadcasts(function: Any, z: Tensor, y: Tensor) -> bool:
    """Return whether values are means or sums over all pairs of an output and a target, instead of a sample's own."""
    rows = [slice(i, i + 1) for i in range(len(z))]
    pairs = torch.stack([function(z[i], y[j]).reshape(()) for i in rows for j in rows]).double().view(len(z), -1)
    values = function(z, y).double()

    def is_any(*wanted: Tensor) -> bool:
        return any(values.shape == own.shape and bool((values - own).norm() <= 0.001 * own.norm()) for own in wanted)

    own = pairs.diagonal()
    if is_any(own, own.mean(), own.sum()):
        return False
    return is_any(*(reduce(axis) for reduce in (pairs.mean, pairs.sum) for axis in (0, 1)), pairs.mean(), pairs.sum())


# ---- samples and labels --------------------------------------------------------------------------------------------

log = logging.getLogger("undrift")
SOME = 1000
"""The number of samples whose values are looked at."""
READ = 0.01
"""By how much outputs must differ if the model reads a digit that its precision does not have."""
SEEN = 64
"""The number of samples that are looked at for pixels."""
SMALLEST, WHITE, DARK = 49, 200, 16
"""Of images: the fewest values, the least largest value, and the mean of those above 0 from which they are not dark."""
LARGER = 10
"""By how much larger the outputs for unscaled pixels must be than those for scaled ones."""
UNKNOWN = 0.01
"""The share of test samples of classes that no client has from which these matter."""
VALUES, PER_CLASS, FULL = 100, 10, 0.95
"""Labels that are numbers: at least so many different ones, fewer samples of each, and gaps between them."""
DISTINCT = 0.99
"""The share of test samples that must be among the clients', and that must differ from one another."""
COLUMNS, LOOKED_AT = 64, 1 << 28
"""The number of values by which a sample is found again, and the bytes of a tensor beyond which none is searched."""


def spread_samples(rows: Rows, count: int) -> Samples:
    """Return this many samples from all over the data, in host memory."""
    chosen = rows.index[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)]
    return rows.take(rows.store, chosen)[0]


def warn_of_rounding(model: Model, rows: Rows, device: torch.device) -> None:
    """Warn if samples have digits that the model's precision has not, and these matter.

    They do if the model reads them, as it does those of an identifier among floats, or if they are what tells one
    sample from another, as in times in seconds since 1970 of the same minute.
    """
    dtype = model.compute_dtype
    if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:  # which rounds all but the first two or three digits
        return
    x = spread_samples(rows, FEW)
    low, other = floats_to(x, dtype), tree_map(lambda t: round_the_other_way(t, dtype), x)
    if all(torch.equal(a, b) for a, b in zip(tree_leaves(low), tree_leaves(other), strict=True)):
        return
    reads = False
    with torch.no_grad(), contextlib.suppress(Exception):  # other checks report what the model does not take
        outputs = [model(model.perturbed(), tree_map(lambda t: t.to(device), each)) for each in (low, other)]
        reads = relative_distance(*outputs) > READ
    numbers = [
        t.flatten(1) for t in tree_leaves(spread_samples(rows, SOME)) if t.is_floating_point() and t.dtype != dtype
    ]
    columns = [t.double().numpy() for t in numbers if t.shape[1]]
    lost = [t[:, own] for t in columns if (own := loses_precision(t)).any()]
    if reads or lost:
        log.warning(
            "The clients' samples have more digits than %s, the model's precision%s, and %s. Give identifiers as "
            "integers (samples may be tuples or dicts of tensors), subtract an offset from times and amounts, or train "
            "a model in float64 (model.double()).",
            str(dtype).removeprefix("torch."),
            f" ({rounding_example((lost or columns)[0])})" if lost or columns else "",
            "the model's outputs depend on them" if reads else "they are what tells samples apart",
        )  # fmt: skip


def warn_of_pixels(model: Model, rows: Rows, device: torch.device) -> None:
    """Warn if samples are pixels from 0 to 255 as floats, unless the model scales them itself or has norms that do."""
    x = spread_samples(rows, SEEN)
    if not isinstance(x, Tensor) or not looks_like_pixels(x):
        return
    few, key = (
        tree_map(lambda t: t.to(device), floats_to(spread_samples(rows, FEW), model.compute_dtype)),
        fixed_key(device),
    )
    with torch.no_grad(), contextlib.suppress(Exception):  # other checks report what the model does not take
        large, small = (output_norm(model.train(model.perturbed(), each, key)) for each in (few, few / 255))
        if large > LARGER * small:
            log.warning(
                "The clients' samples look like pixels from 0 to 255, as floats, and the model does not scale them, so "
                "it may learn nothing. Divide them by 255; images given as uint8 are scaled."
            )


def looks_like_pixels(x: Tensor) -> bool:
    """Return whether these are images, perhaps flattened, whose values are whole numbers from 0 to 255."""
    if not x.is_floating_point() or x.dim() < 2 or x[0].numel() < SMALLEST:
        return False
    areas = [x[0].numel() / channels for channels in (1, 3)]
    if not (min(x.shape[-2:]) > 1 if x.dim() > 2 else any(area == math.isqrt(int(area)) ** 2 for area in areas)):
        return False
    whole, largest = bool((x == x.round()).all() and x.min() >= 0), float(x.max())
    return whole and WHITE <= largest <= 255 and bool(x[x > 0].double().mean() >= DARK)


def output_norm(outputs: Tree) -> float:
    return sum(float(t.double().norm()) for t in tree_leaves(outputs) if t.is_floating_point())


def warn_of_labels(data: FederatedDataset, loss: Loss, default: bool) -> None:
    """Warn of labels that are numbers to predict, and of classes that only test samples have.

    `default`: whether the loss was chosen by what labels look like.
    """
    unknown = data.labels is not None and len(data.labels) == 1 < len(data.index)  # they are on a federation's nodes
    if data.labels is None or unknown or loss not in CLASSES:
        return
    own = class_counts(data.labels, data.index)
    used, samples = int((own > 0).sum()), int(own.sum())
    numbered = default and data.names is None and data.task.classes is None
    known = data.classes > MANY and labels_are_sparse(used, data.classes)  # which has a warning of its own
    few, gaps = samples < PER_CLASS * used, used < FULL * data.classes
    if numbered and not known and used >= VALUES and few and gaps:
        log.warning(
            "The labels have %d different values up to %d, with %.1f samples each, and are taken for classes. If they "
            "are numbers to predict, give them as floats, and loss='mse'.", used, len(own) - 1, samples / used,
        )  # fmt: skip
    elif data.test_rows:
        warn_of_unknown_classes(own, class_counts(data.test_rows.store["y"], data.test_rows.index), data.names)


def warn_of_unknown_classes(own: Tensor, test: Tensor, names: Sequence[str] | None) -> None:
    """Warn of classes that no client has, given the numbers of samples of each class."""
    missing = [c for c in test.nonzero().flatten().tolist() if c >= len(own) or not own[c]]
    share = int(test[missing].sum()) / max(1, int(test.sum()))
    if not missing or share < UNKNOWN:
        return
    mine, theirs = (set(t.nonzero().flatten().tolist()) for t in (own, test))
    off_by_one = any(theirs == {c + by for c in mine} for by in (-1, 1))
    log.warning(
        "No client has samples of class %s, of which %.0f%% of the test samples are. %s",
        listed([quoted(names[c]) if names and c < len(names) else str(c) for c in missing], 10),
        100 * share,
        f"The clients' labels begin at {min(mine)}, and those of the test data at {min(theirs)}: count both from 0."
        if off_by_one
        else "The model cannot learn what is in none of the clients' samples; check the labels, and how the data were "
        "split.",
    )


def class_counts(labels: Tensor, index: Tensor) -> Tensor:
    """Return the number of samples per class, without those that have no label."""
    counts = torch.zeros(0, dtype=torch.int64)
    for piece in index.split(1 << 22):
        own = labels[piece]
        more = torch.bincount(own[own >= 0].long(), minlength=len(counts))
        counts = torch.cat([counts, torch.zeros(len(more) - len(counts), dtype=torch.int64)]) + more
    return counts


def warn_of_trained_test(data: FederatedDataset) -> None:
    """Warn if the test samples are among those that clients train on. Samples that repeat anyway do not count."""
    test = data.test_rows
    if test is None or not (searchable(data.store) and searchable(test.store)):
        return
    names = [name for name in to_store(spread_samples(test, 1)) if name in data.store and data.store[name].dim() > 1]
    if not names or any(data.store[n].shape[1:] != test.store[n].shape[1:] for n in names):
        return
    chosen = test.index[np.linspace(0, len(test) - 1, min(SOME, len(test))).astype(np.int64)]
    keys = sample_keys(test.store, chosen, names)
    if len(keys.unique()) < DISTINCT * len(keys):
        return
    own, order = sample_keys(data.store, data.index, names).sort()
    places = torch.searchsorted(own, keys).clamp(max=len(own) - 1)
    repeated = (own[places] == keys).nonzero().flatten()
    mine = data.index[order[places[repeated]]]
    alike = [(data.store[n][mine] == test.store[n][chosen[repeated]]).flatten(1).all(1) for n in names]
    if int(torch.stack(alike).all(0).sum()) >= DISTINCT * len(keys):
        log.warning(
            "The test samples are also the clients', so the figures on test data are those of training data. Hold "
            "samples out instead, as with ud.load(…, test_fraction=0.2)."
        )


def searchable(store: Store) -> bool:
    """Return whether a store is small enough to look at whole, and is not read from files sample by sample."""
    return all(isinstance(t, Tensor) and t.numel() * t.element_size() <= LOOKED_AT for t in store.values())


def sample_keys(store: Store, index: Tensor, names: list[str]) -> Tensor:
    """Return one number per sample, from some of its values: the same for the same samples, whatever else is there."""
    total = torch.zeros(len(index), dtype=torch.float64)
    for name in names:
        flat = store[name].reshape(len(store[name]), -1)
        for i, column in enumerate(np.linspace(0, flat.shape[1] - 1, min(COLUMNS, flat.shape[1])).astype(np.int64)):
            total = total * 0.7310585 + flat[:, column][index].double() * (i + 1.618034)
    return total


def round_the_other_way(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floats rounded to `dtype` in the other direction; unchanged where they are not rounded.

    What has been rounded already goes to the next float, if it is so large that not every whole number is one.
    """
    if not t.is_floating_point():
        return t
    low = t.to(dtype)
    up = torch.tensor(torch.inf, dtype=dtype)
    if t.dtype == dtype:
        return torch.where(low.abs() >= 2 / torch.finfo(dtype).eps, torch.nextafter(low, up), low)
    above = torch.where(low.to(t.dtype) < t, torch.nextafter(low, up), torch.nextafter(low, -up))
    return torch.where(low.to(t.dtype) == t, low, above)


def relative_distance(outputs: Tree, wanted: Tree) -> float:
    """Return the distance between two outputs, as a share of the second."""
    pairs = zip(tree_leaves(outputs), tree_leaves(wanted), strict=True)
    shares = [0.0]
    for a, b in pairs:
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.is_floating_point() or b.is_floating_point()):
            if a.shape != b.shape:
                return float("inf")
            gap, size = (a.double() - b.double()).nan_to_num().norm(), b.double().nan_to_num().norm()
            shares.append(float(gap / size) if size else float(gap > 0))
    return max(shares)
