"""Data sets as arrays in small files, for machines where only torch, numpy and safetensors are installed.

`prepare` writes what undrift's cache has of a data set in pieces of at most 60 MiB, with an index; `use` makes the data
sets of such a folder known to `ud.load`, which then gives the same clients as from the original files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from undrift.data import sources
from undrift.data.source import Source
from undrift.errors import UndriftError
from undrift.files import digest, replacing, verify, write_text

PIECE = 60 * 2**20 - 2**16
"""Bytes of data in a file, which has a short header too."""


def prepare(names: Iterable[str], folder: Path, piece: int = PIECE) -> list[Path]:
    """Write each data set's arrays and an index into `folder`, unless they are there. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name in names:
        index = folder / f"{name}.json"
        if not index.exists():
            recipe = sources.RECIPES[name]
            arrays, notes = sources.decoded(name, recipe, sources.places_of(recipe))
            files = _write(name, arrays, folder, piece)
            shapes = {
                key: [str(array.dtype).removeprefix("torch."), list(array.shape)] for key, array in arrays.items()
            }
            told = {"notes": notes, "arrays": shapes, "files": {file.name: digest(file) for file in files}}
            write_text(index, json.dumps(told))
        written += [index, *(folder / file for file in json.loads(index.read_text())["files"])]
    return written


def _write(name: str, arrays: dict[str, Tensor], folder: Path, piece: int) -> list[Path]:
    """The arrays' rows, one after another, in as few files as hold them."""
    files: list[Path] = []
    waiting: dict[str, Tensor] = {}
    room = piece

    def flush() -> None:
        nonlocal waiting, room
        if waiting:
            files.append(folder / f"{name}-{len(files):02}.safetensors")
            with replacing(files[-1]) as partial_file:
                save_file(waiting, str(partial_file))
        waiting, room = {}, piece

    for key, array in arrays.items():
        size = max(1, array.element_size() * array[:1].numel())
        begin = 0
        while begin < len(array):
            if room < size:
                flush()
            rows = min(len(array) - begin, max(1, room // size))
            waiting[f"{key}/{begin}"] = array[begin : begin + rows].clone()
            begin, room = begin + rows, room - rows * size
    flush()
    return files


def use(folder: Path) -> list[str]:
    """Make the data sets of a prepared folder known; each is read when it is first loaded. Returns their names."""
    found = sorted(file.stem for file in folder.glob("*.json"))
    if not found:
        raise UndriftError(f"{folder} has no prepared data; `undrift reproduce --prepare {folder}` writes them.")
    for name in found:
        sources.FUNCTIONS[name] = partial(_source, folder, name)
    return found


def _source(folder: Path, name: str) -> Source:
    told = json.loads((folder / f"{name}.json").read_text())
    pieces: dict[str, list[tuple[int, Tensor]]] = {key: [] for key in told["arrays"]}
    for file, expected in told["files"].items():
        if not (folder / file).exists():
            raise UndriftError(f"{folder / file} is missing: a piece of {name}. Copy it there.")
        verify(folder / file, expected)
        for entry, rows in load_file(folder / file).items():
            key, _, begin = entry.rpartition("/")
            pieces[key].append((int(begin), rows))
    arrays = {
        key: torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])]) for key, parts in pieces.items()
    }
    for key, (dtype, shape) in told["arrays"].items():
        if [str(arrays[key].dtype).removeprefix("torch."), list(arrays[key].shape)] != [dtype, shape]:
            raise UndriftError(f"{folder / name} is damaged: its array {key!r} is not as its index says.")
    return sources.RECIPES[name].open(arrays, told["notes"])
