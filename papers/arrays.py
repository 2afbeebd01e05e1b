"""Data sets as arrays in small files, for machines where only torch, numpy and safetensors are installed.

`prepare` writes a data set's decoded arrays in files of at most 48 MiB, with an index; `use` registers the data sets of
such a folder with `ud.load`, which then returns the same clients as from the original files.
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

PIECE = 48 * 2**20 - 2**16
"""Bytes of data in a file, in addition to its short header. With a copy of the source it stays below 64 MiB."""


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
            contents = {"notes": notes, "arrays": shapes, "files": {file.name: digest(file) for file in files}}
            write_text(index, json.dumps(contents))
        written += [index, *(folder / file for file in json.loads(index.read_text())["files"])]
    return written


def _write(name: str, arrays: dict[str, Tensor], folder: Path, piece: int) -> list[Path]:
    """Write the arrays, cut along their first axis, into as few files as possible."""
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
            count = min(len(array) - begin, max(1, room // size))
            waiting[f"{key}/{begin}"] = array[begin : begin + count].clone()
            begin, room = begin + count, room - count * size
    flush()
    return files


def use(folder: Path) -> list[str]:
    """Register the data sets of a prepared folder; each is read on first use. Returns their names."""
    found = sorted(file.stem for file in folder.glob("*.json"))
    if not found:
        raise UndriftError(f"{folder} has no prepared data; `undrift reproduce --prepare {folder}` writes them.")
    for name in found:
        sources.FUNCTIONS[name] = partial(_source, folder, name)
    return found


def _source(folder: Path, name: str) -> Source:
    index = json.loads((folder / f"{name}.json").read_text())
    pieces: dict[str, list[tuple[int, Tensor]]] = {key: [] for key in index["arrays"]}
    for file, expected in index["files"].items():
        if not (folder / file).exists():
            raise UndriftError(f"{folder / file} is missing, a piece of {name}; copy it there.")
        verify(folder / file, expected)
        for entry, piece in load_file(folder / file).items():
            key, _, begin = entry.rpartition("/")
            pieces[key].append((int(begin), piece))
    arrays = {
        key: torch.cat([piece for _, piece in sorted(parts, key=lambda part: part[0])]) for key, parts in pieces.items()
    }
    for key, (dtype, shape) in index["arrays"].items():
        if [str(arrays[key].dtype).removeprefix("torch."), list(arrays[key].shape)] != [dtype, shape]:
            raise UndriftError(f"{folder / name} is damaged: its array {key!r} does not match its index.")
    return sources.RECIPES[name].open(arrays, index["notes"])
