"""Short names for groups of runs: the method first, then only what differs; where that is too much, folders' names."""

from __future__ import annotations

import re
from collections import Counter
from itertools import takewhile
from typing import Any

from undrift.tools.compare import IGNORED_KEYS, Run, brief

LONGEST = 60
"""The most characters of a name that is made of settings."""
SPEAKING = ("method", "model", "data.name", "data.partition")
"""Settings whose value says what it is. They come first."""


def named(grouped: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """The groups, in their order, under names that are short and differ."""
    own = list(grouped.values())
    texts = [_described(runs[0], _differing([group[0] for group in own])) for runs in own]
    counts = Counter(texts)
    names = [
        text if counts[text] == 1 and len(text) <= LONGEST else _by_folder(runs)
        for text, runs in zip(texts, own, strict=True)
    ]
    unique = len(set(names)) == len(names)
    return dict(zip(names if unique else grouped, own, strict=True))


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
