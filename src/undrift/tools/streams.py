"""What commands print, and where to: streams that may be closed, full, or a pipe that nobody reads any more."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Any

import typer

from undrift.errors import printable
from undrift.tools.torchrun import speaks


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


def prepare() -> None:
    """Open streams that are closed, and let neither file names nor log messages control or stop the terminal."""
    for number in range(3):  # in order, as a file gets the lowest number that is free
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # otherwise a file of the run would get the number, and what is printed
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        if before is None or (isinstance(_raw(before), io.FileIO) and before.fileno() == number):
            setattr(sys, name, _opened(number, before))
        elif isinstance(before, io.TextIOWrapper):
            before.reconfigure(errors="backslashreplace")
    if logging.lastResort:
        logging.lastResort.addFilter(_literal)


def _opened(number: int, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
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


def _literal(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


def is_of_output(error: BaseException) -> bool:
    """Return whether an error is that the standard output cannot be written."""
    raw = _raw(sys.stdout)
    return isinstance(raw, Output) and raw.error is error


def say(text: str, err: bool = False) -> None:
    """Print a line, in which control characters have no effect on the terminal. All commands print with it."""
    if speaks():
        typer.echo(printable(text), err=err)
