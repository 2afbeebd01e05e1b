"""A method is a sum of parts: the hooks a part may override, and `+`.

Everything is FedAvg plus changes. Within each hook parts apply in the order of `+`.
Client hooks are pure tensor functions that hold under `torch.func.vmap`; state is plain trees of tensors,
so nothing may hide on `self`.
"""

from __future__ import annotations

import copy
import zlib
from dataclasses import is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrift.errors import UndriftError, nearest
from undrift.method.context import Batch, Client, Plan, Server, Totals
from undrift.method.numbers import bind, check_numbers, numbers_at
from undrift.tree import Tree

BROADCAST, REFINE, FINISH = 2**31, 2**31 + 1, 2**31 + 2


class Part:
    """One change to FedAvg. Subclass it as a frozen dataclass and override the hooks you need.

    Fields annotated `Number` may be values or schedules; inside a hook they are that round's tensor.
    """

    measures: ClassVar[str | None] = None
    """When `measure` passes over the client's data: "before" training, "after" it, or once at the "finish"."""
    reads_rates: ClassVar[bool] = True
    """Whether `update` or `upload` reads `client.rate_sum` or `client.work`. False spares every step their sums."""
    implies_weighting: ClassVar[str | None] = None
    """The weighting this part's mathematics assumes ("uniform"), if it assumes one."""
    contradicts: ClassVar[tuple[str, ...]] = ()
    """Names of parts, or of their base classes, that cannot stand beside this one."""
    ranges: ClassVar[dict[str, str]] = {}
    """The interval of each number, written "[0, 1)". A number that is not named here is in "[0, inf)"."""

    # ---- server, before the clients --------------------------------------------------------------------------
    def start(self, params: Tree) -> Tree:
        """Return the part's initial state at the server. Called once."""
        return ()

    def plan(self, plan: Plan, state: Tree) -> Plan:
        """Return the round's plan, with its step counts and rates."""
        return plan

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        """Return a tree that clients receive beside the weights, as `client.received`."""
        return ()

    # ---- client ----------------------------------------------------------------------------------------------
    def keep(self, params: Tree) -> Tree:
        """Return a client's state before its first round; `upload` returns the next one."""
        return ()

    def measure(self, params: Tree, batch: Batch, client: Client) -> Tree:
        """Return sums over one batch of a pass without training; they are added up over the client's data."""
        return ()

    def prepare(self, client: Client) -> Tree:
        """Return a tree computed before the first step, say from `client.measured`; it becomes `client.prepared`."""
        return ()

    def logits(self, z: Tensor, client: Client) -> Tensor:
        """Return the model's output as the loss sees it."""
        return z

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        """Return the gradient of a local step."""
        return g

    def rate(self, k: Tensor, client: Client) -> Tree:
        """Return a factor of the learning rate in local step `k`: a number, or a tree like the parameters."""
        return 1.0

    def project(self, params: Tree, client: Client) -> Tree:
        """Return the weights after a local step."""
        return params

    def update(self, delta: Tree, client: Client) -> Tree:
        """Return the client's update, which is then weighted and summed."""
        return delta

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        """Return a tree to sum over the cohort, and the client's new state. `delta` is final minus initial weights."""
        return (), client.kept

    # ---- server, after the clients ---------------------------------------------------------------------------
    def transform(self, update: Tree, totals: Totals, state: Tree) -> tuple[Tree, Tree]:
        """Return the aggregated update, which is then added to the weights, and the part's new state."""
        return update, state

    def refine(self, params: Tree, server: Server) -> Tree:
        """Return the new weights, given those after all parts' `transform`."""
        return params

    def after(self, params: Tree, previous: Tree, state: Tree) -> Tree:
        """Return the part's new state, given the weights after and before this round."""
        return state

    def finish(self, params: Tree, totals: Totals, server: Server) -> Tree:
        """Return the final weights. Called once, after the last round."""
        return params

    # ---- either ----------------------------------------------------------------------------------------------
    def check(self, local: Any, data: Any) -> None:
        """Raise `UndriftError` if the part does not fit the local work or the data. Called before training."""

    def check_model(self, model: Any, rounds: int) -> None:
        """Raise `UndriftError` if the part does not fit the model, whose layers are in `model.layers`."""

    def history(self, state: Tree) -> dict[str, Any]:
        """Return the part's columns of the round's history."""
        return {}

    def __add__(self, other: Part | Method) -> Method:
        return Method(self) + other


HOOKS = {name for name, value in vars(Part).items() if callable(value) and not name.startswith("_")}
"""Everything that a part may override."""


class Method:
    """A sum of parts. The server's hooks of the sum are here, the clients' in `engine/client.py`."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        _refuse_contradictions(parts)
        self.weighting = _weighting(parts)

    def __add__(self, other: Part | Method) -> Method:
        if not isinstance(other, Part | Method):
            raise UndriftError(f"A method is a sum of parts; {other!r} is not a part.")
        return Method(*self.parts, *(other.parts if isinstance(other, Method) else (other,)))

    def __repr__(self) -> str:
        return " + ".join(repr(part) for part in self.parts)

    def overriding(self, hook: str) -> list[tuple[int, Part]]:
        """The parts, with their positions, that change this hook; the others cost nothing."""
        return [(i, p) for i, p in enumerate(self.parts) if getattr(type(p), hook) is not getattr(Part, hook)]

    def measuring(self, when: str) -> list[tuple[int, Part]]:
        return [(i, p) for i, p in enumerate(self.parts) if p.measures == when]

    # ---- numbers ---------------------------------------------------------------------------------------------
    def numbers(self, t: int) -> list[dict[str, Any]]:
        """Every part's numbers as they are in round `t`."""
        return [numbers_at(part, t) for part in self.parts]

    def bind(self, numbers: list[dict[str, Any]]) -> Method:
        """The same method with its numbers replaced: by this round's tensors, under `vmap` one per lane."""
        bound = copy.copy(self)
        bound.parts = tuple(bind(part, own) for part, own in zip(self.parts, numbers, strict=True))
        return bound

    def check(self, local: Any, data: Any, rounds: int) -> None:
        for part in self.parts:
            check_numbers(part, rounds, type(part).__name__)
            _check_definition(part)
            part.check(local, data)

    # ---- the hooks of the sum: server ------------------------------------------------------------------------
    def start(self, params: Tree) -> list[Tree]:
        return [part.start(params) for part in self.parts]

    def plan(self, plan: Plan, states: list[Tree]) -> Plan:
        for part, state in zip(self.parts, states, strict=True):
            plan = part.plan(plan, state)
        return plan

    def broadcast(self, params: Tree, states: list[Tree], server: Server) -> list[Tree]:
        return [p.broadcast(params, s, _own(server, p, BROADCAST)) for p, s in zip(self.parts, states, strict=True)]

    def transform(self, totals: Totals, states: list[Tree]) -> tuple[Tree, list[Tree]]:
        update, after = totals.update, list(states)
        for i, part in enumerate(self.parts):
            update, after[i] = part.transform(update, replace(totals, sums=totals.sums[i]), states[i])
            update = aligned(update, totals.update, part, "transform")
        return update, after

    def refine(self, params: Tree, server: Server) -> Tree:
        for _, part in self.overriding("refine"):
            params = aligned(part.refine(params, _own(server, part, REFINE)), params, part, "refine")
        return params

    def after(self, params: Tree, previous: Tree, states: list[Tree]) -> list[Tree]:
        new = list(states)
        for i, part in self.overriding("after"):
            new[i] = part.after(params, previous, states[i])
        return new

    def finish(self, params: Tree, totals: Totals, server: Server) -> Tree:
        for i, part in self.overriding("finish"):
            own = replace(totals, sums=totals.sums[i])
            params = aligned(part.finish(params, own, _own(server, part, FINISH)), params, part, "finish")
        return params

    def history(self, states: list[Tree]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for part, state in zip(self.parts, states, strict=True):
            row |= part.history(state)
        return row


def part_stream(part: Part) -> int:
    """Where a part's draws begin among a step's streams: by its name, so that what stands beside it changes nothing.

    The first 2¹⁶ streams are the model's own (dropout).
    """
    return (1 + zlib.crc32(type(part).__name__.encode()) % 0xFFFE) << 16


def aligned(tree: Any, params: Tree, part: Part, hook: str) -> Tree:
    """A hook's result in the order and the precision of the parameters."""
    if not isinstance(tree, dict) or tree.keys() != params.keys():
        raise UndriftError(
            f"{type(part).__name__}.{hook} must return a dict with the parameters' own names ({', '.join(params)})."
        )
    return {name: tree[name].to(w.dtype) for name, w in params.items()}


def _own(server: Server, part: Part, hook: int) -> Server:
    """The server as this part's hook sees it; each hook draws from a step of its own, far above local steps."""
    key = replace(server.key, step=torch.full_like(server.key.step, hook), stream=part_stream(part))
    return replace(server, key=key)


def _refuse_contradictions(parts: tuple[Part, ...]) -> None:
    for j, later in enumerate(parts):
        if not is_dataclass(later):
            raise UndriftError(f"{type(later).__name__} must be a dataclass: put @dataclass(frozen=True) above it.")
        if later.measures not in (None, "before", "after", "finish"):
            raise UndriftError(f'{type(later).__name__}.measures must be "before", "after" or "finish".')
        if later.measures is None and type(later).measure is not Part.measure:
            raise UndriftError(f'{type(later).__name__} has a measure hook; say when: measures = "before", say.')
        for earlier in parts[:j]:
            first, second = type(earlier).__name__, type(later).__name__
            if first == second:
                raise UndriftError(f"{first} stands twice in the method; keep one.")
            if _named(later, earlier.contradicts) or _named(earlier, later.contradicts):
                raise UndriftError(f"{first} and {second} contradict each other; keep one of them.")


def _check_definition(part: Part) -> None:
    """Refuse a user's part that would change nothing, and methods that are probably meant to be hooks."""
    if type(part).__module__.startswith("undrift."):  # tests show that ours have their effect; FedAvg has no hook
        return
    name = type(part).__name__
    own = {key: value for base in type(part).__mro__ if base not in Part.__mro__ for key, value in vars(base).items()}
    for key, value in own.items():
        if callable(value) and not key.startswith("_") and key not in vars(Part):
            meant = nearest(key, HOOKS, cutoff=0.8)
            if meant:
                raise UndriftError(
                    f"{name}.{key} is not a hook; did you mean {meant}? (If it is a helper, begin its name with _.)"
                )
    if not part.implies_weighting and not own.keys() & HOOKS:
        raise UndriftError(f"{name} overrides no hook, so it would change nothing; docs/hooks.md lists the hooks.")


def _named(part: Part, names: tuple[str, ...]) -> bool:
    return any(base.__name__ in names for base in type(part).__mro__)


def _weighting(parts: tuple[Part, ...]) -> str:
    """By samples, unless parts imply something else; they must agree."""
    implying = [part for part in parts if part.implies_weighting]
    for part in implying[1:]:
        if part.implies_weighting != implying[0].implies_weighting:
            needs = [f"{type(p).__name__} needs the {p.implies_weighting} mean" for p in (implying[0], part)]
            raise UndriftError(f"{' and '.join(needs)}; they contradict each other.")
    return str(implying[0].implies_weighting) if implying else "samples"
