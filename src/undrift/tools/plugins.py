"""Imports users' own methods, models and data, so that strings and experiment files know them.

A module that only the folder of a run names is imported if the user allows it, since the folder may come from somebody
else.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError, first_line, quoted
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
    _check_allowed(modules)
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
    from importlib.metadata import entry_points

    for point in entry_points(group="undrift"):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            package = point.dist.name if point.dist else point.value
            log.warning(
                "the package %s cannot be used with undrift: its module %s does not import (%s: %s); update or "
                "uninstall it", package, point.module, type(error).__name__, first_line(error),
            )  # fmt: skip


# ---- what may be imported -------------------------------------------------------------------------------------------


@dataclass
class Gate:
    """What a command may import."""

    run: Path | None = None
    """The folder of a run that the user does not trust. Without one, anything may be imported."""
    flag: bool = True
    """Whether the command has `--trust`."""
    allowed: set[str] = field(default_factory=set)
    """The modules that the user has named, on the command line or in experiment files."""


_gates = [Gate()]
"""The gate of this process, then those of the commands that are running."""


@contextmanager
def gated() -> Iterator[None]:
    """A context with a gate of its own, for one command."""
    _gates.append(Gate())
    try:
        yield
    finally:
        _gates.pop()


def _check_allowed(modules: Iterable[Any]) -> None:
    gate = _gates[-1]
    refused = [name for name in modules if gate.run and name not in gate.allowed]
    if refused:
        raise UndriftError(
            f"{gate.run}/config.toml asks to import {', '.join(map(quoted, refused))}, which executes that code. If "
            f"you trust it, allow it with {' '.join(f'--import {shlex.quote(str(name))}' for name in refused)}"
            f"{', or with --trust.' if gate.flag else '.'}"
        )


def allow_imports(file: Path, given: Any, imports: list[str], trust: bool | None) -> None:
    """Look for modules next to an experiment file, or where a run found them; raise for those that are not allowed.

    A file that the user names may import code. The folder of a run may not, as it may come from somebody else; its
    `config.toml` stands for the folder. What it names elsewhere, such as in `[sweep]`, is refused when it is imported.

    Args:
        file: The experiment file, or the folder of a run.
        given: Its `imports`.
        imports: The modules that the user names.
        trust: Whether the user trusts the file; None for commands that have no `--trust`.
    """
    given = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    run = run_folder(file)
    _gates[-1].allowed.update(imports, () if run else given)
    if run and not trust:
        _gates[-1].run, _gates[-1].flag = run, trust is not None
        _check_allowed(given)
    if not given and not imports:
        return
    if run:
        search_for({name: folders for name, folders in _recorded_modules(run).items() if name in given}, run)
    search_in(Path.cwd(), *([] if run else [file.resolve().parent]))


def _recorded_modules(run: Path) -> dict[str, list[str]]:
    """Where a run found its modules, by its `run.json`, the last session first.

    The file may come from somebody else: what is not an absolute path, or is in the run's own folder, is left out.
    """
    from undrift.training.run_folder import RUN, recorded

    known = recorded(run) if (run / RUN).exists() else None
    if not isinstance(known, dict):
        return {}
    resumed = known.get("resumed")
    sessions = [known.get("started"), *(resumed if isinstance(resumed, list) else ())]
    by_module: dict[str, list[str]] = {}
    for session in reversed(sessions):
        modules = session.get("modules") if isinstance(session, dict) else None
        for name, folder in modules.items() if isinstance(modules, dict) else ():
            if isinstance(folder, str) and os.path.isabs(folder) and not _inside(folder, run):
                by_module.setdefault(name, []).append(os.path.abspath(folder))
    return by_module


def _inside(folder: str, run: Path) -> bool:
    """Whether the folder is in a run's own, or is not one at all."""
    try:
        return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(run))
    except ValueError:  # characters that no path can have
        return True


def run_folder(file: Path) -> Path | None:
    """The folder of the run that this is, or whose `config.toml` this is; None for other experiment files."""
    from undrift.training.run_folder import RUN

    if file.is_dir():
        return file
    real = file.resolve()
    return real.parent if real.name == "config.toml" and os.path.lexists(real.parent / RUN) else None


# ---- in the worker processes of a sweep -----------------------------------------------------------------------------


Places = tuple[list[str], dict[str, list[str]], list[str], Gate]


def places() -> Places:
    """Where this process looks for modules, and which it may import, for `adopt` in another one."""
    return list(_added), dict(_recorded), list(_excluded), _gates[-1]


def adopt(places: Places) -> None:
    """Look for modules where another process does, and import no others than it may."""
    added, recorded, excluded, gate = places
    _gates[-1] = gate
    _recorded.update(recorded)
    _excluded.extend(excluded)
    search_in(*added)
