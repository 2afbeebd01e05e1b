"""The command `undrift reproduce`; `python -m papers` needs only torch, numpy and safetensors."""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
from pathlib import Path

from papers import catalogue
from papers.catalogue import Cell, Table
from papers.results import CLONE, DEFAULT, Results
from undrift.errors import DEBUG, UndriftError, printable

PARTS = Path("papers", "parts")
QUICK = Path("runs", "reproduce-quick")

DESCRIPTION = """Rerun the experiments of the papers and compare the results with the published numbers.

  undrift reproduce fednlr --table table-1          the remaining cells of one table
  undrift reproduce --budget 9m                     the most valuable cells of all papers, for nine minutes
  undrift reproduce --list                          what is done, what remains, and how long that takes
  undrift reproduce all --quick                     everything, scaled down to a minute on a CPU
"""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        "undrift reproduce", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("paper", nargs="?", default="all", help="a paper's name or number, or all (the default)")
    add("--table", help="one of its tables: table-1")
    add("--figure", help="one of its figures: figure-2, or just 2")
    add("--budget", type=duration, help="start only what fits into this time: 9m, 30s, 2h")
    add("--quick", action="store_true", help="scaled-down versions on a CPU; not the papers' experiments")
    add("--list", action="store_true", help="show what is done and what remains, and run nothing")
    add("--cells", action="store_true", help="with --list: every cell")
    add("--show", metavar="CELL", help="print a cell's experiment file, and run nothing")
    add("--cell", action="append", help="run this cell only; if given more than once, the cells train in one program")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    add("--prepare", type=Path, metavar="DIR", help="write the data as arrays, in files of at most 48 MiB")
    add("--data", type=Path, metavar="DIR", help="read data that --prepare wrote")
    add("--out", type=Path, help=f"the folder of results ({DEFAULT})")
    add("--parts", type=Path, help=f"the folder of unfinished cells ({PARTS})")
    add(
        "--archive",
        type=Path,
        metavar="FILE",
        help="pack the results of this call into FILE, and unfinished cells into parts-FILE, while it runs",
    )
    add("--unpack", type=Path, metavar="FILE", help="add the contents of such an archive")
    add("--page", type=Path, metavar="FILE", help="write the page that shows all results: docs/papers.md")
    add("--device", default="auto", help="cpu, cuda, cuda:1; by default a GPU if there is one")
    add("--processes", type=int, help="cells at a time (4 on a GPU, which they share; else 1)")
    return found


def duration(text: str) -> float:
    """Return a duration such as `9m`, in seconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h)?", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write it like 9m, 30s or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, None: 1}[found[2]]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a cell failed, 2 for bad input, 3 if `--cell` ran out of time."""
    asked = parser().parse_args(arguments)
    try:
        return command(asked)
    except UndriftError as error:
        if DEBUG in os.environ:
            raise
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2


def command(asked: argparse.Namespace) -> int:
    began = time.monotonic()
    out = asked.out or (QUICK / "results" if asked.quick else CLONE / DEFAULT)
    parts = asked.parts or (QUICK / "parts" if asked.quick else CLONE / PARTS)
    if asked.show:
        print(experiment_file(catalogue.cell(asked.show, asked.quick)), end="")
        return 0
    if asked.unpack:
        from papers.archive import unpack

        taken = unpack(asked.unpack, out, parts)
        print(f"{len(taken)} results added from {asked.unpack}")
        return 0
    if asked.page:
        from papers import page

        page.write(out, asked.page, asked.quick)
        print(f"written: {asked.page}")
        return 0
    which = asked.table or (asked.figure and (asked.figure if "-" in asked.figure else f"figure-{asked.figure}"))
    tables = catalogue.select(asked.paper, which, asked.quick)
    if asked.prepare:
        return prepare(tables, asked.prepare)
    results = Results(out)
    if asked.list:
        print(listing(tables, results, parts, asked.cells, asked.device))
        return 0
    if asked.data:
        from papers.arrays import use

        use(asked.data)
    return run(asked, tables, results, parts, began)


def run(asked: argparse.Namespace, tables: list[Table], results: Results, parts: Path, began: float) -> int:
    import torch

    from papers import comparison
    from papers.archive import Archive
    from papers.queue import held_back
    from papers.runner import PAUSED, Runner
    from undrift.tools.stopping import stopping
    from undrift.training.threads import use_threads

    device = "cpu" if asked.quick and asked.device == "auto" else asked.device
    on_gpu = device != "cpu" and torch.cuda.is_available()
    processes = asked.processes if asked.processes is not None else (4 if on_gpu else 0)
    archive = Archive(asked.archive, results.folder, parts) if asked.archive else None
    runner = Runner(results, parts, began, device, asked.budget, processes, asked.data, asked.quick, _say, archive)
    if asked.child:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        # Scaled-down models are too small to gain from more threads.
        with use_threads(1 if asked.quick else None), stopping() as runner.stop:
            if asked.cell:
                runner.several([catalogue.cell(key, asked.quick) for key in asked.cell])
            else:
                runner.run(tables)
    finally:
        results = runner.results
        if archive:
            print(
                f"{archive.write()} results in {archive.file}, {len(runner.paused)} unfinished cells in {archive.more}"
            )
    if asked.cell:
        return PAUSED if runner.paused else int(bool(runner.failed))
    if asked.quick:
        print(comparison.QUICK)
    for table in tables:
        if any(results.get(cell) for cell in table.cells):
            print(f"\n{comparison.text_table(table, results)}")
    for other, count in held_back(tables, results).items():
        print(f"\n{count} cells have as many samples as those of {other}, which must be run before them")
    print(
        f"\n{len(runner.finished)} cells finished, {len(runner.paused)} paused, {len(runner.failed)} failed "
        f"in {time.monotonic() - began:.0f} s"
    )
    return 1 if runner.failed else 0


def _end_with_parent() -> None:
    """End this process with its parent: the pipe is closed however the parent ends."""
    sys.stdin.read()
    os._exit(1)


def _say(line: str) -> None:
    print(line, flush=True)


def prepare(tables: list[Table], folder: Path) -> int:
    from papers.arrays import prepare as write
    from undrift.data import sources

    asked = {
        cell.settings["data"]["name"] for cell in catalogue.cells(tables) if "name" in cell.settings.get("data", {})
    }
    names = sorted(asked & set(sources.RECIPES))
    files = write(names, folder)
    for file in files:
        print(f"{file.stat().st_size / 2**20:6.1f} MiB  {file}")
    print(f"{', '.join(names)}: {sum(file.stat().st_size for file in files) / 2**20:.0f} MiB in {len(files)} files")
    return 0


def listing(tables: list[Table], results: Results, parts: Path, cells: bool, device: str) -> str:
    """Per table, what is done, what remains and how long that takes; then the next cells."""
    from papers import work
    from papers.queue import Costs, held_back, ordered

    costs = Costs(results, work.hardware(device))
    wide = max(len(f"{table.paper}/{table.name}") for table in tables)
    lines = [f"{'':{wide}}{'done':>6}{'all':>6}{'to run':>8}   time left on {costs.hardware}"]
    for table in tables:
        done = sum(results.get(cell) is not None for cell in table.cells)
        waiting = list(ordered([table], results))
        seconds = costs.total(waiting)
        left = "unknown" if seconds is None else f"{seconds / 60:.0f} min"
        name = f"{table.paper}/{table.name}"
        later = "".join(f"{count} after {other}" for other, count in held_back([table], results).items())
        lines.append(f"{name:{wide}}{done:6}{len(table.cells):6}{len(waiting):8}   {left if waiting else later or '-'}")
        if cells:
            lines += [f"    {_state(cell, results, parts):8} {cell.key}" for cell in table.cells]
    waiting = list(ordered(tables, results))
    total = costs.total(waiting)
    lines.append(f"{len(waiting)} cells to run" + ("" if total is None else f", {total / 3600:.1f} hours one by one"))
    if waiting:
        lines += ["", "next:", *(f"    {cell.key}" for cell in waiting[:5])]
    return "\n".join(lines)


def _state(cell: Cell, results: Results, parts: Path) -> str:
    if results.get(cell) is not None:
        return "done"
    from papers import work

    share = work.share_done(parts / cell.digest, cell)
    return f"{100 * share:.0f} %" if share else "-"


def experiment_file(cell: Cell) -> str:
    """Return the cell as a file for `undrift run`; options that only the runner has are comments."""
    from undrift.training.config_writer import toml_line

    lines = [f"# {cell.key}"]
    lines += [f"# beyond an experiment file: {name} = {value!r}" for name, value in cell.options.items()]
    plain = {name: value for name, value in cell.settings.items() if not isinstance(value, dict)}
    lines += [toml_line(name, value) for name, value in plain.items()]
    for name, section in cell.settings.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *(toml_line(key, value) for key, value in section.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
