"""Read numbers out of pickled numpy arrays and dicts, without running anything that the pickle names.

`np.savez(file, data={"x": x, "y": y})` pickles the dict. A pickle is a program: it names functions and calls them.
Here, the few names that numpy's arrays need stand for two classes of ours, which only keep what they are given, and
any other name is refused. Numpy's own functions are not called, for they trust what a pickle tells them of memory.
Arrays are made afterwards, from bytes whose number fits their shape and of a type that is a plain number.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy

KINDS = {"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"}
"""The types of numbers that arrays may have, as numpy writes them, but for the byte order."""
MOST_BYTES = 1 << 34
"""The most bytes that an array may unpack to: a file of a few kilobytes may claim any number."""


class Kind:
    """Stands for `numpy.dtype`."""

    def __init__(self, text: Any, *rest: Any) -> None:
        self.text = str(text)
        self.order: Literal["<", ">", "="] = "="

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">"):
            self.order = state[1]


class Kept:
    """Stands for an array, and for `numpy.core.multiarray._reconstruct`, whose arguments say nothing that matters."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Restricted(pickle.Unpickler):
    """An unpickler that knows arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return Kept
        if (module, name) == ("numpy", "ndarray"):
            return "ndarray"  # an argument of `_reconstruct`
        if (module, name) == ("numpy", "dtype"):
            return Kind
        raise ValueError(f"it names {module}.{name}, which is no part of an array of numbers")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to something outside of the file")


def arrays(file: Path, wanted: tuple[str, ...] = ("x", "y")) -> dict[str, np.ndarray]:
    """The arrays of these names in an `.npz` file: on their own, or in a dict that is called "data".

    Raises `ValueError`, or an error of `zipfile`'s or of `pickle`'s, for anything else.
    """
    with zipfile.ZipFile(file) as archive:
        held = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        if set(wanted) <= held.keys():
            return {name: _plain(_content(archive, held[name])) for name in wanted}
        if "data" not in held:
            raise ValueError(f"it has neither {' and '.join(wanted)} nor a dict called data")
        found = _pickled(_content(archive, held["data"]))
    if not isinstance(found, dict) or not set(wanted) <= found.keys():
        raise ValueError(f"its data are no dict with {' and '.join(wanted)}")
    return {name: _array(found[name]) for name in wanted}


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > MOST_BYTES:
        raise ValueError(f"{entry.filename} has {entry.file_size:,} bytes; the limit is {MOST_BYTES:,}")
    return archive.read(entry)


def _plain(content: bytes) -> np.ndarray:
    return np.asarray(npy.read_array(io.BytesIO(content), allow_pickle=False))


def _pickled(content: bytes) -> Any:
    """The one object in an array of Python objects without axes."""
    stream = io.BytesIO(content)
    version = npy.read_magic(stream)
    shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
    if dtype != np.dtype(object) or shape != ():
        raise ValueError("its data are no dict")
    kept = Restricted(stream).load()
    inside = _state(kept)[4] if isinstance(kept, Kept) else None
    if not isinstance(inside, list) or len(inside) != 1:
        raise ValueError("its data are no dict")
    return inside[0]


def _state(kept: Any) -> tuple[Any, ...]:
    """An array's version, shape, type, order and content."""
    state = getattr(kept, "state", None)
    if not isinstance(kept, Kept) or not isinstance(state, tuple) or len(state) != 5:
        raise ValueError(f"it holds {type(kept).__name__} in the place of an array of numbers")
    return state


def _array(kept: Any) -> np.ndarray:
    """The array that numpy's pickle describes."""
    _, shape, kind, by_column, content = _state(kept)
    if not isinstance(kind, Kind) or kind.text not in KINDS or not isinstance(content, bytes):
        raise ValueError("an array in it does not hold plain numbers")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("an array in it has no shape")
    flat = np.frombuffer(content, np.dtype(kind.text).newbyteorder(kind.order)) if content else np.empty(0, kind.text)
    return flat.reshape(shape, order="F" if by_column is True else "C").astype(kind.text)  # a copy, in native order
