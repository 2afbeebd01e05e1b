"""A rehearsal of the model before a run: do its clients train as ordinary PyTorch trains the caller's own module?

Engines call a copy of the module, with other tensors in the place of its weights, traced and for many clients at once.
A module may depend on what gets lost on the way: a closure that has the weight itself, a hook on a parameter, a value
that the forward pass keeps in Python. No list of such idioms is complete. So the engine that will train takes the first
two local steps of the first cohort on a few samples of each client, and one of these clients takes them again with the
caller's own module: called as it is, with `loss.backward()`. Weights, buffers, and then the outputs in evaluation mode
must agree, up to what rounding may do. So must the gradients of the loss alone, which a learning rate or a method that
leaves some weights where they are does not hide.

If they do not, the plain engine is tried, and the plain engine that trains a copy of the module in place
(`functional/in_place.py`). If that differs too, the copy is not the caller's module, and the run is refused.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from undrift.data.dataset import Rows
from undrift.engine.base import Engine, RoundInputs
from undrift.engine.client import Program
from undrift.engine.fallback import Fallback
from undrift.engine.plain import PlainEngine
from undrift.engine.ranked import RankedEngine
from undrift.engine.ranks import ALONE
from undrift.engine.trace import CALLING
from undrift.errors import UndriftError, first_sentence, machine_trouble
from undrift.functional.borrowed import borrowed
from undrift.functional.copying import copy_of, has_factory, leads_to
from undrift.functional.draws import fixed_key
from undrift.functional.generators import seeded
from undrift.functional.in_place import WHY
from undrift.functional.loss_draws import repeating
from undrift.functional.model import Model, Params
from undrift.method.context import Plan
from undrift.random import normal_like
from undrift.training.model_checks import OF_THE_MODEL, relative_distance
from undrift.training.rounds import inputs_of
from undrift.training.run import Run
from undrift.training.state import State
from undrift.tree import Tree, tree_map, tree_unstack

log = logging.getLogger("undrift")
FEW = 3
"""The number of samples of a batch, unless lanes must not pad it or the model needs more."""
STEPS = 2
"""The number of local steps: after the first, weights have moved, and a head of zeros no longer hides the rest."""
ROUNDING = 256
"""How far a tensor of nothing but rounding may move, in the last digits of the largest move."""
NOISE = 50
"""How many times as far as rounding may move a result, an engine may not."""
LOW_TOLERANCE, LOW_NOISE = 0.3, 10
"""By how much the updates of an engine in lower precision may differ from those in the model's own."""
SHORT, LONG, SOME_RATE = 1e-3, 1e-2, 0.01
"""A share of a weight's norm that is a short move, and one that is not; the learning rate in the place of 0."""
COARSE = 0.05
"""What rounding may be of a gradient, and of the largest one, in tf32 and in half precision."""


class Trained(NamedTuple):
    """What two local steps make of one client."""

    params: Params
    buffers: Params


class Off(NamedTuple):
    """The tensor that differs most, and by which share of its size or move."""

    name: str
    share: float
    when: str = ""

    def __str__(self) -> str:
        return f"{self.name} is off by {round(100 * self.share, 1):.3g}%{self.when}"


@dataclass(frozen=True)
class OwnModule:
    """The caller's module, and how undrift calls its copy."""

    module: nn.Module
    model: Model
    """For the plain engine."""
    program: Program
    padded: bool
    """Whether the engine may pad batches."""


class Verdict(NamedTuple):
    """How a model is to be trained."""

    how: str
    """`AS_CHOSEN`, `ON_PLAIN`, `IN_PLACE`, `REFUSED`, or `UNKNOWN` if the comparison failed."""
    why: str = ""


AS_CHOSEN, ON_PLAIN, IN_PLACE, REFUSED, UNKNOWN = "as chosen", "on the plain engine", "in place", "refused", "unknown"


def rehearse_model(run: Run) -> Run:
    """Return the run, on another engine if the one that was chosen does not train the model as PyTorch does.

    Raises `UndriftError` if none does. Of several processes, the first compares.
    """
    own = run.own_module
    if own is None or type(run) is not Run:  # a federation's server has done so, and its nodes do
        return run
    verdict = run.ranks.said(partial(compare_with_pytorch, run, own))
    if verdict.how == REFUSED:
        raise MismatchError(verdict.why)
    if verdict.how == UNKNOWN:
        log.warning("%s", verdict.why)
        run.choices["rehearsal"] = verdict.why
    return run if verdict.how in (AS_CHOSEN, UNKNOWN) else fall_back_to_plain(run, own, verdict)


def compare_with_pytorch(run: Run, own: OwnModule) -> Verdict:
    """Return how to train the model, from a few samples or, if it does not take those, from whole batches."""
    failed: Exception | None = None
    if own.padded or run.choices["engine"] == "plain":  # otherwise lanes have batches of one size
        try:
            return Comparison(run, own, FEW).verdict()
        except Exception as error:
            if machine_trouble(error):
                raise
            failed = error
    try:
        return Comparison(run, own, None).verdict()
    except Exception as error:
        if machine_trouble(error):
            raise
        failed = error
    if KEPT in str(failed):
        return Verdict(
            REFUSED,
            "PyTorch cannot take two steps with this model: its forward pass keeps from one call to the next what has "
            "a gradient through the first. Reset it in forward, as with functional.reset_net(self) or "
            "utils.reset(self) for layers of spiking neurons, or keep it detached.",
        )
    whose = ", which failed" if isinstance(failed, PyTorchError) else ""
    return Verdict(UNKNOWN, f"the model could not be compared with ordinary PyTorch{whose}: {first_sentence(failed)}")


KEPT = "Trying to backward through the graph a second time"
"""Words of torch's error."""


def fall_back_to_plain(run: Run, own: OwnModule, verdict: Verdict) -> Run:
    """Return the run on the plain engine, with the module as the verdict says."""
    log.warning("the run trains on the plain engine: %s", verdict.why)
    model, engine = own.model if verdict.how == ON_PLAIN else own.model.in_place(WHY), run.engine
    if isinstance(engine, Fallback):
        if verdict.how == IN_PLACE:
            engine.plain = partial(plain_engine, run, own, model)
        engine.switch(0, verdict.why)
    else:
        run = replace(run, engine=plain_engine(run, own, model))
    run.choices.update(engine="plain", lanes=1, compile=False, why=verdict.why)
    run.choices.pop("switched", None)  # which says from which round on
    return replace(run, model=model)


def plain_engine(run: Run, own: OwnModule, model: Model) -> PlainEngine:
    """Return the plain engine with this model."""
    return PlainEngine(replace(own.program, model=model), run.device_data)


class MismatchError(UndriftError):
    """A model that undrift would not train as PyTorch does."""


class PyTorchError(Exception):
    """The caller's own module failed in a step of ordinary PyTorch."""


class Comparison:
    """The first two local steps of one client, by several engines and by the caller's own module."""

    def __init__(self, run: Run, own: OwnModule, few: int | None) -> None:
        several = run.ranks.several
        # What clients keep now is not for the run's folder, and other processes are not asked.
        self.run = run = replace(run, files=None, ranks=ALONE, engine=without_ranks(run.engine))
        self.own, self.few, self.several = own, few, several
        self.start = run.start()
        self.inputs = self._inputs()
        sizes = run.data.sizes_of(self.inputs.filled.clients[: self.inputs.cohort])
        self.place = int(sizes.argmax())
        self.low = is_low_precision(run)
        try:
            self.wanted = self.by_pytorch()
            if (move := self._move()) < SHORT:
                self.inputs = self._inputs(move)
                self.wanted = self.by_pytorch()
            self.gradients = self._gradients_by_pytorch()
        except Exception as error:
            if machine_trouble(error):
                raise
            raise PyTorchError(str(error)) from error

    def _inputs(self, move: float = LONG) -> RoundInputs:
        """Return the first round's inputs, of no more clients and samples than it takes.

        Lanes get as many clients as they have, in batches of the usual shape: what they trace now, the run needs. A
        learning rate with which the weights `move` by less than `SHORT` is made larger, since it would hide what
        differs. A warm-up begins with such rates, or with 0.
        """
        run = self.run
        most = run.choices["lanes"] if run.choices["engine"] == "lanes" else 1

        def short(plan: Plan) -> Plan:
            if not len(plan.clients):  # a part's choice; the next may be another
                plan = run.conditions.with_fates(run.plan(0), run.seed)
            some = np.sort(np.argsort(-run.data.sizes_of(plan.clients), kind="stable")[:most])
            return replace(
                plan,
                clients=plan.clients[some],
                steps=np.minimum(plan.steps[some], STEPS),
                lr=plan.lr if move >= SHORT else plan.lr * LONG / move if move else SOME_RATE,
                fates=plan.fates and plan.fates.of(some),
            )

        with torch.no_grad():
            inputs = inputs_of(run, run.bound(0), self.start, short)[0]
        if self.few is None:
            return inputs
        counts = np.minimum(inputs.batches.counts, self.few)
        return replace(inputs, batches=replace(inputs.batches, counts=counts))

    def _move(self) -> float:
        """Return by which share of its norm the weight moves that moves most; NaN counts as far."""
        start, shares = self.inputs.shared["start"], [0.0]
        for name, t in self.wanted.params.items():
            before = start[name].double()
            if before.any():
                shares.append(float(((t.double() - before).norm() / before.norm()).nan_to_num(LONG)))
        return max(shares)

    # ---- training, in several ways --------------------------------------------------------------------------------
    def by_pytorch(self, start: Params | None = None) -> Trained:
        """Return what the caller's own module makes of the client."""
        inputs = self.inputs
        if start is not None:
            inputs = replace(inputs, shared={**inputs.shared, "start": start})
        with self._module() as module, seeded(fixed_key(self.run.device)):
            return self._plainly(self.own.model.in_place(WHY, module), inputs)

    @contextmanager
    def _module(self) -> Iterator[nn.Module]:
        """A context with the caller's own module or, if a function makes it, what that makes now.

        A global name means the latest module that the function has made.
        """
        own, device = self.own, self.run.device
        lent = copy_of(own.module, device) if has_factory(own.module) else own.module
        with CALLING, borrowed(lent, device, own.model.owns_frozen, own.model.module) as module:
            yield module

    def _plainly(self, model: Model, inputs: RoundInputs) -> Trained:
        engine = plain_engine(self.run, self.own, model)
        state = engine.train(inputs, self.place, engine.given(inputs, self.place))
        return Trained(tree_map(torch.clone, state["params"]), tree_map(torch.clone, state.get("statistics", {})))

    def _value(self, model: Model) -> Callable[[Params], Tensor]:
        """Return the loss alone, of a batch of the client's, as a function of the weights."""
        loss, key, tracked = repeating(model, self.run.loss), fixed_key(self.run.device), self.inputs.shared["tracked"]
        client, first = int(self.inputs.filled.clients[self.place]), int(self.inputs.batches.first[self.place])
        batch = plain_engine(self.run, self.own, model).batch_at(self.inputs, client, first)

        def value(weights: Params) -> Tensor:
            x = tree_map(torch.clone, batch.x)  # which a forward pass may write to
            z = model.train(weights, x, key, tree_map(torch.clone, tracked))
            found: Tensor = loss(z, batch.y).mean()
            return found

        return value

    def _gradients(self, model: Model) -> list[Params]:
        """Return the gradient of the loss, at the first weights and near them."""
        value, gradients = self._value(model), []
        for weights in (model.start, model.perturbed()):
            with model.seeding(fixed_key(self.run.device)):
                gradients.append(model.gradient(value, tree_map(torch.clone, weights)))
        return gradients

    def _keeps(self) -> bool:
        """Return whether the loss of the same batch at the same weights is another one the next time.

        Weights after some steps do not tell: on a GPU, the rounding of a backward pass may not repeat.
        """
        losses = []
        for _ in range(2):
            with self._module() as module, torch.no_grad():
                model = self.own.model.in_place(WHY, module)
                with model.seeding(fixed_key(self.run.device)):
                    losses.append(self._value(model)(tree_map(torch.clone, model.start)).double())
        return bool((losses[0] - losses[1]).abs() > self.eps**0.5 * losses[0].abs())

    def _gradients_by_pytorch(self) -> list[Params]:
        with self._module() as module:
            return self._gradients(self.own.model.in_place(WHY, module))

    def by(self, engine: Engine) -> Trained:
        """Return what an engine makes of the client."""
        if isinstance(engine, PlainEngine):
            return self._plainly(engine.program.model, self.inputs)
        after: list[Params] = []
        client = self.inputs.filled.clients[self.place]

        def visit(params: Params, clients: np.ndarray) -> None:  # of lanes, whose memory others will use
            each = zip(tree_unstack(params), clients, strict=True)
            after.extend(tree_map(torch.clone, own) for own, c in each if c == client)

        engine.run(self.inputs, visit)
        names = self.own.model.start.keys()
        return Trained(*({n: t for n, t in after[0].items() if (n in names) == which} for which in (True, False)))

    # ---- what differs ---------------------------------------------------------------------------------------------
    def off(self, engine: Engine, model: Model, alone: Model) -> Off | None:
        """Return what an engine trains otherwise than PyTorch, or evaluates otherwise; None if nothing.

        `model` is the one that it trains, and `alone` the one that the plain engine would train.
        """
        # What a forward pass keeps of weights in evaluation mode must not outlast the next steps. The plain engine
        # calls the module in these; lanes do so only once, while they trace it.
        calls = isinstance(engine, PlainEngine)
        if calls:
            self._evaluated(model)
        trained = self.by(engine)
        if not calls:
            self._evaluated(model)
        for each in (self._training(trained), self._descending(alone)):
            if each:
                return max(each, key=lambda off: off.share)
        return self._evaluation(model)

    def _training(self, trained: Trained) -> list[Off]:
        """Return the tensors that an engine has trained otherwise, by more than rounding explains."""
        off = list(self._different(trained, None))
        if not off or self._keeps():  # which changes from call to call, as rounding does not
            return off
        return list(self._different(trained, self.by_pytorch(self._in_last_digits())))

    def _descending(self, model: Model) -> list[Off]:
        """Return the weights whose gradient is another one. It is the same computation, in the same order."""
        gradients = self._gradients(model.in_own_precision())
        coarse, off = self.low or self.own.model.dtype in (torch.float16, torch.bfloat16), []
        tolerance, rounding = (COARSE, COARSE) if coarse else (self.eps**0.5, ROUNDING * self.eps)
        for mine, theirs in zip(gradients, self.gradients, strict=True):
            sizes = {n: g.double().norm() for n, g in theirs.items()}
            floor = rounding * max(sizes.values(), default=torch.zeros(()))
            for name, size in sizes.items():
                gap = (mine[name].double() - theirs[name].double()).norm()
                if gap > floor and gap > tolerance * size:
                    off.append(Off(f"the gradient of {name!r}", float(gap / torch.maximum(size, gap))))
        return off

    def _different(self, trained: Trained, nearby: Trained | None) -> Iterator[Off]:
        """Yield the tensors that differ by more than rounding explains; `nearby` shows what it may do."""
        tolerance, noise = (LOW_TOLERANCE, LOW_NOISE) if self.low else (self.eps**0.5, NOISE)
        for kind, before in (("params", self.inputs.shared["start"]), ("buffers", self.inputs.shared["tracked"])):
            mine, theirs, near = (getattr(one, kind) if one else {} for one in (trained, self.wanted, nearby))
            moves = {n: (t.double() - before[n].double()).norm() for n, t in theirs.items()}
            floor = ROUNDING * self.eps * max(moves.values(), default=torch.zeros(()))
            for name, wanted in theirs.items():
                gap, size = (mine[name].double() - wanted.double()).norm(), moves[name]
                digits = 8 * self.eps * wanted.double().norm()
                if not (gap > floor and gap > tolerance * size and gap > digits):  # nor NaN in both
                    continue
                if name in near and not gap > noise * (near[name].double() - wanted.double()).norm():
                    continue
                yield Off(repr(name), float(gap / torch.maximum(size, gap)), f" after {STEPS} local steps")

    def _evaluation(self, model: Model) -> Off | None:
        """Return how outputs in evaluation mode differ from those of the caller's own module; None if they do not."""
        with torch.no_grad():
            mine = self._outputs(model, *self._after())
        share = relative_distance(mine, self._outputs_by_pytorch())
        return Off("the output in evaluation mode", share) if share > tolerance(self.run) else None

    def _evaluated(self, model: Model) -> None:
        """Evaluate the first weights."""
        with torch.no_grad():
            self._outputs(model, self.start.params, self.start.tracked)

    def _after(self) -> Trained:
        """Return what the caller's own module has after its steps."""
        return self.wanted._replace(buffers=self.start.tracked | self.wanted.buffers)

    def _outputs(self, model: Model, params: Params, buffers: Params) -> Tree:
        params = tree_map(torch.clone, params)  # which a forward pass may write to
        outputs = model.at(buffers)(params, few_samples(self.run, self.few or FEW))
        # It may be a view of a weight, and the module gets its own weights back.
        return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, outputs)

    def _outputs_by_pytorch(self) -> Tree:
        with torch.no_grad(), self._module() as module:
            return self._outputs(self.own.model.in_place(WHY, module), *self._after())

    @property
    def eps(self) -> float:
        return float(torch.finfo(self.own.model.dtype).eps)

    def _in_last_digits(self) -> Params:
        """Return weights that differ from the first ones in the last digits with which the engine computes."""
        start = self.inputs.shared["start"]
        eps = {True: 2.0**-8 if self.own.model.low else 2.0**-11, False: 8 * self.eps}[self.low]
        drawn = normal_like(fixed_key(self.run.device), start)
        return tree_map(lambda w, z: w * (1 + eps * z), start, drawn)

    # ---- what follows ---------------------------------------------------------------------------------------------
    def verdict(self) -> Verdict:
        """Return the first way in which the model is trained as PyTorch trains it."""
        run, model = self.run, self.own.model
        off = self.off(run.engine, run.model, model)
        if not off:
            return Verdict(AS_CHOSEN)
        if run.choices["engine"] == "lanes" and self._trains(model):
            if isinstance(run.engine, Fallback) and run.engine.plain is None:
                why = f'engine="lanes" does not train this model as PyTorch does: {off}. Use "auto".'
                return Verdict(REFUSED, why)
            return Verdict(ON_PLAIN, f"in lanes {off}")
        if model.low or self.several or not self._trains(model.in_place(WHY)):
            return Verdict(REFUSED, self._sentence(off))
        return Verdict(IN_PLACE, f"{WHY} ({off})")

    def _trains(self, model: Model) -> bool:
        """Return whether the plain engine trains this model as PyTorch does."""
        try:
            return not self.off(plain_engine(self.run, self.own, model), model, model)
        except Exception as error:
            if machine_trouble(error):
                raise
            return False

    def _sentence(self, off: Off) -> str:
        """Return what is wrong, why perhaps, and what to change."""
        return f"undrift would not train this model as PyTorch does: {off}. {self._cause()}"

    def _cause(self) -> str:
        """Return the likely cause."""
        module, run = self.own.module, self.run
        parts = {id(x) for x in (*module.modules(), *module.parameters(), *module.buffers())}
        if leads_to(run.loss, parts, everywhere=True):
            return OF_THE_MODEL
        again = relative_distance(self._outputs_by_pytorch(), self._outputs_by_pytorch())
        if self._keeps() or again > tolerance(run):
            return (
                "Two trials with PyTorch alone differ as well: the forward pass or the loss keeps something in Python "
                "from one call to the next (a counter, a cache). Keep it in a buffer, or compute it anew."
            )
        for name, layer in module.named_modules():
            if leads_to(type(layer).forward, parts, everywhere=True):
                return f"The forward of {type(layer).__name__} uses your module by a global name; use self instead."
            for attribute, x in vars(layer).items():
                where = f"Its attribute {f'{name}.{attribute}'.lstrip('.')!r}"
                if isinstance(x, weakref.ReferenceType):
                    return f"{where} is a weak reference, which still leads to your module in a copy of it. {FACTORY}"
                held = attribute in ("_modules", "_parameters", "_buffers")
                if not held and leads_to(x, parts, everywhere=True) and not leads_to(x, parts):
                    return f"{where} uses your module by a global name, also in a copy of it. {FACTORY}"
        return (
            "It may reach a weight in another way than by the name under which a module holds it, or keep something in "
            f"Python from one call to the next. {FACTORY}"
        )


FACTORY = "Write it as a method that uses self; or give a function that makes the model, model=lambda: Net(…)."


def few_outputs(run: Run, state: State) -> Tree:
    """Return the model's outputs for a few held-out samples, as evaluation has them; None if they are not compared."""
    if run.own_module is None or not (run.test or run.validation):
        return None
    with torch.no_grad():
        return run.model.at(state.tracked)(state.params, few_samples(run))


def warn_of_another_evaluation(run: Run, outputs: Tree, trained: nn.Module) -> None:
    """Warn if the trained module, called as its user calls it, has other outputs than these."""
    if outputs is None:
        return
    try:
        with torch.no_grad(), borrowed(trained, run.device, frozen=True):  # observers record in evaluation mode, too
            share = relative_distance(outputs, run.model.called(trained, few_samples(run)))
    except Exception as error:  # whatever a user's module may raise
        log.warning("result.model fails on samples that undrift has evaluated it on: %s", first_sentence(error))
        return
    if share > tolerance(run):
        log.warning(
            "result.model's outputs in evaluation mode differ by %.2g%% from those that the history's last loss is "
            "about; its forward pass may keep something in Python from one call to the next.", 100 * share,
        )  # fmt: skip


def few_samples(run: Run, few: int = FEW) -> Tree:
    """Return a few samples, of the test set if there is one."""
    rows = run.test or run.validation or run.device_data.place(Rows(run.data.store, run.data.index, run.data.take))
    x: Tree = next(iter(replace(rows, index=rows.index[:few]).batches(few)))[0]
    return tree_map(torch.clone, x)  # which a forward pass may write to


def without_ranks(engine: Engine) -> Engine:
    """Return the engine of this process alone."""
    inner = engine.engine if isinstance(engine, Fallback) else engine
    return inner.engine if isinstance(inner, RankedEngine) else engine


def is_low_precision(run: Run) -> bool:
    """Return whether the run computes in a lower precision than that of its weights."""
    return run.model.low or run.choices["precision"] == "tf32"


def tolerance(run: Run) -> float:
    """Return by which share outputs may differ."""
    return LOW_TOLERANCE if is_low_precision(run) else 10 * float(torch.finfo(run.model.dtype).eps) ** 0.5
