"""Models by name: `ud.models.get("mlp", classes=10, shape=(1, 8, 8))`. Any `nn.Module` serves instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn

from undrift.errors import UndriftError, unknown
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


def get(
    name: str, *, classes: int, shape: Sequence[int], seed: int = 0, vocabulary: int | None = None, **options: Any
) -> nn.Module:
    """A fresh model for samples of `shape` (no batch axis) with `classes` outputs; `seed` decides its weights.

    `vocabulary` is how many different tokens a sample may hold; only models that read tokens look at it.
    """
    taken = {
        n: p.default for n, p in inspect.signature(known(name)).parameters.items() if n not in ("classes", "shape")
    }
    tokens = {"vocabulary": vocabulary} if "vocabulary" in taken else {}
    taken.pop("vocabulary", None)
    if tokens and vocabulary is not None and not _counts(vocabulary):
        raise UndriftError(f"vocabulary must be a whole number from 1, not {vocabulary!r}.")
    _check_options(name, options, taken)
    with torch.device("cpu"), Seeded(torch_seed(seed, "model")):
        return MODELS[name](classes, tuple(shape), **tokens, **options)


def known(name: str) -> Callable[..., nn.Module]:
    """The function that makes the model of this name."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def _check_options(name: str, options: dict[str, Any], defaults: dict[str, Any]) -> None:
    for option, given in options.items():
        if option not in defaults:
            known = f"its options are {', '.join(defaults)}" if defaults else "it has none"
            raise UndriftError(f'The model "{name}" has no option {option!r}; {known}.')
        switch = isinstance(defaults[option], bool)
        if not (isinstance(given, bool) if switch else _counts(given)):
            kind = "True or False" if switch else "a whole number from 1"
            raise UndriftError(f'The option {option} of the model "{name}" must be {kind}, not {given!r}.')


def _counts(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= 1
