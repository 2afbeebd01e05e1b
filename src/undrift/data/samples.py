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
from undrift.tree import tree_leaves, tree_structure, tree_unflatten

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
    readers = {name: store[name].reader for name in names if not isinstance(store[name], Tensor)}  # type: ignore[attr-defined]
    columns: Store = {}
    for reader in set(readers.values()):  # a sample with several inputs is read once
        columns |= reader.read(indices)
    return {name: columns[name] if name in readers else pick(store[name], indices) for name in names}


def finish(rows: Store, store: Store) -> tuple[Samples, Tensor]:
    """Return the samples, from what `gather` returned; see `take`."""
    y = rows["y"]
    if "x" in rows:
        x = rows["x"]
        return (x.float() / 255 if x.dtype == torch.uint8 and x.dim() > 2 else x), y
    return _nested_inputs({name.removeprefix(INPUT): t for name, t in rows.items() if name != "y"}), y


def _nested_inputs(inputs: Store) -> Samples:
    """Return inputs as a dict or a tuple, from their names in the store."""
    tree: dict[str, Any] = {}
    for path, t in inputs.items():
        name, inside, rest = path.partition(INSIDE)
        if inside:
            tree.setdefault(name, {})[rest] = t
        else:
            tree[name] = t
    tree = {name: _nested_inputs(t) if isinstance(t, dict) else t for name, t in tree.items()}
    return tuple(tree[str(i)] for i in range(len(tree))) if "0" in tree else tree


def declare_halves(take: Take, gather: Callable[..., Store], finish: Callable[[Store, Store], Any]) -> None:
    """Declare that `take` is `finish(gather(store, indices), store)`.

    If the store stays in host memory, the host then only gathers, and all computation runs on the device, as it would
    with the store there: the results are the same, bit by bit. A class of `take` has both as methods.
    """
    vars(take).update(gather=gather, finish=finish)


declare_halves(take, gather, finish)


def to_store(x: Samples, y: Tensor | None = None) -> Store:
    """Return a store with these samples and, if given, their targets."""
    inputs = {f"{INPUT}{path}": t for path, t in input_paths(x)} if isinstance(x, dict | tuple) else {"x": x}
    return inputs if y is None else {**inputs, "y": y}


def input_paths(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in a dict or a tuple of inputs, with the names of tensors in the store less `INPUT`."""
    for name, inner in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(inner, dict | tuple):
            yield from ((f"{name}{INSIDE}{path}", t) for path, t in input_paths(inner))
        else:
            yield str(name), inner


def split(x: Samples, size: int) -> list[Samples]:
    """Return the samples in pieces of `size`, the last of which may be smaller, as `Tensor.split` gives them."""
    leaves = [t.split(size) for t in tree_leaves(x)]
    return [tree_unflatten(list(piece), tree_structure(x)) for piece in zip(*leaves, strict=True)]


def sample_shape(x: Samples) -> str:
    """Return one sample's shape, for messages: `(3, 32, 32)`, `((3,), (5,))` or `{input_ids: (16,), mask: (16,)}`."""
    return _format(x, lambda t: str(tuple(t.shape[1:])))


def sample_kind(x: Samples) -> str:
    """Return the shape and type of one sample, for messages."""
    return _format(x, lambda t: f"{tuple(t.shape[1:])} {t.dtype}")


def same_kind(x: Samples, other: Samples) -> bool:
    """Return whether samples have the same inputs, of the same shapes and types."""
    one, two = ({name: (t.shape[1:], t.dtype) for name, t in to_store(each).items()} for each in (x, other))
    return one == two


def nonfinite_samples(tensor: Tensor) -> list[int]:
    """Return the indices of samples with NaN or infinity. If the sum is finite, there are none."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
        return []
    return torch.nonzero(~torch.isfinite(tensor.reshape(len(tensor), -1)).all(1)).flatten().tolist()


def nonfinite_error(where: str, name: str, values: Tensor) -> UndriftError:
    """Return the error for a sample with NaN or infinity in the entry `name` of its store."""
    kind = "NaN" if bool(torch.isnan(values).any()) else "infinity"
    return UndriftError(f"{where} has {kind} in its {name}; clean or drop that sample.")


def _format(x: Samples, leaf: Callable[[Tensor], str]) -> str:
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name}: {_format(t, leaf)}" for name, t in x.items()) + "}"
    return f"({', '.join(_format(t, leaf) for t in x)})" if isinstance(x, tuple) else leaf(x)


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
        shapes = _format(x, lambda t: str(tuple(t.shape)))
        raise UndriftError(f"The data of {whose} must have as many x as y, not shapes {shapes} and {tuple(y.shape)}.")
    # Labels are indices; with one integer type, no later step has to convert them.
    return x, y if y.is_floating_point() else y.long()


def _samples(x: Any, copy: bool) -> Samples:
    """Return x as tensors: one entry per input for a mapping or a tuple of arrays; otherwise a single array."""
    if isinstance(x, Mapping):
        if not x or not all(isinstance(name, str) and name and not name.isdigit() for name in x):
            raise ValueError(f"the inputs in a dict need names that are words, not {quoted(list(x))}")
        if wrong := [name for name in x if INSIDE in name or name[0] == "/" or name[-1] == "/"]:
            raise ValueError(f"the names of inputs may have single slashes within them only, unlike {quoted(wrong[0])}")
        return {name: _samples(t, copy) for name, t in x.items()}
    if isinstance(x, tuple) and x and all(hasattr(t, "shape") or isinstance(t, Mapping | tuple) for t in x):
        return tuple(_samples(t, copy) for t in x)
    return _as_tensor(x, copy)


def _as_tensor(part: Any, copy: bool) -> Tensor:
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_meta or part.is_quantized:
            raise ValueError(f"a tensor must be dense and in memory, not {part.layout} on {part.device}")
        tensor = part.detach().to("cpu", copy=copy)
    else:
        if hasattr(part, "toarray"):
            raise ValueError("a sparse matrix must be made dense with .toarray()")
        refuse_masked(part)
        array = np.array(part) if copy else np.asarray(part)
        tensor = torch.as_tensor(array if array.flags.writeable else array.copy())  # torch has no read-only tensors
    if tensor.is_complex():
        raise ValueError("complex numbers must be given as two real ones, such as z.real and z.imag")
    return tensor


def refuse_masked(part: Any) -> None:
    """Raise for masked values: converting the array would drop the mask and train on them."""
    several = part if isinstance(part, list | tuple) else (part,)
    if any(isinstance(one, np.ma.MaskedArray) and np.ma.is_masked(one) for one in several):
        raise ValueError("some values are masked; drop those samples, or fill them in with .filled(…)")
