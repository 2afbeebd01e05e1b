"""What each client holds: a summary for run folders, measures of heterogeneity, a table and a figure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undrift.data.array_ops import median_size
from undrift.data.dataset import FederatedDataset
from undrift.data.partition import ONE_BY_ONE
from undrift.errors import UndriftError
from undrift.random import host_generator

MOST = 200
"""At most this many clients and classes are listed. Of more clients, this many at evenly spaced ranks by size."""
BATCH = 500
"""How many samples to read at a time if only `take` has the labels, since a bag of words is wide."""
BARS = 60
"""Up to this many clients have a bar each; more are drawn as one stacked area."""
TABLE_ROWS = 20
"""How many clients the table shows."""
MOST_SORTED = 10_000
"""Up to this many clients are listed by name; more, in the order in which the data name them."""


def partition_summary(data: FederatedDataset) -> dict[str, Any]:
    """Return a summary of all clients' sizes, and class counts of those listed. Cheap with a million clients."""
    listed = np.arange(len(data)) if len(data) <= MOST else _clients_at_ranks(data)
    summary = _sizes(data, len(data)) | {"listed": listed.tolist(), "sizes": data.sizes_of(listed).tolist()}
    if data.client_names:
        summary["names"] = [data.client_names[c] for c in listed.tolist()]
    if 0 < data.classes <= MOST:
        summary["classes"] = data.names or [str(c) for c in range(data.classes)]
        summary["counts"] = data.label_counts(listed).tolist()
    return summary


def _sizes(data: FederatedDataset, clients: int) -> dict[str, Any]:
    sizes, counts = data.size_counts
    return {
        "clients": clients,
        "empty": len(data) - data.population,
        "samples": int((sizes * counts).sum()),
        "smallest": int(sizes.min()),
        "median": median_size(sizes, counts),
        "largest": int(sizes.max()),
    }


def _clients_at_ranks(data: FederatedDataset) -> np.ndarray:
    """Return `MOST` clients at evenly spaced ranks by size, the largest first; ties go to the lower id."""
    ranks = np.linspace(0, data.population - 1, MOST).round().astype(np.int64)
    sizes, counts = (array[::-1] for array in data.size_counts)
    which = np.searchsorted(np.cumsum(counts), ranks, side="right")
    within = ranks - (np.cumsum(counts) - counts)[which]
    listed = np.empty(len(ranks), np.int64)
    for size in np.unique(which):  # one pass over all clients for each, since sorting them would double the memory
        mine = which == size
        listed[mine] = np.flatnonzero(data.offsets[1:] - data.offsets[:-1] == sizes[size])[within[mine]]
    return listed


def class_counts(data: FederatedDataset) -> np.ndarray:
    """Return samples per client and class, as clients × classes. A sample with several labels counts once for each."""
    if data.labels is not None:
        return data.label_counts().numpy()
    if not data.task.classes:
        raise UndriftError("These data have no classes to count; their targets are numbers.")
    counts = np.zeros((len(data), data.task.classes), np.int64)
    owner = np.repeat(np.arange(len(data)), data.sizes)
    for begin in range(0, len(owner), BATCH):
        part = slice(begin, begin + BATCH)
        targets = data.take(data.store, data.index[part])[1].to(torch.int64).numpy()
        np.add.at(counts, owner[part], targets)
    return counts


def label_distance(counts: np.ndarray) -> float:
    """Return the mean over clients, weighted by size, of the total variation distance `½ Σ_c |p_c − q_c|`.

    p is a client's label distribution, q that of all data. 0 means that all clients have the same distribution;
    values near 1 that no two clients share a class.
    """
    counts = counts[counts.sum(1) > 0]
    sizes = counts.sum(1)
    mix, overall = counts / sizes[:, None], counts.sum(0) / counts.sum()
    return float(np.average(np.abs(mix - overall).sum(1) / 2, weights=sizes))


def shuffle_labels(counts: np.ndarray) -> np.ndarray:
    """Return the same samples assigned at random to clients of the same sizes."""
    rng, left, sizes = host_generator(0, "heterogeneity"), counts.sum(0), counts.sum(1)
    if len(counts) > ONE_BY_ONE:
        labels = rng.permutation(np.repeat(np.arange(len(left)), left))
        place = np.repeat(np.arange(len(sizes)), sizes) * len(left) + labels
        return np.bincount(place, minlength=counts.size).reshape(counts.shape)
    drawn = []
    for size in sizes:
        drawn.append(rng.multivariate_hypergeometric(left, size))
        left = left - drawn[-1]
    return np.stack(drawn)


def heterogeneity(data: FederatedDataset) -> dict[str, Any]:
    """Return sizes, classes per client, and `label_distance`, also for a random partition of the same sizes."""
    sizes = _sizes(data, data.population)
    if not data.classes and not data.task.classes:
        return sizes
    counts = class_counts(data)[data.nonempty]
    return sizes | {
        "classes": int((counts.sum(0) > 0).sum()),
        "classes_per_client": float((counts > 0).sum(1).mean()),
        "label_distance": label_distance(counts),
        "label_distance_by_chance": label_distance(shuffle_labels(counts)),
    }


def draw(data: FederatedDataset, title: str, file: str | Path) -> None:
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

    figures = heterogeneity(data)
    lines = [
        f"{figures['samples']:,} samples over {figures['clients']:,} clients"
        + (f" ({figures['empty']:,} more have none)" if figures["empty"] else ""),
        f"sizes: smallest {figures['smallest']:,}, median {figures['median']:,.0f}, largest {figures['largest']:,}",
    ]
    held = [f"{name} {len(rows):,}" for name, rows in data.held_out.items() if rows]
    held += [f"clients' own tests {int(data.client_test.sizes.sum()):,}"] if data.client_test else []
    lines += [f"held out: {', '.join(held)}"] if held else []
    if "classes" not in figures:
        return Group(Text(title, style="bold"), *lines)
    lines += [
        f"classes: {figures['classes']}, on average {figures['classes_per_client']:.1f} per client",
        f"label distance: {figures['label_distance']:.3f} (0: all alike, near 1: nothing in common; a random partition "
        f"of the same sizes has {figures['label_distance_by_chance']:.3f})",
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("client", justify="right")
    table.add_column("samples", justify="right")
    table.add_column("")
    table.add_column("largest classes")
    counts, names = class_counts(data), data.names or []
    for client in _by_name(data)[:TABLE_ROWS]:
        own = counts[client]
        top = np.argsort(-own, kind="stable")[:3]
        shares = [f"{names[c] if names else c} {own[c] / own.sum():.0%}" for c in top if own[c]]
        bar = "█" * round(20 * data.sizes[client] / data.sizes.max())
        who = data.client_names[client] if data.client_names else str(client)
        table.add_row(Text(who), f"{data.sizes[client]:,}", bar, Text(", ".join(shares)))
    rest = [f"and {len(data) - TABLE_ROWS:,} more clients"] if len(data) > TABLE_ROWS else []
    return Group(Text(title, style="bold"), *lines, "", table, *rest)


def _by_name(data: FederatedDataset) -> list[int]:
    """Return the clients in the order of their names, numbers in them by value; as they are if there are many."""
    order = list(range(min(len(data), MOST_SORTED)))
    if not data.client_names or len(data) > MOST_SORTED:
        return order
    parts = [re.split(r"(\d+)", name) for name in data.client_names]  # every other one is a number
    keys = [[int(part) if i % 2 else part for i, part in enumerate(own)] for own in parts]
    return sorted(order, key=keys.__getitem__)
