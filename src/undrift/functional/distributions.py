"""Torch's random functions as functions of a key.

Each takes `draw` first, which calls a function of (key, shape, …) with the key of this call (`KeyedDraws.draw`), and
then the arguments of torch's function. A user's `generator` is ignored: the key takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from undrift.random import Key, bits, keep_mask, normal, uniform

Draw = Callable[..., Tensor]


# ---- functions of a key --------------------------------------------------------------------------------------------


def exact(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which to compute draws of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exponential(key: Key, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return −log u, which is standard exponential, and greater than 0."""
    return -torch.log(uniform(key, shape, exact(dtype)))


def integers(key: Key, shape: Sequence[int], low: int, high: int) -> Tensor:
    """Return integers from `low` to `high` − 1, as int64."""
    span, count = high - low, math.prod(shape)
    if span <= 2**31:  # a word times the span still fits into 63 bits
        found = bits(key, count) * span >> 32
    else:
        first, second = bits(key, 2 * count).reshape(count, 2).unbind(1)
        found = ((first << 31) ^ second) % span if span < 2**63 else (first << 31) ^ second
    return (found + low).reshape(tuple(shape))


def permutation(key: Key, shape: Sequence[int]) -> Tensor:
    """Return a random permutation, the order of random words."""
    return torch.argsort(bits(key, shape[0]), stable=True)


# ---- functions that make a tensor ----------------------------------------------------------------------------------


def shape_of(size: tuple[Any, ...], named: Any = None) -> tuple[int, ...]:
    """Return the shape from `(2, 3)` or `((2, 3),)`, or from the argument `size`."""
    size = size or (named,)
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def made(value: Tensor, out: Tensor | None = None, requires_grad: bool = False, **_: Any) -> Tensor:
    """Return the result of a function that creates a tensor, applying the arguments that all of them have."""
    value = value if out is None else out.copy_(value)
    return value.requires_grad_() if requires_grad else value


def _new(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(draw: Draw, *size: Any, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        shape = shape_of(size, rest.get("size"))
        return made(draw(kind, shape, dtype or torch.get_default_dtype()), **rest)

    return drawn


def _like(kind: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(draw: Draw, input: Tensor, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
        return made(draw(kind, input.shape, dtype or input.dtype), **rest)

    return drawn


def _randint(draw: Draw, *args: Any, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    numbers = [a for a in args if isinstance(a, int)]
    size = [a for a in args if not isinstance(a, int)]
    low, high = _bounds(numbers, rest)
    shape = shape_of((size[0],) if size else (), rest.get("size"))
    return made(draw(integers, shape, low, high).to(dtype or torch.int64), **rest)


def _randint_like(draw: Draw, input: Tensor, *args: int, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    low, high = _bounds(list(args), rest)
    return made(draw(integers, input.shape, low, high).to(dtype or input.dtype), **rest)


def _bounds(numbers: list[int], named: dict[str, Any]) -> tuple[int, int]:
    """`low` and `high`, of which `low` may be left out, by position or by name."""
    if "high" in named:
        return (numbers[0] if numbers else named.get("low", 0)), named["high"]
    return (0, numbers[0]) if len(numbers) == 1 and "low" not in named else (named.get("low", numbers[0]), numbers[-1])


def _randperm(draw: Draw, n: int, dtype: torch.dtype | None = None, **rest: Any) -> Tensor:
    return made(draw(permutation, (n,)).to(dtype or torch.int64), **rest)


def _normal(draw: Draw, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **rest: Any) -> Tensor:
    """`torch.normal`, whose arguments are tensors or numbers. As there, the result does not depend on them."""
    tensors = [t.detach() if isinstance(t, Tensor) else t for t in (mean, std)]
    given = [t for t in tensors if isinstance(t, Tensor)]
    if given:
        shape, dtype = torch.broadcast_shapes(*(t.shape for t in given)), given[0].dtype
    else:
        shape, dtype = torch.Size(size), rest.get("dtype") or torch.get_default_dtype()
    return made(tensors[0] + tensors[1] * draw(normal, shape, dtype), **rest)


def _bernoulli(draw: Draw, input: Tensor, p: float | None = None, **rest: Any) -> Tensor:
    return made(_with_probability(draw, input.shape, input if p is None else p).to(input.dtype), **rest)


def _with_probability(draw: Draw, shape: Sequence[int], p: Any) -> Tensor:
    """Return True with probability p, a number or a tensor that broadcasts to the shape."""
    if not isinstance(p, Tensor):
        return draw(keep_mask, shape, 1 - p)
    kind = exact(p.dtype)
    return draw(uniform, shape, kind) < p.to(kind)


def _multinomial(draw: Draw, input: Tensor, num_samples: int, replacement: bool = False, **rest: Any) -> Tensor:
    """Indices with probability p ∝ `input`: with E standard exponential, the least of E/p is at i with probability pᵢ.

    The k least are k draws without replacement, in their order.
    """
    kind = exact(input.dtype)
    p = input.detach().to(kind)
    if not replacement and num_samples > 1:
        found = (draw(exponential, p.shape, kind) / p).topk(num_samples, -1, largest=False).indices
    else:
        races = draw(exponential, (*p.shape[:-1], num_samples, p.shape[-1]), kind)
        found = (races / p.unsqueeze(-2)).argmin(-1)
    return made(found, **rest)


# ---- methods that fill a tensor ------------------------------------------------------------------------------------


def _fill_normal(draw: Draw, self: Tensor, mean: float = 0, std: float = 1, **_: Any) -> Tensor:
    return self.copy_(draw(normal, self.shape, self.dtype) * std + mean)


def _fill_log_normal(draw: Draw, self: Tensor, mean: float = 1, std: float = 2, **_: Any) -> Tensor:
    return self.copy_((draw(normal, self.shape, exact(self.dtype)) * std + mean).exp())


def _fill_uniform(draw: Draw, self: Tensor, a: float = 0, b: float = 1, **rest: Any) -> Tensor:
    a, b = rest.get("from", a), rest.get("to", b)
    return self.copy_(draw(uniform, self.shape, exact(self.dtype)) * (b - a) + a)


def _fill_exponential(draw: Draw, self: Tensor, lambd: float = 1, **_: Any) -> Tensor:
    return self.copy_(draw(exponential, self.shape, self.dtype) / lambd)


def _fill_cauchy(draw: Draw, self: Tensor, median: float = 0, sigma: float = 1, **_: Any) -> Tensor:
    angle = math.pi * (draw(uniform, self.shape, exact(self.dtype)) - 0.5)
    return self.copy_(median + sigma * torch.tan(angle))


def _fill_geometric(draw: Draw, self: Tensor, p: float, **_: Any) -> Tensor:
    """⌈log u / log(1 − p)⌉: the trials until the first success."""
    if p >= 1:
        return self.fill_(1)
    return self.copy_((-draw(exponential, self.shape, self.dtype) / math.log1p(-p)).ceil().clamp(min=1))


def _fill_bernoulli(draw: Draw, self: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    return self.copy_(_with_probability(draw, self.shape, p))


def _fill_random(draw: Draw, self: Tensor, *args: int, **rest: Any) -> Tensor:
    named = {new: rest[old] for old, new in (("from", "low"), ("to", "high")) if rest.get(old) is not None}
    if args or named:
        low, high = _bounds([a for a in args if a is not None], named)
    elif self.is_floating_point():  # all integers that the dtype can represent
        low, high = 0, round(2 / torch.finfo(self.dtype).eps) + 1
    else:
        low, high = 0, 2 if self.dtype == torch.bool else torch.iinfo(self.dtype).max + 1
    return self.copy_(draw(integers, self.shape, low, high))


DISTRIBUTIONS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _new(uniform),
    torch.rand_like: _like(uniform),
    torch.randn: _new(normal),
    torch.randn_like: _like(normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    torch.Tensor.multinomial: _multinomial,
    torch.Tensor.normal_: _fill_normal,
    torch.Tensor.log_normal_: _fill_log_normal,
    torch.Tensor.uniform_: _fill_uniform,
    torch.Tensor.exponential_: _fill_exponential,
    torch.Tensor.cauchy_: _fill_cauchy,
    torch.Tensor.geometric_: _fill_geometric,
    torch.Tensor.bernoulli_: _fill_bernoulli,
    torch.Tensor.random_: _fill_random,
}
