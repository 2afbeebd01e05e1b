"""Samples as a tensor, or as a tuple or dict of tensors, for models with several inputs.

The store stays a flat dict of tensors, one entry per input: `x` for a single tensor, `x/0`, `x/1`, … for a tuple,
`x/input_ids`, … for a dict, and `x/text//input_ids`, … for dicts and tuples in one another. So whatever goes through a
store tensor by tensor need not know of trees; `take` puts the samples together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.errors import UndriftError, quoted
from undrift.tree import tree_leaves, tree_map, tree_structure, tree_unflatten

Samples = Any
"""A tensor with the samples along the first axis, or tuples and dicts of such tensors."""
Store = dict[str, Tensor]
Take = Callable[[Store, Tensor], tuple[Samples, Tensor]]

Pick = Callable[[Tensor, Tensor], Tensor]
"""A function of a tensor and indices, which may have any shape: the tensor's entries there, along its first axis."""

INPUT = "x/"
"""The prefix of the store's names of several inputs."""
INSIDE = "//"
"""What separates the name of a dict or a tuple of inputs from that of an input in it."""


def take(store: Store, indices: Tensor) -> tuple[Samples, Tensor]:
    """Return the samples at `indices`, on the store's device.

    uint8 values of a single tensor are pictures if a sample has at least two axes, and are scaled to [0, 1]. Along one
    axis, or in a tuple or dict, nothing is converted: such small integers may be tokens or a mask.
    """
    return finish(gather(store, indices), store)


def gather(store: Store, indices: Tensor, pick: Pick = operator.getitem) -> Store:
    """Return the entries of the store that make up the samples at `indices`, in the types in which they are stored."""
    names = ["y", *(["x"] if "x" in store else [name for name in store if name.startswith(INPUT)])]
    read = {name: store[name].reader for name in names if not isinstance(store[name], Tensor)}  # type: ignore[attr-defined]
    found: Store = {}
    for reader in set(read.values()):  # a sample with several inputs is read once
        found |= reader.read(indices)
    return {name: found[name] if name in read else pick(store[name], indices) for name in names}


def finish(rows: Store, store: Store) -> tuple[Samples, Tensor]:
    """Return the samples, from what `gather` found; see `take`."""
    y = rows["y"]
    if "x" in rows:
        x = rows["x"]
        return (x.float() / 255 if x.dtype == torch.uint8 and x.dim() > 2 else x), y
    return _put_together({name.removeprefix(INPUT): t for name, t in rows.items() if name != "y"}), y


def _put_together(inputs: Store) -> Samples:
    """Return inputs as a dict or a tuple, from their names in the store."""
    found: dict[str, Any] = {}
    for path, t in inputs.items():
        name, inside, rest = path.partition(INSIDE)
        if inside:
            found.setdefault(name, {})[rest] = t
        else:
            found[name] = t
    found = {name: _put_together(t) if isinstance(t, dict) else t for name, t in found.items()}
    return tuple(found[str(i)] for i in range(len(found))) if "0" in found else found


def in_halves(take: Take, gather: Callable[..., Store], finish: Callable[[Store, Store], Any]) -> None:
    """Declare that `take` is `finish(gather(store, indices), store)`.

    If the store stays in host memory, the host then only gathers, and all computation runs on the device, as it would
    with the store there: the results are the same, bit by bit. A class of `take` has both as methods.
    """
    vars(take).update(gather=gather, finish=finish)


in_halves(take, gather, finish)


def stored(x: Samples) -> Store:
    """Return the entries of a store that hold these samples."""
    return {f"{INPUT}{path}": t for path, t in paths(x)} if isinstance(x, dict | tuple) else {"x": x}


def paths(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in a dict or a tuple of inputs, with the names of tensors in the store less `INPUT`."""
    for name, inner in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(inner, dict | tuple):
            yield from ((f"{name}{INSIDE}{path}", t) for path, t in paths(inner))
        else:
            yield str(name), inner


def count(x: Samples) -> int:
    """Return the number of samples."""
    return len(tree_leaves(x)[0])


def chosen(x: Samples, indices: Tensor | slice) -> Samples:
    """Return the samples at `indices`."""
    return tree_map(lambda t: t[indices], x)


def split(x: Samples, size: int) -> list[Samples]:
    """Return the samples in pieces of `size`, the last of which may be smaller, as `Tensor.split` gives them."""
    leaves = [t.split(size) for t in tree_leaves(x)]
    return [tree_unflatten(list(piece), tree_structure(x)) for piece in zip(*leaves, strict=True)]


def shape(x: Samples) -> str:
    """The shape of one sample, for messages: `(3, 32, 32)`, `((3,), (5,))` or `{input_ids: (16,), mask: (16,)}`."""
    return _written(x, lambda t: str(tuple(t.shape[1:])))


def kind(x: Samples) -> str:
    """Return the shape and type of one sample, for messages."""
    return _written(x, lambda t: f"{tuple(t.shape[1:])} {t.dtype}")


def alike(x: Samples, other: Samples) -> bool:
    """Return whether samples have the same inputs, of the same shapes and types."""
    one, two = ({name: (t.shape[1:], t.dtype) for name, t in stored(each).items()} for each in (x, other))
    return one == two


def _written(x: Samples, leaf: Callable[[Tensor], str]) -> str:
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name}: {_written(t, leaf)}" for name, t in x.items()) + "}"
    return f"({', '.join(_written(t, leaf) for t in x)})" if isinstance(x, tuple) else leaf(x)


def as_pair(pair: Any, whose: str, copy: bool = True) -> tuple[Samples, Tensor]:
    """Return samples and targets as tensors, copied unless the caller will copy them."""
    if isinstance(pair, tuple | list) and len(pair) > 2 and all(hasattr(part, "shape") for part in pair):
        raise UndriftError(
            f"The data of {whose} must be a pair (x, y), not {len(pair)} arrays; with several inputs, x is a tuple or "
            "a dict of them: ((x1, x2), y)."
        )
    try:
        x, y = pair
        x, y = _samples(x, copy), _as_tensor(y, copy)
    except (TypeError, ValueError) as error:
        raise UndriftError(f"The data of {whose} must be a pair (x, y) of arrays or tensors ({error}).") from error
    if any(t.dim() == 0 or len(t) != len(y) for t in tree_leaves(x) if y.dim()) or y.dim() == 0:
        shapes = _written(x, lambda t: str(tuple(t.shape)))
        raise UndriftError(f"The data of {whose} must have as many x as y, not shapes {shapes} and {tuple(y.shape)}.")
    # Labels are indices; with one integer type, no later step has to convert them.
    return x, y if y.is_floating_point() else y.long()


def _samples(x: Any, copy: bool) -> Samples:
    """Return x as tensors: one entry per input for a mapping or a tuple of arrays; otherwise a single array."""
    if isinstance(x, Mapping):
        if not x or not all(isinstance(name, str) and name and not name.isdigit() for name in x):
            raise ValueError(f"the inputs in a dict need names that are words, not {quoted(list(x))}")
        if found := [name for name in x if INSIDE in name or name[0] == "/" or name[-1] == "/"]:
            raise ValueError(f"the names of inputs may have single slashes within them only, unlike {quoted(found[0])}")
        return {name: _samples(t, copy) for name, t in x.items()}
    if isinstance(x, tuple) and x and all(hasattr(t, "shape") or isinstance(t, Mapping | tuple) for t in x):
        return tuple(_samples(t, copy) for t in x)
    return _as_tensor(x, copy)


def _as_tensor(part: Any, copy: bool) -> Tensor:
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_meta or part.is_quantized:
            raise ValueError(f"a tensor must be dense and in memory, not {part.layout} on {part.device}")
        found = part.detach().to("cpu", copy=copy)
    else:
        if hasattr(part, "toarray"):
            raise ValueError("a sparse matrix must be made dense with .toarray()")
        refuse_masked(part)
        array = np.array(part) if copy else np.asarray(part)
        found = torch.as_tensor(array if array.flags.writeable else array.copy())  # torch has no read-only tensors
    if found.is_complex():
        raise ValueError("complex numbers must be given as two real ones, such as z.real and z.imag")
    return found


def refuse_masked(part: Any) -> None:
    """Raise for masked values: converting the array would drop the mask and train on them."""
    several = part if isinstance(part, list | tuple) else (part,)
    if any(isinstance(one, np.ma.MaskedArray) and np.ma.is_masked(one) for one in several):
        raise ValueError("some values are masked; drop those samples, or fill them in with .filled(…)")
