"""A rehearsal of one client's round before a run, which finds hooks that would be wrong without a word.

Lanes pad short batches and trace hooks once, so some mistakes change the result and raise nothing: a sum over a batch
that forgets `batch.mask`, a loss that is cut off from the weights, a hook that ignores what the parts before it have
done. Here one client takes its first and its last local step on a few samples, eagerly and with ordinary autograd:
twice as it is, once with padding, and once at weights that differ in their last digits, to see what rounding does.
Whatever differs otherwise depends on the padding, or on something that is not the client's.

Only methods with hooks of the user's own are rehearsed; undrift's own parts are tested.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.engine.base import RoundInputs
from undrift.engine.client import Program, with_carries
from undrift.engine.gradients import StepGradients
from undrift.engine.plain import PlainEngine
from undrift.engine.ranks import ALONE
from undrift.errors import UndriftError
from undrift.functional.model import Params
from undrift.method.calls import HookError, name, ours
from undrift.method.context import Batch, Client, Totals
from undrift.method.part import Part, by_stage
from undrift.method.rules import overrides
from undrift.method.work import Momentum, Optimize
from undrift.training.arithmetic import full_precision
from undrift.training.run import Run
from undrift.tree import Tree, tree_leaves, tree_map, tree_sub

log = logging.getLogger("undrift")

FEW = 3
"""The number of samples of a batch."""
PADDING = 2
"""The number of samples that pad it. They are others than its own, so that a maximum notices them too."""
NOISE = 50
"""How many times as far as rounding may move a result, padding may not."""
IN_STEPS = ("logits", "objective", "gradient", "step")
"""The hooks whose result decides where a local step leads, and that see a batch or its gradients."""


def find_sums(run: Run, program: Program) -> None:
    """Complete a program whose parts measure in "training": find the form of their sums, with which clients begin."""
    if program.measuring:
        Trial(replace(run, ranks=ALONE), program).find_sums()


def rehearse(run: Run, program: Program, padded: bool) -> None:
    """Rehearse a round of one client. Raises `UndriftError` if a hook of the user's would be wrong without a word.

    Args:
        run: The run.
        program: What its clients do, with the model as the engine trains it.
        padded: Whether the engine may pad batches.
    """
    try:
        trial = Trial(replace(run, ranks=ALONE), program)
        with torch.no_grad(), full_precision():
            first = trial.result(looks=True)
            refuse_unrepeatable(trial, first)
            if padded:
                refuse_unmasked(trial, first)
    except (HookError, RehearsalError):
        raise
    except Exception as error:  # a model may not take so few samples, for example; training will tell
        log.info("the rehearsal of the method's hooks was given up: %s", error)


class RehearsalError(UndriftError):
    """A hook that would be wrong without a word."""


@dataclass(frozen=True)
class Rehearsed(Program):
    """A client's program that looks at what users' hooks make of what they are given."""

    looks: bool = False

    @classmethod
    def of(cls, program: Program, **more: Any) -> Rehearsed:
        known = {entry.name: getattr(program, entry.name) for entry in fields(Program)}
        return cls(**known | {"model": program.model.in_own_precision()} | more)

    def changed_losses(
        self, part: Part, client: Client, losses: Tensor, z: Tensor, batch: Batch, params: Params
    ) -> Tensor:
        found = super().changed_losses(part, client, losses, z, batch, params)
        if not self.looks or ours(part) or torch._C._functorch.maybe_current_level() is not None:
            return found
        if losses.requires_grad and not found.requires_grad:
            raise RehearsalError(
                f"{name(part)}.objective returns losses that do not depend on the weights, so nothing would be "
                "trained; compute them without torch.no_grad() and .detach()."
            )
        if not part.replaces_losses and not connected(found, [losses]):
            raise RehearsalError(
                f"{name(part)}.objective ignores the losses that it is given, so what other parts have added to them "
                "would be lost. Return losses + a term of your own; or, if it is meant to replace them, set "
                "replaces_losses: ClassVar = True."
            )
        return found

    def changed_gradient(self, part: Part, client: Client, g: Params, params: Params) -> Params:
        def hook(g: Params) -> Params:
            return super(Rehearsed, self).changed_gradient(part, client, g, params)

        self._refuse_ignoring(part, "gradient", g, hook)
        return super().changed_gradient(part, client, g, params)

    def taken_step(self, part: Part, client: Client, g: Params, carry: Tree, params: Params) -> tuple[Params, Tree]:
        def hook(g: Params) -> Params:
            return super(Rehearsed, self).taken_step(part, client, g, carry, params)[0]

        self._refuse_ignoring(part, "step", g, hook)
        return super().taken_step(part, client, g, carry, params)

    def _refuse_ignoring(self, part: Part, hook: str, g: Params, call: Any) -> None:
        """Refuse a hook whose result has nothing to do with the gradient it is given, unless it says so."""
        if not self.looks or ours(part) or part.replaces_gradient:
            return
        with torch.enable_grad():
            leaves = {n: t.detach().clone().requires_grad_() for n, t in g.items()}
            found = call(leaves)
        if connected(found, list(leaves.values())):
            return
        # Inside torch.no_grad() nothing is connected; but what uses the gradient changes if that is doubled.
        twice = call(tree_map(lambda t: 2 * t, g))
        if any(not torch.equal(a, b) for a, b in zip(tree_leaves(found), tree_leaves(twice), strict=True)):
            return
        raise RehearsalError(
            f"{name(part)}.{hook} ignores the gradient that it is given, so weight decay and what other parts have "
            "added would be lost. Add the difference that you make, g + client.gradient(there) - "
            "client.gradient(params); or, if it is to replace the gradient, set replaces_gradient: ClassVar = True."
        )

    def uploaded(self, part: Part, client: Client, delta: Params) -> tuple[Tree, Tree]:
        if self.looks and not ours(part) and overrides(part, "update"):
            self._refuse_another_delta(part, client, delta)
        return super().uploaded(part, client, delta)

    def _refuse_another_delta(self, part: Part, client: Client, delta: Params) -> None:
        """Refuse a part whose `update` and `upload` are given different updates, as if they were the same."""
        order = [other for _, other in by_stage(list(enumerate(self.method.parts)))]
        place = next(i for i, other in enumerate(order) if type(other) is type(part))
        before = [name(other) for other in order[:place] if overrides(other, "update")]
        if not before:
            return
        with torch.enable_grad():
            leaves = {n: t.detach().clone().requires_grad_() for n, t in delta.items()}
            found = super().uploaded(part, client, leaves)
        if connected(found, list(leaves.values())):
            raise RehearsalError(
                f"{name(part)}.upload uses its `delta`, the update before any `update` hook, but {name(part)}.update "
                f"was given what {before[-1]}.update returned. Return (update, tree) from `update`, and use that tree "
                "in `upload`, as client.from_update."
            )


def connected(found: Tree, inputs: list[Tensor]) -> bool:
    """Return whether autograd finds a way from some of the inputs to some of the results."""
    outputs = [t for t in tree_leaves(found) if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()]
    if not outputs:
        return False
    ways = torch.autograd.grad(
        outputs, inputs, [torch.ones_like(t) for t in outputs], retain_graph=True, allow_unused=True
    )
    return any(way is not None for way in ways)


class Trial(PlainEngine):
    """One client's round on a few samples: its first and its last local step."""

    def __init__(self, run: Run, program: Program) -> None:
        super().__init__(Rehearsed.of(program), run.device_data)
        self.method, self.padding = run.method, 0
        with torch.no_grad(), full_precision():
            self.inputs = self.prepared(run)

    def prepared(self, run: Run) -> RoundInputs:
        """Return the inputs of a round of one client: of the first cohort, the one with the most samples."""
        plan, state, method = run.plan(0), run.start(), run.bound(0)
        one = [int(run.data.sizes_of(plan.clients).argmax())]
        plan = replace(plan, clients=plan.clients[one], steps=plan.steps[one])
        server = replace(run.server(0, state), cohort=plan.clients, client_weights=run.weights(plan.clients))
        if method.measuring("cohort"):
            sums = self.measure_all(run.inputs(plan, state, None, state.clients), "cohort")
            size = torch.ones((), dtype=torch.float64, device=run.device)
            server = replace(server, totals=Totals(sums, size, server.client_weights.sum(), None, sums))
        received = method.broadcast(state.params, state.parts, server)
        return run.inputs(plan, state, received, state.clients)

    # ---- a few samples, and two steps --------------------------------------------------------------------------
    def steps(self, inputs: RoundInputs, c: int) -> Iterable[int]:
        return sorted({0, int(inputs.filled.steps[c]) - 1})

    def step(self, inputs: RoundInputs, c: int, k: int, state: Tree, given: Tree) -> Tree:
        after = super().step(inputs, c, k, state, given)
        if k == 0 and self.program.looks:  # type: ignore[attr-defined]
            refuse_lasting_momentum(self.program, given, after)
        return after

    def batch(self, client: int, positions: np.ndarray) -> Batch:
        real = positions[:FEW]
        others = np.setdiff1d(np.arange(self.size(client)), real)
        padding = np.resize(others if len(others) else real, self.padding)
        found = super().batch(client, np.concatenate([real, padding]))
        mask = torch.arange(len(found.mask), device=found.mask.device) < len(real)
        return replace(found, mask=mask.to(found.mask.dtype))

    def measure(self, params: Params, given: Tree, client: int, when: str) -> list[Tree]:
        if not self.program.method.measuring(when):
            return [() for _ in self.program.method.parts]
        batch, number = self.batch(client, np.arange(min(FEW, self.size(client)))), torch.zeros_like(given["id"])
        found: list[Tree] = self.program.measure(params, given, batch, when, number)
        return found

    def size(self, client: int) -> int:
        return int(self.data.data.sizes_of(np.array([client]))[0])

    # ---- what comes out ----------------------------------------------------------------------------------------
    def result(self, padding: int = 0, start: Params | None = None, looks: bool = False) -> dict[str, Tree]:
        """Return what the client measures, where it moves, and what it sends and keeps; by part, except for moves."""
        program, inputs = self.program, self.inputs
        if start is not None:
            inputs = replace(inputs, shared={**inputs.shared, "start": start})
        self.padding, self.program = padding, replace(program, looks=looks)  # type: ignore[call-arg]
        try:
            given = self.given(inputs, 0)
            state = self.train(inputs, 0, given)
            early = given["measured"]
            sent = self.conclude(state, int(inputs.filled.clients[0]), given, skip=False)
            own = self.program.own(given) if self.program.using["own"] else {}
        finally:
            self.padding, self.program = 0, program
        training = dict(zip(program.measuring, state.get("measured", ()), strict=True))
        late = [training.get(i, tree) for i, tree in enumerate(given["measured"])]
        moved = tree_sub(state["params"], program.starting(given))
        return {"early": early, "moved": moved, "late": late, "sums": sent.sums[1], "kept": sent.kept, "own": own}

    def find_sums(self) -> None:
        """Find the form of what parts measure in "training", which the training state has to begin with."""
        program, inputs = self.program, self.inputs
        with torch.no_grad(), full_precision():
            given, client = self.given(inputs, 0), int(inputs.filled.clients[0])
            self.begin(given, client)
            k = torch.zeros_like(given["id"])
            batches = [self.batch_at(inputs, client, j) for j in range(inputs.batches.per_step)]
            views, gradient = program.clients(given, k, local=True), program.model.gradient_and_buffers
            gradients = StepGradients(program, given, batches, k, gradient, views)
            _, _, found = gradients.first(program.starting(given), given["tracked"])
        program.sums.update(zip(program.measuring, tree_map(torch.zeros_like, found), strict=True))


def refuse_unrepeatable(trial: Trial, first: dict[str, Tree]) -> None:
    """Refuse hooks that return something else for the same arguments."""
    for hook, _ in differences(trial, first, trial.result(), first):
        raise RehearsalError(
            f"{hook} does not return the same for the same arguments, so runs would not repeat. Hooks must depend on "
            "their arguments alone; draw random numbers from the key: ud.random.normal(client.key, shape)."
        )


def refuse_unmasked(trial: Trial, first: dict[str, Tree]) -> None:
    """Refuse hooks whose result depends on the samples that pad a batch."""
    eps = torch.finfo(trial.program.model.dtype).eps
    nearby = trial.result(start=tree_map(lambda w: w * (1 + 8 * eps), trial.inputs.shared["start"]))
    for hook, far in differences(trial, first, trial.result(PADDING), nearby):
        raise RehearsalError(
            f"{hook} depends on the samples that pad a short batch: with {PADDING} of them, the result is off by "
            f"{100 * far:.2g}%. Multiply what you sum over a batch by batch.mask, and divide by batch.mask.sum() "
            "instead of its length (docs/hooks.md#objective)."
        )


def refuse_lasting_momentum(program: Program, given: Tree, state: Tree) -> None:
    """Refuse rates that train parameters in turns, while the optimizer takes in the gradients of all of them.

    `state` is that after the first step. A parameter that stands still then, but not in the last step, must have no
    velocity by now.
    """
    rating = [part for part in program.method.parts if overrides(part, "rate") and not ours(part)]
    optimizers = [i for i, part in enumerate(program.method.parts) if isinstance(part, Momentum | Optimize)]
    if not rating or not optimizers:
        return
    still = []
    for k in (torch.zeros_like(given["id"]), (given["steps"] - 1).to(given["id"].dtype)):
        clients = with_carries(program.clients(given, k, local=True), state["carry"])
        rates = program.rates(k, clients, state["params"], given)[2]
        still.append({n for n, rate in rates.items() if not bool(rate.any())})
    if len(still[0]) == len(state["params"]):  # a schedule that begins at 0, as PyTorch's may
        return
    for n in sorted(still[0] - still[1]):
        if any(bool(t.any()) for i in optimizers for t in entries(state["carry"][i], n)):
            raise RehearsalError(
                f"{name(rating[0])}.rate is 0 for {n!r} in the first step and not in the last, but its gradients enter "
                "the local optimizer's momentum meanwhile; return zeros for it from `gradient`, too, as long as its "
                "rate is 0."
            )


def entries(tree: Tree, key: str) -> list[Tensor]:
    """Return all tensors below this key in a tree."""
    if not isinstance(tree, dict):
        return [t for child in tree for t in entries(child, key)] if isinstance(tree, list | tuple) else []
    return tree_leaves(tree[key]) if key in tree else [t for child in tree.values() for t in entries(child, key)]


def differences(
    trial: Trial, first: dict[str, Tree], other: dict[str, Tree], nearby: dict[str, Tree]
) -> Iterator[tuple[str, float]]:
    """Yield the users' hooks whose results differ, in the order in which they are called, and by which share.

    `nearby` is the result at weights that differ in their last digits: what rounding may do.
    """
    tolerance = torch.finfo(trial.program.model.dtype).eps ** 0.5
    parts = trial.method.parts

    def far(*path: Any) -> float:
        a, b, c = ([t.double() for t in tree_leaves(_at(tree, path))] for tree in (first, other, nearby))
        shares = [0.0]
        for x, y, z in zip(a, b, c, strict=True):
            moved, noise, size = ((y - x).norm(), (z - x).norm(), torch.maximum(x.norm(), y.norm()))
            if moved > tolerance * size and moved > NOISE * noise:
                shares.append(float(moved / size))
        return max(shares)

    def of_parts(stage: str, hook: str) -> Iterator[tuple[str, float]]:
        for i, part in enumerate(parts):
            if not ours(part) and (share := far(stage, i)):
                yield f"{name(part)}.{hook}", share

    yield from of_parts("early", "measure")
    if share := far("moved"):
        hooks = [f"{name(p)}.{hook}" for p in parts if not ours(p) for hook in IN_STEPS if overrides(p, hook)]
        yield " or ".join(hooks) or f"{name(next(p for p in parts if not ours(p)))}", share
    yield from of_parts("late", "measure")
    yield from of_parts("sums", "upload")
    yield from of_parts("kept", "upload")


def _at(tree: Tree, path: tuple[Any, ...]) -> Tree:
    for key in path:
        tree = tree[key]
    return tree
