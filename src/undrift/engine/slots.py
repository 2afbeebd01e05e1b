"""What clients keep, in files: for states that are too large for host memory together.

A file has slots of one size, each for the state of one client at one time. A state is written to a free slot and never
changed there. A `Slot` is taken as long as anything references it: the run's state, the state before a round that may
have to be undone, or one of the last two checkpoints. When the last reference goes, the slot is free. So what has been
written since a checkpoint is in slots that the checkpoint does not name.

The files have two sides, one for every other checkpoint, so that a damaged file affects one checkpoint only. A state is
written to the side of the next checkpoint. If the one after that has it too, it is copied to the other side.

States are written with ordinary writes, which report a full disk, and read from the memory-mapped file.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.cpus import usable_cpus
from undrift.files import DamagedError, regular, sync
from undrift.tree import Tree, tree_leaves, tree_structure, tree_unflatten

FILE_BYTES = 1 << 30
"""The size of a file. It is sparse: unwritten parts take no disk space."""
ALIGNED = 64
"""Tensors begin at multiples of this many bytes."""
NAME = re.compile(r"kept-\d+\.bin")


@dataclass(frozen=True)
class Layout:
    """Where in a slot the tensors of a state are."""

    structure: Any
    kinds: tuple[tuple[torch.dtype, torch.Size], ...]
    places: tuple[int, ...]
    size: int
    """The size of a slot, in bytes."""

    @classmethod
    def of(cls, state: Tree) -> Layout:
        leaves, places, end = tree_leaves(state), [], 0
        for leaf in leaves:
            places.append(end)
            end += -(-leaf.numel() * leaf.element_size() // ALIGNED) * ALIGNED
        return cls(tree_structure(state), kinds(leaves), tuple(places), max(end, ALIGNED))


def kinds(leaves: list[Tensor]) -> tuple[tuple[torch.dtype, torch.Size], ...]:
    return tuple((leaf.dtype, leaf.shape) for leaf in leaves)


class SlotFile:
    """A file of slots, open for reading and writing."""

    def __init__(self, handle: int, size: int, path: Path | None, side: int) -> None:
        self.handle, self.size, self.path, self.side = handle, size, path, side
        self.count = os.fstat(handle).st_size // size
        self.used = 0
        """The first slot that has never been taken."""
        self.free: deque[int] = deque()
        self.dirty = False
        self.mapped = mmap.mmap(handle, self.count * size)

    def take(self) -> int | None:
        """Return a free slot, if there is one. Not thread-safe."""
        if self.free:
            return self.free.popleft()
        self.used += 1
        return self.used - 1 if self.used <= self.count else None

    def write(self, place: int, view: memoryview) -> None:
        self.dirty = True
        try:
            while len(view):
                written = os.pwrite(self.handle, view, place)
                place, view = place + written, view[written:]
        except OSError as error:
            error.filename = str(self.path) if self.path else tempfile.gettempdir()
            raise

    def sync(self) -> None:
        if self.dirty:
            self.dirty = False
            os.fsync(self.handle)

    def __del__(self) -> None:
        os.close(self.handle)  # the map has a handle of its own


class Slot:
    """A client's state in a file. When this object is garbage-collected, the slot is free again."""

    def __init__(self, file: SlotFile, number: int, layout: Layout) -> None:
        self.file, self.number, self.layout = file, number, layout
        self.finite = True
        """Whether all numbers of the state are finite."""
        self.sha256: bytes | None = None
        self.copy: Slot | None = None
        """The same state on the other side."""

    def __del__(self) -> None:
        self.file.free.append(self.number)

    @property
    def begin(self) -> int:
        return self.number * self.file.size

    def read(self) -> Tree:
        """Return a copy of the state in memory."""
        leaves = []
        for (dtype, shape), place in zip(self.layout.kinds, self.layout.places, strict=True):
            count = shape.numel()
            if count:
                mapped = torch.frombuffer(self.file.mapped, dtype=dtype, count=count, offset=self.begin + place)
                leaves.append(mapped.reshape(shape).clone())
            else:
                leaves.append(torch.empty(shape, dtype=dtype))
        return tree_unflatten(leaves, self.layout.structure)

    @contextlib.contextmanager
    def content(self) -> Iterator[memoryview]:
        with memoryview(self.file.mapped) as whole, whole[self.begin : self.begin + self.layout.size] as mine:
            yield mine

    def digest(self) -> bytes:
        """Return the SHA-256 of the slot's content."""
        with self.content() as mine:
            return hashlib.sha256(mine).digest()


class SlotFiles:
    """The files of a run: in its checkpoint folder or, without one, temporary files that are already unlinked."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.files: dict[str, SlotFile] = {}
        self.layouts: dict[int, Layout] = {}
        """The layout of each part's states."""
        self.lock = threading.Lock()
        self.side = 0
        """That of the next checkpoint."""
        self._known: dict[str, dict[int, Slot]] = {}
        """By file of an earlier process: the slots that checkpoints name, while checkpoints are being read."""

    def write(self, part: int, state: Tree) -> Slot:
        """Write a state of a part to a free slot. Thread-safe."""
        leaves = [leaf.detach().cpu().contiguous() for leaf in tree_leaves(state)]
        with self.lock:
            layout = self.layouts.get(part)
            if layout is None or (layout.structure, layout.kinds) != (tree_structure(state), kinds(leaves)):
                layout = self.layouts[part] = Layout.of(state)
            slot = self._free(layout)
        for leaf, place in zip(leaves, layout.places, strict=True):
            if leaf.numel():  # as bytes, since numpy does not have all of torch's dtypes
                slot.file.write(slot.begin + place, leaf.reshape(-1).view(torch.uint8).numpy().data)
        slot.finite = all(bool(leaf.isfinite().all()) for leaf in leaves if leaf.is_floating_point())
        return slot

    def _free(self, layout: Layout) -> Slot:
        for file in self.files.values():
            right = file.size == layout.size and file.side == self.side
            if right and (number := file.take()) is not None:
                return Slot(file, number, layout)
        file = self._new(layout.size)
        number = file.take()
        assert number is not None
        return Slot(file, number, layout)

    def _new(self, size: int) -> SlotFile:
        """Create another file, exclusively, so that no existing file is ever written to."""
        path = self._named() if self.folder else None
        if path is None:
            with tempfile.TemporaryFile(buffering=0) as unnamed:
                handle = os.dup(unnamed.fileno())
        else:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
            sync(path.parent)
        os.truncate(handle, max(1, FILE_BYTES // size) * size)
        name = path.name if path else str(len(self.files))
        self.files[name] = SlotFile(handle, size, path, self.side)
        return self.files[name]

    def _named(self) -> Path:
        assert self.folder
        if not self.folder.is_dir():
            self.folder.mkdir()
            sync(self.folder.parent)
        number = len(self.files)
        while os.path.lexists(path := self.folder / f"kept-{number}.bin"):
            number += 1
        return path

    def reopened(self, name: str, size: int) -> SlotFile:
        """Return a file that an earlier process created. Raises `DamagedError` if it is not one."""
        if name not in self.files:
            assert self.folder
            path = self.folder / name
            if not NAME.fullmatch(name) or not regular(path):
                raise DamagedError(f"{path} is missing.")
            handle = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            if os.fstat(handle).st_size < size:
                os.close(handle)
                raise DamagedError(f"{path} is damaged: it is too short.")
            file = self.files[name] = SlotFile(handle, size, path, self.side)
            file.used, self._known[name] = file.count, {}  # until `settle` knows which of them are free
        return self.files[name]

    def known(self, name: str, number: int, layout: Layout, sha256: bytes) -> Slot:
        """Return the slot that a checkpoint names. Two checkpoints that name the same share it."""
        file = self.reopened(name, layout.size)
        if file.size != layout.size or not 0 <= number < file.count:
            raise DamagedError(f"{file.path} has no slot {number}.")
        known = self._known[name]
        if number not in known:
            known[number] = Slot(file, number, layout)
            known[number].sha256 = sha256
        return known[number]

    def settle(self, restored: Iterable[Slot]) -> None:
        """Free the slots that no checkpoint names, after all checkpoints have been read.

        The files of those that have been restored are on the other side than the next checkpoint.
        """
        other = {id(slot.file) for slot in restored}
        for file in self.files.values():
            file.side = 1 - self.side if id(file) in other else self.side
        for name, known in self._known.items():
            file = self.files[name]
            file.used = max(known, default=-1) + 1
            file.free.extend(number for number in range(file.used) if number not in known)
        self._known.clear()

    def beside(self, slots: list[Slot]) -> list[Slot]:
        """Return the slots, or their copies where they are not on the side of the next checkpoint."""
        with workers() as threads:
            return list(threads.map(self._beside, slots))

    def _beside(self, slot: Slot) -> Slot:
        if slot.file.side == self.side:
            return slot
        if slot.copy is None:
            with self.lock:
                copy = self._free(slot.layout)
            with slot.content() as mine:
                copy.file.write(copy.begin, mine)
            if slot.sha256 not in (None, copy.digest()):  # the other checkpoint must not be replaced by this
                raise DamagedError(
                    f"{slot.file.path} is damaged: a client's state is not what was written. Resume the run, which "
                    "continues from the last checkpoint without damage."
                )
            slot.copy, copy.sha256, copy.finite = copy, slot.sha256, slot.finite
        return slot.copy

    def seal(self, slots: Iterable[Slot]) -> None:
        """Write everything to the disk, with a checksum of each of these slots."""
        new = [slot for slot in slots if slot.sha256 is None]
        for slot, sha256 in zip(new, digests(new), strict=True):
            slot.sha256 = sha256
        for file in self.files.values():
            file.sync()


def digests(slots: list[Slot]) -> list[bytes]:
    """Return the digests of these slots' current content, computed in threads."""
    with workers() as threads:
        return list(threads.map(Slot.digest, slots))


def workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, usable_cpus()))


def damaged(slots: list[Slot]) -> Slot | None:
    """Return the first slot whose content is not what was written."""
    found = zip(slots, digests(slots), strict=True)
    return next((slot for slot, sha256 in found if sha256 != slot.sha256), None)
