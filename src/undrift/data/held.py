"""Tables in memory: a pandas `DataFrame`, or a Hugging Face `Dataset` with one value per cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from undrift.data.cache import Notes
from undrift.data.tables import BATCH, Place, Read, arrow_features, even_batches
from undrift.errors import UndriftError, first_line

NAMES = {"train": "the data frame", "test": "the test data frame"}


@dataclass(frozen=True)
class Held(Place):
    """A place whose splits are Arrow tables."""

    tables: tuple[tuple[str, Any, Any], ...] = ()
    """Each split's name, table and features."""

    def _open(self, split: str) -> tuple[dict[str, Any], Read]:
        table, features = next((table, features) for name, table, features in self.tables if name == split)
        return features, lambda columns: even_batches(
            type(table).from_batches([batch]) for batch in table.select(columns).to_batches(BATCH)
        )


class Memory:
    """What a recipe writes to, in place of a file in the cache."""

    def __init__(self) -> None:
        self.parts: dict[str, list[np.ndarray]] = {}
        self.shapes: dict[str, tuple[str, list[int]]] = {}
        self.notes: Notes = {}

    def append(self, name: str, values: np.ndarray) -> None:
        self.parts.setdefault(name, []).append(values)
        self.shapes[name] = values.dtype.name, [sum(map(len, self.parts[name])), *values.shape[1:]]

    def arrays(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.concatenate(parts)) for name, parts in self.parts.items()}


def is_frame(data: Any) -> bool:
    """Return whether this is a pandas `DataFrame`."""
    return type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "iloc") and hasattr(data, "columns")


def is_table(data: Any) -> bool:
    """Return whether this is a Hugging Face `Dataset` of single values, with or without images, and not of tokens."""
    features = getattr(data, "features", None)
    if not hasattr(data, "column_names") or not hasattr(data, "with_format") or not isinstance(features, Mapping):
        return False
    single = [
        isinstance(getattr(feature, "dtype", None), str) and not hasattr(feature, "feature")
        for feature in features.values()
    ]
    return len(single) > 1 and all(single)


def place_of(data: Any, test: Any) -> Held:
    """Return the place of such data, and of a test set of the same kind."""
    splits = {"train": data} | ({"test": test} if test is not None else {})
    if any(type(given) is not type(data) for given in splits.values()):
        raise UndriftError(f"The test set must be a {type(data).__name__}, like the data to train on.")
    tables = [
        (split, *(_of_frame(given, split) if is_frame(given) else _of_set(given))) for split, given in splits.items()
    ]
    name = NAMES["train"] if is_frame(data) else "the data set"
    return Held(name, "memory", tuple((split, ()) for split in splits), tables=tuple(tables))


def _of_frame(frame: Any, split: str) -> tuple[Any, dict[str, Any]]:
    import pyarrow as pa

    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise UndriftError(f"{NAMES[split]} has the column {str(twice[0])!r} more than once; rename one.".capitalize())
    try:
        table = pa.Table.from_pandas(frame.rename(columns=str), preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UndriftError(f"{NAMES[split]} cannot be read ({first_line(error)}).".capitalize()) from error
    for i, entry in enumerate(table.schema):
        if pa.types.is_dictionary(entry.type):  # pandas' categories
            table = table.set_column(i, entry.name, table.column(i).cast(entry.type.value_type))
    return table, arrow_features(table.schema)


def _of_set(data: Any) -> tuple[Any, dict[str, Any]]:
    return data.with_format("arrow")[:], dict(data.features)
