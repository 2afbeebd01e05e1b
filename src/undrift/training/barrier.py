"""Where runs side by side meet: to train their cohorts as one, and to evaluate their models.

The first of them works for all, while the others wait; each then continues with its own answer.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from undrift.engine.base import Engine, Outcome, RoundInputs, Visit
from undrift.engine.client import Program
from undrift.engine.stacked import StackedEngine, stacked
from undrift.errors import first_sentence
from undrift.functional.model import Params
from undrift.training.run import Run
from undrift.tree import Tree

if TYPE_CHECKING:
    from undrift.training.side_by_side import Coordinator

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("undrift")


def meet(run: Run, item: T, function: Callable[[list[T]], list[R | BaseException]]) -> R:
    """Return a function's result for an item, with the items of other runs side by side that have reached this point.

    Args:
        run: The run. One that trains alone has the only item.
        item: What the function needs from it.
        function: Returns a result per item, or an exception, which is raised in the run whose item it is.
    """
    barrier = barrier_of(run)
    return barrier.meet(item, function) if barrier else unwrap(function([item])[0])


def unwrap(answer: R | BaseException) -> R:
    """Return the answer, or raise it if it is an exception."""
    if isinstance(answer, BaseException):
        raise answer
    return answer


def checkpoint_due(run: Run, t: int, own: Callable[[int], bool]) -> bool:
    """Return whether a run saves a checkpoint after this round: by its `own` rule, or as the others side by side."""
    barrier = barrier_of(run)
    return barrier.group.due(t) if barrier else own(t)


def announce_checkpoints(run: Run, own: Callable[[int], bool]) -> None:
    """Tell the runs side by side when this one wants a checkpoint. It ends with one, which the others then have too."""
    if barrier := barrier_of(run):
        barrier.due = lambda t: t == run.rounds or own(t)


def companions(run: Run, t: int) -> list[str] | None:
    """Return the folders of the runs that trained this round side by side with a run; None if there are none."""
    barrier = barrier_of(run)
    return barrier.group.companions(barrier.i, t) if barrier else None


def resume_round(run: Run) -> int | None:
    """Return the round of the checkpoint from which a run side by side must continue; None if it is free to choose."""
    barrier = barrier_of(run)
    return barrier.group.resume_rounds.get(barrier.i) if barrier else None


def barrier_of(run: Run) -> BarrierEngine | None:
    """Return the engine that waits for the runs side by side; None for a run that trains alone."""
    engine = getattr(run.engine, "engine", None)
    return engine if isinstance(engine, BarrierEngine) else None


class Interrupted(KeyboardInterrupt):
    """Raised in a run side by side between two rounds, once all must stop."""


class RunGroup:
    """Runs that train as one."""

    def __init__(
        self, coordinator: Coordinator, runs: dict[int, Run], engine: StackedEngine, folders: dict[int, Path | None]
    ) -> None:
        self.coordinator, self.members, self.folders = coordinator, list(runs), folders
        self.engine: StackedEngine | None = engine
        """None once it has failed: then each run trains alone."""
        self.engines = {i: BarrierEngine(self, i, run.engine.engine) for i, run in runs.items()}  # type: ignore[attr-defined]
        self.holders: dict[int, Any] = {i: run.engine for i, run in runs.items()}
        for i, holder in self.holders.items():
            holder.engine = self.engines[i]
        firsts = np.cumsum([0, *(len(run.data) for run in runs.values())]).tolist()
        self.firsts: dict[int, int] = dict(zip(runs, firsts, strict=False))
        self.waiting: dict[int, Call] = {}
        self.answers: dict[int, Any] = {}
        self.latest: tuple[int, list[int]] = (0, [])
        """The latest round, from 1, and the runs that train it."""
        self.decided: tuple[int, bool] = (0, False)
        """The latest round after which somebody asked whether to save a checkpoint, and the answer."""
        self.resume_rounds: dict[int, int] = {}
        """By run: the round of the checkpoint from which it must continue, so that all do so from one round."""

    @property
    def present(self) -> list[int]:
        """The runs that may reach another round, without those that have switched to the plain engine."""
        return [
            i
            for i, holder in self.holders.items()
            if i not in self.coordinator.ended and holder.engine is self.engines[i]
        ]

    def call(self, i: int, call: Call) -> Any:
        """Return the answer to a run's call, once the others have come as far."""
        self.waiting[i] = call
        self.proceed()
        while i not in self.answers:
            if self.coordinator.interrupted and call.trains and call.item.inputs.plan.round >= self.latest[0]:
                raise Interrupted  # what belongs to the others' latest round is still done
            if self.ready and i == self.present[0]:
                self.serve()
            else:
                self.engines[i].turn.wait()
        return unwrap(self.answers.pop(i))

    @property
    def ready(self) -> bool:
        return len(self.waiting) == len(self.present) > 0

    def proceed(self) -> None:
        """Wake up the first run if all wait, so that the same thread always trains."""
        if self.ready:
            self.engines[self.present[0]].turn.notify()

    def serve(self) -> None:
        """Answer calls. Training comes last: a run that evaluates its model will reach its next round, too.

        A run that is behind, because a round was repeated, trains without the others until they are in the same round.
        What a run computes thus depends on the runs and the round alone, and not on what happened before.
        """
        served = {i: call for i, call in sorted(self.waiting.items()) if not call.trains}
        if not served:
            rounds = {i: call.item.inputs.plan.round + 1 for i, call in sorted(self.waiting.items())}
            first = min(rounds.values())
            served = {i: self.waiting[i] for i, t in rounds.items() if t == first}
            if self.latest[0] != first:
                self.latest = first, list(served)
        self.waiting = {i: call for i, call in self.waiting.items() if i not in served}
        kinds: dict[Any, list[int]] = {}
        for i, call in served.items():
            kinds.setdefault(call.kind, []).append(i)
        for members in kinds.values():
            self.answers |= dict(zip(members, answer_together([served[i] for i in members]), strict=True))
        for i in served:
            self.engines[i].turn.notify()

    def due(self, t: int) -> bool:
        """Return whether the runs save a checkpoint after this round: all or none, so that they share a round."""
        if self.decided[0] != t:
            self.decided = t, any(self.engines[i].due(t) for i in self.latest[1])
        return self.decided[1]

    def companions(self, i: int, t: int) -> list[str] | None:
        """Return the folders of the other runs that trained this round, seen from a run's own; None if unknown."""
        own = self.folders[i]
        others = [self.folders[j] for j in self.latest[1] if j != i]
        if own is None or self.latest[0] != t or i not in self.latest[1] or None in others:
            return None
        return [os.path.relpath(other, own) for other in others if other is not None]

    def train(self, rounds: list[Training]) -> list[Outcome | BaseException]:
        """Train the rounds of several runs, as one program if possible."""
        outcomes = self._train_together(rounds) if self.engine else None
        return outcomes or [
            result_or_error(partial(self.engines[one.i].own.run, one.inputs, one.visit, one.skip)) for one in rounds
        ]

    def _train_together(self, rounds: list[Training]) -> list[Outcome | BaseException] | None:
        def visit(place: int, params: Params, clients: np.ndarray) -> None:
            rounds[place].visit(params, clients)  # type: ignore[misc]

        visits, skip = rounds[0].visit is not None, rounds[0].skip
        assert self.engine
        try:
            inputs = stacked([one.inputs for one in rounds], [self.firsts[one.i] for one in rounds])
            return list(self.engine.run_all(inputs, visit if visits else None, skip))
        except BaseException as error:  # training alone shows which run fails
            log.warning("the runs no longer train side by side, but one after another: %s", first_sentence(error))
        self.engine = None  # outside of the handler, whose traceback would keep its tensors alive
        return None


def result_or_error(function: Callable[[], R]) -> R | BaseException:
    """Return a function's result, or the exception that it raised."""
    try:
        return function()
    except BaseException as error:  # raised in its own thread
        return error


def answer_together(calls: list[Call]) -> list[Any]:
    """Return the answers to calls of the same kind. If it fails for all, each on its own shows which of them fails."""
    function = calls[0].function
    answers = result_or_error(lambda: function([call.item for call in calls]))
    if not isinstance(answers, BaseException):
        return answers
    del answers  # its traceback keeps tensors alive
    return [result_or_error(lambda call=call: unwrap(function([call.item])[0])) for call in calls]  # type: ignore[misc]


class Training(NamedTuple):
    """A run's round."""

    i: int
    inputs: RoundInputs
    visit: Visit | None
    skip: bool


class Call(NamedTuple):
    """What a run waits for. Calls of the same kind are answered together."""

    kind: Any
    item: Any
    function: Callable[[list[Any]], list[Any]]
    trains: bool = False


class BarrierEngine:
    """The engine of a run that trains side by side with others: it waits until all of them have come as far."""

    def __init__(self, group: RunGroup, i: int, own: Engine) -> None:
        """`own` is the engine that trains the run alone."""
        self.group, self.i, self.own = group, i, own
        self.turn = threading.Condition(group.coordinator.lock)
        self.due: Callable[[int], bool] = lambda t: False
        """Whether the run itself wants a checkpoint after a round."""

    @property
    def width(self) -> int:
        return self.own.width

    @property
    def program(self) -> Program:
        return self.own.program

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        item = Training(self.i, inputs, visit, skip)
        outcome: Outcome = self.group.call(self.i, Call((visit is None, skip), item, self.group.train, trains=True))
        return outcome

    def meet(self, item: T, function: Callable[[list[T]], list[R | BaseException]]) -> R:
        """Return a function's result for an item, together with those of the other runs. See `meet`."""
        answer: R = self.group.call(self.i, Call(function, item, function))
        return answer

    def measure_all(self, inputs: RoundInputs, when: str) -> list[Tree]:
        engine = self.group.engine
        if engine is None:
            return self.own.measure_all(inputs, when)
        return engine.measure_all(stacked([inputs], [self.group.firsts[self.i]]), when)
