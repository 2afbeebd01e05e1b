"""Collate the samples of a torch `Dataset`, or the columns of a Hugging Face one, into tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from undrift.data import warn_once
from undrift.data.samples import Samples, as_pair, refuse_masked
from undrift.errors import UndriftError, listed, quoted
from undrift.losses import IGNORED

TOKENS, MASK = "input_ids", "attention_mask"
"""The names that Hugging Face's models give to tokens, and to the 1s and 0s that tell them from padding."""


def to_tensors(data: Any, whose: str, label: str = "label") -> tuple[Samples, Tensor]:
    """Return samples and targets of a pair `(x, y)`, a torch `Dataset` or a Hugging Face one.

    A `Dataset` yields `(x, y)`, where x may be a tuple or a dict; `(x1, x2, y)`; or a dict with its labels under
    `label`, `labels` or "label". Lists of tokens that differ in length are padded.
    """
    if isinstance(data, tuple | list):
        return as_pair(data, whose)
    try:
        x, y = _stack_columns(*_columns(data, label))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UndriftError(
            f"The samples of {whose} must be pairs (x, y) that stack into two arrays ({error})."
        ) from error
    return as_pair((x, y), whose, copy=False)  # stacking has copied them


def _columns(data: Any, label: str) -> tuple[Any, Sequence[Any]]:
    """Return the values of x, per input where there are several, and those of y: one value per sample."""
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return _table_columns(dict(data[:]), label)
    samples = [data[i] for i in range(len(data))]
    if samples and isinstance(samples[0], Mapping):
        return _table_columns(_columns_by_name(samples), label)
    if not samples or not all(isinstance(sample, tuple | list) and len(sample) > 1 for sample in samples):
        raise ValueError("there are none" if not samples else f"the first is {quoted(samples[0])}")
    # (x1, x2, y): the target comes last
    xs = [sample[0] if len(sample) == 2 else tuple(sample[:-1]) for sample in samples]
    ys = [sample[-1] for sample in samples]
    if isinstance(xs[0], Mapping):
        return _columns_by_name(xs), ys
    # A tuple of numbers is a vector; one with an array in it has several inputs.
    if isinstance(xs[0], tuple) and (len(samples[0]) > 2 or any(getattr(part, "ndim", 0) for part in xs[0])):
        return tuple(zip(*xs, strict=True)), ys
    return xs, ys


def _columns_by_name(samples: list[Any]) -> dict[str, Sequence[Any]]:
    for i, sample in enumerate(samples):
        if sample.keys() != samples[0].keys():
            missing = next(iter(samples[0].keys() - sample.keys() or sample.keys() - samples[0].keys()))
            has = "no" if missing in samples[0] else "another entry,"
            raise ValueError(f"sample {i} has {has} {missing!r}, unlike the first")
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _table_columns(columns: dict[str, Sequence[Any]], label: str) -> tuple[Any, Sequence[Any]]:
    """Return the inputs of a table by name, and its labels. Columns of text are left out."""
    target = next((name for name in (label, "labels", "label") if name in columns), None)
    if target is None:
        raise ValueError(f"there is no {quoted(label)} among {listed(columns)}; name the labels with label=…")
    ys = columns.pop(target)
    if text := [name for name, values in columns.items() if len(values) and isinstance(values[0], str)]:
        warn_of_text(text)
        columns = {name: values for name, values in columns.items() if name not in text}
    if not columns:
        raise ValueError(f"there are no numbers besides {quoted(target)}; tokenize the text first")
    alone = next(iter(columns.values()))
    picture = len(columns) == 1 and len(alone) > 0 and _is_pil_image(alone[0])  # one tensor, as from a file of pictures
    return (alone if picture else columns), ys


def warn_of_text(columns: list[str]) -> None:
    warn_once.warn(f"the text in {listed(columns)} is left out: only numbers can be trained on")


def _stack_columns(xs: Any, ys: Sequence[Any]) -> tuple[Samples, Tensor]:
    refuse_masked(ys)
    targets = [torch.as_tensor(y) for y in ys]
    if isinstance(xs, dict):
        inputs = {name: _input_tensors(values) for name, values in xs.items()}
        if TOKENS in inputs and _is_ragged(inputs[TOKENS]):
            return _pad_tokens(inputs, targets)
        return {name: _stack(values) for name, values in inputs.items()}, _stack(targets)
    if isinstance(xs, tuple):
        return tuple(_stack([_as_tensor(x) for x in values]) for values in xs), _stack(targets)
    return _stack([_as_tensor(x) for x in xs]), _stack(targets)


def _input_tensors(values: Sequence[Any]) -> Any:
    """Return the values of an input as tensors, by name where they are dicts."""
    if len(values) and isinstance(values[0], Mapping):
        return {name: _input_tensors(inner) for name, inner in _columns_by_name(list(values)).items()}
    return [_as_tensor(x) for x in values]


def _pad_tokens(inputs: dict[str, Any], targets: list[Tensor]) -> tuple[Samples, Tensor]:
    """Return tokens, and what is aligned with them, padded with 0 to the longest sample; labels of tokens with -100.

    If the data have no mask, one is created, since attention must not see the padding.
    """
    tokens = inputs[TOKENS]
    lengths = [len(t) if t.dim() == 1 else None for t in tokens]
    inputs.setdefault(MASK, [torch.ones_like(t) for t in tokens])

    def column(values: Any, padding: int) -> Any:
        flat = isinstance(values, list)
        aligned = flat and [len(t) if t.dim() == 1 else None for t in values] == lengths
        return pad_sequence(values, batch_first=True, padding_value=padding) if aligned else _stack(values)

    return {name: column(values, 0) for name, values in inputs.items()}, column(targets, IGNORED)


def _is_ragged(values: list[Tensor]) -> bool:
    return len({t.shape for t in values}) > 1


def _stack(values: Any) -> Any:
    """Return tensors as one, by name where they are in a dict."""
    if isinstance(values, dict):
        return {name: _stack(inner) for name, inner in values.items()}
    if _is_ragged(values):
        shapes = sorted({tuple(t.shape) for t in values})
        raise ValueError(
            f"they have shapes from {shapes[0]} to {shapes[-1]}; pad them to one, with torch.nn.utils.rnn.pad_sequence "
            f"for example, or yield a dict with {TOKENS!r}, whose lists of tokens are padded with 0"
        )
    return torch.stack(values)


def _is_pil_image(x: Any) -> bool:
    """Return whether this is a Pillow image, whose mode is a string such as "RGB"; tensors have a method `mode`."""
    return isinstance(getattr(x, "mode", None), str)


def _as_tensor(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    refuse_masked(x)
    pixels = np.array(x)
    if not _is_pil_image(x):
        return torch.from_numpy(pixels) if pixels.ndim else torch.as_tensor(pixels)
    return torch.from_numpy(pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None])  # PIL: channels last
