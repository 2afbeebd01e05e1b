"""Models by name: `ud.models.get("mlp", classes=10, shape=(1, 8, 8))`. Any other `nn.Module` can be trained too."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from undrift.errors import UndriftError, nearest, quoted, whole
from undrift.expressions import parse
from undrift.models import timm
from undrift.models.cnn import cnn, cnn_fedavg, cnn_femnist, cnn_temporal
from undrift.models.lenet import lenet5
from undrift.models.linear import logistic, mlp, svm
from undrift.models.readers import gru_reader, lstm_reader
from undrift.models.resnet import resnet20
from undrift.models.seeded import Seeded
from undrift.models.vgg import vgg9
from undrift.random import torch_seed
from undrift.registry import Registry

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "mlp": mlp,
        "logistic": logistic,
        "svm": svm,
        "cnn": cnn,
        "lenet5": lenet5,
        "cnn_fedavg": cnn_fedavg,
        "cnn_femnist": cnn_femnist,
        "cnn_temporal": cnn_temporal,
        "vgg9": vgg9,
        "resnet20": resnet20,
        "gru": gru_reader,
        "lstm": lstm_reader,
    },
    replaceable=True,
    called=True,
)
"""Functions of `(classes, shape, …)` by name. Those that read tokens also take `vocabulary`; the rest are options."""

FROM_DATA = ("classes", "shape", "vocabulary", "seed")
"""Arguments that come from the data and the run, so they are not options."""


def get(
    name: str, *, classes: int, shape: Sequence[int], seed: int = 0, vocabulary: int | None = None, **options: Any
) -> nn.Module:
    """Create a model by name.

    Example:
        >>> import undrift as ud
        >>> model = ud.models.get("mlp", classes=10, shape=(1, 8, 8), hidden=32)
        >>> model(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])

    Args:
        name: One of `undrift list models`, or a model of timm, such as `timm:vit_tiny_patch16_224`.
        classes: The number of outputs.
        shape: The shape of a sample, without the batch axis.
        seed: The seed of the initial weights.
        vocabulary: The number of different tokens in the samples, for models that read tokens.
        **options: The model's own options.

    Returns:
        The model, on the CPU. Torch's global random state is neither read nor changed.

    Raises:
        UndriftError: If there is no such model or option, if the model cannot take samples of this shape, or if its
            parameters would not fit into memory.
    """
    check_options(name, options)
    function = known(name)
    tokens = {"vocabulary": vocabulary} if "vocabulary" in inspect.signature(function).parameters else {}
    if tokens and vocabulary is not None and not _counts(vocabulary):
        raise UndriftError(f"vocabulary must be a whole number from 1, not {quoted(vocabulary)}.")
    make = partial(function, classes, tuple(shape), **tokens, **options)
    _check_size(name, make)
    with torch.device("cpu"), Seeded(torch_seed(seed, "model")):
        return make()


def known(name: str) -> Callable[..., nn.Module]:
    """Return the function that creates the model of this name."""
    if timm.is_timm(name):
        return timm.builder(name)
    return MODELS.find(name)


def is_ours(model: Any) -> bool:
    """Return whether this is the name of a model of undrift's own, with or without options."""
    if not isinstance(model, str) or timm.is_timm(model):
        return False
    return known(parse_model(model)[0]).__module__.startswith("undrift.")


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raise for options that the model of this name does not have, and for values of the wrong type."""
    if timm.is_timm(name):
        timm.check_options(name, options)
    taken = inspect.signature(known(name)).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return  # a user's function, which checks its options itself
    defaults = {n: p.default for n, p in taken.items() if n not in FROM_DATA}
    listed = f"its options are {', '.join(defaults)}" if defaults else "it has none"
    for option, given in options.items():
        if option in FROM_DATA:
            raise UndriftError(f'The model "{name}" takes {option!r} from the data and the run; leave it out.')
        if option not in defaults:
            close = nearest(option, defaults)
            hint = f" (did you mean {close!r}?)" if close else ""
            raise UndriftError(f'The model "{name}" has no option {quoted(option)}{hint}; {listed}.')
        ours = known(name).__module__.startswith("undrift.")  # a user's function checks its options itself
        switch, count = isinstance(defaults[option], bool), isinstance(defaults[option], int)
        if ours and count and not (isinstance(given, bool) if switch else _counts(given)):
            kind = "True or False" if switch else "a whole number from 1"
            raise UndriftError(f'The option {option} of the model "{name}" must be {kind}, not {quoted(given)}.')


def _check_size(name: str, make: Callable[[], nn.Module]) -> None:
    """Raise if the parameters of one of our models would not fit into this machine's memory."""
    if timm.is_timm(name) or not MODELS[name].__module__.startswith("undrift."):
        return  # timm's and users' functions may not work on the meta device
    try:
        with torch.device("meta"):
            needed = sum(p.numel() * p.element_size() for p in make().parameters())
    except (RuntimeError, TypeError):  # sizes, or a product of sizes, beyond 64 bits
        needed = 2**64
    if needed > (_memory() or 2**48):
        raise UndriftError(
            f'The parameters of the model "{name}" would take {needed / 2**30:,.0f} GiB, more memory than this machine '
            "has; choose smaller options, or smaller samples."
        )


def _memory() -> int:
    """Return the machine's memory in bytes, or 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _counts(x: Any) -> bool:
    return whole(x) and int(x) >= 1


def register_model(name: str, function: Callable[..., Any]) -> None:
    """Register a model under a name that `ud.train` and experiment files know.

    Example:
        >>> import undrift as ud
        >>> def one_layer(classes, shape):
        ...     return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes))
        >>> ud.register_model("one_layer", one_layer)
        >>> ud.models.get("one_layer", classes=3, shape=(1, 2, 2))(torch.zeros(5, 1, 2, 2)).shape
        torch.Size([5, 3])

    Args:
        name: The name. An existing model of this name is replaced.
        function: A function of `(classes, shape, **options)` that returns an `nn.Module`. If it has a parameter
            `vocabulary`, it also gets the number of different tokens.
    """
    MODELS.register(name, function)


def parse_model(text: str) -> tuple[str, dict[str, Any]]:
    """Return a model's name and options, from a string such as `vgg9` or `vgg9(dropout=False)`."""
    if "(" not in text:
        return text, {}
    if timm.is_timm(text):  # whose names may have a colon and a dot
        name, _, rest = text.partition("(")
        _, options = parse(f"timm({rest}", "model", {"timm": partial(_named, name)}, f"{name}(drop_rate=0.1)")
        check_options(name, options)
        return name, options
    name, options = parse(text, "model", {name: partial(_named, name) for name in MODELS}, "vgg9(dropout=False)")
    check_options(name, options)
    return name, options


def _named(name: str, /, *values: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    if values:
        raise UndriftError(f"Options of the model {name} need their names, such as vgg9(dropout=False).")
    return name, options
