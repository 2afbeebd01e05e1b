"""Users' own data: arrays, a torch `Dataset`, a parquet or CSV file, a folder of images, any data set of the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from undrift.data import held, lazy_images, lazy_sets, notices, shards, tables
from undrift.data.dataset import Rows
from undrift.data.images import ImageFolder, Images
from undrift.data.labels import not_utf8
from undrift.data.paths import as_path, files_below, folders_in, kind
from undrift.data.samples import stored
from undrift.data.source import Source
from undrift.data.sources import Recipe, opened, said
from undrift.data.stacking import partition_labels, stacked
from undrift.data.table import MISSING, Table
from undrift.data.tables import Place
from undrift.errors import UndriftError, listed, quoted, shortened, whole

NOT_LAZY = (
    "lazy=True is for folders of images, torch Datasets and arrays; {} is decoded once and then read from its file "
    "in the cache anyway. Leave lazy out."
)
MOST_SIDE = 4096
"""The largest height and width that images are resized to."""
ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


@dataclass(frozen=True)
class Wanted:
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
            asked = getattr(self, name)
            if asked is not None and (isinstance(asked, str) or not all(isinstance(column, str) for column in asked)):
                raise UndriftError(f"{name} must be a list of columns' names, not {quoted(asked)}.")
        if self.columns is not None and self.drop is not None:
            raise UndriftError("columns names the features, drop all that are none; give one of them.")
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


def _sizes(resize: Any) -> list[int]:
    """Height and width; nothing if they are not whole numbers from 1."""
    both = [resize, resize] if whole(resize) else list(resize) if isinstance(resize, list | tuple) else []
    return [int(n) for n in both] if len(both) == 2 and all(whole(n) and 1 <= n <= MOST_SIDE for n in both) else []


def given(data: Any, test: Any = None, wanted: Wanted = Wanted()) -> Source:  # noqa: B008 - it is frozen
    """Return the source of a pair (x, y), a `Dataset` of such samples or a table in memory, perhaps with a test set."""
    if held.is_frame(data) or (held.is_table(data) and not wanted.lazy):
        return _in_memory(data, test, wanted)
    wanted.refuse("arrays and torch Datasets", "client", "columns", "drop", "missing", "resize")
    label = wanted.label
    if wanted.lazy:
        return lazy_sets.source(data, test, label, wanted.workers)
    x, y = stacked(data, "the training set", label)
    held_out = None
    if test is not None:
        test_x, test_y = stacked(test, "the test set", label)
        if not len(test_y):
            raise UndriftError("The test set is empty; leave test out, or give it some samples.")
        held_out = Rows({**stored(test_x), "y": test_y}, torch.arange(len(test_y)))
    return Source({**stored(x), "y": y}, partition_labels(y), test=held_out)


def _in_memory(data: Any, test: Any, wanted: Wanted) -> Source:
    """Return a table in memory, which stays there: nothing is written to the cache."""
    if wanted.lazy:
        raise UndriftError(NOT_LAZY.format("a data frame, which is in memory,"))
    place, write = held.place_of(data, test), held.Memory()
    if not held.is_frame(data) and wanted.columns is None and wanted.drop is None:
        kept = (wanted.label, wanted.client, "client")
        texts = [n for n, f in place.features("train").items() if "string" in str(f.dtype) and n not in kept]
        if texts:
            notices.warn(f"the text in {listed(texts)} is left out: only numbers can be trained on")
        wanted = replace(wanted, drop=texts)
    recipe = _recipe(place, wanted)
    recipe.decode([place], write)  # type: ignore[arg-type]
    return said(recipe, write.arrays(), write.notes)


def on_disk(where: str | Path, wanted: Wanted) -> Source:
    """Return the source of a file, a folder, or a data set on the hub: images or numbers, labels, perhaps clients."""
    path = as_path(where)
    if shards.known(path):
        wanted.refuse("data in one file per client or split", "client", "columns", "drop", "missing", "resize")
        if wanted.lazy:
            raise UndriftError(NOT_LAZY.format(where))
        return shards.source(path)
    place = _find(where, wanted.data_dir)
    name = "".join(c if c.isalnum() else "-" for c in Path(where).stem)[:40]
    recipe = _recipe(place, wanted)
    if wanted.lazy and isinstance(recipe, ImageFolder):
        return lazy_images.folder(place, recipe, wanted.workers)
    if wanted.lazy:
        raise UndriftError(NOT_LAZY.format(place.name))
    return opened(name, recipe, [place])


def _recipe(place: Place, wanted: Wanted) -> Recipe:
    label, client = wanted.label, wanted.client
    test = "test" if "test" in place.splits else None
    if place.kind == "images":
        if client is not None:
            raise UndriftError("A folder of images has no client column; put the images into a parquet file for that.")
        wanted.refuse("a folder of images", "columns", "drop", "missing")
        return ImageFolder(place.name, test=test, resize=wanted.size)
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
        raise not_utf8(place, client)
    images = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if images:
        wanted.refuse("a table of images", "columns", "drop", "missing")
        return Images(place.name, images[0], label, client, test, resize=wanted.size)
    wanted.refuse("a table of numbers", "resize")
    columns, drop = (None if asked is None else tuple(asked) for asked in (wanted.columns, wanted.drop))
    return Table(place.name, label, client, test, columns, drop, wanted.missing)


def _find(where: str | Path, data_dir: str | Path | None) -> Place:
    path = as_path(where)
    found = kind(path)
    if found == "file":
        format = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix.lower())
        if format is None:
            raise UndriftError(f"{path} is neither a parquet or CSV file nor a folder; give one of those.")
        return Place(str(path), format, (("train", (path,)),))
    if found == "folder":
        return tables.in_folder(path, str(path)) or _images(path)
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(where)) and path.suffix.lower() not in (".csv", ".parquet"):
        return tables.hub(str(where), None, data_dir)
    raise UndriftError(f"There is no file or folder {shortened(str(where))}.")


def _images(root: Path) -> Place:
    below = {folder.name.lower(): folder for folder in folders_in(root)}
    splits = [(split, below[split]) for split in ("train", "test") if split in below] or [("train", root)]
    if "train" in below and (others := below.keys() - {"train", "test"}):
        notices.warn(f"{root}: only train and test are read, not {listed(sorted(others))}")
    found = [(split, tuple(_in_classes(folder))) for split, folder in splits]
    if not dict(found).get("train"):
        raise UndriftError(f"{root} has neither parquet files nor images in one subfolder per class.")
    return Place(str(root), "images", tuple(found))


def _in_classes(folder: Path) -> list[Path]:
    """Return the images in the subfolders, each of which is a class; hidden ones are skipped."""
    classes = [each for each in folders_in(folder) if not each.name.startswith(".")]
    return sorted(file for each in classes for file in files_below(each, ENDINGS))
