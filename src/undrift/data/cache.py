"""Decoded data on disk: one safetensors file a data set, written once and memory-mapped ever after.

`UNDRIFT_CACHE` says where (by default `~/.cache/undrift`). A file's name ends in a digest of where its data came
from, so that local files that changed are decoded again. What came from the hub stays as it was that day, until the
file is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from undrift.errors import UndriftError

log = logging.getLogger("undrift")

FORMAT = 2
"""Raised when what is written for the same data changes."""
DTYPES = {"uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64", "float32": "F32"}

Notes = dict[str, Any]


class Writer:
    """A safetensors file that grows row by row, so that decoding takes the memory of a batch, not of a data set.

    The library writes whole tensors only, so each array grows in a file of its own and the last step joins them
    behind the header that the format asks for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, IO[bytes]] = {}
        self.shapes: dict[str, tuple[str, list[int]]] = {}
        self.notes: Notes = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        """More rows of the array `name`."""
        if name not in self.files:
            self.files[name] = (self.folder / name).open("w+b")
            self.shapes[name] = rows.dtype.name, [0, *rows.shape[1:]]
        dtype, shape = self.shapes[name]
        assert dtype == rows.dtype.name and shape[1:] == list(rows.shape[1:]), f"{name} changed its shape"
        self.files[name].write(np.ascontiguousarray(rows).data)
        shape[0] += len(rows)

    def finish(self, file: Path) -> None:
        header: dict[str, Any] = {"__metadata__": {"notes": json.dumps(self.notes)}}
        end = 0
        # The widest types first: then every array begins at a multiple of its own item's size.
        order = sorted(self.shapes, key=lambda name: -np.dtype(self.shapes[name][0]).itemsize)
        for name in order:
            dtype, shape = self.shapes[name]
            begin, end = end, end + int(np.prod(shape)) * np.dtype(dtype).itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as whole:
            whole.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                self.files[name].seek(0)
                shutil.copyfileobj(self.files[name], whole, 1 << 20)
            whole.flush()
            os.fsync(whole.fileno())


def folder() -> Path:
    if given := os.environ.get("UNDRIFT_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "undrift"


def cached(name: str, identity: Any, decode: Callable[[Writer], None]) -> tuple[dict[str, Tensor], Notes]:
    """The arrays and notes of data that `identity` tells apart from all others, decoded now or earlier."""
    digest = hashlib.sha256(json.dumps([FORMAT, identity], sort_keys=True).encode()).hexdigest()[:16]
    file = folder() / f"{name}-{digest}.safetensors"
    if file.exists():
        with contextlib.suppress(SafetensorError):
            return _mapped(file)
        log.warning("%s cannot be read; decoding its data again", file)
    log.info("decoding %s into %s", name, file)
    with _scratch(file.parent) as scratch:
        writer = Writer(scratch)
        try:
            decode(writer)
            writer.finish(scratch / "whole")
        finally:
            for stream in writer.files.values():
                stream.close()
        (scratch / "whole").replace(file)  # at once, so that nobody ever reads half a file
    return _mapped(file)


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="decoding-", dir=parent))
    except OSError as error:
        raise UndriftError(
            f"Decoded data cannot be kept in {parent} ({error.strerror}); set UNDRIFT_CACHE to a folder you may write."
        ) from error
    try:
        yield path
    except OSError as error:
        if error.errno != 28:  # no space left on device
            raise
        raise UndriftError(
            f"{parent} has no room for the decoded data; set UNDRIFT_CACHE to a folder with more."
        ) from error
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _mapped(file: Path) -> tuple[dict[str, Tensor], Notes]:
    with safe_open(file, framework="pt") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        return arrays, json.loads(opened.metadata()["notes"])
