"""What each client holds, as a figure and as a table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from undrift.data.dataset import FederatedDataset
from undrift.data.heterogeneity import class_counts, heterogeneity
from undrift.errors import UndriftError

BARS = 60
"""Up to this many clients have a bar each; more are drawn as one stacked area."""
LISTED = 20
MOST_SORTED = 10_000
"""Up to this many clients are listed by name; more, in the order in which the data name them."""


def picture(data: FederatedDataset, title: str, file: str | Path) -> None:
    """Write a figure with a stacked bar per client: its number of samples, coloured by class.

    The file's extension determines the format.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    classes = bool(data.classes or data.task.classes)
    counts = class_counts(data) if classes else data.sizes[:, None]
    what = "samples" if data.labels is not None or not classes else "labels"  # a sample may have several
    clients = np.arange(len(counts))
    names = data.names or [str(c) for c in range(counts.shape[1])]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = _colours(counts.shape[1])
    if len(clients) <= BARS:
        below = np.zeros(len(clients))
        for c in range(counts.shape[1]):
            axes.bar(clients, counts[:, c], 0.85, below, color=colours[c], label=names[c])
            below += counts[:, c]
    else:
        order = np.argsort(-counts.sum(1), kind="stable")
        axes.stackplot(clients, counts[order].T, colors=colours, labels=names, step="mid", linewidth=0)
    axes.set(title=title, xlabel="client" if len(clients) <= BARS else "clients, largest first", ylabel=what)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    if classes and counts.shape[1] <= 20:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    try:
        figure.savefig(file, dpi=150)
    except (ValueError, OSError) as error:  # an unknown extension, or a missing folder
        raise UndriftError(f"{file} cannot be drawn ({error}); name a .png, .svg or .pdf file.") from error


def _colours(count: int) -> list[Any]:
    import matplotlib

    if count <= 20:
        return [matplotlib.colormaps["tab10" if count <= 10 else "tab20"](c) for c in range(count)]
    return list(matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, count)))


def report(data: FederatedDataset, title: str) -> Any:
    """Return a table for Rich to print: sizes and heterogeneity, and what the first clients hold."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = heterogeneity(data)
    lines = [
        f"{found['samples']:,} samples over {found['clients']:,} clients"
        + (f" ({found['empty']:,} more have none)" if found["empty"] else ""),
        f"sizes: smallest {found['smallest']:,}, median {found['median']:,.0f}, largest {found['largest']:,}",
    ]
    splits = {name: getattr(data, f"{name}_rows") for name in ("test", "validation", "server")}
    held = [f"{name} {len(split):,}" for name, split in splits.items() if split]
    held += [f"clients' own tests {int(data.client_test.sizes.sum()):,}"] if data.client_test else []
    lines += [f"held out: {', '.join(held)}"] if held else []
    if "classes" not in found:
        return Group(Text(title, style="bold"), *lines)
    lines += [
        f"classes: {found['classes']}, on average {found['classes_per_client']:.1f} per client",
        f"label distance: {found['label_distance']:.3f} (0: all alike, near 1: nothing in common; a random partition "
        f"of the same sizes has {found['label_distance_by_chance']:.3f})",
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("client", justify="right")
    table.add_column("samples", justify="right")
    table.add_column("")
    table.add_column("largest classes")
    counts, names = class_counts(data), data.names or []
    for client in _by_name(data)[:LISTED]:
        own = counts[client]
        top = np.argsort(-own, kind="stable")[:3]
        said = [f"{names[c] if names else c} {own[c] / own.sum():.0%}" for c in top if own[c]]
        bar = "█" * round(20 * data.sizes[client] / data.sizes.max())
        who = data.client_names[client] if data.client_names else str(client)
        table.add_row(Text(who), f"{data.sizes[client]:,}", bar, Text(", ".join(said)))
    rest = [f"and {len(data) - LISTED:,} more clients"] if len(data) > LISTED else []
    return Group(Text(title, style="bold"), *lines, "", table, *rest)


def _by_name(data: FederatedDataset) -> list[int]:
    """Return the clients in the order of their names, numbers in them by value; as they are if there are many."""
    order = list(range(min(len(data), MOST_SORTED)))
    if not data.client_names or len(data) > MOST_SORTED:
        return order
    parts = [re.split(r"(\d+)", name) for name in data.client_names]  # every other one is a number
    keys = [[int(part) if i % 2 else part for i, part in enumerate(own)] for own in parts]
    return sorted(order, key=keys.__getitem__)
