"""Fallbacks of the lanes engine: to fewer lanes if memory runs out, and to the plain engine if lanes fail otherwise."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from undrift.engine.base import Engine, Outcome, RoundInputs, Visit
from undrift.engine.client import Program
from undrift.engine.feed import of_data
from undrift.errors import LanesError, UndriftError, first_sentence, machine_trouble
from undrift.tree import Tree

log = logging.getLogger("undrift")


class Fallback:
    """Trains with lanes until they fail, and from that round on with fewer lanes or the plain engine.

    If memory runs out, the number of lanes is halved until it suffices. If lanes fail otherwise, or one lane is still
    too many, the engine that `plain` builds takes over. A round is a function of its inputs, so the one that failed
    restarts from its beginning. If the plain engine fails on it too, the user sees that error.

    Args:
        lanes: Builds the engine for a number of lanes.
        count: The initial number of lanes.
        plain: Builds the plain engine; None if the user asked for lanes, whose failure is then an error.
        narrowed: Called with the round in which memory ran out, from 0, and the new number of lanes.
        switched: Called with the round in which lanes failed, from 0, and the reason.
    """

    def __init__(
        self,
        lanes: Callable[[int], Engine],
        count: int,
        plain: Callable[[], Engine] | None,
        narrowed: Callable[[int, int], None],
        switched: Callable[[int, str], None],
    ) -> None:
        self.engine, self.lanes, self.plain = lanes(count), lanes, plain
        self.narrowed, self.switched, self.fallen = narrowed, switched, False

    @property
    def width(self) -> int:
        return self.engine.width

    @property
    def program(self) -> Program:
        return self.engine.program

    def run(self, inputs: RoundInputs, visit: Visit | None = None, skip: bool = False) -> Outcome:
        found: Outcome = self._try(inputs, lambda engine: engine.run(inputs, visit, skip))
        return found

    def measure_all(self, inputs: RoundInputs, when: str) -> list[Tree]:
        found: list[Tree] = self._try(inputs, lambda engine: engine.measure_all(inputs, when))
        return found

    def narrow(self, t: int, lanes: int) -> None:
        """Train with this number of lanes from now on."""
        self.engine = self.lanes(lanes)
        self.narrowed(t, lanes)

    def switch(self, t: int, why: str) -> None:
        """Train with the plain engine from now on."""
        assert self.plain
        self.engine, self.fallen = self.plain(), True
        self.switched(t, why)

    def _try(self, inputs: RoundInputs, work: Callable[[Engine], Any]) -> Any:
        t = inputs.plan.round
        while not self.fallen:
            try:
                return work(self.engine)
            except Exception as error:  # a model, a loss or a hook may raise anything under vmap or while it is traced
                memory = out_of_memory(error)
                halve = memory and self.width > 1
                if not halve:
                    self._refuse(error, memory)
                why = "lanes need more memory than there is" if memory else f"lanes failed ({first_sentence(error)})"
            # Outside of the handler, whose traceback would keep the lanes' tensors alive.
            if halve:
                self.narrow(t, (self.width + 1) // 2)
                log.warning("round %d starts again with %d lanes: memory ran out with more", t + 1, self.width)
            else:
                self.switch(t, why)
                log.warning("round %d starts again on the plain engine: %s", t + 1, why)
            if torch.cuda.is_available():
                gc.collect()  # captured graphs hold memory of their own
                torch.cuda.empty_cache()
        return work(self.engine)

    def _refuse(self, error: Exception, memory: bool) -> None:
        """Raise the error if the plain engine would not help, or was not asked for."""
        if (machine_trouble(error) or of_data(error)) and not memory:
            raise error
        if self.plain is None and (memory or isinstance(error, UndriftError)):
            raise error
        if self.plain is None:
            raise explained(error) from error


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether a GPU's memory has run out, also if the error of a capture or a hook hides it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def explained(error: Exception) -> LanesError:
    """Return advice for the user, in one sentence."""
    why = first_sentence(error)
    message = f'The lanes engine failed ({why}). engine="auto" goes on with the plain engine where it must.'
    return LanesError(message, why)
