"""The commands of `undrift`, one function each. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import re
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift import __version__
from undrift.errors import DEBUG, UndriftError, listed, machine_trouble, printable, require, said_elsewhere
from undrift.flower.commands import flower
from undrift.tools import output
from undrift.tools.cli_helpers import (
    Command,
    DataDir,
    Devices,
    File,
    Group,
    Import,
    Out,
    Seeds,
    Set,
    Together,
    Trust,
    Workers,
    arguments_as_flags,
    examples,
    read_experiment,
    read_settings,
    refuse_torchrun,
    run_experiment,
    run_points,
    warn_left_out,
    with_options,
)
from undrift.tools.output import new_console, say
from undrift.tools.plugins import allow_imports, import_plugins

if TYPE_CHECKING:
    from undrift.tools.compare import Comparison, Figures
    from undrift.tools.parallel import Point

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
    require(out is not None or not force, "--force needs --out, the folder of the run to replace.")
    experiment = read_experiment(file, set, imports, data_dir, trust)
    from undrift.tools.experiment import new_folder, title

    run_experiment(experiment, out or new_folder(title(experiment)), file, force=force)


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
    from undrift.tools import config
    from undrift.tools.experiment import override_for_resume, same_length, settings_to_resume, without_effect
    from undrift.training.config_writer import repeats
    from undrift.training.run_folder import RUN, finished, intact, recorded

    if not any((folder / name).exists() for name in ("config.toml", RUN)):
        raise UndriftError(f"{folder} is not the folder of a run: it has no config.toml.")
    settings, text = settings_to_resume(folder, allow_version_change)
    if not repeats(text):
        raise UndriftError(
            f"{folder} was started from Python; resume it there: ud.train(…, out={str(folder)!r}, resume=True)."
        )
    options = {"on_nonfinite": on_nonfinite, "rounds": rounds}
    given = [*(set or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]
    changed = override_for_resume(settings, given, allow_version_change)
    known = recorded(folder) if finished(folder) else None
    if known and same_length(changed, text) and intact(folder, known):
        rest = without_effect(changed, text)
        say(f"{folder} is finished; to train it further, ask for more rounds with --rounds.{rest}")
        return
    experiment = config.checked(with_options(changed, folder, imports, None, trust), str(folder))
    run_experiment(experiment, folder, folder, resume=True, allow_version_change=allow_version_change)


@app.command(
    cls=Command,
    epilog=examples(
        "undrift compare runs/fedavg runs/fedprox --baseline FedAvg",
        "undrift compare FedAvg=runs/a* FedProx=runs/b* --target 0.8 --latex table.tex",
    ),
)
def compare(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Folders of runs, sweeps or studies, and experiment files to run first. LABEL=PATH names a group.",
            show_default=False,
        ),
    ],
    target: Annotated[
        float | None,
        typer.Option(
            metavar="VALUE", help="Also report the rounds, local steps, bytes and seconds needed to reach this value."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The metric to compare by, such as loss or validation_accuracy.",
            show_default="the first metric of the runs",
        ),
    ] = None,
    last: Annotated[int, typer.Option(min=1, metavar="N", help="Average the metric over the last N evaluations.")] = 1,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also report differences to this group, paired by seed, with a 95% confidence interval.",
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write every number as CSV.")] = None,
    latex: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a LaTeX table (uses booktabs).")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a Markdown table.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also draw figures: .pdf, .svg and .png files.")
    ] = None,
    double: Annotated[bool, typer.Option("--double", help="Draw the figures two columns wide.")] = False,
    seeds: Seeds = None,
    set: Set = None,
    out: Out = None,
    imports: Import = None,
    data_dir: DataDir = None,
) -> None:
    """Compare runs in a table: mean ± standard deviation over seeds.

    Runs that differ only in their seed form a group. Experiment files are run first, into --out.
    """
    refuse_torchrun("compare")
    from undrift.tools import compare as comparing
    from undrift.tools.run_folders import read_runs

    given = comparing.parse_arguments(paths)
    points, of_files = _points_of_files(given.files, seeds, set, imports, data_dir)
    runs, problems = read_runs(list(given.folders)) if given.folders else ([], [])
    warn_left_out(problems)
    if given.skipped:
        say(comparing.describe_skipped(given.skipped), err=True)
    failed: dict[str, str] = {}
    labels = dict(given.folders)
    if points:
        from undrift.tools.experiment import new_folder
        from undrift.tools.parallel import Parallel, alone_in

        folder = out or new_folder("compare")
        with alone_in(folder):
            more, failed = run_points(points, folder, "compare", Parallel())
        runs += more
        labels |= {folder / name: label for name, label in of_files.items()}
    if not runs:
        raise UndriftError("There is nothing to compare: no run finished.")
    groups = comparing.group_by_label(runs, labels)
    for sentence in comparing.find_mismatches(groups):
        say(f"warning: {sentence}", err=True)
    by = comparing.choose_metric(runs, metric)
    if comparing.find_undecided(runs, by):
        say(
            f"warning: nothing says whether lower or higher values of {by} are better; higher ones are taken to be. "
            f"{comparing.DECLARE} and train again to change that.", err=True,
        )  # fmt: skip
    comparison = comparing.Comparison(by, last, target, baseline, comparing.lower_is_better_in(runs, by))
    blocks = {"": comparing.measure(groups, comparison)}
    _print_figures(blocks, comparison)
    _write_tables(blocks, comparison, csv, latex, markdown)
    if figures:
        from undrift.tools.report.figures import DOUBLE, SINGLE, draw
        from undrift.tools.report.gather import gather

        by_folder = {run.folder: name for name, own in groups.items() for run in own}
        made = draw(gather(list(by_folder), by_folder), figures, DOUBLE if double else SINGLE)
        say(f"{len(made)} figures, each as .pdf, .svg and .png, in {figures}")
    raise typer.Exit(1 if failed else 0)


def _points_of_files(
    files: list[tuple[Path, str | None]],
    seeds: int | None,
    set: list[str] | None,
    imports: list[str] | None,
    data_dir: Path | None,
) -> tuple[list[Point], dict[str, str | None]]:
    """The runs of experiment files, one per seed, and their labels by name."""
    from undrift.tools.parallel import Point, unique_names
    from undrift.tools.sweep import grid_points, seeds_from

    points, labels = [], []
    for file, label in files:
        settings = read_settings(file, set, imports, data_dir)
        settings.pop("sweep", None)
        for point in grid_points(settings, {"seed": seeds_from(settings, seeds)}, str(file)):
            points.append(Point(f"{file.stem},{point.name}", point.settings))
            labels.append(label)
    named = unique_names(points)
    return named, {point.name: label for point, label in zip(named, labels, strict=True)}


def _print_figures(blocks: dict[str, list[Figures]], comparison: Comparison) -> None:
    """Print a table, and the notes below it."""
    from undrift.tools import tables

    console = new_console()
    if not console.is_terminal:
        console.width = 400  # a line of a file is as long as it needs to be
    console.print(tables.rich_table(blocks, comparison))
    for note in tables.notes(blocks):
        say(note)


def _write_tables(
    blocks: dict[str, list[Figures]], comparison: Comparison, csv: Path | None, latex: Path | None,
    markdown: Path | None,
) -> None:  # fmt: skip
    """Write a table to each of the files that is not None."""
    from undrift.tools import tables

    texts = {
        csv: tables.csv_text(blocks),
        latex: tables.latex(blocks, comparison),
        markdown: tables.markdown(blocks, comparison),
    }
    for file, text in texts.items():
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise UndriftError(f"{file} cannot be written ({error.strerror}).") from error


@app.command(cls=Command, epilog=examples("undrift sweep experiment.toml --grid 'local.lr=[0.01, 0.1]' --seeds 3"))
def sweep(
    file: File,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=[…]", help="The values to try for a setting, such as 'local.lr=[0.01, 0.1]'. May be repeated."
        ),
    ] = None,
    seeds: Seeds = None,
    workers: Workers = None,
    devices: Devices = None,
    together: Together = None,
    set: Set = None,
    out: Out = None,
    imports: Import = None,
    trust: Trust = False,
    data_dir: DataDir = None,
) -> None:
    """Run every combination of a grid of settings and choose the best on validation data.

    The grid can also be written in the file, in a section \\[sweep]. To continue an interrupted sweep, repeat the
    command with the same --out. To tune each method separately, use undrift study.
    """
    refuse_torchrun("sweep")
    from undrift.tools import sweep as sweeping
    from undrift.tools.experiment import new_folder
    from undrift.tools.parallel import alone_in, parse_parallel

    settings = read_settings(file, set, imports, data_dir, trust)
    values = sweeping.file_grid(settings.pop("sweep", {})) | sweeping.parse_grid(grid or [])
    if seeds is not None or "seed" not in values:
        values["seed"] = sweeping.seeds_from(settings, seeds)
    folder = out or new_folder(file.stem)
    points = sweeping.grid_points(settings, values, str(file))
    how = parse_parallel(workers, devices, together)
    with alone_in(folder):
        runs, failed = run_points(points, folder, str(file), how)
        content = sweeping.summary(runs, folder, failed)
    from rich.text import Text

    console = new_console()
    if runs:
        console.print(sweeping.sweep_table(content))
        for row in content["settings"]:
            if row["remark"]:
                say(f"{row['name']}: {row['remark']}")
    if content["best"] is not None and len(content["settings"]) > 1:
        tied = f" (tied with {listed(content['tied'], 3)})" if content["tied"] else ""
        by = content["chosen_by"].replace("_", " ")
        console.print(Text(f"best by {by}: ").append(content["best"], "bold").append(tied))
    elif content["chosen_by"] and len(content["settings"]) > 1:
        console.print("no best setting: every setting has a run that stopped or diverged")
    console.print(f"in {folder}" + (f"; {len(failed)} of {len(points)} runs failed" if failed else ""))
    raise typer.Exit(1 if failed else 0)


@app.command(
    cls=Command,
    epilog=examples("undrift study study.toml", "undrift study study.toml --devices cuda:0,cuda:1"),
)
def study(
    file: Annotated[Path, typer.Argument(help="A study file (TOML).", show_default=False)],
    workers: Workers = None,
    devices: Devices = None,
    together: Together = None,
    set: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder to write to.", show_default="the file's name, in runs/"),
    ] = None,
    imports: Import = None,
    data_dir: DataDir = None,
) -> None:
    """Tune every method on validation data, rerun the best settings on fresh seeds, and write tables and figures.

    To continue an interrupted study, repeat the command.
    """
    refuse_torchrun("study")
    from undrift.tools.live_table import LiveTable
    from undrift.tools.parallel import alone_in, parse_parallel
    from undrift.tools.study import results
    from undrift.tools.study.file import read_study
    from undrift.tools.study.run import Outcome, TableRunner, prepare, progress_table, run_study

    plan = prepare(read_study(read_settings(file, set, imports, data_dir), str(file)), str(file))
    folder = out or Path("runs") / file.stem
    how = parse_parallel(workers, devices, together)
    outcomes = [Outcome(cell) for cell in plan.cells]
    with alone_in(folder):
        try:
            with LiveTable(new_console(), lambda: progress_table(outcomes)) as table:
                run_study(outcomes, plan, folder, str(file), TableRunner(table, str(file), how))
        except KeyboardInterrupt:
            rest = "" if out is None else f" with --out {out}"
            say(f"stopped; to continue, repeat the command{rest}", err=True)
            raise typer.Exit(130) from None
        _print_figures(*results.write(outcomes, plan, folder))
        for outcome in outcomes:
            if outcome.why:
                where = ", ".join(filter(None, (outcome.cell.partition, outcome.cell.method)))
                say(f"{where}: {outcome.why}", err=True)
        results.draw(outcomes, plan, folder / "figures")
    say(f"in {folder}: study.json, study.csv, study.tex, study.md, and figures as .pdf, .svg and .png")
    raise typer.Exit(1 if any(outcome.why for outcome in outcomes) else 0)


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
    from undrift.tools.report.gather import gather
    from undrift.tools.report.page import write
    from undrift.tools.run_folders import find_runs

    if watch:
        from undrift.tools.report.watch import wait_for

        wait_for(runs, say)
    folders = find_runs(runs)
    payload = gather(folders)
    warn_left_out(payload["left_out"])
    file = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    write(file, payload)
    count = len(payload["runs"])
    say(f"{count} run{'s' if count > 1 else ''}, in {file}")
    if figures:
        from undrift.tools.report.figures import draw

        say(f"{len(draw(payload, figures))} figures, each as .pdf, .svg and .png, in {figures}")
    if watch:
        from undrift.tools.report.watch import watch as follow

        follow(runs, file, port, say)


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
    from undrift.tools import publish as publishing
    from undrift.tools.run_folders import RunFolder

    require(bool(repo) or not upload, "--upload needs the model's name on the hub: --repo me/name.")
    allow_imports(run, RunFolder.read(run).settings.get("imports", []), imports or [], trust)
    files = publishing.publish(run, to, repo, license)
    say(f"{len(files)} files, in {to}")
    if upload and repo:
        say(f"uploaded to {publishing.upload(to, repo)}")


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

    import_plugins(imports or ())
    listing.show(getattr(listing, kind.value)(), new_console())


@app.command(cls=Command, epilog=examples("undrift info"))
def info() -> None:
    """Print package versions, GPUs, the driver and CPU threads, for bug reports."""
    from undrift.tools.info import info

    for name, value in info().items():
        say(f"{name:<12}{value}")


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

    import_plugins(imports or ())
    columns: dict[str, Any] = {"label": label, "client": client, "drop": drop or None, "missing": missing}
    options = columns | {"resize": resize, "normalize": normalize, "data_dir": data_dir}
    with arguments_as_flags(), call_once(name) as split:
        partition = partition or ("ByKey()" if split else "IID()")
        if clients is None and not partition.startswith("ByKey"):
            clients = 10
        loaded = load(name, partition, clients, seed, **options)
    title = f"{name}, {partition}"
    file = picture or Path(re.sub(r"\W+", "-", f"{Path(name).stem}-{partition}-{len(loaded)}").strip("-") + ".png")
    partition_summary.draw(loaded, title, file)
    new_console().print(partition_summary.report(loaded, title))
    say(f"\ndrawn in {file}")


def main() -> None:
    """The entry point of the command `undrift`: errors are printed as a sentence, not as a traceback.

    The exit status is 2 for bad input, 130 for Ctrl-C, and 1 for any other error (a full disk, no memory).
    """
    output.prepare_streams()
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
        if output.is_output_error(error):
            if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has closed the pipe
                sys.exit(1)
            message = f"The standard output cannot be written ({getattr(error, 'strerror', error)})."
        if DEBUG in os.environ or message is None:
            raise
        if not said_elsewhere(error):
            who = "" if output.speaks() else f"process {os.environ['RANK']}: "
            print(printable(f"{who}error: {message}"), file=sys.stderr)
        sys.exit(status)


def _describe(error: Exception) -> tuple[int, str | None]:
    """The exit status and the message for an error; no message for a bug in undrift."""
    if not isinstance(error, UndriftError):
        return 1, machine_trouble(error)
    cause: BaseException | None = error
    while cause is not None and machine_trouble(cause) is None:
        cause = cause.__cause__
    return (2 if cause is None else 1), str(error)
