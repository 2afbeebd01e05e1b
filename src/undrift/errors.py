"""The exception that users see, when to raise it, and the wording of errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral

DEBUG = "UNDRIFT_DEBUG"
"""An environment variable: `undrift --debug` sets it, so that a sweep's processes show tracebacks too."""


class UndriftError(ValueError):
    """Bad input, refused before anything runs. The message says what to change."""


def require(fine: bool, sentence: str) -> None:
    if not fine:
        raise UndriftError(sentence)


def whole(x: object) -> bool:
    """Whether `x` is a whole number, numpy's included; True and False are not."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def quoted(x: object, most: int = 80) -> str:
    """`repr(x)`, cut to `most` characters: a message must not repeat a whole file."""
    try:
        text = repr(x)
    except Exception:  # nested too deeply, or a number of too many digits
        text = f"<{type(x).__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that is most like `name`, whatever its case, if there is one."""
    by_lower = {n.lower(): n for n in sorted(known, reverse=True)}
    close = difflib.get_close_matches(name[:100].lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def unknown(kind: str, name: str, known: Iterable[str]) -> UndriftError:
    """The error for a name that nobody registered, with the nearest one that somebody did."""
    names = sorted(known)
    close = nearest(name, names)
    hint = f"Did you mean {close!r}?" if close else f"Known: {', '.join(names)}."
    return UndriftError(f"There is no {kind} called {quoted(name)}. {hint}")


def machine_trouble(error: BaseException) -> str | None:
    """A sentence about a file or memory that the machine refused, with the path if known; None for any other error."""
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


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if len(line) <= 300 else f"{line[:299]}…"


def shortened(text: str, most: int = 300) -> str:
    """A path or a name without its middle if it is long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names as a message lists them: the first few, and how many more there are."""
    found = list(names)
    rest = f" and {len(found) - most:,} more" if len(found) > most else ""
    return ", ".join(shortened(name, 40) for name in found[:most]) + rest
