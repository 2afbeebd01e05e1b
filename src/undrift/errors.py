"""The one exception users meet: a sentence that says what to change."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


class UndriftError(ValueError):
    """Bad input, refused before anything runs. The message says what to change."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UndriftError:
    """The error for a name that nobody registered, with the nearest one that somebody did."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower()[:100], [n.lower() for n in names], n=1, cutoff=0.5)
    nearest = [n for n in names if n.lower() in close]
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Known: {', '.join(names)}."
    return UndriftError(f"There is no {kind} called {quoted(name)}. {hint}")


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 120


def quoted(given: object) -> str:
    """What a user gave, as `repr` writes it, without its middle if it is long."""
    try:
        return _short.repr(given)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(given).__name__}"


def shortened(text: str, most: int = 300) -> str:
    """A path or a name without its middle if it is long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names as a message lists them: the first few, and how many more there are."""
    found = list(names)
    rest = f" and {len(found) - most:,} more" if len(found) > most else ""
    return ", ".join(shortened(name, 40) for name in found[:most]) + rest
