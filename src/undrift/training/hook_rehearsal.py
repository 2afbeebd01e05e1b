"""A rehearsal of one client's round before a run, which finds hooks that would be wrong without a word.

Lanes pad short batches and trace hooks once, so some mistakes change the result and raise nothing: a sum over a batch
that forgets `batch.mask`, a loss that is cut off from the weights, a hook that ignores what the parts before it have
done. Here one client takes its first and its last local step on a few samples, eagerly and with ordinary autograd, and
again with padding. If the results differ, it takes them as they were once more, and at weights that differ in their
last digits, to see what rounding does. Whatever differs otherwise depends on the padding, or on something that is not
the client's.

During a run in lanes, the same is repeated a few times: if its result is another one by then, a hook depends on a value
of Python that has changed since it was traced.

Only methods with hooks of the user's own are rehearsed; undrift's own parts are tested.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from undrift.engine.base import RoundInputs
from undrift.engine.client import Program, with_carries
from undrift.engine.gradients import StepGradients
from undrift.engine.plain import PlainEngine
from undrift.engine.ranks import ALONE
from undrift.engine.trace import CALLING
from undrift.errors import UndriftError, listed
from undrift.functional.draws import fixed_key
from undrift.functional.model import Params
from undrift.method.calls import HookError, HookFailureError, name, ours
from undrift.method.context import Batch, Client, Totals
from undrift.method.part import Part, by_stage
from undrift.method.rules import overrides
from undrift.method.work import Momentum, Optimize
from undrift.random import normal_like
from undrift.training.run import Run
from undrift.training.torch_flags import full_precision
from undrift.tree import Tree, tree_leaves, tree_map, tree_sub, tree_to

log = logging.getLogger("undrift")

FEW = 3
"""The number of samples of a batch, unless the hooks or the model need more."""
PADDING = 2
"""The number of samples that pad it. They are others than its own, so that a maximum notices them too."""
NOISE = 50
"""How many times as far as rounding may move a result, padding may not."""
ROUNDING = 256
"""How large a tensor of nothing but rounding may be, as a multiple of the others of its dict in their last digit."""
LEADING = (("logits", "objective", "gradient", "step"), ("begin", "prepare", "carry", "rate", "project"))
"""The hooks whose result decides where local steps lead: those that see a batch or its gradients, and the others."""


def find_sums(run: Run, program: Program) -> None:
    """Complete a program whose parts measure in "training": find the form of their sums, with which clients begin."""
    if program.measuring:
        HookTrial(replace(run, ranks=ALONE), program, None).find_sums()


def rehearse_hooks(run: Run, program: Program, lanes: bool, padded: bool) -> Rehearsal | None:
    """Rehearse a round of one client. Raises `UndriftError` if a hook of the user's would be wrong without a word.

    Args:
        run: The run.
        program: What its clients do, with the model as the engine trains it.
        lanes: Whether hooks will be traced.
        padded: Whether the engine may pad batches.

    Returns:
        What can repeat it during the run; None if hooks are not traced, or if they or the model cannot be tried.
    """
    for few in (FEW, None):
        try:
            trial = HookTrial(replace(run, ranks=ALONE), program, few)
            with torch.no_grad(), full_precision():
                first = trial.result(looks=True)
                refuse_impure_hooks(trial, first, PADDING if padded else 0)
            warn_of_frozen(run, trial)
            return Rehearsal(trial, tree_to(first, torch.device("cpu"))) if lanes else None
        except (HookError, RehearsalError) as error:
            if not isinstance(error, HookFailureError):
                raise
            failed: Exception = error
        except Exception as error:
            failed = error
    # Training will tell; it may be that the model does not take one client's samples alone, for example.
    log.info("the rehearsal of the method's hooks was given up: %s", failed)
    return None


@dataclass
class Rehearsal:
    """The rehearsal of a run whose hooks are traced, to be repeated while it goes on."""

    trial: HookTrial
    first: dict[str, Tree]
    """What came out of it before the run, in the host's memory."""
    rounds: int = 0

    def due(self, last: bool) -> bool:
        """Count a round, and return whether to repeat the rehearsal after it: after rounds 1, 32, 1024, … and the last.

        Each repetition takes about 1% of 30 rounds of a small model.
        """
        self.rounds += 1
        return last or self.rounds in (1, 2**5, 2**10, 2**15, 2**20)

    def repeat(self) -> None:
        """Raise `UndriftError` if the result is another one by now."""
        with CALLING, torch.no_grad(), full_precision():
            now = tree_to(self.trial.result(), torch.device("cpu"))
        for hook, _ in differences(self.trial, self.first, now, self.first):
            raise RehearsalError(
                f"{hook} depends on a value of Python that has changed during the run (a variable, an attribute, a "
                "list), but lanes trace hooks once and keep the first value. Pass it as a tensor: from `broadcast` as "
                "client.received, in the client's state, or as a number with a schedule; client.round has the round."
            )


class RehearsalError(UndriftError):
    """A hook that would be wrong without a word."""


@dataclass(frozen=True)
class RehearsedProgram(Program):
    """A client's program that looks at what users' hooks make of what they are given."""

    looks: bool = False
    seen: set[tuple[type, str]] = field(default_factory=set, compare=False)
    """The hooks that have been looked at."""

    @classmethod
    def of(cls, program: Program, **more: Any) -> RehearsedProgram:
        known = {entry.name: getattr(program, entry.name) for entry in fields(Program)}
        return cls(**known | {"model": program.model.in_own_precision()} | more)

    def looks_at(self, part: Part, hook: str) -> bool:
        """Return whether to look at this call of a hook: at the first one, outside of `client.gradients`."""
        which = (type(part), hook)
        if not self.looks or ours(part) or which in self.seen or in_transform():
            return False
        self.seen.add(which)
        return True

    def changed_losses(
        self, part: Part, client: Client, losses: Tensor, z: Tensor, batch: Batch, params: Params
    ) -> Tensor:
        changed = super().changed_losses(part, client, losses, z, batch, params)
        if not self.looks_at(part, "objective"):
            return changed
        if losses.requires_grad and not changed.requires_grad:
            raise RehearsalError(
                f"{name(part)}.objective returns losses that do not depend on the weights, so nothing would be "
                "trained; compute them without torch.no_grad() and .detach()."
            )
        if losses.requires_grad and not part.replaces_losses and not is_connected(changed, [losses]):
            raise RehearsalError(
                f"{name(part)}.objective ignores the losses that it is given, or detaches them, so they would not be "
                "trained, nor what other parts have added to them. Return losses + a term of your own; or, if it is "
                "meant to replace them, set replaces_losses: ClassVar = True."
            )
        return changed

    def changed_gradient(self, part: Part, client: Client, g: Params, params: Params) -> Params:
        def hook(client: Client, g: Params) -> Params:
            return super(RehearsedProgram, self).changed_gradient(part, client, g, params)

        self._refuse_ignoring(part, "gradient", client, g, hook)
        return super().changed_gradient(part, client, g, params)

    def taken_step(self, part: Part, client: Client, g: Params, carry: Tree, params: Params) -> tuple[Params, Tree]:
        def hook(client: Client, g: Params) -> Params:
            return super(RehearsedProgram, self).taken_step(part, client, g, carry, params)[0]

        self._refuse_ignoring(part, "step", client, g, hook)
        taken = super().taken_step(part, client, g, carry, params)
        rates = [rate.to(client.lr.dtype) for rate in client.rates.values()]
        if self.looks and not ours(part) and not all(bool((rate == client.lr).all()) for rate in rates):
            other = replace(client, lr=2 * client.lr + 1)
            if not trees_equal(taken[1], super().taken_step(part, other, g, carry, params)[1]):
                raise RehearsalError(
                    f"{name(part)}.step takes client.lr for the rate of its own weights, which leaves out the factors "
                    "of `rate` hooks, step schedules and parameter groups; take client.rates[name], by parameter."
                )
        return taken

    def _refuse_ignoring(self, part: Part, hook: str, client: Client, g: Params, call: Any) -> None:
        """Refuse a hook whose result has nothing to do with the gradient it is given, unless it says so.

        To choose where `client.gradient` takes another is not enough: that does not have what other parts have added.
        """
        if part.replaces_gradient or not self.looks_at(part, hook):
            return
        taken = RecordedGradients(client.gradients_of)
        client = replace(client, gradients_of=taken)
        with torch.enable_grad():
            leaves = {n: t.detach().clone().requires_grad_() for n, t in g.items()}
            result = call(client, leaves)
        if is_connected(result, list(leaves.values())):
            return
        # Inside torch.no_grad() nothing is connected; but what uses the gradient returns something else for another.
        taken.again()
        if not trees_equal(result, call(client, tree_map(lambda t: 1 - 2 * t, g))):
            return
        raise RehearsalError(
            f"{name(part)}.{hook} ignores the gradient that it is given, so weight decay and what other parts have "
            "added would be lost. Add the difference that you make, g + client.gradient(there) - "
            "client.gradient(params); or, if it is to replace the gradient, set replaces_gradient: ClassVar = True."
        )

    def uploaded(self, part: Part, client: Client, delta: Params) -> tuple[Tree, Tree]:
        if overrides(part, "update") and self.looks_at(part, "upload"):
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
            result = super().uploaded(part, client, leaves)
        if is_connected(result, list(leaves.values())):
            raise RehearsalError(
                f"{name(part)}.upload uses its `delta`, the update before any `update` hook, but {name(part)}.update "
                f"was given what {before[-1]}.update returned. Return (update, tree) from `update`, and use that tree "
                "in `upload`, as client.from_update. (The update before all hooks is client.final - client.begun.)"
            )


class RecordedGradients:
    """The gradients that a hook has asked for, which it gets again when it is called again, whatever it asks for."""

    def __init__(self, gradients: Any) -> None:
        self.gradients, self.found, self.repeats = gradients, [], False  # type: Any, list[Any], bool

    def again(self) -> None:
        self.repeats = True

    def _next(self, kind: str, *where: Any) -> Any:
        if self.repeats:
            return self.found.pop(0)
        self.found.append(getattr(self.gradients, kind)(*where))
        return self.found[-1]

    def gradient(self, weights: Tree, batch: int) -> Tree:
        return self._next("gradient", weights, batch)

    def gradient_and_buffers(self, weights: Tree, buffers: Tree, batch: int) -> tuple[Tree, Tree]:
        result: tuple[Tree, Tree] = self._next("gradient_and_buffers", weights, buffers, batch)
        return result

    def per_sample(self, weights: Tree, batch: int) -> Tree:
        return self._next("per_sample", weights, batch)


def in_transform() -> bool:
    """Return whether this is inside a transform of `torch.func`, where ordinary autograd finds nothing."""
    return peek_interpreter_stack() is not None


def trees_equal(a: Tree, b: Tree) -> bool:
    """Return whether two trees of the same form are equal."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs)


def is_connected(results: Tree, inputs: list[Tensor]) -> bool:
    """Return whether autograd finds a way from some of the inputs to some of the results."""
    outputs = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()]
    if not outputs:
        return False
    ways = torch.autograd.grad(
        outputs, inputs, [torch.ones_like(t) for t in outputs], retain_graph=True, allow_unused=True
    )
    return any(way is not None for way in ways)


class HookTrial(PlainEngine):
    """One client's round on a few samples: its first and its last local step."""

    def __init__(self, run: Run, program: Program, few: int | None) -> None:
        """`few` is the number of samples of a batch; None takes whole ones, of which none is short."""
        super().__init__(RehearsedProgram.of(program), run.device_data)
        self.method, self.few, self.padding = run.method, few, 0
        self.whole = run.local.widest(run.data.size_counts[0])
        with torch.no_grad(), full_precision():
            self.inputs = self.prepared(run)

    def prepared(self, run: Run) -> RoundInputs:
        """Return the inputs of a round of one client: of the first cohort, the one with the most samples."""
        state, method = run.start(), run.bound(0)
        server, plan, parts = run.server(0, state), run.plan(0), state.parts
        if method.overriding("plan"):
            planned, parts = method.plan(plan, parts, server)
            planned = run.checked(planned, 0)
            plan = planned if len(planned.clients) else plan
        one = [int(run.data.sizes_of(plan.clients).argmax())]
        plan = replace(plan, clients=plan.clients[one], steps=plan.steps[one])
        server = replace(server, cohort=plan.clients, client_weights=run.weights(plan.clients))
        if method.measuring("cohort"):
            sums = self.measure_all(run.inputs(plan, state, None, state.clients), "cohort")
            size = torch.ones((), dtype=torch.float64, device=run.device)
            server = replace(server, totals=Totals(sums, size, server.client_weights.sum(), None, sums))
        received = method.broadcast(state.params, parts, server)
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
        everyone = np.arange(self.size(client))
        if self.few is None and len(positions) < self.whole:  # as long as lanes pad it
            positions = np.concatenate([positions, np.setdiff1d(everyone, positions)])[: self.whole]
        real = positions[: self.few]
        others = np.setdiff1d(everyone, real)
        padding = np.resize(others if len(others) else real, self.padding)
        padded = super().batch(client, np.concatenate([real, padding]))
        mask = torch.arange(len(padded.mask), device=padded.mask.device) < len(real)
        return replace(padded, mask=mask.to(padded.mask.dtype))

    def measure(self, params: Params, given: Tree, client: int, when: str) -> list[Tree]:
        if not self.program.method.measuring(when):
            return [() for _ in self.program.method.parts]
        most = min(self.size(client), self.data.measure_width)
        batch, number = self.batch(client, np.arange(most)[: self.few]), torch.zeros_like(given["id"])
        measured: list[Tree] = self.program.measure(params, given, batch, when, number)
        return measured

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
            client, given = int(inputs.filled.clients[0]), self.given(inputs, 0)
            before = {name: value for name, value in given.items() if name != "received"}
            passes = {when: self.measure(given["start"], before, client, when) for when in ("cohort", "finish")}
            with repeatable(self.data.device):
                state = self.train(inputs, 0, given)
            early = given["measured"]
            sent = self.conclude(state, client, given, skip=False)
            own = self.program.own(given) if self.program.using["own"] else {}
        finally:
            self.padding, self.program = 0, program
        training = dict(zip(program.measuring, state.get("measured", ()), strict=True))
        late = [training.get(i, tree) for i, tree in enumerate(given["measured"])]
        moved = tree_sub(state["params"], program.starting(given))
        result = {"early": early, "moved": moved, "late": late, "sums": sent.sums[1], "kept": sent.kept, "own": own}
        return passes | result

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
            _, _, sums = gradients.first(program.starting(given), given["tracked"])
        program.sums.update(zip(program.measuring, tree_map(torch.zeros_like, sums), strict=True))


def repeatable(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which cuDNN repeats its results to the bit."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    cudnn = torch.backends.cudnn
    flags: contextlib.AbstractContextManager[Any] = cudnn.flags(
        enabled=cudnn.enabled, deterministic=True, allow_tf32=cudnn.allow_tf32
    )
    return flags


def refuse_impure_hooks(trial: HookTrial, first: dict[str, Tree], padding: int) -> None:
    """Refuse hooks that return something else for the same arguments, or for a batch with this much padding."""
    again = trial.result(padding)
    if next(differences(trial, first, again, first), None) is None:
        return
    for hook, _ in differences(trial, first, trial.result(), first):
        raise RehearsalError(
            f"{hook} does not return the same for the same arguments, so runs would not repeat. Hooks must depend on "
            "their arguments alone; draw random numbers from the key: ud.random.normal(client.key, shape)."
        )
    nearby = trial.result(start=in_last_digits(trial.inputs.shared["start"]))
    for hook, far in differences(trial, first, again, nearby):
        how = "has another shape" if far == math.inf else f"is off by {100 * far:.2g}%"
        raise RehearsalError(
            f"{hook} depends on the samples that pad a short batch: with {padding} of them, the result {how}. Multiply "
            "what you sum over a batch by batch.mask, and divide by batch.mask.sum() instead of its length "
            "(docs/hooks.md#objective)."
        )


def in_last_digits(params: Params) -> Params:
    """Return weights that differ from these in their last digits."""
    drawn = normal_like(fixed_key(next(iter(params.values())).device), params)
    return tree_map(lambda w, z: w * (1 + 8 * torch.finfo(w.dtype).eps * z), params, drawn)


def refuse_lasting_momentum(program: Program, given: Tree, state: Tree) -> None:
    """Refuse rates that train parameters in turns, while the optimizer takes in the gradients of all of them.

    `state` is that after the first step. A parameter that stands still then, but not in the last step, must have no
    velocity by now.
    """
    rating = [part for part in program.method.parts if overrides(part, "rate") and not ours(part)]
    optimizers = [i for i, part in enumerate(program.method.parts) if isinstance(part, Momentum | Optimize)]
    if not rating or not optimizers:
        return
    first, last = (frozen_parameters(program, given, state, k) for k in first_and_last_step(given))
    if len(first) == len(state["params"]):  # a schedule that begins at 0, as PyTorch's may
        return
    for n in sorted(first - last):
        if any(bool(t.any()) for i in optimizers for t in tensors_below(state["carry"][i], n)):
            raise RehearsalError(
                f"{name(rating[0])}.rate is 0 for {n!r} in the first step and not in the last, but its gradients enter "
                "the local optimizer's momentum meanwhile; return zeros for it from `gradient`, too, as long as its "
                "rate is 0."
            )


def first_and_last_step(given: Tree) -> tuple[Tensor, Tensor]:
    """Return the indices of a client's first and last local step."""
    return torch.zeros_like(given["id"]), (given["steps"] - 1).to(given["id"].dtype)


def frozen_parameters(program: Program, given: Tree, state: Tree, k: Tensor) -> set[str]:
    """Return the parameters whose rate is 0 in step `k`."""
    clients = with_carries(program.clients(given, k, local=True), state.get("carry", []))
    rates = program.rates(k, clients, state["params"], given)[2]
    return {n for n, rate in rates.items() if not bool(rate.any())}


def warn_of_frozen(run: Run, trial: HookTrial) -> None:
    """Warn if a user's `rate` freezes parameters even where clients' own models are tuned, for `tuned_*` alone."""
    program, own = trial.program, run.data.client_test
    rating = [part for part in program.method.parts if overrides(part, "rate") and not ours(part)]
    if not rating or own is None or not len(own.index):
        return
    with torch.no_grad():
        given = trial.given(trial.inputs, 0)
        trial.begin(given, int(trial.inputs.filled.clients[0]))
        given["tuning"] = torch.ones_like(given["tuning"])
        state = program.initial(given)
        still = set.intersection(*(frozen_parameters(program, given, state, k) for k in first_and_last_step(given)))
    if 0 < len(still) < len(state["params"]):
        log.warning(
            "%s.rate is 0 for %s, also in the epoch before the history's tuned_* columns; if it is meant to be tuned "
            "there, return 1 where client.tuning is true.", name(rating[0]), listed(sorted(still)),
        )  # fmt: skip


def tensors_below(tree: Tree, key: str) -> list[Tensor]:
    """Return all tensors below this key in a tree."""
    if not isinstance(tree, dict):
        return [t for child in tree for t in tensors_below(child, key)] if isinstance(tree, list | tuple) else []
    return tree_leaves(tree[key]) if key in tree else [t for child in tree.values() for t in tensors_below(child, key)]


def differences(
    trial: HookTrial, first: dict[str, Tree], other: dict[str, Tree], nearby: dict[str, Tree]
) -> Iterator[tuple[str, float]]:
    """Yield the users' hooks whose results differ, in the order in which they are called, and by which share.

    `nearby` is the result at weights that differ in their last digits: what rounding may do. Of a dict by parameter,
    some tensors may be nothing but rounding, such as the gradient of a bias before a norm; the others say how large
    that may be.
    """
    eps = torch.finfo(trial.program.model.dtype).eps
    parts, tolerance, rounding = trial.method.parts, eps**0.5, min(ROUNDING * eps, eps**0.5)

    def far(*path: Any) -> float:
        shares = [0.0]
        each = (parameter_groups(_at(tree, path), trial.program.model.start) for tree in (first, other, nearby))
        for group in zip(*each, strict=True):
            before, after, noise = ([t.double() for t in leaves] for leaves in group)
            if [t.shape for t in before] != [t.shape for t in after]:
                return math.inf
            sizes = [torch.maximum(x.norm(), y.norm()) for x, y in zip(before, after, strict=True)]
            floor = rounding * max(sizes, default=torch.zeros(()))
            for x, y, z, size in zip(before, after, noise, sizes, strict=True):
                moved = (y - x).norm()
                if moved > tolerance * size and moved > floor and moved > NOISE * (z - x).norm():
                    shares.append(float(moved / size))
        return max(shares)

    def of_parts(stage: str, hook: str) -> Iterator[tuple[str, float]]:
        for i, part in enumerate(parts):
            if not ours(part) and (share := far(stage, i)):
                yield f"{name(part)}.{hook}", share

    for when in ("cohort", "finish", "early"):
        yield from of_parts(when, "measure")
    if share := far("moved"):
        of_users = [part for part in parts if not ours(part)]
        named = [[f"{name(p)}.{hook}" for p in of_users for hook in which if overrides(p, hook)] for which in LEADING]
        yield " or ".join(next(filter(None, named), [name(of_users[0])])), share
    yield from of_parts("late", "measure")
    yield from of_parts("sums", "upload")
    yield from of_parts("kept", "upload")
    if share := far("own"):
        yield " or ".join(f"{name(p)}.own" for p in parts if overrides(p, "own")), share


def parameter_groups(tree: Tree, params: Params) -> Iterator[list[Tensor]]:
    """Yield the tensors of a tree: those of a dict by parameter together, all others one by one."""
    if isinstance(tree, dict) and tree.keys() == params.keys():
        yield tree_leaves(tree)
    elif isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from parameter_groups(child, params)
    else:
        yield [tree]


def _at(tree: Tree, path: tuple[Any, ...]) -> Tree:
    for key in path:
        tree = tree[key]
    return tree
