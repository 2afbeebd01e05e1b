"""Tables, read in batches: from the Hugging Face hub, a folder in the hub's layout, a file, or memory.

`datasets` reads the hub and has its own cache. Local files are read with Arrow directly, which takes paths literally;
`datasets` would treat them as glob patterns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from undrift.data.paths import as_path, files_below, kind, unreadable_error
from undrift.errors import UndriftError, first_line, listed, quoted, shortened

BATCH = 1000
FRAMES = {"train": "the data frame", "test": "the test data frame"}
"""What to call the splits of a pandas `DataFrame` in messages."""

Read = Callable[[list[str]], Iterator[Any]]
"""A function that reads the given columns of a split, as Arrow tables of at most `BATCH` rows."""


@dataclass(frozen=True)
class Place:
    """The location of a data set."""

    name: str
    """The hub's id, or a path."""
    kind: str = "hub"
    """What to read: the "hub", or local files, "parquet", "csv" or "images"."""
    files: tuple[tuple[str, tuple[Path, ...]], ...] = ()
    """Each split's files, for local data."""
    config: str | None = None
    stream: bool = False
    """Whether to stream from the hub, for when only a few of many rows are wanted."""

    @property
    def splits(self) -> list[str]:
        if self.kind == "hub":
            return self._from_hub(lambda: _datasets().get_dataset_split_names(self.name, self.config))
        return [split for split, _ in self.files]

    @property
    def identity(self) -> list[Any]:
        """Identifies these data: the name and, for local files, their paths, sizes and modification times."""
        files = []
        for file in (file for _, files_of_split in self.files for file in files_of_split):
            try:
                status = file.stat()
            except OSError as error:
                raise unreadable_error(file, error) from error
            files.append([str(file.resolve()), status.st_size, status.st_mtime_ns])
        return [self.name, self.config, *files]

    def batches(self, split: str, columns: Sequence[str]) -> Iterator[Any]:
        """Yield the given columns of a split, as Arrow tables of at most `BATCH` rows."""
        features, read = self._open(split)
        if missing := [name for name in columns if name not in features]:
            raise UndriftError(f"{self.name} has no column {quoted(missing[0])}; its columns are {listed(features)}.")
        try:
            yield from read(list(columns))
        except UndriftError:
            raise
        except Exception as error:  # readers raise all kinds of errors for damaged bytes
            raise _unreadable_table_error(self.name, error) from error

    def features(self, split: str) -> dict[str, Any]:
        """Return the columns and their types."""
        return self._open(split)[0]

    def beside(self, named: Any) -> Path:
        """Return the file that a cell names. It must be in the table's folder: data must not choose what is read."""
        if not isinstance(named, str) or not named:
            raise ValueError("it has neither an image's bytes nor the path of one")
        if self.kind == "hub":  # `datasets` writes absolute paths of files in its cache
            roots = _datasets_folders(self.name)
        else:
            roots = list(dict.fromkeys(file.parent for _, files in self.files for file in files))
            if Path(named).is_absolute() or ".." in Path(named).parts:
                raise ValueError(f"its path {quoted(named)} is not relative to the table's folder")
        real = [Path(os.path.realpath(root / named)) for root in roots]
        inside = [file for file, root in zip(real, roots, strict=True) if file.is_relative_to(os.path.realpath(root))]
        if not inside:
            raise ValueError(f"its path {quoted(named)} leads out of the table's folder")
        for file in inside:
            if kind(file) is not None:
                return file
        raise ValueError(f"there is no file {quoted(named)} in the table's folder")

    def _open(self, split: str) -> tuple[dict[str, Any], Read]:
        """Return the split's columns with their types, and a function that reads some of them."""
        if self.kind == "hub":
            load = _datasets().load_dataset
            data = self._from_hub(lambda: load(self.name, self.config, split=split, streaming=self.stream))
            return dict(
                data.features
            ), lambda columns: data.select_columns(columns).with_format("arrow").iter(batch_size=BATCH)
        if split not in dict(self.files):
            raise UndriftError(f"{self.name} has no {split} split; it has {listed(dict(self.files))}.")
        files = dict(self.files)[split]
        features = _features(files[0], self.kind)
        if self.kind == "csv":
            return features, lambda columns: _slices(_csv_table(files[0]).select(columns))
        return features, lambda columns: _even_batches(_read_parquet(files, columns, features))

    def _from_hub(self, get: Callable[[], Any]) -> Any:
        if "/" not in self.name:
            raise UndriftError(
                f"{self.name} is not on the hub; put its parquet files into FOLDER/{self.name} and set "
                "UNDRIFT_DATA=FOLDER."
            )
        try:
            return get()
        except Exception as error:  # no network, no such data set, no such split: many types
            raise UndriftError(
                f"{self.name} could not be read from the Hugging Face hub ({_root_cause(error)}). Without a network, "
                f"put its parquet files into FOLDER/{self.name} and set UNDRIFT_DATA=FOLDER."
            ) from error


def hub_place(name: str, config: str | None = None, data_dir: str | Path | None = None, stream: bool = False) -> Place:
    """Return a data set by its hub id: from `data_dir` or UNDRIFT_DATA if it is there, else from the hub."""
    given = data_dir or os.environ.get("UNDRIFT_DATA")
    root = as_path(given) if given else None
    if root is not None and kind(root) != "folder":
        raise UndriftError(
            f"There is no data folder {shortened(str(root))}; set UNDRIFT_DATA (or data_dir) to one that exists."
        )
    local = hub_folder(root / name, name, config) if root else None
    return local or Place(name, config=config, stream=stream)


def hub_folder(folder: Path, name: str, config: str | None = None) -> Place | None:
    """Return a folder in hub layout, with `<split>-0000i-of-0000n.parquet` at any depth, or None if it has none."""
    folder = folder / config if config and kind(folder / config) == "folder" else folder
    splits: dict[str, list[Path]] = {}
    for file in files_below(folder, {".parquet"}) if kind(folder) == "folder" else ():
        if match := re.fullmatch(r"(\w+)-(\d+)-of-(\d+)", file.stem):
            splits.setdefault(match[1], []).append(file)
        else:  # `train.parquet`, or `train/0000.parquet`
            splits.setdefault(file.parent.name if file.stem.isdigit() else file.stem, []).append(file)
    for split, files in splits.items():
        counts = {int(m[1]) for file in files if (m := re.search(r"-of-(\d+)$", file.stem))}
        if counts and len(files) > max(counts):
            raise UndriftError(f"{folder} has several data sets in subfolders; name one of those.")
        if counts and len(files) != max(counts):
            raise UndriftError(
                f"{folder} has {len(files)} of the {max(counts)} files of its {split} split; get the others."
            )
    return Place(name, "parquet", tuple((s, tuple(f)) for s, f in splits.items()), config) if splits else None


def _features(file: Path, format: str) -> dict[str, Any]:
    """Return the columns of a local table, as a dict: `datasets.Features` copies itself at every access."""
    try:
        schema = _csv_table(file).schema if format == "csv" else _parquet_schema(file)
        twice = [name for name in schema.names if len(schema.get_all_field_indices(name)) > 1]
        features = arrow_features(schema)
    except UndriftError:
        raise
    except Exception as error:  # readers raise all kinds of errors for damaged bytes
        raise _unreadable_table_error(file, error) from error
    if twice:
        raise UndriftError(f"{file} has the column {quoted(twice[0])} more than once; rename or remove the others.")
    return features


def arrow_features(schema: Any) -> dict[str, Any]:
    """Return the columns that an Arrow schema declares, with their types."""
    return dict(_datasets().Features.from_arrow_schema(schema))


def _parquet_schema(file: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.OSFile(str(file)) as stream:
        return pq.read_schema(stream)


def _read_parquet(files: Sequence[Path], columns: list[str], features: dict[str, Any]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets.table import table_cast

    schema = _datasets().Features({name: features[name] for name in columns}).arrow_schema
    for file in files:
        try:
            with pa.OSFile(str(file)) as stream, pq.ParquetFile(stream) as opened:
                for batch in opened.iter_batches(BATCH, columns=columns):
                    yield table_cast(pa.Table.from_batches([batch]).select(columns), schema)
        except Exception as error:
            raise _unreadable_table_error(file, error) from error


def _slices(table: Any) -> Iterator[Any]:
    return (table.slice(begin, BATCH) for begin in range(0, len(table), BATCH))


def _even_batches(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield the same rows in batches of `BATCH`, so that no sum over batches depends on how a file was written."""
    import pyarrow as pa

    waiting: list[Any] = []
    for table in tables:
        waiting.append(table)
        while sum(map(len, waiting)) >= BATCH:
            joined = pa.concat_tables(waiting)
            yield joined.slice(0, BATCH)
            waiting = [joined.slice(BATCH)]
    if sum(map(len, waiting)):
        yield pa.concat_tables(waiting)


def _csv_table(file: Path) -> Any:
    status = file.stat()
    return _read_csv(str(file), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _read_csv(file: str, size: int, time: int) -> Any:
    """Return a CSV file as a table, cached by size and modification time, so that a changed file is read again."""
    from pyarrow import csv

    return csv.read_csv(file, convert_options=csv.ConvertOptions(strings_can_be_null=True))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UndriftError(f"Reading data sets needs the package datasets ({error}): pip install datasets.") from error
    return datasets


def _datasets_folders(name: str) -> list[Path]:
    """Return the folders in which `datasets` caches the files of a hub data set."""
    from huggingface_hub.constants import HF_HUB_CACHE

    config = _datasets().config
    downloaded = [Path(config.DOWNLOADED_DATASETS_PATH), Path(config.EXTRACTED_DATASETS_PATH)]
    return [Path(HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}", *downloaded]


def _unreadable_table_error(file: str | Path, error: Exception) -> UndriftError:
    if isinstance(error, PermissionError):
        return unreadable_error(file, PermissionError(error.errno, os.strerror(error.errno or 13)))
    return UndriftError(f"{file} cannot be read ({_root_cause(error)}); get or write that file again.")


def _root_cause(error: BaseException) -> str:
    """Return the first line of the root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200].rstrip('.')}" if text else type(error).__name__


@dataclass(frozen=True)
class InMemory(Place):
    """A place whose splits are Arrow tables."""

    tables: tuple[tuple[str, Any, Any], ...] = ()
    """Each split's name, table and features."""

    def _open(self, split: str) -> tuple[dict[str, Any], Read]:
        table, features = next((table, features) for name, table, features in self.tables if name == split)
        return features, lambda columns: _slices(table.select(columns))


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


def in_memory(data: Any, test: Any) -> InMemory:
    """Return the place of such data, and of a test set of the same kind."""
    splits = {"train": data} | ({"test": test} if test is not None else {})
    if any(type(given) is not type(data) for given in splits.values()):
        raise UndriftError(f"The test set must be a {type(data).__name__}, like the data to train on.")
    if is_frame(data):
        name, tables = FRAMES["train"], [(split, *_read_frame(frame, split)) for split, frame in splits.items()]
    else:
        name = "the data set"
        tables = [(split, each.with_format("arrow")[:], dict(each.features)) for split, each in splits.items()]
    return InMemory(name, "memory", tuple((split, ()) for split in splits), tables=tuple(tables))


def _read_frame(frame: Any, split: str) -> tuple[Any, dict[str, Any]]:
    import pyarrow as pa

    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise UndriftError(f"T{FRAMES[split][1:]} has the column {str(twice[0])!r} more than once; rename one.")
    try:
        table = pa.Table.from_pandas(frame.rename(columns=str), preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UndriftError(f"T{FRAMES[split][1:]} cannot be read ({first_line(error)}).") from error
    for i, entry in enumerate(table.schema):
        if pa.types.is_dictionary(entry.type):  # pandas' categories
            table = table.set_column(i, entry.name, table.column(i).cast(entry.type.value_type))
    return table, arrow_features(table.schema)
