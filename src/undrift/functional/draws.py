"""Random operations inside a model: they draw from a key where that is possible, and are refused where it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.errors import UndriftError
from undrift.random import Key, keep_mask, normal, uniform


class RefuseDraws(TorchDispatchMode):
    """Inside it, an operation that would draw from torch's global generator raises, wherever it is called from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs or {}):
            raise UndriftError(
                f"The model draws from torch's global generator ({func}), so runs would not repeat. Use nn.Dropout, "
                "torch.rand or torch.randn (or their _like forms), which undrift draws from the client's key; set a "
                "dropout inside an attention or recurrent layer to 0."
            )
        return func(*args, **(kwargs or {}))


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a random operation draws nothing, as attention and recurrent layers without dropout or in evaluation."""
    schema = func._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named |= {a.name: v for a, v in zip(schema, args, strict=False)} | kwargs
    chance = next((named[name] for name in ("dropout_p", "dropout", "p") if name in named), None)
    return chance == 0 or named.get("train") is False or named.get("training") is False


Row = tuple[Tensor, int]
"""The position of a sample in a batch, and the size of that batch."""


class KeyedDraws(TorchFunctionMode):
    """Inside it, torch's random functions draw from a key, the i-th call from the key's i-th stream.

    An element's counter is its index in the flattened tensor. So if the batch is the first axis, a sample's mask does
    not depend on how much padding follows it. With `row`, a batch of one sample has the draws of that row of a larger
    batch.
    """

    def __init__(self, key: Key, row: Row | None = None) -> None:
        super().__init__()
        self.key, self.row, self.calls = key, row, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            return DRAWS[func](self._draw, *args, **kwargs)
        return func(*args, **kwargs)

    def _draw(self, draw: Callable[..., Tensor], shape: Sequence[int], *args: Any) -> Tensor:
        """`draw(key, shape, …)` with the key of this call."""
        key = self.key.stream_at(self.calls)
        self.calls += 1
        if self.row is None or not shape or shape[0] != 1:
            return draw(key, shape, *args)
        row, rows = self.row
        return draw(key, (rows, *shape[1:]), *args).index_select(0, row.reshape(1))


Draw = Callable[..., Tensor]


def _drop(draw: Draw, x: Tensor, shape: torch.Size, p: float, training: bool) -> Tensor:
    if not training or p == 0:
        return x
    if p >= 1:
        return torch.zeros_like(x)
    return torch.where(draw(keep_mask, shape, p), x / (1 - p), 0.0)


def _dropout(draw: Draw, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _drop(draw, input, input.shape, p, training)


def _channel_dropout(draw: Draw, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drops whole channels: the mask spans the first two axes, or of two axes the first."""
    first = 1 if input.dim() == 2 else 2
    return _drop(draw, input, torch.Size([*input.shape[:first], *[1] * (input.dim() - first)]), p, training)


def _alpha_dropout(draw: Draw, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Sets dropped entries to SELU's lower limit, then restores mean and variance (Klambauer et al., 2017)."""
    if not training or p == 0:
        return input
    low = -1.0507009873554805 * 1.6732632423543772
    a = ((1 - p) * (1 + p * low * low)) ** -0.5
    return torch.where(draw(keep_mask, input.shape, p), input, low) * a - a * p * low


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _draw(kind: Callable[..., Tensor], like: bool) -> Callable[..., Tensor]:
    def drawn(draw: Draw, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        if like:
            return draw(kind, args[0].shape, dtype or args[0].dtype)
        return draw(kind, _shape(args or (kwargs["size"],)), dtype or torch.get_default_dtype())

    return drawn


DRAWS: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _channel_dropout,
    F.dropout2d: _channel_dropout,
    F.dropout3d: _channel_dropout,
    F.alpha_dropout: _alpha_dropout,
    torch.rand: _draw(uniform, like=False),
    torch.rand_like: _draw(uniform, like=True),
    torch.randn: _draw(normal, like=False),
    torch.randn_like: _draw(normal, like=True),
}
