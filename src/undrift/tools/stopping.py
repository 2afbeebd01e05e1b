"""How runs stop when they are asked to: Ctrl-C and SIGTERM let a round finish."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether a stop was asked for, by Ctrl-C or SIGTERM."""

    asked = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if it was."""
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def stopping() -> Iterator[Stop]:
    """Inside it, Ctrl-C and SIGTERM only ask for a stop, so that a round can finish. The second one does not wait."""
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        stop.check()
        stop.asked = True
        print("stopping after this round; once more stops at once", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
