"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from undrift import __version__
from undrift.errors import DEBUG, said_elsewhere
from undrift.flower.commands import flower
from undrift.tools import launch
from undrift.tools.options import DataDir, File, Import, Out, Set, Trust
from undrift.tools.study.commands import register
from undrift.tools.torchrun import speaks

app = typer.Typer(
    name="undrift", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Federated learning that holds its course when clients' data differ.",
)  # fmt: skip
data = typer.Typer(no_args_is_help=True, help="Data sets and their partitions.")
app.add_typer(data, name="data")
app.add_typer(flower, name="flower")


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
    experiment = launch.read_experiment(file, set, imports, data_dir, trust)
    from undrift.tools.experiment import new_folder, title

    launch.run_experiment(experiment, out or new_folder(title(experiment)), file)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that stopped or finished.")],
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Train until so many rounds are done, also if the run has finished.")
    ] = None,
    on_nonfinite: Annotated[
        str | None, typer.Option(help="If the run stopped on NaN: skip drops clients whose updates are not finite.")
    ] = None,
    imports: Import = None,
    trust: Trust = False,
    allow_version_change: Annotated[
        bool,
        typer.Option(
            "--allow-version-change",
            help="Resume with other versions or on another device, where last digits may differ, or with changed code.",
        ),
    ] = False,
) -> None:
    """Resume a run from its last checkpoint, as if it had never stopped, or continue a finished one."""
    from undrift.errors import UndriftError
    from undrift.tools import config
    from undrift.tools.experiment import resumable, same_length
    from undrift.training.record import repeats
    from undrift.training.result import RUN, finished, intact, recorded

    if not any((folder / name).exists() for name in ("config.toml", RUN)):
        raise UndriftError(f"{folder} is not a run: it has no config.toml.")
    settings, text = resumable(folder, allow_version_change)
    if not repeats(text):
        raise UndriftError(
            f"{folder} was started from Python; resume it there: ud.train(…, out={str(folder)!r}, resume=True)."
        )
    options = {"on_nonfinite": on_nonfinite, "rounds": rounds}
    changed = config.override(settings, [f"{key}={value}" for key, value in options.items() if value is not None])
    known = recorded(folder) if finished(folder) else None
    if known and same_length(changed, text) and intact(folder, known):
        launch.say(f"{folder} is finished.")
        return
    experiment = config.checked(launch.with_options(changed, folder, imports, None, trust), str(folder))
    launch.run_experiment(experiment, folder, folder, resume=True, allow_version_change=allow_version_change)


register(app)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or not, or of sweeps.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page.  [default: report.html in the run's folder; for several runs, here]"),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date, and serve it locally.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to serve it on.  [default: a free one]")] = 0,
    figures: Annotated[Path | None, typer.Option(help="Also draw figures for a paper into this folder.")] = None,
) -> None:
    """Write one page of charts that opens without a network. Runs that differ only in their seed are one curve."""
    from undrift.tools.report.gather import folders, gather
    from undrift.tools.report.page import write

    found = folders(runs)
    payload = gather(found)
    launch.warn_left_out(payload["left_out"])
    file = out or (found[0] / "report.html" if len(found) == 1 else Path("report.html"))
    write(file, payload)
    count = len(payload["runs"])
    typer.echo(f"{count} run{'s' if count > 1 else ''}, in {file}")
    if figures:
        from undrift.tools.report.figures import draw

        typer.echo(f"{len(draw(payload, figures))} figures, each as .pdf, .svg and .png, in {figures}")
    if watch:
        from undrift.tools.report.watch import watch as follow

        follow(found, file, port, typer.echo)


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    to: Annotated[Path, typer.Option(help="The folder to write, empty or new.", show_default=False)],
    repo: Annotated[str | None, typer.Option(help="The model's name on the hub: me/digits-fedprox")] = None,
    license: Annotated[str | None, typer.Option(help="The license of the weights, as the hub spells it.")] = None,
    upload: Annotated[bool, typer.Option("--upload", help="Also send the folder to the hub, as --repo.")] = False,
    imports: Import = None,
    trust: Trust = False,
) -> None:
    """Write a run's model card and files for the Hugging Face hub. Nothing is sent without --upload."""
    from undrift.errors import require
    from undrift.tools import publish as publishing
    from undrift.tools.compare import Run

    require(bool(repo) or not upload, "--upload needs the model's name on the hub: --repo me/name.")
    launch.check_trust(run, Run.read(run).settings.get("imports", []), imports or [], trust)
    files = publishing.publish(run, to, repo, license)
    typer.echo(f"{len(files)} files, in {to}")
    if upload and repo:
        typer.echo(f"uploaded to {publishing.upload(to, repo)}")


class Kind(StrEnum):
    methods = "methods"
    optimizers = "optimizers"
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
    from undrift.reproduce.__main__ import main  # uses argparse, so that it also runs where typer is not installed

    raise typer.Exit(main(context.args))


@app.command("list")
def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    imports: Import = None,
) -> None:
    """List what is available, with a line about each."""
    from rich.table import Table

    from undrift.tools import listing
    from undrift.tools.plugins import import_plugins

    import_plugins(imports or ())
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    for name, line in getattr(listing, kind.value)().items():
        table.add_row(name, line)
    launch.new_console().print(table)


@app.command()
def info() -> None:
    """Print versions and hardware, for bug reports."""
    from undrift.tools.info import info

    for name, value in info().items():
        typer.echo(f"{name:<12}{value}")


@data.command()
def show(
    name: Annotated[str, typer.Argument(help="A data set's name, a file, or a folder.")],
    partition: Annotated[str, typer.Option(help='The partition: "Dirichlet(0.1)", "ByKey()" …')] = "IID()",
    clients: Annotated[int | None, typer.Option(help="How many clients; ByKey() takes the data's own.")] = None,
    seed: Annotated[int, typer.Option(help="The random seed of the partition.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="The figure to write: a .png, .svg or .pdf file.")] = None,
    label: Annotated[str, typer.Option(help="The column of the labels, in your own file.")] = "label",
    client: Annotated[str | None, typer.Option(help="The column of the client ids, in your own file.")] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="A column of your own file to leave out; may be repeated.")
    ] = None,
    missing: Annotated[str | None, typer.Option(help='What to do about empty cells: "drop" or "mean".')] = None,
    resize: Annotated[int | None, typer.Option(help="The height and width of your own images.")] = None,
    imports: Import = None,
    data_dir: DataDir = None,
) -> None:
    """Show a partition: a figure, sizes, and how much clients' data differ."""
    from undrift.data import show as shown
    from undrift.data.load import load
    from undrift.tools.plugins import import_plugins

    import_plugins(imports or ())
    if clients is None and not partition.startswith("ByKey"):
        clients = 10
    columns: dict[str, Any] = {"label": label, "client": client, "drop": drop or None, "missing": missing}
    loaded = load(name, partition, clients, seed, **columns, resize=resize, data_dir=data_dir)
    title = f"{name}, {partition}"
    file = picture or Path(re.sub(r"\W+", "-", f"{Path(name).stem}-{partition}-{len(loaded)}").strip("-") + ".png")
    shown.picture(loaded, title, file)
    launch.new_console().print(shown.report(loaded, title))
    typer.echo(f"\ndrawn in {file}")


def main() -> None:
    """The entry point of the command `undrift`: errors are printed as a sentence, not as a traceback.

    The exit status is 2 for bad input, 130 for Ctrl-C, and 1 for any other error (a full disk, no memory).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for file names that a terminal cannot show
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as ended:
        if ended.code:  # another Ctrl-C must not show a traceback of torch's exit handlers
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        status, message = _describe(error)
        if DEBUG in os.environ or message is None:
            raise
        if not said_elsewhere(error):
            who = "" if speaks() else f"process {os.environ['RANK']}: "
            print(f"{who}error: {message}", file=sys.stderr)
        sys.exit(status)


def _describe(error: Exception) -> tuple[int, str | None]:
    """The exit status and the message for an error; no message for a bug in undrift."""
    from undrift.errors import UndriftError, machine_trouble

    if not isinstance(error, UndriftError):
        return 1, machine_trouble(error)
    cause: BaseException | None = error
    while cause is not None and machine_trouble(cause) is None:
        cause = cause.__cause__
    return (2 if cause is None else 1), str(error)
