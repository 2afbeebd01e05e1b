"""Shared steps of the commands: read an experiment file, start a run or a sweep, print tables."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from undrift.errors import printable
from undrift.tools.streams import say as say  # as launch.say
from undrift.tools.trust import check, gate, run_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from undrift.tools.board import Board
    from undrift.tools.compare import Run
    from undrift.tools.config import Experiment
    from undrift.tools.sweep import Parallel, Point


def new_console() -> Console:
    """A console for tables, without markup and emoji, since names that users choose are printed literally.

    Control characters in what it is given to print have no effect on the terminal.
    """
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Literal(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):  # of objects such as Text, which are no strings
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    console = Literal(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160  # a file has no width, so tables need not be narrow
    return console


def warn_left_out(problems: list[str]) -> None:
    for problem in problems:
        say(f"warning: {problem} It is left out.", err=True)


@contextmanager
def arguments_as_flags() -> Iterator[None]:
    """Errors inside it name the flags of a command, where they name the arguments of `ud.load`."""
    from undrift.errors import UndriftError

    try:
        yield
    except UndriftError as error:
        raise UndriftError(as_flags(str(error))) from error


FLAGS = "label|client|clients|drop|missing|resize|normalize|partition|seed|data_dir"
ARGUMENT = re.compile(rf"""(?<![\w-])({FLAGS})=(\[[^]]*\]|'[^']*'|"[^"]*"|…|\w+(?:\.\w+)*)""")
"""An argument of `ud.load` in a message, such as missing="drop", drop=['id', 'name'] or label=…."""
SUBJECT = re.compile(rf"^({FLAGS})(?= (must|does|is|names) )|`({FLAGS})`")
"""An argument that a message is about."""
PAIR = re.compile(r",? or (resize=\[height, width\]|\(height, width\))")
"""What resize may be in Python, and not on the command line."""


def as_flags(message: str) -> str:
    """A message of `ud.load` in terms of the command line."""
    return SUBJECT.sub(lambda found: _name(found[1] or found[3]), ARGUMENT.sub(_flag, PAIR.sub("", message)))


def _name(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"


def _flag(found: re.Match[str]) -> str:
    name, text = _name(found[1]), found[2]
    if text in ("True", "…"):
        return name if text == "True" else f"{name} …"
    values = re.findall(r"""'([^']*)'|"([^"]*)"|([^][,\s'"]+)""", text)
    return " ".join(f"{name} {shlex.quote(next(filter(None, value), ''))}" for value in values)


def read_settings(
    file: Path, set: list[str] | None, imports: list[str] | None, data_dir: Path | None, trust: bool | None = None
) -> dict[str, Any]:
    from undrift.tools import config

    return with_options(config.override(config.read(file), set or []), file, imports, data_dir, trust)


def with_options(
    settings: dict[str, Any], file: Path, imports: list[str] | None, data_dir: Path | None, trust: bool | None
) -> dict[str, Any]:
    """The settings with the command line's options. Raises for imports that the user has not allowed."""
    given = settings.get("imports", [])
    allow_imports(file, given, imports or [], trust)
    if isinstance(given, list) and imports:
        settings["imports"] = list(dict.fromkeys([*given, *imports]))
    if data_dir and isinstance(settings.get("data"), dict):
        settings["data"]["data_dir"] = str(data_dir)
    return settings


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
    gate().allowed.update(imports, () if run else given)
    if run and not trust:
        gate().run, gate().flag = run, trust is not None
        check(given)
    if not given and not imports:
        return
    from undrift.tools.plugins import search_for, search_in

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
    found: dict[str, list[str]] = {}
    for session in reversed(sessions):
        modules = session.get("modules") if isinstance(session, dict) else None
        for name, folder in modules.items() if isinstance(modules, dict) else ():
            if isinstance(folder, str) and os.path.isabs(folder) and not _inside(folder, run):
                found.setdefault(name, []).append(os.path.abspath(folder))
    return found


def _inside(folder: str, run: Path) -> bool:
    """Whether the folder is in a run's own, or is not one at all."""
    try:
        return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(run))
    except ValueError:  # characters that no path can have
        return True


def read_experiment(
    file: Path, set: list[str] | None, imports: list[str] | None, data_dir: Path | None, trust: bool
) -> Experiment:
    from undrift.errors import UndriftError
    from undrift.tools import config

    settings = read_settings(file, set, imports, data_dir, trust)
    settings.pop("sweep", None)
    if "study" in settings:
        raise UndriftError(f"{file} is a study; run it with: undrift study {file}")
    return config.checked(settings, str(file))


def run_experiment(
    experiment: Experiment,
    folder: Path,
    where: Path,
    resume: bool = False,
    allow_version_change: bool = False,
    force: bool = False,
) -> None:
    from undrift.tools.display import left_out, marks, score
    from undrift.tools.experiment import about, run
    from undrift.tools.stopping import stopping
    from undrift.training.nonfinite import mute

    mute()  # this command reports it below its progress
    flags = "".join(f" --import {name}" for name in experiment.imports)
    with about(str(where)), stopping() as stop:
        try:
            result = run(
                experiment, folder, resume, lambda row: stop.check(), allow_version_change, progress=True, force=force
            )
        except KeyboardInterrupt:
            left = folder if (folder / "config.toml").exists() else None
            say(f"stopped; resume with: undrift resume {left}{flags}" if left else "stopped", err=True)
            raise typer.Exit(130) from None
    if result.stopped:
        some = 'on_nonfinite="skip"' in result.stopped
        rest = f"; to continue without such clients: undrift resume {folder}{flags} --on-nonfinite skip" if some else ""
        say(f"stopped. {result.stopped}\n{len(result.history)} rounds are in {folder}{rest}", err=True)
        raise typer.Exit(1)
    found = score(result.history[-1])
    said = f"{found[0].replace('_', ' ')} {found[1]:.4f} after " if found else ""
    skipped = "".join(f", {mark}" for mark in marks(0, left_out(result.history)))
    say(f"{said}{len(result.history)} rounds{skipped}, in {folder}")
    if result.stopped_early:
        say(f"stopped early: {result.stopped_early}")
    if result.diverged:
        say(f"warning: {result.diverged}", err=True)


def seeds_from(settings: dict[str, Any], count: int | None) -> list[int]:
    first = settings.get("seed", 0)
    plain = isinstance(first, int) and not isinstance(first, bool)
    return [first + i for i in range(count or 1)] if plain else [first]


def grid_points(settings: dict[str, Any], grid: dict[str, list[Any]], where: str) -> Any:
    from undrift.tools.sweep import points

    return points(settings, grid, where)


IN_USE = ".in-use"
"""The file with the number of the process that runs a sweep or a study in its folder."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A context in which this process alone runs a sweep or a study in a folder, which is created if need be."""
    from undrift.files import lock, made

    with made(folder), lock(folder, folder / IN_USE):
        yield


def run_points(points: Any, folder: Path, where: str, how: Parallel) -> tuple[list[Any], dict[str, str]]:
    """Run all points, with a board of those in progress. Returns the runs that ended, and the messages of others."""
    from undrift.tools.board import Board

    with Board(new_console()) as board:
        try:
            return run_on(board, points, folder, where, how, lambda point: None)
        except KeyboardInterrupt:
            board.__exit__()
            say(f"stopped; to continue, repeat the command with --out {folder}", err=True)
            raise typer.Exit(130) from None


def run_on(
    board: Board,
    points: Sequence[Point],
    folder: Path,
    where: str,
    how: Parallel,
    ended: Callable[[Point], None],
    kind: str = "sweep",
) -> tuple[list[Run], dict[str, str]]:
    """Run the points that are not finished, and report them to the board. Returns as `run_points` does."""
    from undrift.tools.config import checked
    from undrift.tools.experiment import about, arguments
    from undrift.tools.sweep import sweep
    from undrift.training.run_folder import finished

    waiting = [point for point in points if not finished(folder / point.name)]
    for point in {str(point.settings.get("data")): point for point in waiting}.values():
        with about(where):  # report errors in the data, which runs share, before the first run
            arguments(checked(point.settings, where))
    board.expect(
        {folder / point.name: point.settings.get("rounds", 0) for point in waiting}, len(points) - len(waiting)
    )
    for point in points:
        if point not in waiting:
            ended(point)
    failed: dict[str, str] = {}

    def done(point: Point, message: str | None) -> None:
        if folder / point.name in board.open:
            board.end(folder / point.name)
            ended(point)
        if message:
            failed[point.name] = message
            board.say(f"error: {point.name}: {message}")

    return sweep(list(points), folder, where, how, done, kind), failed


def sweep_table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    keys = [key for key in (found["chosen_by"], found["metric"]) if key]
    for column in ("", "runs", *(f"last {key.replace('_', ' ')}" for key in keys)):
        table.add_column(column, justify="left" if not column else "right", no_wrap=bool(column))
    for row in found["settings"]:
        cells = [_cell(row[key]) for key in keys]
        table.add_row(row["name"], row["counted"], *cells)
    return table


def _cell(figures: dict[str, Any]) -> str:
    """Mean ± standard deviation, the value itself for one run, or a dash if there is none."""
    if figures["mean"] is None:
        return "–"
    return f"{figures['mean']:.4f}" + (f" ± {figures['std']:.4f}" if figures["std"] is not None else "")
