"""What every timed side must pass before its figure counts: finite weights, and agreement with a reference.

Two sides start from the same weights and see the same batches. Their distance is ‖Δa − Δb‖ / ‖Δb‖, where Δ is what
training changed: the weights themselves would hide a wrong update behind a large starting point. `Problem.train` takes
both from the very run that is timed; a side that fails raises `SystemExit`, so no row is printed or written for it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import undrift as ud
from undrift.method.parse import as_method

Weights = Mapping[str, Tensor]

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8}
"""The unit round-off of each precision: the largest relative error of rounding one number."""
BOUNDS = {precision: 4 * math.sqrt(unit) for precision, unit in UNIT.items()}
"""How far a side's update may lie from the reference's: 4·√u, so 1e-3 in float32, 0.09 in tf32, 0.25 in bfloat16.

The square root is for kinks. Round-off of relative size u moves a fraction of about u of all activations across a
ReLU's zero, or to another maximum of a pool, and each of them is then wrong by its full size; in the norm that is √u.
The factor covers some ten layers and some twenty local steps, at learning rates at which steps do not multiply errors.
What faults make, with pfl's CNN and a cohort of 10 on a CPU: other batches 1.0, dropout too many 1.1, every client a
step short 0.4, one of the ten on another's samples 0.3, one of them a step short 0.1, one's samples in another order
0.03. So tf32 and bfloat16 hide a fault of a single client; that is for the tests, in float32 and float64, to find.
"""


def finite(side: str, weights: Weights) -> None:
    """Raises `SystemExit` if any of a side's weights is NaN or infinite."""
    wrong = [name for name, w in weights.items() if not bool(torch.isfinite(w).all())]
    if wrong:
        raise SystemExit(f"{side} ended with weights that are not finite ({', '.join(wrong)}): its time means nothing.")


def ended(side: str, run: ud.Result, rounds: int) -> None:
    """Raises `SystemExit` unless a run went through all its rounds and left finite weights."""
    if len(run.history) != rounds:
        raise SystemExit(f"{side} stopped after {len(run.history)} of {rounds} rounds: its time means nothing.")
    finite(side, run.params)


def distance(update: Weights, reference: Weights) -> float:
    """‖update − reference‖ / ‖reference‖ over all tensors, accumulated in float64 on the reference's device."""
    if update.keys() != reference.keys():
        raise ValueError(f"The updates have different names: {list(update)} and {list(reference)}.")
    apart = sum((update[n].to(r.device).double() - r.double()).square().sum() for n, r in reference.items())
    return math.sqrt(float(apart) / float(sum(r.double().square().sum() for r in reference.values())))


def check(
    side: str,
    update: Weights,
    reference: Weights,
    precision: str,
    against: str = "the plain engine",
    steps: bool = True,
) -> float:
    """The distance of two updates, if it is within the precision's bound; otherwise raises `SystemExit`.

    `steps=False` is for one linear operation, which has no kinks: its bound is 4·u.
    """
    finite(f"{side}'s reference, {against},", reference)
    finite(side, update)
    apart, bound = distance(update, reference), BOUNDS[precision] if steps else 4 * UNIT[precision]
    if not apart <= bound:
        raise SystemExit(
            f"{side} disagrees with {against}: relative distance {apart:.2g}, bound {bound:.2g} for {precision}. "
            "Its time means nothing."
        )
    return apart


def change(after: Weights, before: Weights) -> dict[str, Tensor]:
    """What training changed, in float64."""
    return {name: w.detach().double() - before[name].detach().to(w.device).double() for name, w in after.items()}


@dataclass(frozen=True, eq=False)
class Watch(ud.Part):
    """Remembers the weights that some rounds (counted from 0) leave, and changes nothing."""

    rounds: Container[int]
    weights: list[Any] = field(default_factory=list)
    """One entry per round; None for rounds that are not watched."""

    def observe(self, params: Any, state: Any, server: Any) -> Any:
        watched = len(self.weights) in self.rounds
        self.weights.append({name: w.clone() for name, w in params.items()} if watched else None)
        return state


@dataclass(eq=False)
class Problem:
    """A training problem that several sides are timed on, and what the plain engine makes of its first rounds."""

    model: nn.Module
    data: ud.FederatedDataset
    local: ud.Local
    method: ud.Part | ud.Method | str = field(default_factory=ud.FedAvg)
    rounds: int = 1
    """After how many rounds updates are compared."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else every side passes to `ud.train`."""

    def train(self, side: str, rounds: int, precision: str = "auto", **options: Any) -> tuple[ud.Result, float]:
        """The run that is timed, and how far it was from the plain engine after the problem's first rounds.

        Raises `SystemExit` if it was further than the precision's bound, or if the run does not end finite.
        """
        run, update = self.run(rounds, precision=precision, **options)
        ended(side, run, rounds)
        exact = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return run, check(side, update, self.reference, exact if precision == "auto" else precision)

    @cached_property
    def plain(self) -> tuple[ud.Result, dict[str, Tensor]]:
        """The plain engine's run of the first rounds, in the model's own precision, and its update."""
        return self.run(self.rounds, engine="plain", evaluate_every=self.rounds)

    @property
    def reference(self) -> dict[str, Tensor]:
        return self.plain[1]

    def run(self, rounds: int, **options: Any) -> tuple[ud.Result, dict[str, Tensor]]:
        """A run that nothing is checked of, and its update after the problem's first rounds."""
        watch = Watch({self.rounds - 1})
        method = as_method(self.method) + watch
        run = ud.train(self.model, self.data, method, rounds=rounds, local=self.local, **self.options, **options)
        return run, change(watch.weights[self.rounds - 1], dict(self.model.named_parameters()))
