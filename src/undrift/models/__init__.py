"""Models by name: `ud.models.get("mlp", classes=10, shape=(1, 8, 8))`. Any `nn.Module` serves instead."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from undrift.errors import UndriftError, nearest, quoted, unknown, whole
from undrift.expressions import parse
from undrift.models.cnn import cnn, cnn_fedavg, cnn_femnist, cnn_temporal
from undrift.models.lenet import lenet5
from undrift.models.linear import logistic, mlp, svm
from undrift.models.readers import gru_reader, lstm_reader
from undrift.models.resnet import resnet20
from undrift.models.seeded import Seeded
from undrift.models.vgg import vgg9
from undrift.random import torch_seed

MODELS: dict[str, Callable[..., nn.Module]] = {
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
}
"""By name, a function of `(classes, shape, …)`: of `vocabulary` too where it reads tokens; the rest are its options."""

FROM_DATA = ("classes", "shape", "vocabulary", "seed")
"""What a model is given by the data and the run, and no option."""


def get(
    name: str, *, classes: int, shape: Sequence[int], seed: int = 0, vocabulary: int | None = None, **options: Any
) -> nn.Module:
    """A fresh model for samples of `shape` (no batch axis) with `classes` outputs; `seed` decides its weights.

    `vocabulary` is how many different tokens a sample may hold; only models that read tokens look at it.
    """
    check_options(name, options)
    tokens = {"vocabulary": vocabulary} if "vocabulary" in inspect.signature(MODELS[name]).parameters else {}
    if tokens and vocabulary is not None and not _counts(vocabulary):
        raise UndriftError(f"vocabulary must be a whole number from 1, not {quoted(vocabulary)}.")
    make = partial(MODELS[name], classes, tuple(shape), **tokens, **options)
    _check_size(name, make)
    with torch.device("cpu"), Seeded(torch_seed(seed, "model")):
        return make()


def known(name: str) -> Callable[..., nn.Module]:
    """The function that makes the model of this name."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def check_options(name: str, options: dict[str, Any]) -> None:
    """Refuse options that the model of this name does not have, and values that it cannot take."""
    taken = inspect.signature(known(name)).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return  # a user's function that looks at them itself
    defaults = {n: p.default for n, p in taken.items() if n not in FROM_DATA}
    listed = f"its options are {', '.join(defaults)}" if defaults else "it has none"
    for option, given in options.items():
        if option in FROM_DATA:
            raise UndriftError(f'The model "{name}" takes {option!r} from the data and the run; leave it out.')
        if option not in defaults:
            close = nearest(option, defaults)
            hint = f" (did you mean {close!r}?)" if close else ""
            raise UndriftError(f'The model "{name}" has no option {quoted(option)}{hint}; {listed}.')
        ours = known(name).__module__.startswith("undrift.")  # a user's function knows what its options may be
        switch, count = isinstance(defaults[option], bool), isinstance(defaults[option], int)
        if ours and count and not (isinstance(given, bool) if switch else _counts(given)):
            kind = "True or False" if switch else "a whole number from 1"
            raise UndriftError(f'The option {option} of the model "{name}" must be {kind}, not {quoted(given)}.')


def _check_size(name: str, make: Callable[[], nn.Module]) -> None:
    """Refuse one of our models whose parameters alone would not fit into this machine's memory."""
    if not MODELS[name].__module__.startswith("undrift."):
        return  # a user's function may not take a device without memory
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
    """The machine's memory in bytes, or 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _counts(x: Any) -> bool:
    return whole(x) and int(x) >= 1


def register_model(name: str, function: Callable[..., Any]) -> None:
    """Give a model a name that experiment files know: `function(classes, shape, **options)` makes it."""
    MODELS[name] = function


def parse_model(text: str) -> tuple[str, dict[str, Any]]:
    """`vgg9` or `vgg9(dropout=False)`: a model's name and its options."""
    if "(" not in text:
        return text, {}
    name, options = parse(text, "model", {name: partial(_named, name) for name in MODELS}, "vgg9(dropout=False)")
    check_options(name, options)
    return name, options


def _named(name: str, /, *values: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    if values:
        raise UndriftError(f"Options of the model {name} need their names, such as vgg9(dropout=False).")
    return name, options
