"""What `undrift list` prints: names by kind, with a short description of each."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from undrift import losses as known_losses
from undrift import metrics as known_metrics
from undrift import models as known_models
from undrift.data import partition, sources
from undrift.method.parse import known_optimizers, known_parts

if TYPE_CHECKING:
    from rich.console import Console

Entries = dict[str, list[str]]
"""By name: the lines about it. A terminal shows each on a line of its own, a file all of them on one."""

REFERENCE = re.compile(r"(?:Reference: )?([^.*:;()]+(?:et al\.)?), \*[^*]+\*[^*.]*?\b((?:19|20)\d\d)\b")
"""A reference in a docstring, its whitespace made single spaces: the authors, the title, the year."""

DATA = {
    "digits": "Image classification: 1,797 handwritten digits, 8×8, gray, 10 classes; a fifth is the test set.",
    "cifar10": "Image classification: 60,000 photos (10,000 for testing), 32×32, color, 10 classes.",
    "cifar100": "Image classification: 60,000 photos (10,000 for testing), 32×32, color, 100 classes.",
    "cinic10": "Image classification: 180,000 photos (90,000 for testing), 32×32, color, 10 classes.",
    "mnist": "Image classification: 70,000 handwritten digits (10,000 for testing), 28×28, gray, 10 classes.",
    "fashion_mnist": "Image classification: 70,000 articles of clothing (10,000 for testing), 28×28, gray, 10 classes.",
    "emnist": "Image classification: handwritten digits and letters (EMNIST ByClass), 28×28, gray, 62 classes.",
    "femnist": "Image classification: handwritten digits and letters, 28×28, gray, 62 classes; ByKey() is by writer.",
    "chars74k_hnd": "Image classification: 3,410 hand-drawn digits and letters (Chars74K), 28×28, gray, 62 classes; "
    "ByKey() is by writer (55).",
    "audiomnist": "Speech classification: spoken digits as 40×64 log-mel spectrograms, 10 classes; ByKey() is by "
    "speaker (60).",
    "speech_commands": "Speech classification: spoken words as 40×64 log-mel spectrograms, 36 classes; ByKey() is by "
    "speaker.",
    "shakespeare": "Next-character prediction from the 80 characters before; ByKey() is by speaking role, as in LEAF.",
    "shakespeare_roles": "Next-character prediction from the 80 characters before; ByKey() is by speaking role "
    "(1,120).",
    "stackoverflow": "Tag prediction (multi-label): titles of questions as bags of 10,000 words, 500 tags; ByKey() is "
    "by user.",
    "stackoverflow_tags": "Tag prediction (multi-label): titles of 30,000 questions as bags of 10,000 words, 100 tags.",
    "ag_news": "Text classification: 127,600 news articles (7,600 for testing), 64 words each, 4 classes.",
}
"""The task, samples and classes of each data set."""


def summary(thing: Any) -> str:
    """The first paragraph of its docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def reference(thing: Any) -> str:
    """`Li et al., 2020`, if its docstring has a reference."""
    match = REFERENCE.search(" ".join((inspect.getdoc(thing) or "").split()))
    if not match:
        return ""
    named = re.split(r"\b(?:by|from|in|of) ", match[1])[-1]  # "The experiment of Figure 2 in Mo et al."
    authors = re.split(r",? and |, ", named.strip())
    who = f"{authors[0]} et al." if len(authors) > 2 else " and ".join(authors)
    return f"{who}, {match[2]}."


def parameters(thing: Any) -> str:
    """`Parameters: mu, target=None.`, if it has any."""
    try:
        own = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in own if p.kind < p.VAR_POSITIONAL]
    return f"Parameters: {', '.join(shown)}." if shown else ""


def _entry(*lines: str) -> list[str]:
    return [line for line in lines if line]


def methods() -> Entries:
    return {
        name: _entry(f"{summary(part)} {reference(part)}".strip(), parameters(part))
        for name, part in known_parts().items()
    }


def optimizers() -> Entries:
    return {name: _entry(summary(own), parameters(own)) for name, own in known_optimizers().items()}


def partitions() -> Entries:
    return {name: _entry(summary(own), parameters(own)) for name, own in partition.PARTITIONS.items()}


def models() -> Entries:
    return {name: _entry(summary(model)) for name, model in known_models.MODELS.items()}


def losses() -> Entries:
    return {name: _entry(summary(loss)) for name, loss in known_losses.LOSSES.items()}


def metrics() -> Entries:
    return {name: _entry(summary(metric)) for name, metric in known_metrics.METRICS.items()}


def data() -> Entries:
    entries = {name: _entry(summary(function)) for name, function in sources.FUNCTIONS.items()}
    if sources.FUNCTIONS["digits"] is sources.digits:
        entries["digits"] = _entry(DATA["digits"], "Source: UCI; included with undrift.")
    for name, recipe in sources.RECIPES.items():
        if name in sources.FUNCTIONS:  # a user's, which ud.load takes
            continue
        hub = f"{recipe.hub} on the Hugging Face hub"
        where = hub if "/" in recipe.hub else f"not on the hub; needs a folder {recipe.hub} in --data-dir"
        entries[name] = _entry(DATA[name], f"Source: {where}.")
    return entries


def show(entries: Entries, console: Console) -> None:
    """Print entries: on a terminal as wide as it is, in a file one line each."""
    width = max(map(len, entries), default=0)
    if not console.is_terminal:
        for name, lines in entries.items():
            console.out(f"{name:<{width}}  {' '.join(lines)}".rstrip(), highlight=False)
        return
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, lines in entries.items():
        table.add_row(name, "\n".join(lines))
    console.print(table)
