"""A column of labels as classes from 0, and a column of clients as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from undrift.data.tables import Place
from undrift.errors import UndriftError

MOST = 100_000
"""Labels that are bare numbers are classes counted from 0: what is above this is something else."""


class Labels:
    """Labels as the table declares them: class numbers with names, bare whole numbers, or words, sorted."""

    def __init__(self, place: Place, column: str) -> None:
        self.place, self.column = place, column
        feature = place.features("train").get(column)
        self.names: list[str] | None = getattr(feature, "names", None)
        self.words = getattr(feature, "dtype", "") in ("string", "large_string")
        if self.words:
            found = {word for table in place.rows("train", [column]) for word in table[column].to_pylist()}
            self.names = sorted(found - {None})

    def read(self, column: Any, split: str, begin: int) -> np.ndarray:
        """One batch of the column, whose first row is row `begin` of the split."""
        if column.null_count:
            row = np.flatnonzero(column.is_null().to_numpy())[0]
            raise UndriftError(f"{self._row(split, begin + row)} has no {self.column}; drop that row.")
        if self.words:
            known = {name: i for i, name in enumerate(self.names or ())}
            y = np.array([known.get(word, -1) for word in column.to_pylist()], np.int64)
        else:
            y = column.to_numpy()
        if y.dtype.kind not in "iub":
            raise UndriftError(
                f"The column {self.column!r} of {self.place.name} holds {column.type}, not classes; name another one."
            )
        most = len(self.names) if self.names else MOST
        wrong = np.flatnonzero((y < 0) | (y >= most))
        if len(wrong):
            allowed = "one that the training data have" if self.words else f"from 0 to {most - 1:,}"
            label = column[int(wrong[0])].as_py()
            raise UndriftError(
                f"{self._row(split, begin + wrong[0])} has {self.column} {label!r}, which must be {allowed}; mend or "
                "drop that row, or write labels as words."
            )
        return y.astype(np.int64)

    def _row(self, split: str, row: int) -> str:
        return f"Row {row} of the {split} split of {self.place.name}"


def encoded(names: list[Any], codes: dict[Any, int], where: str = "") -> np.ndarray:
    """Names as numbers, in the order in which they first appear; `codes` grows."""
    if None in names:
        raise UndriftError(f"{where} has rows that are no client's: the cell is empty. Drop or mend them.")
    return np.array([codes.setdefault(name, len(codes)) for name in names], np.int32)
