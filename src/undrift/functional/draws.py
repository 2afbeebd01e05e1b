"""Random operations inside a model draw from a key.

`KeyedDraws` sees every call of a torch function in a forward pass, and computes those that draw itself, from the tables
of `distributions.py` and `dropouts.py`. `NoticeDraws` finds what it cannot see. Models with such draws train on the
plain engine, inside `generators.seeded`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.functional.distributions import DISTRIBUTIONS, shape_of
from undrift.functional.dropouts import DROPOUTS, recurrent
from undrift.functional.generators import host_states, seeded, torch_states
from undrift.functional.recurrent.layers import gru, lstm
from undrift.random import Key
from undrift.vmap import mapped

Row = tuple[Tensor, int]
"""The position of a sample in a batch, and the size of that batch."""

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, lstm, gru)
DRAWS: dict[Any, Callable[..., Any]] = DISTRIBUTIONS | DROPOUTS | {f: recurrent(f) for f in RECURRENT}
INSIDE = {F.multi_head_attention_forward, F.gumbel_softmax}
"""Torch functions, written in Python, that draw internally."""


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
            return DRAWS[func](self.draw, *args, **kwargs)
        if func in INSIDE:
            with self:
                return _inside(func)(*args, **kwargs)
        if func is torch.empty:
            return self._empty(*args, **kwargs)
        return func(*args, **kwargs)

    def draw(self, draw: Callable[..., Tensor], shape: Sequence[int], *args: Any) -> Tensor:
        """Return `draw(key, shape, …)` with the key of this call."""
        key = self.key.stream_at(self.calls)
        self.calls += 1
        if self.row is None or not shape or shape[0] != 1:
            return draw(key, shape, *args)
        row, rows = self.row
        return draw(key, (rows, *shape[1:]), *args).index_select(0, row.reshape(1))

    def _empty(self, *size: Any, **options: Any) -> Tensor:
        """`torch.empty`, in lanes with one tensor per lane: what fills it next may be a lane's own draws.

        vmap cannot write those into a tensor that all lanes share.
        """
        like = self.key.words[0] if self.row is None else self.key.words[0] + self.row[0]
        if not mapped(like) or options.get("out") is not None:
            return torch.empty(*size, **options)
        shape = shape_of(size, options.pop("size", None))
        kind, place = options.get("dtype") or torch.get_default_dtype(), options.get("device")
        return like.new_empty(shape, dtype=kind, device=torch.get_default_device() if place is None else place)


class TrialDraws(KeyedDraws):
    """The draws of a trial pass, which also notes whether the pass has a generator of its own or seeds torch's."""

    def __init__(self, key: Key, generators: bool) -> None:
        """With `generators`, calls that name a generator draw from it."""
        super().__init__(key)
        self.generators, self.named, self.seeded = generators, False, False
        self.states = torch_states(key.words.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS and (kwargs or {}).get("generator") is not None:
            self.named = True
            if self.generators:
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def draw(self, draw: Callable[..., Tensor], shape: Sequence[int], *args: Any) -> Tensor:
        self.check()
        return super().draw(draw, shape, *args)

    def check(self) -> None:
        """Note whether torch's generators are no longer as they were; keyed draws leave them alone.

        This is also called by every draw, since `torch.random.fork_rng` puts the states back afterwards.
        """
        now = torch_states(self.key.words.device)
        self.seeded = self.seeded or not all(map(torch.equal, self.states, now))


@cache
def _inside(function: Any) -> Any:
    """The function without its first check for function modes, so that they see the calls in its body instead."""
    seen = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **seen}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class NoticeDraws(TorchDispatchMode):
    """Notes the first operation that draws from torch's global generators, wherever it is called from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(func, args, kwargs or {}):
            self.found = self.found or str(func.overloadpacket)
        return func(*args, **(kwargs or {}))


def _draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a random operation draws nothing, as attention and recurrent layers without dropout or in evaluation."""
    schema = func._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named |= {a.name: v for a, v in zip(schema, args, strict=False)} | kwargs
    chance = next((named[name] for name in ("dropout_p", "dropout", "p") if name in named), None)
    return chance == 0 or named.get("train") is False or named.get("training") is False


class Trial:
    """Finds what passes of a model draw, from whatever source, and restores the generators afterwards.

    Args:
        device: Where the model is.
        who: What draws, for the message in `unkeyed`.
    """

    def __init__(self, device: torch.device, who: str = "its forward pass") -> None:
        self.key, self.who = fixed_key(device), who
        self.unkeyed = ""
        """A message about draws that no key controls; empty if there are none."""
        self.named = False
        """Whether a draw has named a generator, whose place the key takes."""

    @contextmanager
    def draws(self, keyed: bool = True, generators: bool = False) -> Iterator[list[bool]]:
        """A context for one pass from the initial generators. Afterwards, the list says whether the pass drew.

        With `keyed=False`, every draw counts as one that no key controls, as in a backward pass. With `generators`,
        draws that name a generator come from it, and do not count.
        """
        drew: list[bool] = []
        with seeded(self.key), NoticeDraws() as noticed:
            before, mode = host_states(), TrialDraws(self.key, generators)
            try:
                with mode if keyed else nullcontext():
                    yield drew
            finally:  # a pass that repeats another with different draws may fail for that reason
                changed = [a != b for a, b in zip(before, host_states(), strict=True)]
                sources = [noticed.found, "Python's random" if changed[0] else "", "numpy.random" if changed[1] else ""]
                drew.append(mode.calls > 0 or any(sources))
                self.named |= mode.named
                mode.check()
                found = next((source for source in sources if source), "")
                if generators or self.unkeyed:
                    pass
                elif found:
                    self.unkeyed = f"{self.who} draws from {found}, for which there is no keyed form"
                elif keyed and mode.seeded:
                    self.unkeyed = f"{self.who} seeds torch's generators"


def fixed_key(device: torch.device) -> Key:
    """Return the key of passes outside of any client's step: evaluation and trials."""
    words = torch.zeros(2, dtype=torch.int64, device=device)
    return Key(words, words[0])
