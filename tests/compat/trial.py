"""Carries out a case: three engines, the hand-written loop, and what must hold of any run."""

from __future__ import annotations

import logging
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import undrift as ud
from tests.compat import hand
from tests.compat.case import Case

ENGINES = ("auto", "lanes", "plain")


@dataclass
class Attempt:
    """One call of `ud.train`."""

    outcome: str
    """"trained", "refused" (an `UndriftError`), or "traceback" (any other exception)."""
    says: str = ""
    """The sentence, or the exception."""
    detail: str = ""
    choices: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    """The trained module's parameters and buffers."""
    touched: list[str] = field(default_factory=list)
    """What of the caller's own module the run has changed."""
    faults: list[str] = field(default_factory=list)
    """What is wrong with the trained module, apart from its weights."""
    warned: list[str] = field(default_factory=list)
    """What undrift has warned of."""
    loss: float | None = None
    """The history's last loss."""


def attempt(case: Case, seed: int = 0, noise: int = 0, **options: Any) -> Attempt:
    """Train a new module. `noise` seeds the global generators, on which nothing may depend."""
    local = options.pop("local", {})
    named = {"output": case.output} if case.output else {}
    with tempfile.TemporaryDirectory(prefix="compat-") as folder, warnings_of("undrift") as warned:
        try:
            data, module = case.data(), case.module()
            before, modes = hand.tensors(module, caches=True), modes_of(module)
            for seed_generator in (torch.manual_seed, random.seed, np.random.seed):
                seed_generator(noise)
            given = {"rounds": hand.ROUNDS, "local": case.work(**local), "loss": case.criterion(module), "seed": seed,
                     "device": "cpu", **named, **case.options, **options}  # fmt: skip
            if case.saved:
                given["out"] = f"{folder}/run"
            method = case.method or "FedAvg()"
            result = ud.train(case.function() if case.factory else module, data, method, **given)
            again = ud.train(module, data, method, **given, resume=True).model if case.saved else result.model
        except ud.UndriftError as error:
            return Attempt("refused", str(error), traceback.format_exc())
        except Exception as error:  # what the suite looks for
            return Attempt("traceback", brief(error), traceback.format_exc())
    if result.stopped:
        return Attempt("traceback", f"stopped: {result.stopped}")
    after = hand.tensors(module, caches=True)
    touched = [name for name, t in before.items() if name not in after or not same(t, after[name])]
    touched += [f"the mode of {name or 'the module'}" for name, mode in modes_of(module).items() if mode != modes[name]]
    # In training mode, as that of the hand-written loop: some layers merge weights for evaluation.
    state, other = (hand.tensors(in_training(m)) for m in (result.model, again))
    if apart(state, other) != 0:
        return Attempt("traceback", "read again, the model is another")
    faults, loss = faults_of(case, module, result), result.history[-1].get("loss")
    return Attempt("trained", "", "", result.choices, state, touched, faults, warned, loss)


def in_training(module: nn.Module) -> nn.Module:
    with suppress(NotImplementedError):  # exported programs have no modes
        module.train()
    return module


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """A context that collects what a logger warns of."""
    said: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, logger = Collects(logging.WARNING), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def faults_of(case: Case, module: nn.Module, result: ud.Result) -> list[str]:
    """What the trained module has otherwise than the caller's, and whether the history is about its outputs."""
    if not case.by_hand:
        return []
    faults = []
    if shape_of(module) != shape_of(result.model):
        faults.append("result.model has other parameters than the module")
    if isinstance(result.history[-1].get("loss"), float) and case.held_out():
        said, loss = result.history[-1]["loss"], hand.evaluate(case, result.model)
        if not abs(loss - said) <= max(1e-6, 10 * case.limit(module)) * max(1.0, abs(loss)):
            faults.append(f"the history's loss is {said:.4g}, that of result.model {loss:.4g}")
    return faults


def shape_of(module: nn.Module) -> list[tuple[str, int, bool, bool, bool]]:
    """The names of all parameters, which of them are the same, and whether they are leaves that train."""
    named = {unwrap(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    first: dict[int, int] = {}
    return [
        (name, first.setdefault(id(p), i), isinstance(p, nn.Parameter), p.is_leaf, p.requires_grad)
        for i, (name, p) in enumerate(named.items())
    ]


def brief(error: Exception) -> str:
    """An exception in a line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def modes_of(module: nn.Module) -> dict[str, bool]:
    return {name: layer.training for name, layer in module.named_modules()}


@dataclass
class Finding:
    """What a case shows."""

    outcome: str
    """"lanes" or "plain", the engine that auto chose, or "refused", "torch" (which refuses it too), "traceback",
    "wrong"."""
    why: str = ""
    """Why auto chose that engine."""
    lanes: int | None = None
    lanes_plain: float | None = None
    """The largest difference between weights trained in lanes and by the plain engine."""
    hand: float | None = None
    """The largest difference between weights trained by any engine and by the hand-written loop."""
    bound: float | None = None
    """What rounding explains."""
    moved: float | None = None
    """The largest change of a weight in training."""
    repeats: bool | None = None
    """Whether a second run gave the same bits, with other global generators."""
    drawn: float | None = None
    """The largest difference between runs that differ in their draws alone."""
    engines: dict[str, str] = field(default_factory=dict)
    """What came of each engine when it was asked for."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    detail: str = ""
    """Tracebacks, for the log."""


def carry_out(case: Case) -> Finding:
    """Train it in every way, and compare."""
    began = time.perf_counter()
    try:
        case.module()
    except Exception as error:  # the case is written wrongly, or its library has changed
        return Finding("traceback", problems=[f"cannot be built: {brief(error)}"], detail=traceback.format_exc())
    tried = {engine: attempt(case, noise=i, engine=engine) for i, engine in enumerate(ENGINES)}
    found = Finding(outcome=tried["auto"].choices.get("engine", tried["auto"].outcome))
    found.engines = {engine: t.outcome + (f": {t.says}" if t.says else "") for engine, t in tried.items()}
    found.detail = "\n".join(t.detail for t in tried.values() if t.detail)
    if any(t.outcome == "trained" for t in tried.values()):
        compare(case, found, tried)
    conclude(case, found, tried)
    found.seconds = round(time.perf_counter() - began, 2)
    return found


def compare(case: Case, found: Finding, tried: dict[str, Attempt]) -> None:
    """Fill in the differences, and say which of them are too large."""
    trained = {engine: t.state for engine, t in tried.items() if t.outcome == "trained"}
    start = case.module()
    bound = found.bound = case.limit(start)
    begin = {name: p.detach() for name, p in start.named_parameters() if p.requires_grad and not is_lazy(p)}
    if begin:  # what is lazy has no weights before
        found.moved = max(apart(begin, {name: unwrapped(state)[name] for name in unwrapped(begin)})
                          for state in trained.values())  # fmt: skip
    found.lanes, found.why = tried["auto"].choices.get("lanes"), tried["auto"].choices.get("why", "")
    if found.moved is not None and found.moved <= 10 * bound:
        found.problems.append(f"hardly trains: the largest change of a weight is {found.moved:.1e}")
    if {"lanes", "plain"} <= trained.keys():
        found.lanes_plain = apart(trained["lanes"], trained["plain"])
        if found.lanes_plain > bound:
            found.problems.append(f"lanes and plain differ by {found.lanes_plain:.1e}")
    chosen = tried["auto"].choices.get("engine", "")
    if "auto" in trained and chosen in trained:
        found.repeats = apart(trained["auto"], trained[chosen]) == 0
        if not found.repeats:
            found.problems.append("two runs with one seed differ")
    if case.by_hand:
        try:
            wanted = hand.simulate(case)
        except Exception as error:
            found.problems.append(f"the hand-written loop fails: {brief(error)}")
            found.detail += traceback.format_exc()
        else:
            gaps = {engine: apart(state, wanted) for engine, state in trained.items()}
            found.hand = max(gaps.values())
            found.problems += [f"{e} differs from the hand loop by {gap:.1e}" for e, gap in gaps.items() if gap > bound]
            if case.held_out() and not found.problems:
                hand.put(start.train(), wanted)
                check_loss(hand.evaluate(case, start), found, tried)
    if case.draws and "auto" in trained:
        check_draws(case, found)
    for engine, t in tried.items():
        if t.touched:
            found.problems.append(f"{engine} changes the caller's module ({', '.join(t.touched[:3])})")
        found.problems += [f"{engine}: {fault}" for fault in t.faults]
        if t.outcome == "trained" and not any(case.warned in warning for warning in t.warned or [""]):
            found.problems.append(f"{engine} does not warn")


def check_loss(wanted: float, found: Finding, tried: dict[str, Attempt]) -> None:
    """The histories' last losses against that of the hand-written loop's module."""
    for engine, t in tried.items():
        if t.loss is not None and not abs(t.loss - wanted) <= max(1e-6, 10 * (found.bound or 0)) * max(1, abs(wanted)):
            found.problems.append(f"{engine}: the history's loss is {t.loss:.4g}, that of the hand loop {wanted:.4g}")


def check_draws(case: Case, found: Finding) -> None:
    """Two seeds with full batches: the samples of each step are the same, so only draws can make a difference."""
    runs = [attempt(case, seed=seed, local={"batch_size": None, "steps": 1}) for seed in (0, 1)]
    if any(run.outcome != "trained" for run in runs):
        found.problems.append(f"full batches: {runs[0].says or runs[1].says}")
        return
    found.drawn = apart(*(run.state for run in runs))
    if found.drawn <= 10 * (found.bound or 0.0):
        found.problems.append("nothing was drawn: two seeds agree on full batches")


def conclude(case: Case, found: Finding, tried: dict[str, Attempt]) -> None:
    """The outcome, and what is not as it must be."""
    sentence = tried["auto"].says
    if any(t.outcome == "traceback" for t in tried.values()):
        found.outcome = "traceback"
        found.problems += [f"{e}: {t.says}" for e, t in tried.items() if t.outcome == "traceback"]
    elif found.outcome == "refused":
        found.why = sentence
        if tried["plain"].outcome == "trained":
            found.problems.append("plain trains what auto refuses")
        elif not case.refused:
            found.problems.append(f"should not be refused: {sentence}")
        elif case.refused not in sentence:
            found.problems.append(f"refused without {case.refused!r}")
        elif torch_refuses(case):
            found.outcome = "torch"
    elif found.problems:
        found.outcome = "wrong"
    elif tried["plain"].outcome == "refused":
        found.problems.append("plain refuses what auto trains")
    if case.refused and found.outcome in ("lanes", "plain"):
        found.problems.append("should be refused")


def torch_refuses(case: Case) -> bool:
    """Whether the loop written by hand cannot train it either."""
    try:
        hand.simulate(case)
    except Exception:  # whatever torch or numpy say
        return True
    return False


def unwrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names without those of wrappers (`DataParallel`, `torch.compile`)."""
    return {unwrap(name): t for name, t in state.items()}


def unwrap(name: str) -> str:
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two states; infinite where they do not have the same entries or a NaN differs."""
    a, b = unwrapped(a), unwrapped(b)
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return float("inf")
    gaps = [gap(a[name], b[name]) for name in a if a[name].numel()]
    return max(gaps, default=0.0)


def gap(a: Tensor, b: Tensor) -> float:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    differs = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())  # infinities are equal to themselves
    return float(differs.nan_to_num(nan=float("inf")).max())
