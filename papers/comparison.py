"""Tables with published numbers and ours, line by line, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from papers.catalogue import Cell, Figure, Table, value_of
from papers.readings import (
    Measured,
    calculated,
    chosen_variant,
    expected,
    measured,
    published,
    quick,
    shortfall,
)
from papers.results import Result, Results
from papers.verdict import signed

QUICK = "QUICK: scaled down, not the paper's experiment"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Line:
    """One column and row of a table, for one of its figures."""

    column: str
    row: str
    figure: str
    data: str
    published: str
    ours: str
    difference: str
    seeds: str
    runs: list[Result]


def text_table(table: Table, results: Results) -> str:
    """Return the table for a terminal: published, ours, difference and seeds for every row and column."""
    lines = list(lines_of(table, results))
    shown = {
        "setting": [line.column for line in lines],
        "method": [line.row for line in lines],
        "figure": [line.figure for line in lines] if len(table.figures) > 1 else [],
        "published": [line.published for line in lines],
        "ours": [line.ours for line in lines],
        "difference": [line.difference for line in lines],
        "seeds": [line.seeds for line in lines],
    }
    shown = {name: texts for name, texts in shown.items() if any(texts) or name == "ours"}
    widths = {name: max(map(len, [name, *texts])) for name, texts in shown.items()}
    grid = [[name.ljust(widths[name]) for name in shown], ["-" * widths[name] for name in shown]]
    grid += [[texts[i].ljust(widths[name]) for name, texts in shown.items()] for i in range(len(lines))]
    head = [f"{table.paper} {table.name}. {table.title}"]
    head += [QUICK] if quick(table) else []
    head += [f"Stand-in: {text}" for text in dict.fromkeys(table.standins.values())]
    variant = chosen_variant(table, results)
    if table.variants:
        head.append("No variant is chosen yet." if variant is None else f"Variant: {variant}")
    return "\n".join([*head, "", *("  ".join(cells).rstrip() for cells in grid)]) + "\n"


def shown_variant(table: Table, results: Results) -> str:
    """Return the chosen variant, or the first while none is chosen."""
    chosen = chosen_variant(table, results)
    return table.variants[0] if chosen is None else chosen


def lines_of(table: Table, results: Results) -> Iterator[Line]:
    """Yield every column and row of the table, for every figure."""
    variant = shown_variant(table, results)
    for column in table.columns:
        for row in table.rows:
            cells = table.at(column, row, variant)
            runs = [run for cell in cells if (run := results.get(cell)) is not None]
            data = _data(cells[0], column in table.standins)
            for which in table.figures:
                place = table, which, column, row
                shown = _printed(published(*place)) or _printed(calculated(*place), " (calculated)")
                found = measured(which, cells, results)
                known = value_of(expected(*place))
                d = "" if known is None or not found.whole else signed((found.mean or 0.0) - known[0], which.digits)
                ours, seeds = ours_of(which, found, bool(runs)), seeds_of(len(runs), len(cells))
                yield Line(column, row, which.name, data, shown, ours, d, seeds, runs)
            if not table.figures:
                ours = _without_figure(runs)
                yield Line(column, row, "", data, "", ours, "", seeds_of(len(runs), len(cells)), runs)


def _without_figure(runs: list[Result]) -> str:
    stopped = sum(bool(run.get("stopped")) for run in runs)
    if stopped:
        return f"diverged ({stopped} of {len(runs)} seeds)"
    return "drawn" if runs else NOT_RUN


def _data(cell: Cell, standin: bool) -> str:
    name = str(cell.settings.get("data", {}).get("name", ""))
    return f"{name}, stand-in" if name and standin else name


def _printed(text: str, mark: str = "") -> str:
    """ "72.66 (0.20)" as 72.66 ± 0.20, with the digits as printed, and the mark behind it."""
    known = value_of(text)
    if known is not None and known[1] is not None:
        value, _, spread = text.strip().rstrip(")").partition("(")
        text = f"{value.strip()} ± {spread.strip()}"
    return text.strip() + mark if text.strip() else ""


def ours_of(which: Figure, found: Measured, run: bool) -> str:
    if not found.seeds:
        return "no value" if run else NOT_RUN
    mean = "" if found.mean is None else f"{found.mean:.{which.digits}f}".replace("-", "−")
    if found.std is not None:
        mean += f" ± {found.std:.{which.digits}f}"
    short = shortfall(found)
    if not short:
        return mean
    return f"{short}; {mean} otherwise" if mean else short


def seeds_of(done: int, planned: int) -> str:
    return str(done) if done == planned else f"{done} of {planned}"
