"""Encode a column of labels as classes from 0, and a column of client names as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from undrift.data.tables import Place
from undrift.errors import UndriftError, quoted

MOST_CLASSES = 100_000
"""Bare numbers as labels are classes counted from 0. Larger numbers are taken for something else."""
MANY_CLASSES = 1000
"""With at most this many classes, unused ones do no harm."""


def labels_are_sparse(used: int, outputs: int) -> bool:
    """Return whether so few of the numbers below `outputs` are used that labels are unlikely to be classes from 0."""
    return outputs > MANY_CLASSES and used * 10 < outputs


class Labels:
    """Labels as the table declares them: class numbers with names, bare whole numbers, or strings, sorted."""

    def __init__(self, place: Place, column: str, whole: bool = False) -> None:
        """`whole`: the column's type is float, but its values are known to be whole numbers."""
        self.place, self.column, self.whole = place, column, whole
        feature = place.features("train").get(column)
        self.names: list[str] | None = getattr(feature, "names", None)
        kind = getattr(feature, "dtype", "")
        self.strings = kind in ("string", "large_string")
        self.used: set[int] = set()
        if kind in ("binary", "large_binary"):
            raise not_utf8_error(place, column)
        if self.strings:
            strings = {label for table in place.batches("train", [column]) for label in table[column].to_pylist()}
            self.names = sorted(strings - {None})
            if len(self.names) > MOST_CLASSES:
                raise UndriftError(
                    f"The column {quoted(column)} of {place.name} has {len(self.names):,} different strings, too "
                    "many for classes; name another column."
                )

    def encode(self, column: Any, split: str, rows: np.ndarray | range) -> np.ndarray:
        """Return one batch of the column; `rows` are the numbers of its rows in the split."""
        if column.null_count:
            row = np.flatnonzero(column.is_null().to_numpy())[0]
            raise UndriftError(f"{self._row(split, rows[int(row)])} has no {self.column}; drop that row.")
        if self.strings:
            known = {name: i for i, name in enumerate(self.names or ())}
            y = np.array([known.get(label, -1) for label in column.to_pylist()], np.int64)
        else:
            y = column.to_numpy()
            y = y.astype(np.int64) if self.whole else y
        if y.dtype.kind not in "iub":
            raise UndriftError(
                f"The column {quoted(self.column)} of {self.place.name} holds {column.type}, not classes; name "
                "another column."
            )
        most = len(self.names) if self.names else MOST_CLASSES
        wrong = np.flatnonzero((y < 0) | (y >= most))
        if len(wrong):
            allowed = "one that the training data have" if self.strings else f"from 0 to {most - 1:,}"
            label = column[int(wrong[0])].as_py()
            raise UndriftError(
                f"{self._row(split, rows[int(wrong[0])])} has {self.column} {quoted(label)}, which must be {allowed}; "
                "correct or drop that row, or write labels as strings."
            )
        self.used.update(np.unique(y).tolist())
        return y.astype(np.int64)

    def check(self) -> None:
        """Check, after all labels are read, whether most numbers are unused, so that they are codes and not classes."""
        outputs = max(self.used, default=0) + 1
        if self.names is None and labels_are_sparse(len(self.used), outputs):
            raise UndriftError(
                f"The column {quoted(self.column)} of {self.place.name} has {len(self.used):,} different labels up to "
                f"{outputs - 1:,}, which would make a model of {outputs:,} outputs; number the classes from 0, or "
                "write them as strings."
            )

    def _row(self, split: str, row: int) -> str:
        return f"Row {row} of the {split} split of {self.place.name}"


def not_utf8_error(place: Place, column: str) -> UndriftError:
    return UndriftError(
        f"The column {quoted(column)} of {place.name} holds text that is not UTF-8; save the file as UTF-8."
    )


def encode_names(names: list[Any], codes: dict[Any, int], where: str = "") -> np.ndarray:
    """Return names as numbers, in order of first appearance; new ones are added to `codes`."""
    if any(name is None or name != name for name in names):  # NaN is not itself
        raise UndriftError(f"{where} has empty cells, so those rows belong to no client; drop or correct them.")
    return np.array([codes.setdefault(name, len(codes)) for name in names], np.int32)
