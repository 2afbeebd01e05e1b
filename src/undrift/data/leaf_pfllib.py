"""Data in one piece per client, as LEAF and PFLlib write them, with each client's own test data.

LEAF (Caldas et al., 2018): JSON files below `train` and `test`, each with `users`, `num_samples` and `user_data`.
PFLlib (Zhang et al., 2023): `train/0.npz`, `train/1.npz`, … and the same below `test`, with arrays x and y.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from undrift.data import safe_pickle, warn_once
from undrift.data.dataset import Rows, concatenate_clients
from undrift.data.paths import kind
from undrift.data.source import Source, partition_labels
from undrift.errors import UndriftError, first_line, listed, quoted
from undrift.files import parse_json, read_text

Pairs = dict[str, tuple[Any, Any]]
"""A pair (x, y) per client, by name."""
RE_SAVE = (
    "write it again from a program that you trust: "
    'd = np.load(file, allow_pickle=True)["data"].item(); np.savez(file, x=np.asarray(d["x"]), y=np.asarray(d["y"]))'
)


def is_split_by_client(folder: Path) -> bool:
    """Return whether this is such a folder: one with JSON or npz files in `train`, and no folders, as images have."""
    return bool(_files(folder, "train")) and not any(kind(path) == "folder" for path in (folder / "train").iterdir())


def _files(folder: Path, split: str) -> list[Path]:
    below = folder / split
    if kind(below) != "folder":
        return []
    return [path for path in below.iterdir() if path.suffix.lower() in (".json", ".npz")]


def load_source(folder: Path) -> Source:
    """Return the training data of all clients, with their names, and their test data."""
    train, names = _read_split(folder, "train"), None
    test = _read_split(folder, "test")
    if _labels_are_text(train, test):
        names = sorted({str(label) for _, y in train.values() for label in y})
        train, test = ({who: (x, _encode_labels(y, names, who)) for who, (x, y) in s.items()} for s in (train, test))
    train = {who: pair for who, pair in train.items() if len(pair[1])}
    own = concatenate_clients(list(train.values()), list(train))
    test_rows, test_keys = None, None
    if test := {who: pair for who, pair in test.items() if len(pair[1])}:
        tests = concatenate_clients(list(test.values()), list(test), own, "test samples")
        test_rows = Rows.whole(tests.store)
        place = {who: i for i, who in enumerate(train)}
        test_keys = np.repeat([place.get(who, -1) for who in test], np.diff(tests.offsets))
        if strange := [who for who in test if who not in place]:
            warn_once.warn(f"{folder}: {listed(strange, 5)} have test data only, which are part of the common test set")
    return Source(
        own.store,
        partition_labels(own.store["y"]),
        test=test_rows,
        keys=np.repeat(np.arange(len(train)), np.diff(own.offsets)),
        clients=list(train),
        names=names,
        test_keys=test_keys,
    )


def _is_numeric(y: Any) -> bool:
    return np.asarray(y).dtype.kind in "iufb"


def _labels_are_text(train: Pairs, test: Pairs) -> bool:
    """Return whether labels are text. Where some are numbers, an order of all of them would renumber these."""
    kinds: dict[bool, str] = {}
    for pairs, whose in ((train, ""), (test, "'s test data")):
        for who, (_, y) in pairs.items():
            if len(y):
                kinds.setdefault(_is_numeric(y), f"{who}{whose}")
    if len(kinds) > 1:
        raise UndriftError(
            f"The labels of {kinds[False]} are text and those of {kinds[True]} are numbers; write all of them as one "
            "or the other."
        )
    return False in kinds


def _encode_labels(y: Any, names: list[str], who: str) -> np.ndarray:
    """Return string labels as classes, in alphabetical order."""
    codes = {name: i for i, name in enumerate(names)}
    if strange := {str(label) for label in y} - codes.keys():
        raise UndriftError(
            f"The test data of client {who} have the label {min(strange)!r}, which none to train on has."
        )
    return np.array([codes[str(label)] for label in y], np.int64)


def _read_split(folder: Path, split: str) -> Pairs:
    pairs: Pairs = {}
    for file in sorted(_files(folder, split), key=_file_order):
        own = _read_json(file) if file.suffix.lower() == ".json" else {file.stem: _read_npz(file)}
        if twice := pairs.keys() & own.keys():
            raise UndriftError(
                f"{file} has client {min(twice)!r}, who is in another file too; write each client to one file."
            )
        pairs |= own
    if split == "train" and not any(len(y) for _, y in pairs.values()):
        raise UndriftError(f"The clients in {folder / split} have no samples.")
    return pairs


def _file_order(file: Path) -> tuple[bool, int, Path]:
    """The order of files: 2.npz before 10.npz, and all of these before those that are not called after a number."""
    number = file.stem.isascii() and file.stem.isdecimal() and len(file.stem) < 20
    return not number, int(file.stem) if number else 0, file


def _read_npz(file: Path) -> tuple[Any, Any]:
    try:
        arrays = safe_pickle.load_arrays(file)
    except OSError as error:
        raise UndriftError(f"{file} cannot be read ({error.strerror or first_line(error)}).") from error
    except safe_pickle.TooLargeError as error:
        raise UndriftError(f"{file}: {error}.") from error
    except Exception as error:  # damaged bytes, and pickles that are not of arrays, raise all kinds of errors
        raise UndriftError(f"{file} cannot be read ({first_line(error)}); if it is yours, {RE_SAVE}") from error
    if not all(array.ndim for array in arrays.values()) or len(arrays["x"]) != len(arrays["y"]):
        shapes = " and ".join(f"{name} of shape {array.shape}" for name, array in arrays.items())
        raise UndriftError(f"{file} has {shapes}; both need one entry per sample.")
    return arrays["x"], arrays["y"]


def _read_json(file: Path) -> Pairs:
    try:
        content = parse_json(read_text(file))
        users, data = content["users"], content["user_data"]
        pairs = {str(user): (data[user]["x"], data[user]["y"]) for user in users}
    except OSError as error:
        raise UndriftError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UndriftError(
            f"{file} is not of LEAF's form: users, and user_data with x and y per user ({type(error).__name__}: "
            f"{first_line(error)})."
        ) from error
    counted = content.get("num_samples") or []
    if not isinstance(counted, list):
        raise UndriftError(f"{file}: num_samples must be a list with a number per user, not {quoted(counted)}.")
    counts = dict(zip(map(str, users), counted, strict=False))
    return {user: _as_arrays(x, y, counts.get(user), f"{file}, user {user}") for user, (x, y) in pairs.items()}


def _as_arrays(x: Any, y: Any, count: Any, where: str) -> tuple[np.ndarray, Any]:
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or count not in (None, len(y)):
        raise UndriftError(f"{where}: x, y and num_samples do not agree; get or write that file again.")
    try:
        values = np.asarray(x)
    except ValueError as error:
        raise UndriftError(f"{where}: its samples differ in shape; pad them to one.") from error
    if len(x) and values.dtype.kind not in "iufb":
        raise UndriftError(
            f"{where}: its samples are text, not numbers; encode them first, and pass them to from_clients. Of LEAF's "
            'data sets of text, ud.load knows "shakespeare" by name.'
        )
    return values.astype(np.float32) if values.dtype.kind == "f" else values, _as_labels(y, where)


def _as_labels(y: list[Any], where: str) -> Any:
    """Return labels that are numbers as an array, and those that are text as they are."""
    try:
        numeric = _is_numeric(y)
    except ValueError as error:
        raise UndriftError(f"{where}: its labels differ in shape; pad them to one.") from error
    if numeric:
        return np.asarray(y)
    others = [i for i, label in enumerate(y) if not isinstance(label, str)]
    if others:
        strange = next((i for i in others if not isinstance(y[i], int | float)), others[0])
        raise UndriftError(
            f"{where}: the label of sample {strange} is {quoted(y[strange])}, but labels must be all numbers, or all "
            "text; correct it, or drop that sample."
        )
    return y
