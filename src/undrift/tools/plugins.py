"""Imports users' own methods, models and data, so that strings and experiment files know them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from undrift.errors import UndriftError, first_line, quoted
from undrift.tools import trust
from undrift.training import provenance

log = logging.getLogger("undrift")


def import_plugins(modules: Iterable[str] = ()) -> None:
    """Import users' own methods, models and data: packages with an entry point for undrift, then these modules.

    The entry points are those of the group "undrift". Modules may also be in the working directory, or where
    `search_in` and `search_for` say. These are searched last, so that nothing there can replace an installed package.
    Raises `UndriftError` for modules that only the folder of a run names, which the user has not allowed.
    """
    _load_entry_points()
    modules = list(modules)
    trust.check(modules)
    if modules:
        search_in(os.getcwd())
    for module in modules:
        try:
            _import(module)
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            reason = f"{type(error).__name__}: {first_line(error)}"
            hint = ""
            if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
                folders = ", ".join(_folders(module))
                hint = f" It was searched for among installed packages{' and in ' * bool(folders)}{folders}."
                hint += " The folder of a run is never searched." if _excluded else ""
            raise UndriftError(f"imports: the module {quoted(module)} cannot be imported ({reason}).{hint}") from error
        _remember(module)


_added: list[str] = []
"""Folders that were appended to `sys.path`."""
_recorded: dict[str, list[str]] = {}
"""The folders in which a run found a module, by the module's name."""
_excluded: list[str] = []
"""Folders of runs, which are not searched even if one is the working directory."""


def search_in(*folders: str | Path) -> None:
    """Also look for modules in these folders, after everything else."""
    for folder in map(os.path.abspath, folders):
        if any(Path(os.path.realpath(folder)).is_relative_to(run) for run in _excluded):
            continue
        if folder not in sys.path:
            sys.path.append(folder)
        if folder not in _added:
            _added.append(folder)


def search_for(recorded: Mapping[str, list[str]], run: Path) -> None:
    """Look for these modules, and no others, in the folders given with them if they are nowhere else.

    They are those of a run, whose own folder is never searched.
    """
    _recorded.update(recorded)
    _excluded.append(os.path.realpath(run))


Places = tuple[list[str], dict[str, list[str]], list[str], trust.Gate]


def places() -> Places:
    """Where this process looks for modules, and which it may import, for `adopt` in another one."""
    return list(_added), dict(_recorded), list(_excluded), trust.gate()


def adopt(found: Places) -> None:
    """Look for modules where another process does, and import no others than it may."""
    trust.stand(found[3])
    _recorded.update(found[1])
    _excluded.extend(found[2])
    search_in(*found[0])


def _folders(module: str) -> list[str]:
    return list(dict.fromkeys([*_added, *_recorded.get(module, ())]))


def _import(module: str) -> None:
    """Import a module, from a recorded folder only if it is nowhere else.

    While it is imported, and no longer, that folder is also searched for what the module itself imports.
    """
    root = module.partition(".")[0]
    folder = None
    if module in _recorded and root not in sys.modules and find_spec(root) is None:
        folder = next((folder for folder in _recorded[module] if PathFinder.find_spec(root, [folder])), None)
    if folder is None:
        importlib.import_module(module)
        return
    sys.path.append(folder)
    try:
        importlib.import_module(module)
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed the path itself
            sys.path.remove(folder)


def _remember(module: str) -> None:
    """Note the folder of a module that is not installed, for the `run.json` of runs that use it."""
    root = sys.modules[module.partition(".")[0]]
    for place in [root.__file__] if getattr(root, "__file__", None) else list(getattr(root, "__path__", ())):
        file = Path(str(place))
        folder = str(file.parent.parent if file.name == "__init__.py" else file.parent)
        if folder in _folders(module):
            provenance.modules[module] = folder


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
