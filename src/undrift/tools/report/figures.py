"""Figures for a paper: one or two columns wide, in colours that work in print and for colour-blind readers.

Every figure is written as .pdf, with fonts embedded, as .svg, with text as text, and as .png.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from undrift.errors import UndriftError, printable
from undrift.files import file_name, replacing

Payload = dict[str, Any]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a4c93", "#000000")
"""Okabe and Ito's, with violet instead of yellow, which is hard to see on paper."""
DASHES = ("-", "--", ":", "-.")
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "undrift",
    "pdf.fonttype": 42,  # TrueType, since many venues refuse Type 3
}
SINGLE, DOUBLE = 3.35, 7.0
"""Widths in inches: one column, or both, of a two-column layout."""
HEIGHT = 2.4
"""The height of a panel, in inches."""
ACROSS = 3
"""The most panels in a row."""
KINDS: dict[str, Any] = {
    "pdf": {"metadata": {"CreationDate": None}},
    "svg": {"metadata": {"Date": None}},
    "png": {"dpi": 300},
}
"""The formats of a figure, without the time in them."""


LABELS = {"diagnostic": "diagnostic $S$"}
"""What columns of parts are called on an axis, if not by their names; the payload has the labels of all others."""


def draw(payload: Payload, folder: Path, width: float = SINGLE) -> list[str]:
    """Write every figure that these runs have data for. Returns their names; the files have their `file_name`."""
    return draw_panels({"": payload}, folder, width)


def draw_panels(payloads: Mapping[str, Payload], folder: Path, width: float = DOUBLE) -> list[str]:
    """Write every figure that these payloads have data for, with a titled panel of each; returns their names."""
    import matplotlib

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UndriftError(f"The folder {folder} cannot be created ({error.strerror}); choose another.") from error
    groups = dict.fromkeys(group["name"] for payload in payloads.values() for group in payload["groups"])
    for payload in payloads.values():  # one look per name, in all panels
        for group in payload["groups"]:
            group["look"] = list(groups).index(group["name"])
    drawn = {title: figures(payload) for title, payload in payloads.items()}
    names = list(dict.fromkeys(name for own in drawn.values() for name in own))
    with matplotlib.rc_context(STYLE):
        for name in names:
            figure = _figure({title: own[name] for title, own in drawn.items() if name in own}, width, name)
            for kind, options in KINDS.items():
                with replacing(folder / f"{file_name(name)}.{kind}") as partial:
                    figure.savefig(partial, format=kind, **options)
    return names


def _figure(panels: Mapping[str, Callable[[Any], None]], width: float, name: str) -> Any:
    """A figure with these panels, and one legend for all of them."""
    from matplotlib.figure import Figure

    across = min(len(panels), ACROSS if width > SINGLE else 1)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(width, HEIGHT * down), layout="constrained")
    shared = name != "partition" and len(panels) > 1
    grid = figure.subplots(down, across, squeeze=False, sharey=shared)
    handles: dict[str, Any] = {}
    for i, (axes, (title, paint)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
        paint(axes)
        axes.set_title(escape_math(title))
        if shared and i % across:
            axes.set_ylabel("")
        own, labels = axes.get_legend_handles_labels()
        handles = dict(zip(labels, own, strict=True)) | handles
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    if len(handles) > 1:
        room = int(width / SINGLE * 46)  # characters in a line of the legend
        columns = max(1, min(len(handles), room // (max(map(len, handles)) + 6)))
        figure.set_figheight(HEIGHT * down + 0.14 * -(-len(handles) // columns))
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=columns, frameon=False)
    return figure


def figures(payload: Payload) -> dict[str, Callable[[Any], None]]:
    """Functions that draw a figure, by its name."""
    drawings: dict[str, Callable[..., None]] = {}
    keys = {key: None for group in payload["groups"] for key in group["curves"]}
    for key in keys:
        source, metric = key.split(".", 1)
        counts = [
            sum(y is not None for y in group["curves"].get(key, {"mean": ()})["mean"]) for group in payload["groups"]
        ]
        if not source.endswith("_std") and (max(counts) > 1 or source == "test"):  # one evaluation makes no curve
            name = metric if source == "test" else f"{source}_{metric}"
            label = escape_math(name.replace("_", " "))
            drawings[name] = partial(curves, payload=payload, where="curves", grid="evaluated", key=key, label=label)
            if source == "test" and metric != "loss" and max(counts) > 1:
                drawings[f"{name}_over_bytes"] = partial(drawings[name], axis="bytes")
    for key in {key: None for group in payload["groups"] for key in group["schedules"]}:
        label = LABELS.get(key) or payload["labels"].get(key) or escape_math(key.replace("_", " "))
        drawings[key] = partial(curves, payload=payload, where="schedules", grid="every", key=key, label=label)
    if any("classes" in run for run in payload["runs"]):
        drawings["class_accuracy"] = lambda axes: by_class(axes, payload)
    if any("clients" in run for run in payload["runs"]):
        drawings["by_client"] = lambda axes: by_client(axes, payload)
    first = next((run["partition"] for run in payload["runs"] if "partition" in run), None)
    if first is not None and "counts" in payload["partitions"][first]:
        drawings["partition"] = lambda axes: partition(axes, payload["partitions"][first])
    return drawings


def looks(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]}


def curves(axes: Any, payload: Payload, where: str, grid: str, key: str, label: str, axis: str = "round") -> None:
    """One curve per group, with a band of one standard deviation over seeds; curves that are the same are striped."""
    unit = 1e6 if axis == "bytes" else 1.0
    own = [group for group in payload["groups"] if key in group[where]]
    same = [repr((group[grid][axis], group[where][key])) for group in own]
    for i, group in enumerate(own):
        curve = {name: np.array(values, float) for name, values in group[where][key].items()}
        known = np.isfinite(curve["mean"])
        x, y = np.array(group[grid][axis], float)[known] / unit, curve["mean"][known]
        style, name = looks(group["look"]), escape_math(group["name"])
        if earlier := same[:i].count(same[i]):
            axes.plot([], [], **style, label=name)  # the legend shows the line without gaps
            style["linestyle"], name = (4 * earlier, (4, 4 * same.count(same[i]) - 4)), "_"
        axes.plot(x, y, **style, label=name, marker="o" if len(x) < 3 else None, markersize=3)
        if "std" in curve:
            low, high = y - curve["std"][known], y + curve["std"][known]
            low, high = (np.clip(low, 0, None), np.clip(high, None, 1)) if key.endswith("accuracy") else (low, high)
            axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    words = {"round": "round", "bytes": "sent and received (MB)"}
    axes.set(xlabel=words[axis], ylabel=label)
    values = [v for group in payload["groups"] for v in group[where].get(key, {}).get("mean", ()) if v]
    if key.endswith("loss") and values and min(values) > 0 and max(values) > 200 * min(values):
        axes.set_yscale("log")
    if axis == "round":
        _whole(axes)


def by_class(axes: Any, payload: Payload) -> None:
    count = 0
    for i, group in enumerate(payload["groups"]):
        ends = [payload["runs"][r]["classes"]["accuracy"][-1] for r in group["runs"] if "classes" in payload["runs"][r]]
        if ends and len({len(end) for end in ends}) == 1:
            values = np.array(ends, float)
            seen = np.isfinite(values).all(0)
            count = max(count, len(seen))
            style = {**looks(group["look"]), "linestyle": "none", "marker": "osD^v<>P"[group["look"] % 8]}
            beside = np.linspace(-0.25, 0.25, len(payload["groups"]) + 2)[1 + i]  # so that none hides another
            x, y = np.flatnonzero(seen) + beside, values[:, seen].mean(0)
            axes.plot(x, y, markersize=4, **style, label=escape_math(group["name"]))
    axes.set(xlabel="class", ylabel="accuracy", ylim=(-0.03, 1.03))
    if count <= 20:
        axes.set_xticks(range(count))
    else:
        _whole(axes)
    axes.grid(axis="y", linewidth=0.3)


def by_client(axes: Any, payload: Payload) -> None:
    """Clients from worst to best, averaged over a group's runs."""
    share, metric = np.linspace(0, 1, 101), "accuracy"
    for group in payload["groups"]:
        own = [payload["runs"][r]["clients"] for r in group["runs"] if "clients" in payload["runs"][r]]
        ranked = [np.array([v for v in clients["values"] if v is not None], float) for clients in own]
        if ranked := [values for values in ranked if len(values)]:
            metric = own[0]["metric"]
            axes.plot(100 * share, np.mean([np.quantile(v, share) for v in ranked], 0), **looks(group["look"]),
                      label=escape_math(group["name"]))  # fmt: skip
    axes.set(xlabel="share of clients (%), worst first", ylabel=escape_math(metric.replace("_", " ")))


def partition(axes: Any, content: dict[str, Any]) -> None:
    """The samples per client and class of the first run."""
    counts = np.array(content["counts"]).T
    image = axes.imshow(counts, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0)
    axes.figure.colorbar(image, ax=axes, label="samples")
    axes.set(
        xlabel="client" if len(content["listed"]) == content["clients"] else "clients, largest first", ylabel="class"
    )
    names = content["classes"]
    if len(names) <= 20:
        axes.set_yticks(range(len(names)), [escape_math(name) for name in names])
    _whole(axes)
    axes.spines[:].set_visible(True)


def escape_math(text: str) -> str:
    """Text without matplotlib's mathematical notation, and without characters that no font has."""
    return printable(text).replace("$", r"\$")


def _whole(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
