"""What commands share: options, the look of `--help`, reading an experiment file, running one with its messages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from undrift.errors import UndriftError
from undrift.tools.output import new_console, say, under_torchrun
from undrift.tools.plugins import allow_imports, gated

if TYPE_CHECKING:
    from undrift.tools.config import Experiment
    from undrift.tools.parallel import Parallel, Point
    from undrift.tools.run_folders import RunFolder

# ---- options --------------------------------------------------------------------------------------------------------

File = Annotated[
    Path, typer.Argument(help="An experiment file (TOML), or the folder of a run to repeat.", show_default=False)
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as local.lr=0.05. May be repeated."),
]
Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE",
        help="Import your own methods, models or data: an installed module, or one in the working directory or next "
        "to the experiment file. May be repeated.",
    ),
]  # fmt: skip
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Read data sets from this folder, laid out like the Hugging Face hub."),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The folder to write to.", show_default="a new folder in runs/")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import the modules named in the run's config.toml. This executes their code.")
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1, max=10_000, metavar="N", help="Run with N consecutive seeds, beginning with the experiment's own."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="How many runs train in parallel.", show_default="one per CPU that may be used"
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(metavar="DEVICE,…", help="Devices to train on, one run at a time each, such as cuda:0,cuda:1."),
]
Together = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="How many runs that differ only in numbers train as one program.",
        show_default="8 on a GPU, 1 on a CPU",
    ),
]


# ---- the look of --help ---------------------------------------------------------------------------------------------


def examples(*commands: str) -> str:
    """The last lines of a command's help."""
    return "\n".join([" Examples:" if len(commands) > 1 else " Example:", *(f"   {line}" for line in commands), ""])


class _Readable:
    """Arguments in capitals, flags without a type, and examples at the end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if text := options.get("help"):  # Typer would break lines where the source does
            options["help"] = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        self.examples = options.pop("epilog", None)  # whose lines Typer would join, or put blank lines between
        super().__init__(*arguments, **options)

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if isinstance(param, TyperArgument):
                param.metavar = param.metavar or str(param.name).upper() + ("..." if param.nargs != 1 else "")
                param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
            elif getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "").replace("......", "...") for piece in pieces]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)  # type: ignore[misc]
        if self.examples:
            typer.echo(self.examples)


class Command(_Readable, TyperCommand):
    """A command, with rules of its own about what may be imported."""

    def invoke(self, ctx: Any) -> Any:
        with gated():
            return super().invoke(ctx)


class Group(_Readable, TyperGroup):
    pass


# ---- experiment files -----------------------------------------------------------------------------------------------


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


def read_experiment(
    file: Path, set: list[str] | None, imports: list[str] | None, data_dir: Path | None, trust: bool
) -> Experiment:
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
    from undrift.tools.experiment import about, run
    from undrift.tools.run_folders import count_left_out, main_figure, nonfinite_remarks
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
    figure = main_figure(result.history[-1])
    last = f"{figure[0].replace('_', ' ')} {figure[1]:.4f} after " if figure else ""
    skipped = "".join(f", {mark}" for mark in nonfinite_remarks(0, count_left_out(result.history)))
    say(f"{last}{len(result.history)} rounds{skipped}, in {folder}")
    if result.stopped_early:
        say(f"stopped early: {result.stopped_early}")
    if result.diverged:
        say(f"warning: {result.diverged}", err=True)


# ---- many runs ------------------------------------------------------------------------------------------------------


def refuse_torchrun(command: str) -> None:
    """Raise for a command that starts processes of its own."""
    if under_torchrun():
        raise UndriftError(
            f"undrift {command} runs many experiments, each in one process; start it without torchrun. "
            "To use several GPUs: undrift sweep --devices cuda:0,cuda:1."
        )


def run_points(
    points: Sequence[Point], folder: Path, where: str, how: Parallel
) -> tuple[list[RunFolder], dict[str, str]]:
    """Run all points, with a live table. Returns the runs that ended, and the messages of those that failed."""
    from undrift.tools.live_table import LiveTable
    from undrift.tools.parallel import run_in_table

    with LiveTable(new_console()) as table:
        try:
            return run_in_table(table, points, folder, where, how, lambda point: None)
        except KeyboardInterrupt:
            table.__exit__()
            say(f"stopped; to continue, repeat the command with --out {folder}", err=True)
            raise typer.Exit(130) from None


def warn_left_out(problems: list[str]) -> None:
    for problem in problems:
        say(f"warning: {problem} It is left out.", err=True)


# ---- messages about arguments of `ud.load`, in terms of flags -------------------------------------------------------


@contextmanager
def arguments_as_flags() -> Iterator[None]:
    """A context in which errors of `ud.load` name flags of the command line instead of arguments."""
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
    return SUBJECT.sub(lambda match: _flag_name(match[1] or match[3]), ARGUMENT.sub(_flag, PAIR.sub("", message)))


def _flag_name(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"


def _flag(match: re.Match[str]) -> str:
    name, text = _flag_name(match[1]), match[2]
    if text in ("True", "…"):
        return name if text == "True" else f"{name} …"
    values = re.findall(r"""'([^']*)'|"([^"]*)"|([^][,\s'"]+)""", text)
    return " ".join(f"{name} {shlex.quote(next(filter(None, value), ''))}" for value in values)
