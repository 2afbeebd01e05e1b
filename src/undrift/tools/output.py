"""What commands print: lines, tables, and streams that may be closed, full, or a pipe that nobody reads any more."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from undrift.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console


def say(text: str, err: bool = False) -> None:
    """Print a line, in which control characters have no effect on the terminal. All commands print with it."""
    import typer

    if speaks():
        typer.echo(printable(text), err=err)


def new_console() -> Console:
    """A console for tables, without markup and emoji, since names that users choose are printed literally.

    Control characters in what it is given to print have no effect on the terminal.
    """
    from rich.console import Console
    from rich.segment import Segment
    from rich.text import Text

    class Literal(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):  # of objects such as Text, which are no strings
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    console = Literal(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160  # a file has no width, so tables need not be narrow
    return console


# ---- the processes that torchrun starts -----------------------------------------------------------------------------


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def speaks() -> bool:
    """Whether this process talks to the user. Of those that torchrun has started, only the first does."""
    return not under_torchrun() or os.environ.get("RANK") == "0"


# ---- the standard streams -------------------------------------------------------------------------------------------


class Output(io.FileIO):
    """A standard stream as it is written to. After an error, what is written goes nowhere."""

    error: OSError | None = None
    """Why it can no longer be written to."""
    silent = False
    """Whether even the first error is not raised."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.silent:
                return len(data)
            raise


def prepare_streams() -> None:
    """Open streams that are closed, and let neither file names nor log messages control or stop the terminal."""
    for number in range(3):  # in order, as a file gets the lowest number that is free
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # otherwise a file of the run would get the number, and what is printed
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        if before is None or (isinstance(_raw(before), io.FileIO) and before.fileno() == number):
            setattr(sys, name, _open_stream(number, before))
        elif isinstance(before, io.TextIOWrapper):
            before.reconfigure(errors="backslashreplace")
    if logging.lastResort:
        logging.lastResort.addFilter(_escape_record)


def _open_stream(number: int, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    raw = Output(number, "w", closefd=False)
    raw.silent = number == 2  # there is no place left to say so
    unbuffered = isinstance(getattr(before, "buffer", None), io.FileIO)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",  # for file names that a terminal cannot show
        line_buffering=before.line_buffering if before else False,
        write_through=before.write_through if before else False,
    )


def _raw(stream: Any) -> Any:
    """The file below a stream's buffer, if it has one."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _escape_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


def is_output_error(error: BaseException) -> bool:
    """Return whether an error is that the standard output cannot be written."""
    raw = _raw(sys.stdout)
    return isinstance(raw, Output) and raw.error is error
