"""Tabular data, numbers with a label per row: which columns are features, and what becomes of missing values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from undrift.data import warn_once
from undrift.data.cache import Notes, Writer
from undrift.data.dataset import Scales, Task
from undrift.data.labels import MOST_CLASSES, Labels, encode_names
from undrift.data.normalize import Moments, loses_precision, rounding_example
from undrift.data.source import Source, source_from_arrays
from undrift.data.tables import Place
from undrift.errors import UndriftError, listed, quoted, shortened

MISSING = (None, "drop", "mean")
"""What to do about rows with missing values: refuse them, leave them out, or put in the column's mean."""
NARROW = 1e-5
"""The standard deviation, as a share of the mean, below which a column may lose some of its differences as float32."""
AT_ONCE = 2**24
"""How many of their numbers are read at once."""
ADDED: Any = {"added": True}
"""Marks fields that at their default are no part of the key under which the data are cached."""


@dataclass(frozen=True)
class Table:
    """Columns of numbers with one class per row, or with a number to predict if the labels are fractions."""

    hub: str
    label: str
    client: str | None
    test: str | None
    columns: tuple[str, ...] | None = field(default=None, metadata=ADDED)
    drop: tuple[str, ...] | None = field(default=None, metadata=ADDED)
    missing: str | None = field(default=None, metadata=ADDED)
    version: int = 3
    """Which notes a file in the cache has. Files of earlier versions, which lack some, are not read."""

    def decode(self, places: list[Place], write: Writer) -> None:
        place = places[0]
        every, features = place.features("train"), self.features(place)
        splits = ("train", *([self.test] if self.test else []))
        fractions, assumed = False, None  # whether labels are numbers to predict, and a warning if that is a guess
        if floats := getattr(every[self.label], "dtype", "").startswith("float"):
            fractions, assumed = self._guess_task(place, splits)
        labels = None if fractions else Labels(place, self.label, whole=floats)
        codes: dict[Any, int] = {}
        whose = f"The column {quoted(self.client)} of {place.name}"
        means, changed, moments = self._column_means(place, features) if self.missing == "mean" else None, 0, Moments()
        for split in splits:
            count = 0
            for table, x, rows, gaps in self._batches(place, split, features, means):
                y = table[self.label]
                write.append(f"{split}_x", x)
                if split == "train":
                    moments.add(x)
                if labels:
                    write.append(f"{split}_y", labels.encode(y, split, rows))
                else:
                    write.append(f"{split}_y", self._finite(y, self.label, place, split, rows))
                if self.client and split == "train":
                    write.append("train_key", encode_names(table[self.client].to_pylist(), codes, whose))
                count, changed = count + len(x), changed + gaps
            if not count:
                raise UndriftError(f"The {split} split of {place.name} has no {'complete ' if changed else ''}rows.")
        if labels:
            labels.check()
        names = labels.names if labels else None
        write.notes |= {"classes": names, "fractions": fractions, "clients": list(map(str, codes)), "assumed": assumed}
        codes_of = {name: feature.names for name, feature in features.items() if getattr(feature, "names", None)}
        write.notes["scales"] = {"columns": list(features), "codes": codes_of} | moments.scales().lists()
        write.notes["rounded"] = self._rounding_warning(place, list(features), moments.scales())
        if changed:
            write.notes["incomplete"] = f"{place.name}: {self._describe_changes(changed)} (missing={self.missing!r})."

    def _describe_changes(self, count: int) -> str:
        """Return what was done about `count` missing values, or rows with one."""
        if self.missing == "mean":
            several = f"{count:,} empty cells were filled with their columns' means"
            return "1 empty cell was filled with its column's mean" if count == 1 else several
        return "1 incomplete row was left out" if count == 1 else f"{count:,} incomplete rows were left out"

    def _rounding_warning(self, place: Place, features: list[str], scales: Scales) -> str | None:
        """Return a warning of the first column that loses some of its differences as float32.

        Only those whose numbers are large, compared with their differences, are read again, some at a time.
        """
        narrow = [features[i] for i in np.flatnonzero(scales.std <= NARROW * np.abs(scales.mean))]
        size = max(1, AT_ONCE // max(1, scales.count))
        for begin in range(0, len(narrow), size):
            names = narrow[begin : begin + size]
            batches = list(place.batches("train", names))
            for name in names:
                whole = np.concatenate([t[name].to_numpy().astype(np.float64) for t in batches])
                whole = whole[np.isfinite(whole)]
                if loses_precision(whole[:, None])[0]:
                    return (
                        f"{place.name}: the column {quoted(name)} is rounded to 32 bits, which loses some of the "
                        f"differences between its numbers ({rounding_example(whole)}). Subtract an offset from them "
                        "first, such as the smallest, or leave the column out."
                    )
        return None

    def _batches(
        self, place: Place, split: str, features: dict[str, Any], means: np.ndarray | None
    ) -> Iterator[tuple[Any, np.ndarray, np.ndarray, int]]:
        """Batches without missing values: the table, its features, its rows' numbers, and how much was missing."""
        import pyarrow as pa

        begin = 0
        for table in place.batches(split, [*features, self.label, *([self.client] if self.client else [])]):
            rows = np.arange(begin, begin + len(table))
            x = np.stack([self._finite(table[name], name, place, split, rows) for name in features], 1)
            gaps, begin = np.isnan(x), begin + len(x)
            if means is not None:
                yield table, np.where(gaps, means, x), rows, int(gaps.sum())
            elif self.missing == "drop":
                whole = ~gaps.any(1) & self._complete_rows(table)
                if whole.any() or begin == len(x):
                    yield table.filter(pa.array(whole)), x[whole], rows[whole], int((~whole).sum())
            else:
                yield table, x, rows, 0

    def features(self, place: Place) -> dict[str, Any]:
        """Return the columns to learn from, with their types. Raises `UndriftError` if one does not hold numbers."""
        every = place.features("train")
        others = {n: f for n, f in every.items() if n not in (self.label, self.client)}
        for column in (*(self.columns or ()), *(self.drop or ())):
            if column not in others:
                why = "is the label or the client" if column in every else f"is none of its columns, {listed(every)}"
                which = "drop" if self.columns is None else "columns"
                raise UndriftError(f"{which} must name features of {place.name}; {quoted(column)} {why}.")
        if self.columns is not None:
            features = {name: others[name] for name in self.columns}
        else:
            features = {n: f for n, f in others.items() if not _is_index(n) and n not in (self.drop or ())}
            if any(_is_index(name) and name not in (self.drop or ()) for name in others):
                warn_once.warn(f"{place.name}: the index column that pandas wrote is left out")
        kinds = {name: getattr(feature, "dtype", type(feature).__name__) for name, feature in features.items()}
        if wrong := [name for name, kind in kinds.items() if not kind.startswith(("int", "uint", "float", "bool"))]:
            if kinds[wrong[0]] == "null" and not any(map(len, place.batches("train", [wrong[0]]))):
                raise UndriftError(f"{place.name} has no rows to train on.")
            what = {"binary": "text that is not UTF-8", "null": "nothing"}.get(kinds[wrong[0]], kinds[wrong[0]])
            raise UndriftError(
                f"The column {quoted(wrong[0])} of {place.name} holds {what}, not numbers; turn it into numbers, or "
                f"leave it out: drop={[shortened(name, 40) for name in wrong[:10]]!r}."
            )
        if not features:
            raise UndriftError(
                f"{place.name} has no columns besides {quoted(self.label)}, so there is nothing to learn from."
            )
        return features

    def _column_means(self, place: Place, features: dict[str, Any]) -> np.ndarray:
        """Return each column's mean over the rows to train on that have a value."""
        total, known = np.zeros(len(features)), np.zeros(len(features))
        begin = 0
        for table in place.batches("train", list(features)):
            rows = np.arange(begin, begin + len(table))
            x = np.stack([self._finite(table[name], name, place, "train", rows) for name in features], 1)
            total, known, begin = total + np.nansum(x, 0, np.float64), known + (~np.isnan(x)).sum(0), begin + len(x)
        if len(empty := np.flatnonzero(known == 0)):
            name = list(features)[int(empty[0])]
            raise UndriftError(f"The column {quoted(name)} of {place.name} has no value at all; drop=[{name!r}].")
        return (total / known).astype(np.float32)

    def _complete_rows(self, table: Any) -> np.ndarray:
        """Return which rows have a label and a client."""
        wanted = [table[name] for name in (self.label, self.client) if name]
        return ~np.any([column.is_null(nan_is_null=True).to_numpy() for column in wanted], 0)

    def _guess_task(self, place: Place, splits: tuple[str, ...]) -> tuple[bool, str | None]:
        """Return whether float labels are numbers to predict, and a warning if all are integers, so that we guess."""
        seen: set[float] = set()
        for table in (table for split in splits for table in place.batches(split, [self.label])):
            y = table[self.label].to_numpy()
            if self.missing == "drop" and y.dtype.kind == "f":
                y = y[~np.isnan(y)]
            if y.dtype.kind not in "fiu" or not (y == np.floor(y)).all() or len(seen) > MOST_CLASSES:
                return True, None
            seen.update(np.unique(y).tolist())
        counted = len(seen) > 1 and seen == set(range(len(seen)))
        if counted:
            which = f"the whole numbers from 0 to {len(seen) - 1}, written as floats, and are treated as classes. To "
            which += "predict them as numbers, pass arrays: ud.load((x, y), …)"
        else:
            which = "whole numbers written as floats, and are treated as numbers to predict. If they are classes, "
            which += "write them without a decimal point"
        return not counted, f"The labels in the column {quoted(self.label)} of {place.name} are {which}."

    def _finite(self, column: Any, name: str, place: Place, split: str, rows: np.ndarray) -> np.ndarray:
        """Return a column as float32, with NaN for those values that are missing, where that is allowed."""
        try:
            numbers = column.cast("int8") if str(column.type) == "bool" else column  # so that gaps in it become NaN
            with np.errstate(over="ignore"):  # values that are too large become infinite, and are refused
                values = np.asarray(numbers.to_numpy().astype(np.float32))
        except (ValueError, TypeError) as error:
            raise UndriftError(
                f"The column {quoted(name)} of the {split} split of {place.name} is not all numbers."
            ) from error
        is_label = name == self.label
        wrong = np.isinf(values) if self.missing and not is_label else ~np.isfinite(values)
        if not wrong.any():
            return values
        row = int(np.flatnonzero(wrong)[0])
        given = column[row].as_py()
        empty = given is None or given != given
        large = f" (it is {given!r}, too large for 32 bits)" if not empty and abs(given) < np.inf else ""
        ways = ['missing="drop"'] if is_label else ['missing="drop"', 'missing="mean"']
        hint = f", or pass {' or '.join(ways)}" if empty else ""
        raise UndriftError(
            f"Row {rows[row]} of the {split} split of {place.name} has no finite {quoted(name)}{large}; clean or drop "
            f"that row{hint}."
        )

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source:
        values = {name: np.array(notes["scales"][name]) for name in ("mean", "std")}
        more: dict[str, Any] = {"scales": Scales(**(notes["scales"] | values), table=self.hub)}
        if notes["fractions"]:
            more |= {"labels": np.zeros(len(arrays["train_y"]), np.int64), "task": Task("mse")}
        return source_from_arrays(arrays, notes, **more)


def _is_index(column: str) -> bool:
    """Return whether pandas gives this name to an index that it writes."""
    return column in ("", "Unnamed: 0") or column.startswith("__index_level_")
