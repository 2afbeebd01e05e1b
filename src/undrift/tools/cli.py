"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift import __version__
from undrift.errors import DEBUG

if TYPE_CHECKING:
    from rich.console import Console

    from undrift.tools.config import Experiment

app = typer.Typer(
    name="undrift", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Federated learning that holds its course when clients' data differ.",
)  # fmt: skip
data = typer.Typer(no_args_is_help=True, help="Data sets and who holds them.")
app.add_typer(data, name="data")

File = Annotated[Path, typer.Argument(help="An experiment file, or the folder of a run to repeat.", show_default=False)]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key: local.lr=0.05")]
Import = Annotated[
    list[str] | None, typer.Option("--import", metavar="MODULE", help="Import your own methods, models and data first.")
]
DataDir = Annotated[Path | None, typer.Option(help="A folder in hub layout to read data from.")]
Out = Annotated[Path | None, typer.Option(help="The folder to write to.  [default: a new one in runs/]")]
Seeds = Annotated[int | None, typer.Option(min=1, max=10_000, help="So many seeds, from the experiment's own upwards.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import the modules that a run's config.toml names: they are code.")
]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"undrift {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


@app.command()
def run(
    file: File,
    set: Set = None,
    out: Out = None,
    imports: Import = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Run an experiment."""
    experiment = _experiment(file, set, imports, data_dir, trust)
    from undrift.tools.experiment import new_folder, title

    _run(experiment, out or new_folder(title(experiment)), file)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that stopped.")],
    on_nonfinite: Annotated[
        str | None, typer.Option(help="If the run stopped on NaN: skip drops clients whose updates are not finite.")
    ] = None,
    imports: Import = None,
    trust: Trust = False,
    allow_version_change: Annotated[
        bool,
        typer.Option(
            "--allow-version-change", help="Go on with other versions or another device; last digits may differ."
        ),
    ] = False,
) -> None:
    """Go on with a run from its last checkpoint, as if it had never stopped."""
    from undrift.errors import UndriftError
    from undrift.tools import config
    from undrift.tools.experiment import resumable
    from undrift.training.record import repeats
    from undrift.training.result import RUN, finished, intact, recorded

    if not any((folder / name).exists() for name in ("config.toml", RUN)):
        raise UndriftError(f"{folder} is no run: it has no config.toml.")
    settings, text = resumable(folder, allow_version_change)
    if not repeats(text):
        raise UndriftError(
            f"{folder} was started from Python; go on there: ud.train(…, out={str(folder)!r}, resume=True)."
        )
    known = recorded(folder) if finished(folder) else None
    if known and intact(folder, known):
        typer.echo(f"{folder} is finished.")
        return
    changed = config.override(settings, [f"on_nonfinite={on_nonfinite}"] if on_nonfinite else [])
    experiment = config.checked(_allowed(changed, folder, imports, None, trust), str(folder))
    _run(experiment, folder, folder, resume=True, allow_version_change=allow_version_change)


@app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(help="Experiment files, which are run, and folders of runs.")],
    target: Annotated[float | None, typer.Option(help="Also say what it took to get there: an accuracy, say.")] = None,
    seeds: Seeds = None,
    set: Set = None,
    out: Out = None,
    imports: Import = None,
    data_dir: DataDir = None,
) -> None:
    """Runs side by side, with mean ± standard deviation over seeds."""
    from undrift.errors import UndriftError
    from undrift.tools import compare as compared

    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    points = []
    for file in files:
        settings = _settings(file, set, imports, data_dir)
        settings.pop("sweep", None)
        own = _points(settings, {"seed": _seeds(settings, seeds)}, str(file))
        points += [type(point)(f"{file.stem},{point.name}", point.settings) for point in own]
    runs, problems = compared.read_runs(folders)
    _warn(problems)
    failed: dict[str, str] = {}
    if points:
        from undrift.tools.experiment import new_folder
        from undrift.tools.sweep import unique

        more, failed = _sweep(unique(points), out or new_folder("compare"), "compare", None)
        runs += more
    if not runs:
        raise UndriftError("There is nothing to compare: no run finished.")
    _console().print(compared.table(runs, target))
    raise typer.Exit(1 if failed else 0)


@app.command()
def sweep(
    file: File,
    grid: Annotated[
        list[str] | None, typer.Option(metavar="KEY=[VALUE, …]", help="Values of a key: 'local.lr=[0.01, 0.1]'")
    ] = None,
    seeds: Seeds = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs at a time.  [default: as many as pay]")] = None,
    set: Set = None,
    out: Out = None,
    imports: Import = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Every combination of some keys' values; the best is chosen on validation data.

    The grid may also stand in the file, as a section \\[sweep] of keys and lists. Run again with the same --out, it
    does what is left to do.
    """
    from undrift.tools import sweep as swept
    from undrift.tools.experiment import new_folder

    settings = _settings(file, set, imports, data_dir, trust)
    wanted = swept.file_grid(settings.pop("sweep", {})) | swept.parse_grid(grid or [])
    if seeds is not None or "seed" not in wanted:
        wanted["seed"] = _seeds(settings, seeds)
    folder = out or new_folder(file.stem)
    points = _points(settings, wanted, str(file))
    runs, failed = _sweep(points, folder, str(file), workers)
    from rich.text import Text

    console = _console()
    found = swept.summary(runs, folder, failed)
    if runs:
        console.print(_sweep_table(found))
    if found["best"] is not None and len(found["settings"]) > 1:
        console.print(Text(f"best by {found['chosen_by'].replace('_', ' ')}: ").append(found["best"], "bold"))
    elif found["chosen_by"] and len(found["settings"]) > 1:
        console.print("no setting is the best: in each, a run stopped or diverged")
    console.print(f"in {folder}" + (f"; {len(failed)} of {len(points)} runs failed" if failed else ""))
    raise typer.Exit(1 if failed else 0)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or not, or of sweeps.")],
    out: Annotated[
        Path | None, typer.Option(help="The page.  [default: report.html in the run's folder; of several runs, here]")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it current, and serve it to a browser here.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to serve it.  [default: a free one]")] = 0,
    figures: Annotated[Path | None, typer.Option(help="Also draw figures for a paper into this folder.")] = None,
) -> None:
    """Runs as one page of charts that opens without a network; those that differ in their seed alone as one curve."""
    from undrift.tools.report.gather import folders, gather
    from undrift.tools.report.page import write

    found = folders(runs)
    told = gather(found)
    _warn(told["left_out"])
    file = out or (found[0] / "report.html" if len(found) == 1 else Path("report.html"))
    write(file, told)
    count = len(told["runs"])
    typer.echo(f"{count} run{'s' if count > 1 else ''}, in {file}")
    if figures:
        from undrift.tools.report.figures import draw

        typer.echo(f"{len(draw(told, figures))} figures, each as .svg and .png, in {figures}")
    if watch:
        from undrift.tools.report.watch import watch as follow

        follow(found, file, port, typer.echo)


class Kind(StrEnum):
    methods = "methods"
    partitions = "partitions"
    data = "data"
    models = "models"
    losses = "losses"
    metrics = "metrics"


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)  # fmt: skip
def reproduce(context: typer.Context) -> None:
    """Run the papers' experiments again, and print their numbers beside ours. See undrift reproduce --help."""
    from undrift.reproduce.__main__ import main  # a parser of its own, which needs nothing installed

    raise typer.Exit(main(context.args))


@app.command("list")
def list_(
    kind: Annotated[Kind, typer.Argument(help="Of what.")],
    imports: Import = None,
) -> None:
    """What there is, with a line about each."""
    from rich.table import Table

    from undrift.tools import listing
    from undrift.tools.plugins import import_plugins

    import_plugins(imports or ())
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    for name, line in getattr(listing, kind.value)().items():
        table.add_row(name, line)
    _console().print(table)


@app.command()
def info() -> None:
    """Versions and hardware: what a bug report needs."""
    from undrift.tools.info import info

    for name, value in info().items():
        typer.echo(f"{name:<12}{value}")


@data.command()
def show(
    name: Annotated[str, typer.Argument(help="A data set's name, a file, or a folder.")],
    partition: Annotated[str, typer.Option(help='How it is dealt out: "Dirichlet(0.1)", "ByKey()" …')] = "IID()",
    clients: Annotated[int | None, typer.Option(help="To how many clients; ByKey() has its own.")] = None,
    seed: Annotated[int, typer.Option(help="What chance is drawn from.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it: a .png, .svg or .pdf file.")] = None,
    label: Annotated[str, typer.Option(help="Of a file of your own: the label's column.")] = "label",
    client: Annotated[str | None, typer.Option(help="Of a file of your own: the client's column.")] = None,
    imports: Import = None,
    data_dir: DataDir = None,
) -> None:
    """Who holds what: a picture, sizes, and how much clients' data differ."""
    from undrift.data import show as shown
    from undrift.data.load import load
    from undrift.tools.plugins import import_plugins

    import_plugins(imports or ())
    if clients is None and not partition.startswith("ByKey"):
        clients = 10
    loaded = load(name, partition, clients, seed, label=label, client=client, data_dir=data_dir)
    title = f"{name}, {partition}"
    file = picture or Path(re.sub(r"\W+", "-", f"{Path(name).stem}-{partition}-{len(loaded)}").strip("-") + ".png")
    shown.picture(loaded, title, file)
    _console().print(shown.report(loaded, title))
    typer.echo(f"\ndrawn in {file}")


# ---- what the commands share -------------------------------------------------------------------------------------


def _console() -> Console:
    """Where tables go. What users named is printed as it is: no markup, no emoji."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160  # a file has no edge, and tables need not be squeezed
    return console


def _warn(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(f"warning: {problem} It is left out.", err=True)


def _settings(
    file: Path, set: list[str] | None, imports: list[str] | None, data_dir: Path | None, trust: bool = False
) -> dict[str, Any]:
    from undrift.tools import config

    return _allowed(config.override(config.read(file), set or []), file, imports, data_dir, trust)


def _allowed(
    settings: dict[str, Any], file: Path, imports: list[str] | None, data_dir: Path | None, trust: bool
) -> dict[str, Any]:
    """The settings with what the command line adds to them. Refuses imports that nobody has allowed."""
    given = settings.get("imports", [])
    if isinstance(given, list):
        _check_trust(file, given, imports or [], trust)
        if imports:
            settings["imports"] = list(dict.fromkeys([*given, *imports]))
    if data_dir and isinstance(settings.get("data"), dict):
        settings["data"]["data_dir"] = str(data_dir)
    return settings


def _check_trust(file: Path, given: list[Any], imports: list[str], trust: bool) -> None:
    """A file that the user names may import code; the folder of a run may come from somebody else, so it must not."""
    from undrift.errors import UndriftError, quoted

    strange = [name for name in given if name not in imports]
    if strange and not trust and file.is_dir():
        raise UndriftError(
            f"{file / 'config.toml'} asks to import {', '.join(map(quoted, strange))}, which runs that code. If you "
            f"trust it, allow it with {' '.join(f'--import {name}' for name in strange)}, or with --trust."
        )


def _experiment(
    file: Path, set: list[str] | None, imports: list[str] | None, data_dir: Path | None, trust: bool
) -> Experiment:
    from undrift.tools import config

    settings = _settings(file, set, imports, data_dir, trust)
    settings.pop("sweep", None)
    return config.checked(settings, str(file))


def _run(
    experiment: Experiment, folder: Path, where: Path, resume: bool = False, allow_version_change: bool = False
) -> None:
    from undrift.tools.display import Live, left_out, marks, score
    from undrift.tools.experiment import about, run
    from undrift.tools.stopping import stopping
    from undrift.training.nonfinite import mute

    console = _console()
    mute()  # this command says it itself, below its progress bar
    allowed = "".join(f" --import {name}" for name in experiment.imports)
    with about(str(where)), stopping() as stop, Live(console, experiment.rounds) as live:

        def on_round(row: dict[str, Any]) -> None:
            live(row)
            stop.check()

        try:
            result = run(experiment, folder, resume, on_round, allow_version_change)
        except KeyboardInterrupt:
            live.__exit__()
            left = folder if (folder / "config.toml").exists() else None
            typer.echo(f"stopped; go on with: undrift resume {left}{allowed}" if left else "stopped", err=True)
            raise typer.Exit(130) from None
    if result.stopped:
        some = 'on_nonfinite="skip"' in result.stopped
        rest = f"; to go on without such clients: undrift resume {folder}{allowed} --on-nonfinite skip" if some else ""
        typer.echo(f"stopped. {result.stopped}\n{len(result.history)} rounds are in {folder}{rest}", err=True)
        raise typer.Exit(1)
    found = score(result.history[-1])
    said = f"{found[0].replace('_', ' ')} {found[1]:.4f} after " if found else ""
    skipped = "".join(f", {mark}" for mark in marks(0, left_out(result.history)))
    typer.echo(f"{said}{len(result.history)} rounds{skipped}, in {folder}")


def _seeds(settings: dict[str, Any], count: int | None) -> list[int]:
    first = settings.get("seed", 0)
    plain = isinstance(first, int) and not isinstance(first, bool)
    return [first + i for i in range(count or 1)] if plain else [first]


def _points(settings: dict[str, Any], grid: dict[str, list[Any]], where: str) -> Any:
    from undrift.tools.sweep import points

    return points(settings, grid, where)


def _sweep(points: Any, folder: Path, where: str, workers: int | None) -> tuple[list[Any], dict[str, str]]:
    """The runs that finished or stopped, with a bar that counts them, and by name what went wrong with the others."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from undrift.tools.config import checked
    from undrift.tools.experiment import about, arguments
    from undrift.tools.sweep import sweep

    with about(where):  # what is wrong with the data is wrong with all runs: better said before the first
        arguments(checked(points[0].settings, where))
    failed: dict[str, str] = {}
    console = _console()
    columns = (TextColumn("runs"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(points))

        def done(point: Any, message: str | None) -> None:
            progress.advance(task)
            if message:
                failed[point.name] = message
                print(f"error: {point.name}: {message}", file=sys.stderr)

        try:
            return sweep(points, folder, where, workers, done), failed
        except KeyboardInterrupt:
            progress.stop()
            typer.echo(f"stopped; the same command with --out {folder} goes on", err=True)
            raise typer.Exit(130) from None


def _sweep_table(found: dict[str, Any]) -> Any:
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
    """Mean ± deviation, of one run its figure, of what is no number a dash."""
    if figures["mean"] is None:
        return "–"
    return f"{figures['mean']:.4f}" + (f" ± {figures['std']:.4f}" if figures["std"] is not None else "")


def main() -> None:
    """What the command `undrift` runs: an error ends in a sentence, not in a traceback.

    Exit status 2 is for bad input, 1 for what went wrong otherwise (a full disk, no memory), 130 for Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may hold what a terminal cannot show
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as ended:
        if ended.code:  # one more Ctrl-C must not show a traceback of what torch does at exit
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise
    except BrokenPipeError:  # whoever read the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        status, message = _said(error)
        if DEBUG in os.environ or message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(status)


def _said(error: Exception) -> tuple[int, str | None]:
    """The exit status and the message for an error; no message for one that is undrift's own fault."""
    from undrift.errors import UndriftError, machine_trouble

    if not isinstance(error, UndriftError):
        return 1, machine_trouble(error)
    cause: BaseException | None = error
    while cause is not None and machine_trouble(cause) is None:
        cause = cause.__cause__
    return (2 if cause is None else 1), str(error)
