"""Users' own data: arrays, a torch `Dataset`, a parquet or CSV file, a folder of images, any data set of the hub.

Also what a function returns that was registered with `ud.register_data`: arrays, tables, or data split into clients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from undrift.data import leaf_pfllib, sources, warn_once
from undrift.data.cache import MemoryWriter
from undrift.data.collate import to_tensors, warn_of_text
from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.images import ImageFolder, Images
from undrift.data.labels import not_utf8_error
from undrift.data.lazy import lazy_store
from undrift.data.partition import ByKey
from undrift.data.paths import as_path, files_below, folders_in, kind
from undrift.data.samples import Store, to_store
from undrift.data.source import Source, partition_labels
from undrift.data.tables import Place, hub_folder, hub_place, in_memory, is_frame, is_table
from undrift.data.tabular import MISSING, Table
from undrift.errors import UndriftError, listed, quoted, shortened, whole

MOST_SIDE = 4096
"""The largest height and width that images are resized to."""
ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


@dataclass(frozen=True)
class UserDataOptions:
    """The arguments of `ud.load` that concern a user's own data; see there."""

    label: str = "label"
    client: str | None = None
    columns: Sequence[str] | None = None
    drop: Sequence[str] | None = None
    missing: str | None = None
    resize: Any = None
    data_dir: str | Path | None = None
    lazy: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        for name in ("columns", "drop"):
            names = getattr(self, name)
            if names is not None and (isinstance(names, str) or not all(isinstance(column, str) for column in names)):
                raise UndriftError(f"{name} must be a list of columns' names, not {quoted(names)}.")
        if self.columns is not None and self.drop is not None:
            raise UndriftError("columns names the features, drop the columns that are none; give one of them.")
        if self.missing not in MISSING:
            raise UndriftError(f'missing must be "drop" or "mean", or left out, not {quoted(self.missing)}.')
        if self.workers is not None and (not whole(self.workers) or self.workers < 1):
            raise UndriftError(f"workers must be a whole number from 1, not {quoted(self.workers)}.")
        if not isinstance(self.lazy, bool) or (self.workers is not None and not self.lazy):
            raise UndriftError(
                f"lazy must be True or False, and True where workers are given, not {quoted(self.lazy)}."
            )
        if self.resize is not None and not _sizes(self.resize):
            raise UndriftError(f"resize must be a size such as 32 or (height, width), not {quoted(self.resize)}.")

    @property
    def size(self) -> tuple[int, int] | None:
        """The height and width to resize images to."""
        return None if self.resize is None else tuple(_sizes(self.resize))  # type: ignore[return-value]

    def refuse(self, what: str, *names: str) -> None:
        """Raise if one of these arguments, which do not apply to the data, was given."""
        for name in names:
            if getattr(self, name) is not None:
                raise UndriftError(f"{name} does not suit {what}; leave it out.")

    def refuse_lazy(self, what: str | Path) -> None:
        if self.lazy:
            raise UndriftError(
                f"lazy=True is for folders of images, torch Datasets and arrays; {what} is decoded once and then read "
                "from its file in the cache anyway. Leave lazy out."
            )


def _sizes(resize: Any) -> list[int]:
    """Height and width; nothing if they are not whole numbers from 1."""
    both = [resize, resize] if whole(resize) else list(resize) if isinstance(resize, list | tuple) else []
    return [int(n) for n in both] if len(both) == 2 and all(whole(n) and 1 <= n <= MOST_SIDE for n in both) else []


def source_from_values(data: Any, test: Any, options: UserDataOptions) -> Source:
    """Return the source of a pair (x, y), a `Dataset` of such samples or a table in memory, perhaps with a test set."""
    if is_frame(data) or (is_table(data) and not options.lazy):
        return _source_from_table(data, test, options)
    options.refuse("arrays and torch Datasets", "client", "columns", "drop", "missing", "resize")

    def store(given: Any, whose: str) -> Store:
        if options.lazy:
            return lazy_store(given, whose, options.label, options.workers)
        return to_store(*to_tensors(given, whose, options.label))

    train = store(data, "the training set")
    held = store(test, "the test set") if test is not None else None
    if held is not None and not len(held["y"]):
        raise UndriftError("The test set is empty; leave test out, or give it some samples.")
    return Source(train, partition_labels(train["y"]), test=Rows.whole(held) if held is not None else None)


def _source_from_table(data: Any, test: Any, options: UserDataOptions) -> Source:
    """Return a table in memory, which stays there: nothing is written to the cache."""
    options.refuse_lazy("a data frame, which is in memory,")
    place, write = in_memory(data, test), MemoryWriter()
    if not is_frame(data) and options.columns is None and options.drop is None:
        kept = (options.label, options.client, "client")
        texts = [n for n, f in place.features("train").items() if "string" in str(f.dtype) and n not in kept]
        if texts:
            warn_of_text(texts)
        options = replace(options, drop=texts)
    recipe = _choose_recipe(place, options)
    recipe.decode([place], write)
    return sources.open_with_warnings(recipe, write.arrays(), write.notes)


def source_from_path(where: str | Path, options: UserDataOptions) -> Source:
    """Return the source of a file, a folder, or a data set on the hub: images or numbers, labels, perhaps clients."""
    path = as_path(where)
    if leaf_pfllib.is_split_by_client(path):
        options.refuse("data in one file per client or split", "client", "columns", "drop", "missing", "resize")
        options.refuse_lazy(where)
        return leaf_pfllib.load_source(path)
    place = _find_place(where, options.data_dir)
    recipe = _choose_recipe(place, options)
    if options.lazy and isinstance(recipe, ImageFolder):
        return recipe.lazy_source(place, options.workers)
    options.refuse_lazy(place.name)
    name = "".join(c if c.isalnum() else "-" for c in Path(where).stem)[:40]
    return sources.open_recipe(name, recipe, [place])


def _choose_recipe(place: Place, options: UserDataOptions) -> sources.Recipe:
    label, client = options.label, options.client
    test = "test" if "test" in place.splits else None
    if place.kind == "images":
        if client is not None:
            raise UndriftError("A folder of images has no client column; put the images into a parquet file for that.")
        options.refuse("a folder of images", "columns", "drop", "missing")
        return ImageFolder(place.name, test=test, resize=options.size)
    if not isinstance(label, str) or label == client:
        raise UndriftError(f"label must be the name of a column other than the client column, not {quoted(label)}.")
    features = place.features("train")
    if client is None and "client" in features:
        client = "client"
    for column in (label, *([client] if client else [])):
        if column not in features:
            raise UndriftError(
                f"{place.name} has no column {quoted(column)}; its columns are {listed(features)}. "
                "Name the right ones: label=…, client=…."
            )
    if client and not isinstance(getattr(features[client], "dtype", None), str):
        raise UndriftError(f"The column {quoted(client)} of {place.name} holds several values per row, not a client.")
    if client and features[client].dtype in ("binary", "large_binary"):
        raise not_utf8_error(place, client)
    images = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if images:
        options.refuse("a table of images", "columns", "drop", "missing")
        return Images(place.name, images[0], label, client, test, resize=options.size)
    options.refuse("a table of numbers", "resize")
    columns, drop = (None if names is None else tuple(names) for names in (options.columns, options.drop))
    return Table(place.name, label, client, test, columns, drop, options.missing)


def _find_place(where: str | Path, data_dir: str | Path | None) -> Place:
    path = as_path(where)
    if kind(path) == "file":
        format = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix.lower())
        if format is None:
            raise UndriftError(f"{path} is neither a parquet or CSV file nor a folder; give one of those.")
        return Place(str(path), format, (("train", (path,)),))
    if kind(path) == "folder":
        return hub_folder(path, str(path)) or _image_place(path)
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(where)) and path.suffix.lower() not in (".csv", ".parquet"):
        return hub_place(str(where), None, data_dir)
    raise UndriftError(f"There is no file or folder {shortened(str(where))}.")


def _image_place(root: Path) -> Place:
    below = {folder.name.lower(): folder for folder in folders_in(root)}
    splits = [(split, below[split]) for split in ("train", "test") if split in below] or [("train", root)]
    if "train" in below and (others := below.keys() - {"train", "test"}):
        warn_once.warn(f"{root}: only train and test are read, not {listed(sorted(others))}")
    images = [(split, tuple(_class_images(folder))) for split, folder in splits]
    if not dict(images).get("train"):
        raise UndriftError(f"{root} has neither parquet files nor images in one subfolder per class.")
    return Place(str(root), "images", tuple(images))


def _class_images(folder: Path) -> list[Path]:
    """Return the images in the subfolders, each of which is a class; hidden ones are skipped."""
    classes = [each for each in folders_in(folder) if not each.name.startswith(".")]
    return sorted(file for each in classes for file in files_below(each, ENDINGS))


DEFAULTS = (None, False, 0, "label")
"""The values of arguments of `ud.load` that were not given."""
HARMLESS = ("name", "partition", "seed", "augment", "data_dir")
"""Arguments of `ud.load` that do not change a `FederatedDataset`, or have no influence on one."""


@contextmanager
def call_once(name: str) -> Iterator[bool]:
    """Say whether the function of this name, if any, returns data that are split into clients.

    Loading the data inside the context does not call it again.
    """
    function = sources.FUNCTIONS.get(name)
    if function is None:
        yield False
        return
    data = function()
    sources.FUNCTIONS[name] = lambda: data
    try:
        yield isinstance(data, FederatedDataset)
    finally:
        sources.FUNCTIONS[name] = function


def check_unchanged(arguments: dict[str, Any], partition: Any) -> None:
    """Raise if an argument of `ud.load` would change a `FederatedDataset` that a function returned."""
    name = arguments["name"]
    if partition not in (None, ByKey()):
        raise UndriftError(
            f"The function of {name} returns a FederatedDataset, which has its own clients: the partition must be "
            f"ByKey() or left out, not {partition!r}."
        )
    for argument, value in arguments.items():
        if argument not in HARMLESS and not any(value is default or value == default for default in DEFAULTS):
            raise UndriftError(
                f"{argument} does not suit {name}, as its function returns a FederatedDataset, which is used as it is; "
                "leave it out."
            )


def source_from_function(name: str, data: Any, options: UserDataOptions) -> Source:
    """Return the source of what a function returned: a table, or a pair (train, test) of tables or arrays."""
    if isinstance(data, Source):
        if options.client is not None:
            raise UndriftError(f"client names a column of your own table, and {name} has none; leave it out.")
        options.refuse(name, "columns", "drop", "missing", "resize")
        options.refuse_lazy(name)
        return data
    if _is_tabular(data):
        return source_from_values(data, None, options)
    if not isinstance(data, tuple | list) or len(data) != 2 or (hasattr(data[0], "shape") and not _is_tabular(data[0])):
        pair = isinstance(data, tuple | list) and len(data) == 2
        raise UndriftError(
            f"The function of {name} must return a DataFrame, a FederatedDataset, or a pair (train, test), where train "
            "is a pair (x, y), a Dataset or a DataFrame, and test the same or None, not "
            f"{'two arrays; write ((x, y), None)' if pair else type(data).__name__}."
        )
    train, test = data
    if not _is_tabular(train):
        for argument in ("client", "columns", "drop", "missing"):
            if getattr(options, argument) is not None:
                raise UndriftError(
                    f"{argument} is for tables, but the function of {name} returns arrays or a torch Dataset; leave it "
                    "out, or return a DataFrame with a column of clients, or a FederatedDataset."
                )
    return source_from_values(train, test, options)


def _is_tabular(data: Any) -> bool:
    return is_frame(data) or is_table(data)
