"""Warnings about data, each given once: the runs of a sweep read the same data, and so does a loop in a notebook."""

from __future__ import annotations

import logging

log = logging.getLogger("undrift")

warned: set[str] = set()
"""The warnings that this process has given."""
EVERY = "every warning"
"""Stands for all warnings in `warned`."""


def warn(message: str) -> None:
    """Log a warning; at the level of information if it was given before."""
    level = logging.INFO if {message, EVERY} & warned else logging.WARNING
    warned.add(message)
    log.log(level, "%s", message)


def silence() -> None:
    """Give no warnings in this process, as the process that started it has read the same data and given them."""
    warned.add(EVERY)
