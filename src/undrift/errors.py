"""The one exception users meet: a sentence that says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UndriftError(ValueError):
    """Bad input, refused before anything runs. The message says what to change."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UndriftError:
    """The error for a name that nobody registered, with the nearest one that somebody did."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    nearest = [n for n in names if n.lower() in close]
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Known: {', '.join(names)}."
    return UndriftError(f"There is no {kind} called {name!r}. {hint}")
