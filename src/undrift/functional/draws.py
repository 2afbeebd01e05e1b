"""Random operations inside a model: they draw from a key where that is possible, and are refused where it is not."""

from __future__ import annotations

from collections.abc import Callable
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


class KeyedDraws(TorchFunctionMode):
    """Inside it, torch's random functions draw from a key, the i-th call from the key's i-th stream.

    An element's counter is its index in the flattened tensor. So if the batch is the first axis, a sample's mask does
    not depend on how much padding follows it.
    """

    def __init__(self, key: Key) -> None:
        super().__init__()
        self.key, self.calls = key, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            return DRAWS[func](self._next, *args, **kwargs)
        return func(*args, **kwargs)

    def _next(self) -> Key:
        self.calls += 1
        return self.key.stream_at(self.calls - 1)


NextKey = Callable[[], Key]


def _drop(key: NextKey, x: Tensor, shape: torch.Size, p: float, training: bool) -> Tensor:
    if not training or p == 0:
        return x
    if p >= 1:
        return torch.zeros_like(x)
    return torch.where(keep_mask(key(), shape, p), x / (1 - p), 0.0)


def _dropout(key: NextKey, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _drop(key, input, input.shape, p, training)


def _channel_dropout(
    key: NextKey, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Drops whole channels: the mask spans the first two axes, or of two axes the first."""
    first = 1 if input.dim() == 2 else 2
    return _drop(key, input, torch.Size([*input.shape[:first], *[1] * (input.dim() - first)]), p, training)


def _alpha_dropout(
    key: NextKey, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Sets dropped entries to SELU's lower limit, then restores mean and variance (Klambauer et al., 2017)."""
    if not training or p == 0:
        return input
    low = -1.0507009873554805 * 1.6732632423543772
    a = ((1 - p) * (1 + p * low * low)) ** -0.5
    return torch.where(keep_mask(key(), input.shape, p), input, low) * a - a * p * low


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _draw(draw: Callable[..., Tensor], like: bool) -> Callable[..., Tensor]:
    def drawn(key: NextKey, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        if like:
            return draw(key(), args[0].shape, dtype or args[0].dtype)
        return draw(key(), _shape(args or (kwargs["size"],)), dtype or torch.get_default_dtype())

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
