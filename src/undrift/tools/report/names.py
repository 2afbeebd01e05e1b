"""Short names for groups of runs: the method first, then only what differs; where that is too much, folders' names.

Runs of a study have the study's labels.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import takewhile
from typing import Any

from undrift.tools.compare import IGNORED_KEYS, Run, brief
from undrift.tools.study.labels import read

LONGEST = 60
"""The most characters of a name that is made of settings."""
SPEAKING = ("method", "model", "data.name", "data.partition")
"""Settings whose value says what it is. They come first."""


def named(grouped: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """The groups, in their order, under names that are short and differ."""
    own = list(grouped.values())
    labels = _labelled(own)
    texts = [
        label or _described(runs[0], _differing([g[0] for g in own])) for label, runs in zip(labels, own, strict=True)
    ]
    counts = Counter(texts)
    names = [
        text if counts[text] == 1 and (label or len(text) <= LONGEST) else _by_folder(runs)
        for text, label, runs in zip(texts, labels, own, strict=True)
    ]
    unique = len(set(names)) == len(names)
    return dict(zip(names if unique else grouped, own, strict=True))


def _labelled(groups: list[list[Run]]) -> list[str | None]:
    """The label of each group whose runs have one, from a study: the method's, and the partition's if these differ.

    Groups with the same label, such as the settings that a method tried, also have what they differ in.
    """
    places = [[run.folder.resolve() for run in runs] for runs in groups]
    known = {folder: read(folder) for folder in {place.parent for own in places for place in own}}
    of_runs = [{known[place.parent].get(place.name) for place in own} for own in places]
    labels = [next(iter(own)) if len(own) == 1 else None for own in of_runs]
    several = len({label.partition for label in labels if label}) > 1
    found: list[str | None] = []
    for label, runs in zip(labels, groups, strict=True):
        parts = [label.method, label.partition if several else ""] if label else []
        alike = [other[0] for other, own in zip(groups, labels, strict=True) if own == label]
        if label and len(alike) > 1:
            parts.append(_described(runs[0], _differing(alike)))
        found.append(", ".join(filter(None, parts)) or None)
    return found


def _differing(runs: list[Run]) -> list[str]:
    """The keys in which these runs differ, those that speak for themselves first."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in IGNORED_KEYS)
    told = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]
    return sorted(told, key=lambda key: (SPEAKING.index(key) if key in SPEAKING else len(SPEAKING), key))


def _described(run: Run, keys: list[str]) -> str:
    return ", ".join(_part(key, run.settings[key]) for key in keys if run.settings.get(key) is not None) or _method(run)


def _part(key: str, value: Any) -> str:
    if key == "method":
        return brief(str(value))
    return str(value) if key in SPEAKING else f"{key.rpartition('.')[2]}={value}"


def _method(run: Run) -> str:
    return brief(str(run.settings.get("method", run.folder.name)))


def _by_folder(runs: list[Run]) -> str:
    """The method, and the name of the run's folder; of several, what the names begin with."""
    folders = [run.folder.name or run.folder.resolve().name for run in runs]
    same = "".join(letters[0] for letters in takewhile(lambda one: len(set(one)) == 1, zip(*folders, strict=False)))
    common = re.sub(r"([\W_]+seed)?[\W_]*$", "", same) if len(folders) > 1 else folders[0]
    method = brief(str(runs[0].settings["method"])) if "method" in runs[0].settings else ""
    place = common or folders[0]
    return f"{method} · {place}" if method and len(method) <= LONGEST and method != place else place
