"""From the lanes engine to the plain one, when training shows that lanes cannot run the model, the loss or a hook."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from undrift.engine.base import Engine, Outcome, RoundInputs, Visit
from undrift.engine.client import Program
from undrift.errors import UndriftError, first_sentence, machine_trouble
from undrift.tree import Tree

log = logging.getLogger("undrift")


class Fallback:
    """Trains with `lanes` until that fails; from then on, that round included, with what `plain` makes.

    A round is a function of its inputs, so the one that failed is run again from its beginning. If the plain engine
    fails on it too, that error is the user's to see.

    Args:
        lanes: The engine to begin with.
        plain: Makes the engine that runs everything; None where lanes were asked for, and their failure is an error.
        switched: Called with the round in which lanes failed, from 0, and the reason.
    """

    def __init__(self, lanes: Engine, plain: Callable[[], Engine] | None, switched: Callable[[int, str], None]) -> None:
        self.engine, self.plain, self.switched = lanes, plain, switched
        self.fallen = False

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

    def switch(self, t: int, why: str) -> None:
        """Train with the plain engine from now on."""
        assert self.plain
        self.engine, self.fallen = self.plain(), True
        self.switched(t, why)

    def _try(self, inputs: RoundInputs, work: Callable[[Engine], Any]) -> Any:
        if not self.fallen:
            try:
                return work(self.engine)
            except Exception as error:  # whatever a model, a loss or a hook may raise under vmap or while it is traced
                memory = isinstance(error, torch.OutOfMemoryError)
                if machine_trouble(error) and not memory:
                    raise
                if self.plain is None and (memory or isinstance(error, UndriftError)):
                    raise
                if self.plain is None:
                    raise explained(error) from error
                why = "lanes need more memory than there is" if memory else f"lanes failed ({first_sentence(error)})"
            # Outside of the handler, whose traceback would keep the lanes' tensors alive.
            self.switch(inputs.plan.round, why)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            log.warning("round %d starts again on the plain engine: %s", inputs.plan.round + 1, why)
        return work(self.engine)


def explained(error: Exception) -> UndriftError:
    """A sentence on what to do."""
    return UndriftError(
        f'The lanes engine failed ({first_sentence(error)}). engine="auto" goes on with the plain engine where it must.'
    )
