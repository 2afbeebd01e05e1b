"""Decoded data on disk: one safetensors file per data set, written once and memory-mapped from then on.

The folder is `UNDRIFT_CACHE`, by default `~/.cache/undrift`. A file's name ends in a digest of where its data came
from, so that local files that changed are decoded again. Data from the hub stay as they were when they were decoded,
until the file is removed.

A file carries the SHA-256 of each array, which is part of the data's identity (`FederatedDataset.digests`), and a
checksum, which is verified whenever the file is opened. A damaged file is replaced by decoding the data again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from undrift.data import digest
from undrift.data.paths import as_path, kind
from undrift.errors import UndriftError

log = logging.getLogger("undrift")

FORMAT = 3
"""Version of the file format: increase it whenever the same data would be written differently."""
DTYPES = {"uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64", "float32": "F32"}

Notes = dict[str, Any]

_mapped_files: dict[int, StorageWeakRef] = {}
"""Memory-mapped files, by their address in torch."""


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor, or what it is a view of, is a file of the cache."""
    known = _mapped_files.get(StorageWeakRef(tensor.untyped_storage()).cdata)
    return known is not None and not known.expired()


class Writer(ABC):
    """What a recipe writes a data set to, batch by batch: arrays, each along its first axis, and notes."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[str, list[int]]] = {}
        self.notes: Notes = {}

    def append(self, name: str, values: np.ndarray) -> None:
        """Append to the array `name`, along its first axis."""
        dtype, shape = self.shapes.setdefault(name, (values.dtype.name, [0, *values.shape[1:]]))
        assert dtype == values.dtype.name and shape[1:] == list(values.shape[1:]), f"{name} changed its shape"
        self._write(name, values)
        shape[0] += len(values)

    @abstractmethod
    def _write(self, name: str, values: np.ndarray) -> None: ...


class MemoryWriter(Writer):
    """Keeps the arrays in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, list[np.ndarray]] = {}

    def _write(self, name: str, values: np.ndarray) -> None:
        self.parts.setdefault(name, []).append(values)

    def arrays(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.concatenate(parts)) for name, parts in self.parts.items()}


class FileWriter(Writer):
    """A safetensors file that grows batch by batch, so that decoding takes the memory of a batch, not of a data set.

    The library only writes whole tensors, so each array grows in its own file, and the last step concatenates them
    after the header that the format requires.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.files: dict[str, IO[bytes]] = {}

    def _write(self, name: str, values: np.ndarray) -> None:
        if name not in self.files:
            self.files[name] = (self.folder / name).open("x+b")
        self.files[name].write(np.ascontiguousarray(values).data)

    def finish(self, file: Path) -> None:
        header: dict[str, Any] = {"__metadata__": self._metadata()}
        end = 0
        # The widest types first, so that every array is aligned to its item size.
        order = sorted(self.shapes, key=lambda name: -np.dtype(self.shapes[name][0]).itemsize)
        for name in order:
            dtype, shape = self.shapes[name]
            begin, end = end, end + int(np.prod(shape)) * np.dtype(dtype).itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("xb") as whole:
            whole.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                self.files[name].seek(0)
                shutil.copyfileobj(self.files[name], whole, 1 << 20)
            whole.flush()
            os.fsync(whole.fileno())

    def _metadata(self) -> dict[str, str]:
        """Return the notes and each array's type, shape and digests, with a digest of all that."""
        arrays = {}
        for name, (dtype, shape) in self.shapes.items():
            self.files[name].flush()
            path = self.folder / name
            data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
            arrays[name] = {
                "dtype": f"torch.{dtype}",
                "shape": shape,
                "sha256": digest.sha256(data),
                "checksum": digest.checksum(data),
            }
        contents = json.dumps({"notes": self.notes, "arrays": arrays})
        return {"contents": contents, "sha256": hashlib.sha256(contents.encode()).hexdigest()}


def cache_folder() -> Path:
    if given := os.environ.get("UNDRIFT_CACHE"):
        return as_path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or as_path("~/.cache")) / "undrift"


def cached_arrays(name: str, identity: Any, decode: Callable[[Writer], None]) -> tuple[dict[str, Tensor], Notes]:
    """Return the arrays and notes of the data that `identity` identifies, decoded now or earlier."""
    key = digest.digest_of(FORMAT, identity)[:16]
    file = cache_folder() / f"{name}-{key}.safetensors"
    if os.path.lexists(file):
        try:
            return _open_mapped(file, check=True)
        except Exception as error:  # any damage: the file is written again, so nothing is lost
            log.warning("%s is damaged (%s); its data are decoded again", file, str(error)[:200])
    log.info("decoding %s into %s", name, file)
    with _scratch_folder(file.parent) as scratch:
        writer = FileWriter(scratch)
        try:
            decode(writer)
            writer.finish(scratch / "whole")
        finally:
            for stream in writer.files.values():
                stream.close()
        try:
            # Atomic, so that no process ever reads half a file, and none that has mapped the file sees it change. A
            # symbolic link of that name is replaced, not followed.
            (scratch / "whole").replace(file)
        except OSError as error:  # a folder of that name, which may be the user's
            log.warning("Decoded data cannot be stored as %s (%s); move away what is there", file, error.strerror)
            return _open_mapped(scratch / "whole", check=False)  # removed from the disk once it is unmapped
    return _open_mapped(file, check=False)


@contextlib.contextmanager
def _scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder with a random name and access for this user only, so that no other user can put a link into it."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="decoding-", dir=parent))
    except OSError as error:
        raise UndriftError(
            f"Decoded data cannot be stored in {parent} ({error.strerror}); set UNDRIFT_CACHE to a writable folder."
        ) from error
    try:
        yield path
    except OSError as error:  # no space, a quota, a limit on files; errors of reading have messages of their own
        raise UndriftError(
            f"The decoded data cannot be written to {parent} ({error.strerror}); set UNDRIFT_CACHE to a folder with "
            "more space."
        ) from error
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _open_mapped(file: Path, check: bool) -> tuple[dict[str, Tensor], Notes]:
    """Return a file's arrays and notes; raises an exception of any type if the file is damaged."""
    if kind(file) != "file":
        raise ValueError("it is not a regular file")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    text = metadata.get("contents", "")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("sha256"):
        raise ValueError("its notes are missing or have changed")
    contents = json.loads(text)
    if contents["arrays"].keys() != arrays.keys():
        raise ValueError("it does not hold the arrays that were written")
    for name, known in contents["arrays"].items():
        tensor = arrays[name]
        if [str(tensor.dtype), list(tensor.shape)] != [known["dtype"], known["shape"]]:
            raise ValueError(f"the array {name} has the wrong type or shape")
        if check and digest.checksum(digest.as_bytes(tensor)) != known["checksum"]:
            raise ValueError(f"the values of {name} have changed")
        digest.remember(tensor, known["sha256"])
        mapped = StorageWeakRef(tensor.untyped_storage())
        _mapped_files[mapped.cdata] = mapped
    return arrays, contents["notes"]
