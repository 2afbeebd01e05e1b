"""Read numbers out of pickled numpy arrays and dicts, without running anything that the pickle names.

`np.savez(file, data={"x": x, "y": y})` pickles the dict. A pickle is a program for a small machine, which may call any
function by its name. Here `pickletools` takes it apart, and the few instructions that dicts of arrays need are followed
by hand: where numpy's functions are called, what they are given is kept, and everything else is refused. Arrays are
made afterwards, from bytes whose number fits their shape and of a type that is a plain number.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy

from undrift.files import open_regular

KINDS = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"}
"""The types of numbers that arrays may have, as numpy writes them, but for the byte order."""
MOST_BYTES = 1 << 28
"""The largest size of an unpacked array that is more than `MOST_TIMES` as large as its file. Zeros can be compressed a
thousand times, so a file of a few megabytes could fill any memory."""
MOST_TIMES = 20
"""What compressed images and features stay below."""


class TooLargeError(ValueError):
    """Raised for an array that would take much more memory than its file has bytes."""


@dataclass(frozen=True)
class Name:
    """A function or class that the pickle names."""

    text: str


@dataclass
class ArrayState:
    """An array, as far as the pickle describes it."""

    state: Any = None


@dataclass
class Kind:
    """A type of numbers."""

    text: str
    order: Literal["<", ">", "="] = "="


ARRAY, TYPE, KIND = Name("_reconstruct"), Name("ndarray"), Name("dtype")
KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): ARRAY,
    ("numpy", "ndarray"): TYPE,
    ("numpy", "dtype"): KIND,
}
"""The names in numpy's pickles of arrays. They are compared, but never imported."""
MARK = Name("mark")


@dataclass
class Machine:
    """The state of the machine that executes a pickle: a stack, and memorized values."""

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop_to_mark(self) -> list[Any]:
        """Return what was put on the stack since the last mark."""
        for place in range(len(self.stack) - 1, -1, -1):  # from the end, so that what is searched is also removed
            if self.stack[place] is MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise ValueError("its pickle is damaged")

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("its pickle is damaged")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def look_up(self, module: Any, name: Any) -> Name:
        words = isinstance(module, str) and isinstance(name, str)  # anything else may be huge as text
        known = KNOWN.get((module, name)) if words else None
        if known is None:
            what = f"{module}.{name}" if words else "something"
            raise ValueError(f"it names {what}, which is no part of an array of numbers")
        return known

    def reduce(self, function: Any, arguments: Any) -> Any:
        """Return what stands for the result of a call."""
        if function is ARRAY:
            return ArrayState()
        if function is KIND and isinstance(arguments, tuple) and arguments and isinstance(arguments[0], str):
            return Kind(arguments[0])
        raise ValueError("it calls something that makes no array of numbers")

    def build(self, target: Any, state: Any) -> Any:
        """Return an array or a type, after setting its state."""
        if isinstance(target, ArrayState):
            target.state = state
        elif isinstance(target, Kind) and isinstance(state, tuple) and len(state) > 1:
            target.order = state[1] if state[1] in ("<", ">") else "="
        else:
            raise ValueError("it changes something that is no array of numbers")
        return target

    def extend(self, values: list[Any]) -> Any:
        """Return the list on the stack with more entries, or the dict with more pairs."""
        (target,) = self.pop(1)
        if isinstance(target, list):
            target += values
        elif isinstance(target, dict):
            target |= dict(pairs(values))
        else:
            raise ValueError("it adds to something that is neither a list nor a dict")
        return target


def pairs(values: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Return alternating keys and values.

    Keys must be strings or small numbers: others may take forever to hash, and large numbers may all have one hash.
    """
    if not all(isinstance(key, str) or (isinstance(key, int) and abs(key) < 2**60) for key in values[::2]):
        raise ValueError("it has a dict whose keys are neither words nor numbers")
    return zip(values[::2], values[1::2], strict=True)


VALUES = {
    "BININT", "BININT1", "BININT2", "INT", "LONG1", "STRING", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
"""Instructions that put their argument on the stack."""
STEPS: dict[str, Callable[[Machine, Any], Any]] = {
    "NONE": lambda m, _: None,
    "NEWTRUE": lambda m, _: True,
    "NEWFALSE": lambda m, _: False,
    "MARK": lambda m, _: MARK,
    "EMPTY_TUPLE": lambda m, _: (),
    "EMPTY_LIST": lambda m, _: [],
    "EMPTY_DICT": lambda m, _: {},
    "TUPLE": lambda m, _: tuple(m.pop_to_mark()),
    "TUPLE1": lambda m, _: tuple(m.pop(1)),
    "TUPLE2": lambda m, _: tuple(m.pop(2)),
    "TUPLE3": lambda m, _: tuple(m.pop(3)),
    "LIST": lambda m, _: m.pop_to_mark(),
    "DICT": lambda m, _: dict(pairs(m.pop_to_mark())),
    "APPEND": lambda m, _: m.extend(m.pop(1)),
    "APPENDS": lambda m, _: m.extend(m.pop_to_mark()),
    "SETITEM": lambda m, _: m.extend(m.pop(2)),
    "SETITEMS": lambda m, _: m.extend(m.pop_to_mark()),
    "GLOBAL": lambda m, text: m.look_up(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.look_up(*m.pop(2)),
    "REDUCE": lambda m, _: m.reduce(*m.pop(2)),
    "BUILD": lambda m, _: m.build(*m.pop(2)),
    "BINGET": lambda m, place: m.memo[place],
    "LONG_BINGET": lambda m, place: m.memo[place],
}
"""Instructions that put what they make on the stack."""


def unpickle(stream: io.BytesIO) -> Any:
    """Return the content of a pickle of dicts, lists, numbers and arrays, with an `ArrayState` for each array."""
    machine = Machine()
    for instruction, argument, _ in pickletools.genops(stream):
        name = instruction.name
        if name == "STOP":
            return machine.pop(1)[0]
        if name in ("PROTO", "FRAME"):
            continue
        if name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            machine.memo[len(machine.memo) if argument is None else argument] = machine.stack[-1]
        elif name in VALUES:
            machine.stack.append(argument)
        elif name in STEPS:
            machine.stack.append(STEPS[name](machine, argument))
        else:
            raise ValueError(f"it has the instruction {name}, which no array of numbers needs")
    raise ValueError("its pickle has no end")


def load_arrays(file: Path, wanted: tuple[str, ...] = ("x", "y")) -> dict[str, np.ndarray]:
    """Return the arrays of these names in an `.npz` file: on their own, or in a dict that is called "data".

    Raises `ValueError`, or whatever damaged bytes lead to, for anything else.
    """
    with open_regular(file) as opened, zipfile.ZipFile(opened) as archive:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        if set(wanted) <= entries.keys():
            return {name: _read_plain_array(archive, entries[name]) for name in wanted}
        if "data" not in entries:
            raise ValueError(f"it has neither {' and '.join(wanted)} nor a dict called data")
        _check_size(archive, entries["data"], entries["data"].file_size)
        data = _read_pickled_object(archive.read(entries["data"]))
    if not isinstance(data, dict) or not set(wanted) <= data.keys():
        raise ValueError(f"its data are no dict with {' and '.join(wanted)}")
    return {name: _build_array(data[name]) for name in wanted}


def _check_size(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, size: int) -> None:
    assert archive.fp is not None
    whole = archive.fp.seek(0, io.SEEK_END)
    if size > max(MOST_BYTES, MOST_TIMES * whole):
        raise TooLargeError(
            f"{entry.filename} unpacks to {size:,} bytes of memory, and the file has {whole:,}; if that is right, "
            "write it again without compression, with np.savez"
        )


def _read_plain_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as stream:
        shape, kind = _read_header(stream)
        _check_size(archive, entry, max(math.prod(shape) * kind.itemsize, entry.file_size))
    with archive.open(entry) as stream:
        return np.asarray(npy.read_array(stream))  # which refuses pickles


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the type of an array, from the beginning of its file."""
    version = npy.read_magic(stream)
    shape, _, kind = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
    return shape, kind


def _read_pickled_object(content: bytes) -> Any:
    """Return the one object in an array of Python objects without axes."""
    stream = io.BytesIO(content)
    shape, kind = _read_header(stream)
    if kind != np.dtype(object) or shape != ():
        raise ValueError("its data are no dict")
    array = unpickle(stream)
    inside = _checked_state(array)[4] if isinstance(array, ArrayState) else None
    if not isinstance(inside, list) or len(inside) != 1:
        raise ValueError("its data are no dict")
    return inside[0]


def _checked_state(array: Any) -> tuple[Any, ...]:
    """Return an array's version, shape, type, order and content."""
    state = getattr(array, "state", None)
    if not isinstance(array, ArrayState) or not isinstance(state, tuple) or len(state) != 5:
        raise ValueError(f"it holds {type(array).__name__} in the place of an array of numbers")
    return state


def _build_array(array: Any) -> np.ndarray:
    """Return the array that numpy's pickle describes."""
    _, shape, kind, by_column, content = _checked_state(array)
    if not isinstance(kind, Kind) or kind.text not in KINDS or not isinstance(content, bytes):
        raise ValueError("an array in it does not hold plain numbers")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("an array in it has no shape")
    flat = np.frombuffer(content, np.dtype(kind.text).newbyteorder(kind.order)) if content else np.empty(0, kind.text)
    return flat.reshape(shape, order="F" if by_column is True else "C").astype(kind.text)  # a copy, in native order
