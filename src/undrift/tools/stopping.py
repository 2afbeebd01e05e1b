"""Stopping on request: after Ctrl-C or SIGTERM, a run finishes its round."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from undrift.tools.output import speaks


class Stop:
    """Whether a stop was requested, by Ctrl-C or SIGTERM."""

    asked = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if it was."""
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def stopping() -> Iterator[Stop]:
    """A context in which Ctrl-C and SIGTERM only request a stop, so that a round can finish. The second one stops at
    once.
    """
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        stop.check()
        stop.asked = True
        if speaks():
            print("stopping after this round; press Ctrl-C again to stop at once", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
