"""A method is a sum of parts: the hooks that a part may override, and `+`.

Every method is FedAvg plus changes. Within each hook, parts apply in the order of `+`. Client hooks must be pure tensor
functions that work under `torch.func.vmap`. State is passed in and returned as trees of tensors, never kept on `self`.
"""

from __future__ import annotations

import copy
import zlib
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from undrift.errors import UndriftError, listed, nonnegative, quoted
from undrift.method.calls import aligned, call, pair
from undrift.method.context import Batch, Client, Plan, Server
from undrift.method.numbers import bind, check_numbers, numbers_at
from undrift.method.rules import STAGES, check_definition, hooks_in, overrides, refuse_contradictions, weighting
from undrift.tree import Tree, tree_map

# The step in the key of each server hook, far above the numbers of local steps.
BROADCAST, REFINE, FINISH, PLAN, TRANSFORM, AGGREGATE, OBSERVE, START = (2**31 + i for i in range(8))


class Part:
    """One change to FedAvg. Subclass it as a frozen dataclass and override the hooks you need.

    Fields annotated `Number` may be given as numbers or as schedules. Inside a hook, they are that round's value, as a
    scalar tensor. Parts combine with `+` to a `Method`.

    Example:
        >>> from dataclasses import dataclass
        >>> import undrift as ud
        >>> @dataclass(frozen=True)
        ... class Prox(ud.Part):
        ...     mu: ud.Number
        ...     def gradient(self, g, params, client):
        ...         return ud.tree_map(lambda g, w, w0: g + self.mu * (w - w0), g, params, client.start)
        >>> method = Prox(mu=0.1) + ud.ServerSGD(momentum=0.9)
    """

    measures: ClassVar[str | None] = None
    """When `measure` runs over clients' data: "cohort" (before `broadcast`, for sums over the cohort), "sent" (at the
    weights sent, before `begin`), "before" or "after" a client trains, "training" (on the batch of every local step, in
    its own forward pass), or "finish" (once, after the last round, over all clients)."""
    batches: ClassVar[int] = 1
    """The number of batches per local step. `client.gradient(weights, batch=1)` uses the second of them."""
    personal: tuple[str, ...] = ()
    """Patterns such as "head.*". Parameters and buffers whose names match are each client's own and are never sent."""
    replaces_gradient: ClassVar[bool] = False
    """Whether `gradient` or `step` ignores the gradient it is given, so that parts before it would have no effect."""
    replaces_losses: ClassVar[bool] = False
    """Whether `objective` ignores the losses it is given, so that parts before it would have no effect."""
    needs_losses: ClassVar[bool] = False
    """Whether the part needs the losses or gradients of single samples. If True, losses that return one number for a
    whole batch are refused."""
    stage: ClassVar[str] = "method"
    """What the part's `update` and `transform` are for: "method", "compression" or "privacy". Clients apply `update` in
    this order and the server undoes it in reverse: the `transform` of "privacy" comes first, whatever the order of `+`,
    then "compression", then all others."""
    reads_rates: ClassVar[bool] = True
    """Whether `update` or `upload` reads `client.rate_sum` or `client.work`. If False, they need not be computed."""
    harmless_sums: ClassVar[bool] = False
    """Whether the sums of `upload` may include clients whose updates another part's `aggregate` rejects. If False, this
    part cannot be combined with one that aggregates."""
    starts_at_sent: ClassVar[bool] = False
    """Whether the part assumes that clients start from the weights sent. If True, parts with `begin` are refused."""
    implies_weighting: ClassVar[str | None] = None
    """The mean over clients that this part assumes: "uniform", or None if it works with any weights."""
    contradicts: ClassVar[tuple[str, ...]] = ()
    """Names of parts, or of their base classes, that cannot be combined with this one."""
    ranges: ClassVar[dict[str, str]] = {}
    """The interval of each number, such as "[0, 1)". The default is "[0, inf)"."""

    # ---- server, before the clients --------------------------------------------------------------------------
    def start(self, params: Tree, server: Server) -> Tree:
        """Return the part's initial state at the server, a tree. Called once, with the initial weights."""
        return ()

    def plan(self, plan: Plan, state: Tree, server: Server) -> tuple[Plan, Tree]:
        """Return the round's plan (its clients, step counts and rates), and the part's new state.

        Change a plan with `dataclasses.replace`.
        """
        return plan, state

    def broadcast(self, params: Tree, state: Tree, server: Server) -> Tree:
        """Return a tree that clients receive together with the weights, as `client.received`."""
        return ()

    # ---- client ----------------------------------------------------------------------------------------------
    def keep(self, params: Tree, client: Client) -> Tree:
        """Return a client's state before its first round, given the weights sent in that round.

        Hooks find it in `client.kept`. Later states are what `upload` returns; they must have the same structure.
        """
        return ()

    def begin(self, params: Tree, client: Client) -> Tree:
        """Return the weights that local training starts from, given the weights sent."""
        return params

    def measure(self, params: Tree, batch: Batch, client: Client) -> Tree:
        """Return sums over one batch of a pass over the client's data, without training.

        They are added up over all batches. `measures` says when this pass takes place. Multiply whatever you sum by
        `batch.mask`, which is 0 for padding.
        """
        return ()

    def prepare(self, client: Client) -> Tree:
        """Return a tree to be used in every local step, computed once, for example from `client.measured`.

        Later hooks find it in `client.prepared`.
        """
        return ()

    def carry(self, params: Tree, client: Client) -> Tree:
        """Return the state that `step` is given in the first local step; `params` are the weights trained from."""
        return ()

    def logits(self, z: Tensor, client: Client) -> Tensor:
        """Return the model's output as the loss function is given it. Evaluations use the output as it is."""
        return z

    def objective(self, losses: Tensor, z: Tensor, batch: Batch, params: Tree, client: Client) -> Tensor:
        """Return one loss per sample. The step takes the gradient of their mean over the samples that are not padding.

        Args:
            losses: The losses of the loss function, after the `objective` hooks of the parts before.
            z: The model's output, after all `logits` hooks.
            batch: The batch, after augmentation; `batch.features` has the input of the model's last layer.
            params: The weights with respect to which the gradient is taken.
            client: The client.
        """
        return losses

    def gradient(self, g: Tree, params: Tree, client: Client) -> Tree:
        """Return the gradient of a local step, given that of the loss after the hooks of the parts before.

        `client.gradient` computes gradients at weights other than `params`.
        """
        return g

    def step(self, g: Tree, carry: Tree, params: Tree, client: Client) -> tuple[Tree, Tree]:
        """Return the gradient of a local step, and the state for the next step: `gradient` with state.

        A part overrides `gradient` or `step`, not both. The structure, shapes and dtypes of `carry` must not change.
        """
        return g, carry

    def rate(self, k: Tensor, client: Client) -> Tree:
        """Return a factor of the learning rate in local step `k`, counted from 0.

        A number, or a dict by parameter of tensors that broadcast to the parameters' shapes.
        """
        return 1.0

    def project(self, params: Tree, client: Client) -> Tree:
        """Return the weights after a local step, given those that the step led to."""
        return params

    def update(self, delta: Tree, client: Client) -> Tree:
        """Return the client's update, which is then weighted and summed over the cohort.

        `delta` is the final weights minus the weights sent, after the `update` hooks of the parts before. It is zero
        for personal parameters. Return `(delta, tree)` to hand a tree on to `upload`, as `client.from_update`.
        """
        return delta

    def upload(self, delta: Tree, client: Client) -> tuple[Tree, Tree]:
        """Return a tree to be summed over the cohort, and the client's new state.

        `delta` is the final weights minus those that training started from, before any `update` hook. It is zero
        for personal parameters. The sum is not weighted. The server finds it in `server.totals.sums`.
        """
        return (), client.kept

    def own(self, params: Tree, client: Client) -> Tree:
        """Return the weights that this client would use, given the weights sent.

        Called for evaluation on the client's own test data. If training changes buffers of the model, such as running
        statistics, return those too: `{**weights, **client.buffers}`, or others of the same names.
        """
        return params

    # ---- server, after the clients ---------------------------------------------------------------------------
    def aggregate(self, updates: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        """Return the update, and the part's new state, given the clients' individual updates.

        `updates` is a dict like the parameters, with the clients along a first axis, in the order of `server.cohort`
        and not weighted. At most one part of a method may aggregate; without one, the update is the weighted mean. If
        no client counts, this is not called and the update is zero.
        """
        raise NotImplementedError

    def transform(self, update: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        """Return the update that is added to the weights, and the part's new state.

        `update` is the aggregated update, after the `transform` hooks of the parts before.
        """
        return update, state

    def refine(self, params: Tree, state: Tree, server: Server) -> tuple[Tree, Tree]:
        """Return the new weights, and the part's new state, given the weights with the update added."""
        return params, state

    def observe(self, params: Tree, state: Tree, server: Server) -> Tree:
        """Return the part's new state, given the weights after this round; `server.params` has those before it."""
        return state

    def finish(self, params: Tree, state: Tree, server: Server) -> Tree:
        """Return the final weights, given those after the last round. Called once."""
        return params

    # ---- either ----------------------------------------------------------------------------------------------
    def check(self, local: Any, data: Any) -> None:
        """Raise `UndriftError` if the part cannot be used with this `Local` or this data. Called before training."""

    def check_model(self, model: Any, rounds: int) -> None:
        """Raise `UndriftError` if the part cannot be used with this model. Its layers are in `model.layers`."""

    def update_bytes(self, size: int, params: Tree) -> int:
        """Return the number of bytes that a client sends for its update, for the history.

        `size` is the size of its tensors in bytes, or what the part before returned; `params` has these tensors.
        """
        return size

    def history(self, state: Tree) -> dict[str, Any]:
        """Return the columns that the part adds to the round's history."""
        return {}

    def __add__(self, other: Part | Method) -> Method:
        return Method(self) + other


HOOKS = hooks_in(Part)
"""Everything that a part may override."""


class Method:
    """A sum of parts, such as `ud.FedDyn(0.1) + ud.FedNLR()`.

    Example:
        >>> import undrift as ud
        >>> ud.Method(ud.FedProx(mu=0.1), ud.ServerSGD(momentum=0.9))
        FedProx(mu=0.1, target=None) + ServerSGD(lr=1.0, momentum=0.9)

    Args:
        *parts: The parts, in the order in which they apply within each hook.

    Raises:
        UndriftError: If parts cannot be combined.
    """

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        refuse_contradictions(parts)
        self.weighting = weighting(parts)
        self.batches = max((part.batches for part in parts), default=1)
        """The number of batches per local step."""

    def __add__(self, other: Part | Method) -> Method:
        if not isinstance(other, Part | Method):
            raise UndriftError(f"A method is a sum of parts; {other!r} is not a part.")
        return Method(*self.parts, *(other.parts if isinstance(other, Method) else (other,)))

    def __repr__(self) -> str:
        return " + ".join(repr(part) for part in self.parts)

    def followed_by(self, parts: list[Part]) -> Method:
        """Return this method with parts of undrift's own appended, whose names a user's parts may share."""
        longer = copy.copy(self)
        longer.parts = (*self.parts, *parts)
        return longer

    def overriding(self, *hooks: str) -> list[tuple[int, Part]]:
        """Return the parts that override one of these hooks, given by name, with their positions."""
        return [(i, p) for i, p in enumerate(self.parts) if any(overrides(p, hook) for hook in hooks)]

    def measuring(self, when: str) -> list[tuple[int, Part]]:
        return [(i, p) for i, p in enumerate(self.parts) if p.measures == when]

    def personal(self, names: list[str]) -> frozenset[str]:
        """Return which of these parameters and buffers are the clients' own."""
        found: set[str] = set()
        for part in self.parts:
            for pattern in part.personal:
                matching = {n for n in names if fnmatchcase(n, pattern)}
                if not matching:
                    own = f"{type(part).__name__}(personal)"
                    inside = [n for n in names if n.startswith(f"{pattern}.")]
                    hint = f"write {pattern + '.*'!r}" if inside else f"its names are {listed(names)}"
                    raise UndriftError(f"{own} has {pattern!r}, but the model has no parameter of such a name; {hint}.")
                found |= matching
        return frozenset(found)

    # ---- numbers ---------------------------------------------------------------------------------------------
    def numbers(self, t: int) -> list[dict[str, Any]]:
        """Return every part's numbers in round `t`."""
        return [numbers_at(part, t) for part in self.parts]

    def bind(self, numbers: list[dict[str, Any]]) -> Method:
        """Return the method with these numbers in place of its own: this round's tensors, one per lane under `vmap`."""
        bound = copy.copy(self)
        bound.parts = tuple(bind(part, own) for part, own in zip(self.parts, numbers, strict=True))
        return bound

    def check(self, local: Any, data: Any, rounds: int) -> None:
        for part in self.parts:
            check_numbers(part, rounds, type(part).__name__)
            check_definition(part)
            call(part, "check", local, data)

    # ---- the hooks of the sum: server ------------------------------------------------------------------------
    def start(self, params: Tree, server: Server) -> list[Tree]:
        return [call(part, "start", params, _own(server, part, START, i)) for i, part in enumerate(self.parts)]

    def plan(self, plan: Plan, states: list[Tree], server: Server) -> tuple[Plan, list[Tree]]:
        plan = replace(plan, clients=read_only(plan.clients), steps=read_only(plan.steps))
        return self._chain("plan", PLAN, plan, states, server)

    def broadcast(self, params: Tree, states: list[Tree], server: Server) -> list[Tree]:
        """Return what each part's clients receive. Only parts that measure the cohort have totals at this point."""
        found: list[Tree] = [() for _ in self.parts]
        for i, part in self.overriding("broadcast"):
            own = _own(server, part, BROADCAST, i)
            own = own if part.measures == "cohort" else replace(own, totals=None)  # type: ignore[arg-type]
            found[i] = call(part, "broadcast", params, states[i], own)
        return found

    def aggregate(self, updates: Tree, states: list[Tree], server: Server) -> tuple[Tree, list[Tree]]:
        """Return the update, given all clients' updates along a first axis."""
        ((i, part),) = self.overriding("aggregate")
        found = call(part, "aggregate", updates, states[i], _own(server, part, AGGREGATE, i))
        update, state = pair(found, part, "aggregate", "update")
        like = tree_map(lambda u: u[0], updates)
        return aligned(update, like, part, "aggregate"), [*states[:i], state, *states[i + 1 :]]

    def transform(self, update: Tree, states: list[Tree], server: Server) -> tuple[Tree, list[Tree], Server]:
        """Return the update as it is applied, given `server.totals.update`; the states; and the server.

        What "privacy" returns takes the place of `totals.update`, which nothing must read without its noise.
        """
        update, states = self._chain("transform", TRANSFORM, update, states, server, "privacy")
        server = replace(server, totals=replace(server.totals, update=update))
        for stage in ("compression", "method"):
            update, states = self._chain("transform", TRANSFORM, update, states, server, stage)
        return update, states, server

    def refine(self, params: Tree, states: list[Tree], server: Server) -> tuple[Tree, list[Tree]]:
        return self._chain("refine", REFINE, params, states, server)

    def observe(self, params: Tree, states: list[Tree], server: Server) -> list[Tree]:
        new = list(states)
        for i, part in self.overriding("observe"):
            new[i] = call(part, "observe", params, states[i], _own(server, part, OBSERVE, i))
            if new[i] is None:
                raise UndriftError(f"{type(part).__name__}.observe must return the part's state, not None.")
        return new

    def finish(self, params: Tree, states: list[Tree], server: Server) -> Tree:
        for i, part in self.overriding("finish"):
            found = call(part, "finish", params, states[i], _own(server, part, FINISH, i))
            params = aligned(found, params, part, "finish")
        return params

    def update_bytes(self, update: Tree, size: int) -> int:
        """Return the size of one client's update in bytes, as its parts send it."""
        for _, part in by_stage(self.overriding("update_bytes")):
            found = call(part, "update_bytes", size, update)
            if not nonnegative(found):
                raise UndriftError(
                    f"{type(part).__name__}.update_bytes must return a number from 0, not {quoted(found)}."
                )
            size = int(found)
        return size

    def history(self, states: list[Tree]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for part, state in zip(self.parts, states, strict=True):
            columns = call(part, "history", state)
            if not isinstance(columns, dict):
                raise UndriftError(f"{type(part).__name__}.history must return a dict of columns, not {columns!r}.")
            row |= columns
        return row

    def _chain(
        self, hook: str, step: int, thing: Any, states: list[Tree], server: Server, stage: str | None = None
    ) -> tuple[Any, list[Tree]]:
        """Pass `thing` through the parts' hooks, or those of one stage. Each of them may change its state."""
        new, chooser = list(states), None
        for i, part in self.overriding(hook):
            if stage not in (None, part.stage):
                continue
            found = call(part, hook, thing, states[i], _own(server, part, step, i))
            after, new[i] = pair(found, part, hook, {"plan": "plan", "transform": "update"}.get(hook, "params"))
            if hook == "plan" and not isinstance(after, Plan):
                raise UndriftError(f"{type(part).__name__}.plan must return a plan, not {type(after).__name__}.")
            if hook == "plan":
                chooser = chosen_by(part, thing, after, chooser, server)
            thing = after if hook == "plan" else aligned(after, thing, part, hook)
        return thing, new


def by_stage(found: list[tuple[int, Part]]) -> list[tuple[int, Part]]:
    """Return parts and their positions in the order in which clients apply them: by stage, then in the order of `+`."""
    return sorted(found, key=lambda pair: STAGES.index(pair[1].stage))


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view of an array that hooks cannot write to."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def chosen_by(part: Part, given: Plan, plan: Plan, before: Part | None, server: Server) -> Part | None:
    """Return the part that changed the plan's clients last, if one did. Raises if it overrode another choice.

    A part may always leave out some of the clients that it is given. Which others it may take depends on who chose
    these: nobody, if they are all there are; a part, whose choice would be lost; or `participation`, of which it may at
    least take the number.
    """
    new, old = (set(np.asarray(one.clients).ravel().tolist()) for one in (plan, given))
    if new <= old:
        return part if new < old else before
    own = type(part).__name__
    if before is not None:
        raise UndriftError(
            f"{type(before).__name__} and {own} both choose the round's clients, so the first choice would be lost; "
            "keep one of them."
        )
    if len(given.clients) < server.population and len(plan.clients) != len(given.clients):
        raise UndriftError(
            f"{own}.plan chooses {len(plan.clients)} clients of its own, so `participation`, which samples "
            f"{len(given.clients)}, would have no effect; leave participation out."
        )
    return part


def part_stream(part: Part) -> int:
    """Return where a part's draws begin among a step's streams: by its name, so that other parts do not change them.

    The first 2¹⁶ streams are the model's own (dropout).
    """
    return (1 + zlib.crc32(type(part).__name__.encode()) % 0xFFFE) << 16


def _own(server: Server, part: Part, hook: int, i: int) -> Server:
    """Return the server as this part's hook sees it: with the part's own sums, and a key for its draws."""
    key = replace(server.key, step=torch.full_like(server.key.step, hook), stream=part_stream(part))
    totals = server.totals
    if totals is not None:
        measured = totals.measured[i] if totals.measured else ()
        totals = replace(totals, sums=totals.sums[i], measured=measured)
    return replace(server, key=key, totals=totals)
