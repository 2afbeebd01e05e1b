"""Imports users' own methods, models and data, so that strings and experiment files know them."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points

from undrift.errors import UndriftError, first_line, quoted

log = logging.getLogger("undrift")


def import_plugins(modules: Iterable[str] = ()) -> None:
    """Import users' own methods, models and data: packages with an entry point for undrift, then these modules.

    The entry points are those of the group "undrift". Modules may also be in the working directory, which is searched
    last, so that nothing there can replace an installed package.
    """
    _load_entry_points()
    modules = list(modules)
    if modules and (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UndriftError(f"imports: the module {quoted(module)} cannot be imported ({reason}).") from error


@cache
def _load_entry_points() -> None:
    """Once per process; a package that fails causes a warning, not an error."""
    for point in entry_points(group="undrift"):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            package = point.dist.name if point.dist else point.value
            log.warning(
                "the package %s cannot be used with undrift: its module %s does not import (%s: %s); update or "
                "uninstall it", package, point.module, type(error).__name__, first_line(error),
            )  # fmt: skip
