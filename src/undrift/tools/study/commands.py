"""`undrift compare`, `sweep` and `study`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift.tools import launch
from undrift.tools.help import Command, examples
from undrift.tools.options import DataDir, File, Import, Out, Set, Trust
from undrift.tools.torchrun import refuse_torchrun

if TYPE_CHECKING:
    from undrift.tools.study.measures import Asked, Figures

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


def register(app: typer.Typer) -> None:
    """Add the commands."""
    shown: dict[Any, str] = {
        compare: examples(
            "undrift compare runs/fedavg runs/fedprox --baseline FedAvg",
            "undrift compare FedAvg=runs/a* FedProx=runs/b* --target 0.8 --latex table.tex",
        ),
        sweep: examples("undrift sweep experiment.toml --grid 'local.lr=[0.01, 0.1]' --seeds 3"),
        study: examples("undrift study study.toml", "undrift study study.toml --devices cuda:0,cuda:1"),
    }
    for command, epilog in shown.items():
        app.command(cls=Command, epilog=epilog)(command)


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
    from undrift.errors import UndriftError
    from undrift.tools import compare as compared
    from undrift.tools.study import paths as given_paths
    from undrift.tools.study import tables
    from undrift.tools.study.measures import Asked, measure

    given = given_paths.understand(paths)
    points, of_files = _points(given.files, seeds, set, imports, data_dir)
    runs, problems = compared.read_runs(list(given.folders)) if given.folders else ([], [])
    launch.warn_left_out(problems)
    if given.skipped:
        launch.say(given_paths.describe(given.skipped), err=True)
    failed: dict[str, str] = {}
    labels = dict(given.folders)
    if points:
        from undrift.tools.experiment import new_folder
        from undrift.tools.sweep import Parallel

        folder = out or new_folder("compare")
        with launch.alone_in(folder):
            more, failed = launch.run_points(points, folder, "compare", Parallel())
        runs += more
        labels |= {folder / name: label for name, label in of_files.items()}
    if not runs:
        raise UndriftError("There is nothing to compare: no run finished.")
    groups = given_paths.grouped(runs, labels)
    for sentence in given_paths.mismatches(groups):
        launch.say(f"warning: {sentence}", err=True)
    by = compared.chosen_metric(runs, metric)
    if compared.undecided(runs, by):
        launch.say(
            f"warning: nothing says whether lower or higher values of {by} are better; higher ones are taken to be. "
            f"{compared.DECLARE} and train again to change that.", err=True,
        )  # fmt: skip
    asked = Asked(by, last, target, baseline, compared.agreed(runs, by))
    blocks = {"": measure(groups, asked)}
    _print(blocks, asked)
    for note in tables.notes(blocks):
        launch.say(note)
    _write(blocks, asked, csv, latex, markdown)
    if figures:
        from undrift.tools.report.figures import DOUBLE, SINGLE, draw
        from undrift.tools.report.gather import gather

        by_folder = {run.folder: name for name, own in groups.items() for run in own}
        made = draw(gather(list(by_folder), by_folder), figures, DOUBLE if double else SINGLE)
        launch.say(f"{len(made)} figures, each as .pdf, .svg and .png, in {figures}")
    raise typer.Exit(1 if failed else 0)


def _points(
    files: list[tuple[Path, str | None]],
    seeds: int | None,
    set: list[str] | None,
    imports: list[str] | None,
    data_dir: Path | None,
) -> tuple[list[Any], dict[str, str | None]]:
    """The runs of experiment files, one per seed, and their labels by name."""
    from undrift.tools.sweep import Point, unique

    points, labels = [], []
    for file, label in files:
        settings = launch.read_settings(file, set, imports, data_dir)
        settings.pop("sweep", None)
        for point in launch.grid_points(settings, {"seed": launch.seeds_from(settings, seeds)}, str(file)):
            points.append(Point(f"{file.stem},{point.name}", point.settings))
            labels.append(label)
    found = unique(points)
    return found, {point.name: label for point, label in zip(found, labels, strict=True)}


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
    from undrift.errors import listed
    from undrift.tools import sweep as swept
    from undrift.tools.experiment import new_folder

    settings = launch.read_settings(file, set, imports, data_dir, trust)
    wanted = swept.file_grid(settings.pop("sweep", {})) | swept.parse_grid(grid or [])
    if seeds is not None or "seed" not in wanted:
        wanted["seed"] = launch.seeds_from(settings, seeds)
    folder = out or new_folder(file.stem)
    points = launch.grid_points(settings, wanted, str(file))
    how = swept.parallel(workers, devices, together)
    with launch.alone_in(folder):
        runs, failed = launch.run_points(points, folder, str(file), how)
        found = swept.summary(runs, folder, failed)
    from rich.text import Text

    console = launch.new_console()
    if runs:
        console.print(launch.sweep_table(found))
        for row in found["settings"]:
            if row["remark"]:
                launch.say(f"{row['name']}: {row['remark']}")
    if found["best"] is not None and len(found["settings"]) > 1:
        tied = f" (tied with {listed(found['tied'], 3)})" if found["tied"] else ""
        by = found["chosen_by"].replace("_", " ")
        console.print(Text(f"best by {by}: ").append(found["best"], "bold").append(tied))
    elif found["chosen_by"] and len(found["settings"]) > 1:
        console.print("no best setting: every setting has a run that stopped or diverged")
    console.print(f"in {folder}" + (f"; {len(failed)} of {len(points)} runs failed" if failed else ""))
    raise typer.Exit(1 if failed else 0)


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
    from undrift.tools import sweep as swept
    from undrift.tools.study import live, results, tables
    from undrift.tools.study.file import read_study
    from undrift.tools.study.run import Outcome, prepare, run_study

    found = prepare(read_study(launch.read_settings(file, set, imports, data_dir), str(file)), str(file))
    folder = out or Path("runs") / file.stem
    how = swept.parallel(workers, devices, together)
    outcomes = [Outcome(cell) for cell in found.cells]
    with launch.alone_in(folder):
        try:
            with live.board(launch.new_console(), outcomes) as board:
                run_study(outcomes, found, folder, str(file), live.Runner(board, str(file), how))
        except KeyboardInterrupt:
            rest = "" if out is None else f" with --out {out}"
            launch.say(f"stopped; to continue, repeat the command{rest}", err=True)
            raise typer.Exit(130) from None
        blocks, asked = results.write(outcomes, found, folder)
        _print(blocks, asked)
        for note in tables.notes(blocks):
            launch.say(note)
        for outcome in outcomes:
            if outcome.why:
                where = ", ".join(filter(None, (outcome.cell.partition, outcome.cell.method)))
                launch.say(f"{where}: {outcome.why}", err=True)
        results.draw(outcomes, found, folder / "figures")
    launch.say(f"in {folder}: study.json, study.csv, study.tex, study.md, and figures as .pdf, .svg and .png")
    raise typer.Exit(1 if any(outcome.why for outcome in outcomes) else 0)


def _print(blocks: dict[str, list[Figures]], asked: Asked) -> None:
    from undrift.tools.study.tables import rich_table

    console = launch.new_console()
    if not console.is_terminal:
        console.width = 400  # a line of a file is as long as it needs to be
    console.print(rich_table(blocks, asked))


def _write(
    blocks: dict[str, list[Figures]], asked: Asked, csv: Path | None, latex: Path | None, markdown: Path | None
) -> None:
    """Write the tables that were asked for."""
    from undrift.errors import UndriftError
    from undrift.tools.study import tables

    texts = {csv: tables.csv_text(blocks), latex: tables.latex(blocks, asked), markdown: tables.markdown(blocks, asked)}
    for file, text in texts.items():
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise UndriftError(f"{file} cannot be written ({error.strerror}).") from error
