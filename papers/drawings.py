"""The papers' figures, drawn from results as SVG files; the same results give the same bytes."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from papers.catalogue import Table
from papers.readings import chosen_variant
from papers.results import Result, Results, series
from undrift.errors import unknown
from undrift.files import write_text

KINDS = ("curves", "layers", "path")
WIDTH = 8.0
ACROSS = 3
"""Panels side by side."""
PATHS = ("model", "target")
"""The default columns of a path, which hold points."""
Runs = dict[str, list[Result]]


def drawable(table: Table, results: Results) -> bool:
    """Return whether the table has a drawing and any of its runs has data for it."""
    return table.drawing is not None and any(runs for runs in _panels(table, results).values())


def draw(table: Table, results: Results, file: Path) -> None:
    """Write the table's drawing as an SVG file."""
    figure = paint(table, results)
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context(_style(table)):
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = "\n".join(line.rstrip() for line in written.getvalue().splitlines())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text + "\n")


def paint(table: Table, results: Results) -> Any:
    """Return the table's drawing as a matplotlib figure, with a panel per column."""
    import matplotlib
    from matplotlib.figure import Figure

    drawing = table.drawing
    assert drawing is not None
    if drawing["kind"] not in KINDS:
        raise unknown("kind of drawing", drawing["kind"], KINDS)
    panels = {column: runs for column, runs in _panels(table, results).items() if runs}
    across = min(len(panels), ACROSS)
    down = -(-len(panels) // across)
    with matplotlib.rc_context(_style(table)):
        figure = Figure(figsize=(WIDTH, 2.6 * down + 0.4), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False, sharey=drawing["kind"] != "path")
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for place, (axes, (column, runs)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
            {"curves": _curves, "layers": _layers, "path": _path}[drawing["kind"]](axes, runs, table)
            if column:
                axes.set_title(_escaped(column))
            if place % across and drawing["kind"] != "path":
                axes.set_ylabel("")
        _legend(figure, grid.flat[: len(panels)])
    return figure


def _style(table: Table) -> Any:
    from undrift.tools.report.figures import STYLE

    return {**STYLE, "svg.hashsalt": f"{table.paper}/{table.name}", "grid.linewidth": 0.4}


def _panels(table: Table, results: Results) -> dict[str, Runs]:
    """Return the runs to draw, by column and row, for the variant that the table uses."""
    drawing, variant = table.drawing, chosen_variant(table, results)
    if drawing is None or variant is None:
        return {}
    panels: dict[str, Runs] = {}
    for column in table.columns:
        found = {
            row: [run for cell in table.at(column, row, variant) if (run := results.get(cell)) and _has(run, drawing)]
            for row in table.rows
        }
        panels[column] = {row: runs for row, runs in found.items() if runs}
    return panels


def _names(drawing: dict[str, Any]) -> list[str]:
    """Return the columns of the curve to draw."""
    if "column" in drawing:
        return [drawing["column"]]
    return list(drawing.get("columns", PATHS))


def _has(run: Result, drawing: dict[str, Any]) -> bool:
    return all(any(x is not None for x in run["curve"].get(name, [])) for name in _names(drawing))


def _looks(table: Table, row: str) -> dict[str, Any]:
    """Return the style of a row, the same in every panel."""
    from undrift.tools.report.figures import looks

    return looks(table.rows.index(row))


def _curves(axes: Any, runs: Runs, table: Table) -> None:
    """One line per row, the mean over seeds, with a band from the minimum to the maximum."""
    drawing = table.drawing
    assert drawing is not None
    scale = 100.0 if drawing.get("percent") else 1.0
    for label, look, curves in _lines(runs, table):
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = [[scale * curve[t] for curve in curves] for t in rounds]
        means = [statistics.fmean(each) for each in values]
        axes.plot(rounds, means, **look, label=label, marker="o" if len(rounds) < 3 else None, markersize=3)
        if len(curves) > 1:
            low, high = [min(each) for each in values], [max(each) for each in values]
            axes.fill_between(rounds, low, high, color=look["color"], alpha=0.15, linewidth=0)
    if drawing.get("log"):
        axes.set_yscale("log")
    axes.set_xlabel("round")
    axes.set_ylabel(drawing.get("label", drawing["column"]))
    axes.grid(axis="y", alpha=0.25)


def _lines(runs: Runs, table: Table) -> Iterator[tuple[str, dict[str, Any], list[dict[int, float]]]]:
    """Label, style and each seed's curve, for every line. A column of lists has a line per entry, named by `entry`."""
    from undrift.tools.report.figures import looks

    drawing = table.drawing
    assert drawing is not None
    for row, found in runs.items():
        curves: list[dict[int, Any]] = [dict(series(run, drawing["column"])) for run in found]
        wide = max((len(x) for curve in curves for x in curve.values() if isinstance(x, list)), default=0)
        if not wide:
            yield _labelled(row, found), _looks(table, row), curves
        for i in range(wide):
            label = f"{_labelled(row, found)}, {drawing.get('entry', 'step')} {i + 1}"
            look = looks(table.rows.index(row) * wide + i)
            yield label, look, [{t: x[i] for t, x in curve.items() if i < len(x)} for curve in curves]


def _layers(axes: Any, runs: Runs, table: Table) -> None:
    """A group of bars per layer, one per row: the mean of the last round's value over seeds, with whiskers for the
    minimum and maximum.
    """
    drawing = table.drawing
    assert drawing is not None
    last = {row: [_by_layer(series(run, drawing["column"])[-1][1]) for run in found] for row, found in runs.items()}
    layers = list({layer: None for found in last.values() for each in found for layer in each})
    width = 0.8 / len(last)
    for place, (row, found) in enumerate(last.items()):
        for number, layer in enumerate(layers):
            values = [each[layer] for each in found if layer in each]
            if not values:
                continue
            x, mean = number + (place - (len(last) - 1) / 2) * width, statistics.fmean(values)
            label = _labelled(row, runs[row]) if number == 0 else None
            axes.bar(x, mean, 0.92 * width, color=_looks(table, row)["color"], label=label)
            if len(values) > 1:
                axes.vlines(x, min(values), max(values), color="0.2", linewidth=0.8)
    axes.set_xticks(range(len(layers)), [_escaped(layer) for layer in layers])
    if max(map(len, layers)) * len(layers) > 60:
        axes.tick_params(axis="x", labelrotation=60)
    axes.set_xlabel("layer")
    axes.set_ylabel(drawing.get("label", drawing["column"]))
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def _by_layer(entry: Any) -> dict[str, float]:
    """Return the values of one entry by layer; layers of a list are numbered from 1."""
    if isinstance(entry, dict):
        return {str(layer): float(x) for layer, x in entry.items()}
    return {str(number): float(x) for number, x in enumerate(entry, start=1)}


def _path(axes: Any, runs: Runs, table: Table) -> None:
    """One line in the plane per run and column of points, with a ring at its start and a dot at its end."""
    from undrift.tools.report.figures import looks

    drawing = table.drawing
    assert drawing is not None
    names = _names(drawing)
    for row, found in runs.items():
        for i, name in enumerate(names):
            look = looks(table.rows.index(row) * len(names) + i)
            label = ", ".join([_labelled(row, found), name] if len(names) > 1 else [_labelled(row, found)])
            for number, run in enumerate(found):
                points = [point for point in run["curve"][name] if point is not None]
                xs, ys = [x for x, _ in points], [y for _, y in points]
                axes.plot(xs, ys, **look, label=label if number == 0 else None, alpha=1 if number == 0 else 0.5)
                axes.plot(xs[:1], ys[:1], "o", color=look["color"], markerfacecolor="white", markersize=4)
                axes.plot(xs[-1:], ys[-1:], "o", color=look["color"], markersize=4)
    label = drawing.get("label", "")
    axes.set_xlabel(f"first {label}".strip())
    axes.set_ylabel(f"second {label}".strip())
    axes.grid(alpha=0.25)


def _labelled(row: str, found: list[Result]) -> str:
    """Return the row's name, with a remark if runs diverged."""
    stopped = sum(bool(run.get("stopped")) for run in found)
    return _escaped(row) + (f" ({stopped} of {len(found)} diverged)" if stopped else "")


def _escaped(text: str) -> str:
    """Text without matplotlib's mathematical notation."""
    return text.replace("$", r"\$")


def _legend(figure: Any, panels: Any) -> None:
    """One legend for all panels, if there is more than one row."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if len(entries) > 1:
        columns = max(1, min(len(entries), int(110 / (max(map(len, entries)) + 6))))
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns, frameon=False)
