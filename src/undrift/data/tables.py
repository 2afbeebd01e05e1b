"""Rows of a table, batch by batch, wherever it lies: on the Hugging Face hub, in a folder laid out like it, in a file.

All of it through `datasets`, which streams local files and keeps what it gets from the hub in its own cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from undrift.errors import UndriftError

BATCH = 1000


@dataclass(frozen=True)
class Place:
    """Where a data set's rows lie."""

    name: str
    """The hub's id, or a path."""
    kind: str = "hub"
    """What to read: the "hub", or local files that are "parquet", "csv" or "pictures"."""
    files: tuple[tuple[str, tuple[Path, ...]], ...] = ()
    """Of local data: each split's files."""
    config: str | None = None
    stream: bool = False
    """Of the hub: read row by row, for who wants a few of many."""

    @property
    def splits(self) -> list[str]:
        if self.kind == "hub":
            return self._from_hub(lambda: _datasets().get_dataset_split_names(self.name, self.config))
        return [split for split, _ in self.files]

    @property
    def identity(self) -> list[Any]:
        """What tells these data from any others: of local files their names, sizes and times."""
        stats = [(str(file.resolve()), file.stat()) for _, files in self.files for file in files]
        return [self.name, self.config, *([path, stat.st_size, stat.st_mtime_ns] for path, stat in stats)]

    def rows(self, split: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """The split's rows as Arrow tables of at most a thousand; all columns unless some are named."""
        data = self._open(split)
        missing = [name for name in columns or () if name not in data.features]
        if missing:
            raise UndriftError(f"{self.name} has no column {missing[0]!r}; its columns are {', '.join(data.features)}.")
        data = data.select_columns(list(columns)) if columns else data
        try:
            yield from data.with_format("arrow").iter(batch_size=BATCH)
        except UndriftError:
            raise
        except Exception as error:  # whatever a reader makes of bytes that are not what they should be
            raise self._unreadable(error) from error

    def features(self, split: str) -> dict[str, Any]:
        """The columns and their types."""
        return dict(self._open(split).features)

    def _open(self, split: str) -> Any:
        datasets = _datasets()
        if self.kind == "hub":
            return self._from_hub(
                lambda: datasets.load_dataset(self.name, self.config, split=split, streaming=self.stream)
            )
        if split not in dict(self.files):
            raise UndriftError(f"{self.name} has no {split} split; it has {', '.join(dict(self.files))}.")
        files = [str(file) for file in dict(self.files)[split]]
        try:
            if self.kind == "csv":
                return datasets.Dataset(datasets.table.InMemoryTable(_csv(files[0], Path(files[0]).stat().st_mtime_ns)))
            data = datasets.load_dataset(self.kind, data_files={split: files}, split=split, streaming=True)
            return data if data.features else data._resolve_features()
        except Exception as error:
            raise self._unreadable(error) from error

    def _from_hub(self, get: Callable[[], Any]) -> Any:
        if "/" not in self.name:
            raise UndriftError(
                f"{self.name} is not on the hub; put its parquet files into FOLDER/{self.name} and set "
                "UNDRIFT_DATA=FOLDER."
            )
        try:
            return get()
        except Exception as error:  # no network, no such data set, no such split: the library has many
            raise UndriftError(
                f"{self.name} could not be had from the Hugging Face hub ({_first_line(error)}). Without a network, "
                f"put its parquet files into FOLDER/{self.name} and set UNDRIFT_DATA=FOLDER."
            ) from error

    def _unreadable(self, error: Exception) -> UndriftError:
        culprit = self.name
        if self.kind == "parquet":
            culprit = next((str(f) for _, files in self.files for f in files if not _whole(f)), self.name)
        return UndriftError(f"{culprit} cannot be read ({_first_line(error)}); get or write that file again.")


def hub(name: str, config: str | None = None, data_dir: str | Path | None = None, stream: bool = False) -> Place:
    """A data set by its hub id: in `data_dir`, or the folder that UNDRIFT_DATA names, or else on the hub."""
    given = data_dir or os.environ.get("UNDRIFT_DATA")
    root = Path(given).expanduser() if given else None
    if root is not None and not root.is_dir():
        raise UndriftError(f"There is no data folder {root}; set UNDRIFT_DATA (or data_dir) to one that exists.")
    found = in_folder(root / name, name, config) if root else None
    return found or Place(name, config=config, stream=stream)


def in_folder(folder: Path, name: str, config: str | None = None) -> Place | None:
    """A folder in hub layout, `<split>-0000i-of-0000n.parquet` in it or below, or None if it has no such file."""
    folder = folder / config if config and (folder / config).is_dir() else folder
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*.parquet")):
        if match := re.fullmatch(r"(\w+)-(\d+)-of-(\d+)", file.stem):
            splits.setdefault(match[1], []).append(file)
        else:  # `train.parquet`, or `train/0000.parquet`
            splits.setdefault(file.parent.name if file.stem.isdigit() else file.stem, []).append(file)
    for split, files in splits.items():
        counts = {int(m[1]) for file in files if (m := re.search(r"-of-(\d+)$", file.stem))}
        if counts and len(files) > max(counts):
            raise UndriftError(f"{folder} has several data sets in folders of their own; name one of those.")
        if counts and len(files) != max(counts):
            raise UndriftError(
                f"{folder} has {len(files)} of the {max(counts)} files of its {split} split; get the others."
            )
    return Place(name, "parquet", tuple((s, tuple(f)) for s, f in splits.items()), config) if splits else None


@lru_cache(maxsize=1)
def _csv(file: str, time: int) -> Any:
    """A CSV file as a table, kept for who asks again; `time` tells a changed file from the one before."""
    from pyarrow import csv

    return csv.read_csv(file, convert_options=csv.ConvertOptions(strings_can_be_null=True))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UndriftError(f"Reading data sets needs the package datasets ({error}): pip install datasets.") from error
    return datasets


def _whole(file: Path) -> bool:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            for group in range(opened.num_row_groups):
                opened.read_row_group(group)
    except (OSError, ValueError):  # Arrow's own errors are both
        return False
    return True


def _first_line(error: BaseException) -> str:
    """What went wrong first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200].rstrip('.')}" if text else type(error).__name__
