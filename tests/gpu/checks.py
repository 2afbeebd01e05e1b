"""What a check is, what it finds, and how two runs are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Finding:
    """One line of output: whether something holds, and the figure or the reason."""

    status: str
    """"ok", "FAIL", or "absent" where the check could not run."""
    says: str
    name: str | None = None
    """Set where one check finds several things; the check's own name otherwise."""
    seconds: float | None = None
    detail: str = ""
    """What a log has to say beyond the line, such as a traceback."""


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    run: Callable[[str], Finding | list[Finding]]
    """A function of the device."""
    seconds: float = 3.0
    """An estimate for one H200: the longest checks start first."""
    full: bool = False
    """Whether it runs in `make gpu-full` alone."""

    @property
    def key(self) -> str:
        return f"{self.group}  {self.name}"


class Absent(Exception):  # noqa: N818 - not an error of the engine
    """Raised by a check that cannot run here, with the reason."""


def within(figure: float, bound: float) -> Finding:
    """NaN is within no bound."""
    if not figure <= bound:
        return Finding("FAIL", f"{figure:.1e} > {bound:.0e}")
    return Finding("ok", f"{figure:.1e} ≤ {bound:.0e}")


def relative(found: Mapping[str, Tensor], wanted: Params) -> dict[str, float]:
    """‖found − wanted‖ / ‖wanted‖ of each tensor."""
    pairs = {name: (found[name].detach().double(), w.detach().double()) for name, w in wanted.items()}
    return {name: float((f.to(w.device) - w).norm() / w.norm()) for name, (f, w) in pairs.items()}


def update_distance(found: Params, wanted: Params, start: Params) -> float:
    """‖found − wanted‖ / ‖wanted − start‖ over all parameters as one vector. NaN where nothing was trained."""
    a, b, origin = (flat(params, list(wanted)) for params in (found, wanted, start))
    return float((a - b).norm() / (b - origin).norm())


def flat(params: Params, names: list[str]) -> Tensor:
    return torch.cat([params[name].detach().cpu().double().flatten() for name in names])


def start_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: w.detach().clone() for name, w in model.named_parameters()}


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    """Counts the replays of CUDA graphs, as the one entry of a list."""
    graph, count = torch.cuda.CUDAGraph, [0]
    replay = graph.replay

    def counting(self: torch.cuda.CUDAGraph) -> None:
        count[0] += 1
        replay(self)

    graph.replay = counting
    try:
        yield count
    finally:
        graph.replay = replay
