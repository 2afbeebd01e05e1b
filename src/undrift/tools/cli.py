"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import re
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from undrift import __version__
from undrift.errors import DEBUG, printable, said_elsewhere
from undrift.flower.commands import flower
from undrift.tools import launch, streams
from undrift.tools.help import Command, Group, examples
from undrift.tools.options import DataDir, File, Import, Out, Set, Trust
from undrift.tools.study.commands import register
from undrift.tools.torchrun import speaks

app = typer.Typer(
    name="undrift", cls=Group, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Simulate federated learning on heterogeneous (non-IID) clients with PyTorch.",
    epilog=examples("undrift run experiment.toml", "undrift report runs/*", "undrift list methods"),
)  # fmt: skip
data = typer.Typer(cls=Group, no_args_is_help=True, help="Inspect data sets and how they are partitioned.")
app.add_typer(data, name="data")
app.add_typer(flower, name="flower")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"undrift {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


@app.command(
    cls=Command,
    epilog=examples("undrift run experiment.toml", "undrift run experiment.toml --set local.lr=0.05 --out runs/slow"),
)
def run(
    file: File,
    set: Set = None,
    out: Out = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace the run in the --out folder. No other folder or file is ever deleted."),
    ] = False,
    imports: Import = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Train the experiment described by a file and write the results to a folder."""
    from undrift.errors import require

    require(out is not None or not force, "--force needs --out, the folder of the run to replace.")
    experiment = launch.read_experiment(file, set, imports, data_dir, trust)
    from undrift.tools.experiment import new_folder, title

    launch.run_experiment(experiment, out or new_folder(title(experiment)), file, force=force)


@app.command(
    cls=Command,
    epilog=examples(
        "undrift resume runs/mine", "undrift resume runs/mine --rounds 200", "undrift resume runs/mine --set device=cpu"
    ),
)
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, interrupted or finished.", show_default=False)],
    rounds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Train until N rounds are done in total, even if the run has finished."),
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a setting that a resumed run may change, such as evaluate_every=10. May be repeated.",
        ),
    ] = None,
    on_nonfinite: Annotated[
        str | None,
        typer.Option(
            metavar="stop|skip", help="What to do about NaN and infinity: skip leaves out the clients that send them."
        ),
    ] = None,
    imports: Import = None,
    trust: Trust = False,
    allow_version_change: Annotated[
        bool,
        typer.Option(
            "--allow-version-change",
            help="Resume with other package versions, on another device (the last digits may differ), or with changed "
            "code.",
        ),
    ] = False,
) -> None:
    """Resume an interrupted run from its last checkpoint, or train a finished one for more rounds.

    The result is the same, bit for bit, as that of a run that was never interrupted.
    """
    from undrift.errors import UndriftError
    from undrift.tools import config
    from undrift.tools.experiment import changed_for_resume, resumable, same_length, without_effect
    from undrift.training.config_writer import repeats
    from undrift.training.run_folder import RUN, finished, intact, recorded

    if not any((folder / name).exists() for name in ("config.toml", RUN)):
        raise UndriftError(f"{folder} is not the folder of a run: it has no config.toml.")
    settings, text = resumable(folder, allow_version_change)
    if not repeats(text):
        raise UndriftError(
            f"{folder} was started from Python; resume it there: ud.train(…, out={str(folder)!r}, resume=True)."
        )
    options = {"on_nonfinite": on_nonfinite, "rounds": rounds}
    given = [*(set or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]
    changed = changed_for_resume(settings, given, allow_version_change)
    known = recorded(folder) if finished(folder) else None
    if known and same_length(changed, text) and intact(folder, known):
        rest = without_effect(changed, text)
        launch.say(f"{folder} is finished; to train it further, ask for more rounds with --rounds.{rest}")
        return
    experiment = config.checked(launch.with_options(changed, folder, imports, None, trust), str(folder))
    launch.run_experiment(experiment, folder, folder, resume=True, allow_version_change=allow_version_change)


register(app)


@app.command(
    cls=Command,
    epilog=examples(
        "undrift report runs/mine", "undrift report runs/* --out all.html", "undrift report runs/mine --watch"
    ),
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, finished or not, or of whole sweeps and studies.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The HTML file to write.",
            show_default="report.html in the run's folder, or here for several runs",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Serve the page on this machine and update it while the runs train."),
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="The port for --watch.", show_default="a free one")
    ] = 0,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also draw figures for a paper: .pdf, .svg and .png files.")
    ] = None,
) -> None:
    """Write one self-contained HTML page with charts of one or more runs.

    Runs that differ only in their seed share a curve, the mean with a band of one standard deviation.
    """
    from undrift.tools.report.gather import folders, gather
    from undrift.tools.report.page import write

    if watch:
        from undrift.tools.report.watch import wait_for

        wait_for(runs, launch.say)
    found = folders(runs)
    payload = gather(found)
    launch.warn_left_out(payload["left_out"])
    file = out or (found[0] / "report.html" if len(found) == 1 else Path("report.html"))
    write(file, payload)
    count = len(payload["runs"])
    launch.say(f"{count} run{'s' if count > 1 else ''}, in {file}")
    if figures:
        from undrift.tools.report.figures import draw

        launch.say(f"{len(draw(payload, figures))} figures, each as .pdf, .svg and .png, in {figures}")
    if watch:
        from undrift.tools.report.watch import watch as follow

        follow(runs, file, port, launch.say)


@app.command(
    cls=Command,
    epilog=examples(
        "undrift publish runs/mine --to hub/digits",
        "undrift publish runs/mine --to hub/digits --repo me/digits-fedprox --upload",
    ),
)
def publish(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", show_default=False)],
    to: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write, new or empty.", show_default=False)],
    repo: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="The model's name on the hub, such as me/digits-fedprox.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(metavar="ID", help="The license of the weights, by its id on the hub, such as mit.")
    ] = None,
    upload: Annotated[bool, typer.Option("--upload", help="Also upload the folder to the hub, as --repo.")] = False,
    imports: Import = None,
    trust: Trust = False,
) -> None:
    """Prepare a trained model for the Hugging Face hub: the weights, a model card and the experiment.

    Nothing leaves this machine without --upload.
    """
    from undrift.errors import require
    from undrift.tools import publish as publishing
    from undrift.tools.compare import Run

    require(bool(repo) or not upload, "--upload needs the model's name on the hub: --repo me/name.")
    launch.allow_imports(run, Run.read(run).settings.get("imports", []), imports or [], trust)
    files = publishing.publish(run, to, repo, license)
    launch.say(f"{len(files)} files, in {to}")
    if upload and repo:
        launch.say(f"uploaded to {publishing.upload(to, repo)}")


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
    """Rerun the experiments of the papers and compare the results with the published numbers."""
    from undrift.errors import UndriftError

    clone = Path(__file__).resolve().parents[3]
    if not (clone / "papers" / "__main__.py").is_file():
        raise UndriftError(
            "The papers' experiments and results are not in the installed package, but in the folder papers/ of the "
            "repository; install undrift from a clone of it: pip install -e ."
        )
    sys.path.append(str(clone))
    from papers.__main__ import main  # uses argparse, so that it also runs where typer is not installed

    raise typer.Exit(main(context.args))


@app.command("list", cls=Command, epilog=examples("undrift list methods", "undrift list data --import my_data"))
def list_(
    kind: Annotated[
        Kind,
        typer.Argument(
            help="methods, optimizers (local), partitions, data, models, losses or metrics.", show_default=False
        ),
    ],
    imports: Import = None,
) -> None:
    """List the methods, data sets, models and so on that are available, with a short description of each."""
    from undrift.tools import listing
    from undrift.tools.plugins import import_plugins

    import_plugins(imports or ())
    listing.show(getattr(listing, kind.value)(), launch.new_console())


@app.command(cls=Command, epilog=examples("undrift info"))
def info() -> None:
    """Print package versions, GPUs, the driver and CPU threads, for bug reports."""
    from undrift.tools.info import info

    for name, value in info().items():
        launch.say(f"{name:<12}{value}")


@data.command(
    cls=Command,
    epilog=examples(
        'undrift data show digits --partition "Dirichlet(0.1)" --clients 20',
        'undrift data show own.csv --label y --client hospital --partition "ByKey()"',
    ),
)
def show(
    name: Annotated[
        str, typer.Argument(help="The name of a data set, or your own file or folder.", show_default=False)
    ],
    partition: Annotated[
        str | None,
        typer.Option(metavar="EXPR", help='How samples are assigned: "Dirichlet(0.1)", …', show_default="IID()"),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(metavar="N", help="The number of clients.", show_default="10; with ByKey(), as in the data"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The random seed of the partition.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The figure to write: .png, .svg or .pdf.", show_default="a .png here"),
    ] = None,
    label: Annotated[str, typer.Option(metavar="COLUMN", help="Your file's column with the labels.")] = "label",
    client: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Your file's column with the client ids.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="A column of your file to ignore. May be repeated.")
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(
            metavar="drop|mean", help="How to handle empty cells: drop the row, or fill in the column's mean."
        ),
    ] = None,
    resize: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="Resize your images to this height and width.")
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Subtract each column's or channel's mean and divide by its deviation.")
    ] = False,
    imports: Import = None,
    data_dir: DataDir = None,
) -> None:
    """Draw which clients hold which classes, and print client sizes and measures of heterogeneity."""
    from undrift.data import partition_summary
    from undrift.data.load import load
    from undrift.data.user_data import call_once
    from undrift.tools.plugins import import_plugins

    import_plugins(imports or ())
    columns: dict[str, Any] = {"label": label, "client": client, "drop": drop or None, "missing": missing}
    options = columns | {"resize": resize, "normalize": normalize, "data_dir": data_dir}
    with launch.arguments_as_flags(), call_once(name) as split:
        partition = partition or ("ByKey()" if split else "IID()")
        if clients is None and not partition.startswith("ByKey"):
            clients = 10
        loaded = load(name, partition, clients, seed, **options)
    title = f"{name}, {partition}"
    file = picture or Path(re.sub(r"\W+", "-", f"{Path(name).stem}-{partition}-{len(loaded)}").strip("-") + ".png")
    partition_summary.draw(loaded, title, file)
    launch.new_console().print(partition_summary.report(loaded, title))
    launch.say(f"\ndrawn in {file}")


def main() -> None:
    """The entry point of the command `undrift`: errors are printed as a sentence, not as a traceback.

    The exit status is 2 for bad input, 130 for Ctrl-C, and 1 for any other error (a full disk, no memory).
    """
    streams.prepare()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as ended:
        if ended.code:  # another Ctrl-C must not show a traceback of torch's exit handlers
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        status, message = _describe(error)
        if streams.is_of_output(error):
            if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has closed the pipe
                sys.exit(1)
            message = f"The standard output cannot be written ({getattr(error, 'strerror', error)})."
        if DEBUG in os.environ or message is None:
            raise
        if not said_elsewhere(error):
            who = "" if speaks() else f"process {os.environ['RANK']}: "
            print(printable(f"{who}error: {message}"), file=sys.stderr)
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
