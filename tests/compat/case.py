"""A case: a model as its library makes it, samples for it, and what must come of training it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

import undrift as ud

GROUPS = {
    "vision": "Vision",
    "language": "Language and speech",
    "sequences": "Sequences, graphs and tables",
    "dense": "Dense outputs, several outputs, generative models",
    "odd": "Unusual modules",
    "idioms": "Idioms of PyTorch",
    "data": "Losses, labels and data",
}
BOUNDS = {torch.float64: 1e-8, torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 6e-3}
"""The largest difference between weights that rounding explains, by the model's precision."""

Samples = Callable[[Generator, int], tuple[Any, Tensor]]
"""Makes so many samples and targets; samples are a tensor, or a tuple or dict of tensors."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, the samples that it takes, and how it is trained: as its user would write it, without wrappers.

    Args:
        group: One of `GROUPS`.
        name: What the table calls it.
        build: Makes the module, with torch's generator seeded. Imports what it needs, so that cases can be listed
            where their libraries are missing.
        samples: Makes the samples.
        needs: The packages that `build` imports, by import name.
        review: The faults of a review that this case would show again: "S1" to "S11" of the first, "M1" to "M9" of the
            one about models, whose "MT" and "MR" are the tracebacks and the refusals.
        loss: As in `ud.train`.
        reads: Whether `loss` is instead a function of the module that returns the loss, which reads the module.
        batch_loss: The loss of a batch as plain PyTorch computes it, where it is not the mean of `loss`.
        output: Which output the loss is about, where the model has several and none is called logits.
        draws: Whether training draws random numbers, so that no other loop can agree to the last digit.
        hand: Whether to compare with the hand-written loop. Never where the model draws or another method trains.
        method: As in `ud.train`.
        dtype: What the module and its samples are converted to; None leaves them as they are made.
        samples_dtype: What the samples alone are converted to, where the module is made in its precision.
        bound: The largest difference that rounding explains. By default that of the module's precision.
        sizes: Samples per client.
        test: How many samples are held out; with 0 there is no evaluation.
        local: Changes to the local work.
        options: More arguments of `ud.train`.
        dataset: Makes the federated data, where `from_clients` does not.
        factory: Whether `ud.train` is given the function that makes the module, instead of the module.
        saved: Whether the run is saved in a folder, and read from there again.
        refused: The core of the sentence with which this model must be refused.
        warned: The core of the warning with which it must train, and without which it would be wrong.
        note: Why it is refused, or why the case is not in float64: for the reader of the table.
        quick: Whether it belongs to the subset that runs with the project's tests.
    """

    group: str
    name: str
    build: Callable[[], nn.Module]
    samples: Samples
    needs: tuple[str, ...] = ()
    review: tuple[str, ...] = ()
    loss: Any = None
    reads: bool = False
    batch_loss: Callable[[Any, Tensor], Tensor] | None = None
    output: str | None = None
    draws: bool = False
    hand: bool = True
    method: str | None = None
    dtype: torch.dtype | None = torch.float64
    samples_dtype: torch.dtype | None = None
    bound: float | None = None
    sizes: tuple[int, ...] = (12, 7, 6)
    test: int = 8
    local: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dataset: Callable[[], ud.FederatedDataset] | None = None
    factory: bool = False
    saved: bool = False
    refused: str = ""
    warned: str = ""
    note: str = ""
    quick: bool = False

    @property
    def missing(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    @property
    def by_hand(self) -> bool:
        """Whether it is held against the hand-written loop."""
        return self.hand and not (self.draws or self.method or self.refused or self.warned)

    def limit(self, module: nn.Module) -> float:
        """The largest difference that rounding explains: that of the least precise parameter."""
        if self.bound is not None:
            return self.bound
        return max(BOUNDS.get(p.dtype, 0.0) for p in module.parameters())

    def module(self) -> nn.Module:
        """A new module, with the same weights every time."""
        torch.manual_seed(0)
        module = self.build()
        return module if self.dtype is None else module.to(self.dtype)

    def criterion(self, module: nn.Module) -> Any:
        """The loss as `ud.train` takes it."""
        return self.loss(module) if self.reads else self.loss

    def function(self) -> Callable[[], nn.Module]:
        """A function that makes the module, as if from a checkpoint: undrift draws initial weights of its own."""
        weights = {name: t.clone() for name, t in self.module().state_dict().items()}

        def make() -> nn.Module:
            module = self.module()
            module.load_state_dict(weights)
            return module

        return make

    def data(self) -> ud.FederatedDataset:
        """The clients' data, the same every time. The sizes leave the second step of two clients a short batch."""
        if self.dataset:
            return self.dataset()
        *clients, test = self._pairs()
        return ud.FederatedDataset.from_clients(clients, test=test if self.test else None)

    def clients(self) -> list[tuple[Any, Tensor]]:
        """The clients' samples and targets as their user has them, before undrift sees them."""
        if self.dataset:
            data = self.dataset()
            return [data[i] for i in range(len(data))]
        return self._pairs()[:-1]

    def held_out(self) -> tuple[Any, Tensor] | None:
        """The samples and targets that no client has, as their user has them."""
        return self._pairs()[-1] if self.test and not self.dataset else None

    def _pairs(self) -> list[tuple[Any, Tensor]]:
        """Each client's samples, and at last those of the test set."""
        x, y = self.samples(Generator().manual_seed(1), sum(self.sizes) + self.test)
        x, y = self._cast(x), self._cast(y)
        ends = [sum((*self.sizes, self.test)[:i]) for i in range(len(self.sizes) + 2)]
        return [(rows_of(x, slice(a, b)), y[a:b]) for a, b in itertools.pairwise(ends)]

    def work(self, **changes: Any) -> ud.Local:
        """The clients' local work."""
        return ud.Local(**{"steps": 2, "batch_size": 4, "lr": 0.05, **self.local, **changes})

    def _cast(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {name: self._cast(t) for name, t in x.items()}
        if isinstance(x, tuple):
            return tuple(self._cast(t) for t in x)
        dtype = self.samples_dtype or self.dtype
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def rows_of(x: Any, rows: Any) -> Any:
    """Some of the samples."""
    if isinstance(x, dict):
        return {name: rows_of(t, rows) for name, t in x.items()}
    return tuple(rows_of(t, rows) for t in x) if isinstance(x, tuple) else x[rows]


class Cases(list[Case]):
    """The cases of a group, added one by one."""

    def __init__(self, group: str, *needs: str) -> None:
        super().__init__()
        self.group, self.needs = group, needs

    def add(self, name: str, build: Callable[[], nn.Module], samples: Samples, **options: Any) -> None:
        self.append(Case(group=self.group, name=name, build=build, samples=samples, needs=self.needs, **options))


class Made(nn.Module):
    """A module from its parts and its forward pass, a function of the module and its arguments."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.forward_pass = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_pass(self, *args, **kwargs)
