"""The exception that users see, and helpers for error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from math import inf
from numbers import Integral, Real

DEBUG = "UNDRIFT_DEBUG"
"""The environment variable that `undrift --debug` sets, so that the processes of a sweep show tracebacks too."""


class UndriftError(ValueError):
    """Raised for invalid input, before training starts if possible. The message says what is wrong and what to change.

    Example:
        >>> import undrift as ud
        >>> try:
        ...     ud.load("digits", ud.IID(), clients=0)
        ... except ud.UndriftError as error:
        ...     print(error)
        clients must be a whole number from 1, not 0.
    """


class LanesError(UndriftError):
    """Raised if the lanes engine cannot train a run that asks for it. `why` is the reason alone."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why


def require(fine: bool, sentence: str) -> None:
    if not fine:
        raise UndriftError(sentence)


def whole(x: object) -> bool:
    """Return whether `x` is an integer, numpy's included; True and False are not."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def nonnegative(x: object) -> bool:
    """Return whether `x` is a finite number from 0, numpy's included; True and False are not."""
    return isinstance(x, Real) and not isinstance(x, bool) and 0 <= float(x) < inf


def quoted(x: object, most: int = 80) -> str:
    """Return `repr(x)`, cut to `most` characters, so that a message does not repeat a whole file."""
    try:
        text = repr(x)
    except Exception:  # nested too deeply, or a number with too many digits
        text = f"<{type(x).__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and ends of lines, what changes the direction of text, and what no encoding has."""


def printable(text: str) -> str:
    """Return text with control characters written out, such as \\x1b, so that they have no effect on a terminal."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name most similar to `name`, ignoring case, or None."""
    by_lower = {n.lower(): n for n in sorted(known, reverse=True)}
    close = difflib.get_close_matches(name[:100].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def unknown(kind: str, name: str, known: Iterable[str], instead: Mapping[str, str] | None = None) -> UndriftError:
    """Return the error for an unknown name, which suggests what to write `instead`, or the most similar known name."""
    names = sorted(known)
    close = nearest(name, names)
    hint = f"Did you mean {close!r}?" if close else f"Known: {listed(names, 40)}."
    if instead and name in instead:
        hint = f"Here it is {instead[name]}."
    return UndriftError(f"There is no {kind} called {quoted(name)}. {hint}")


def machine_trouble(error: BaseException) -> str | None:
    """Return a message for errors of the file system or memory, with the path if known; None for other errors."""
    reason = first_line(error)
    if isinstance(error, OSError):
        where = f"{quoted(str(error.filename), 200)}: " if error.filename is not None else ""
        return f"{where}{error.strerror or reason}."
    kind = type(error).__name__
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in reason:
        said = f" ({reason})" if reason != kind else ""
        return f"Out of memory{said}; use a smaller model, batch size, cohort or data set."
    if kind == "SafetensorError":
        return f"A safetensors file cannot be read or written ({reason})."
    return None


def shared_by_all(error: BaseException, relayed: bool = False) -> BaseException:
    """Mark an error as one that all processes of a run raise; with `relayed`, as one that another process reports."""
    error.__dict__["of_all_processes"] = "relayed" if relayed else "own"
    return error


def known_to_all(error: BaseException) -> bool:
    """Return whether all processes of the run raise this error, so that none needs to inform the others."""
    return _of_all_processes(error) is not None


def said_elsewhere(error: BaseException) -> bool:
    """Return whether another process reports the error."""
    return _of_all_processes(error) == "relayed"


def _of_all_processes(error: BaseException | None) -> str | None:
    """Return the mark of an error, or of an error that it was raised from."""
    while error is not None and "of_all_processes" not in error.__dict__:
        error = error.__cause__
    return error.__dict__["of_all_processes"] if error else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if len(line) <= 300 else f"{line[:299]}…"


def first_sentence(error: BaseException, most: int = 200) -> str:
    """Return the beginning of an error's message: its first line, cut after a sentence or a word."""
    line = first_line(error)
    if len(line) <= most:
        return line
    cut = line[:most]
    end = max(cut.rfind(". "), cut.rfind("! "))
    return cut[: end + 1] if end > most // 3 else cut[: cut.rfind(" ")] + " …"


def shortened(text: str, most: int = 300) -> str:
    """Return a path or name with its middle left out if it is long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def listed(names: Iterable[str], most: int = 20) -> str:
    """Return names for a message: the first few, and how many more there are."""
    found = list(names)
    rest = f" and {len(found) - most:,} more" if len(found) > most else ""
    return ", ".join(shortened(name, 40) for name in found[:most]) + rest
