"""Users' own data: arrays, a torch `Dataset`, a parquet or CSV file, a folder of images, any data set of the hub."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data import lazy_images, lazy_sets, tables
from undrift.data.cache import Notes, Writer
from undrift.data.dataset import Rows, Task
from undrift.data.images import ImageFolder, Images
from undrift.data.labels import MOST, Labels, encoded, not_utf8
from undrift.data.paths import as_path, files_below, folders_in, kind
from undrift.data.samples import stored
from undrift.data.source import Source
from undrift.data.sources import Recipe, opened
from undrift.data.stacking import partition_labels, stacked
from undrift.data.tables import Place
from undrift.errors import UndriftError, listed, quoted, shortened

log = logging.getLogger("undrift")

NOT_LAZY = (
    "lazy=True is for folders of images, torch Datasets and arrays; {} is decoded once and then read from its file "
    "in the cache anyway. Leave lazy out."
)
ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


def given(data: Any, test: Any = None, label: str = "label", lazy: bool = False, workers: int | None = None) -> Source:
    """A pair (x, y), or a `Dataset` of such samples, with its own test set where one is given."""
    if lazy:
        return lazy_sets.source(data, test, label, workers)
    x, y = stacked(data, "the training set", label)
    held_out = None
    if test is not None:
        test_x, test_y = stacked(test, "the test set", label)
        if not len(test_y):
            raise UndriftError("The test set is empty; leave test out, or give it some samples.")
        held_out = Rows({**stored(test_x), "y": test_y}, torch.arange(len(test_y)))
    return Source({**stored(x), "y": y}, partition_labels(y), test=held_out)


def on_disk(
    where: str | Path,
    label: str,
    client: str | None,
    data_dir: str | Path | None,
    lazy: bool = False,
    workers: int | None = None,
) -> Source:
    """A file, a folder, or a data set of the hub by its id: images or numbers, labels and optional client ids."""
    place = _find(where, data_dir)
    name = "".join(c if c.isalnum() else "-" for c in Path(where).stem)[:40]
    recipe = _recipe(place, label, client)
    if lazy and isinstance(recipe, ImageFolder):
        return lazy_images.folder(place, recipe, workers)
    if lazy:
        raise UndriftError(NOT_LAZY.format(place.name))
    return opened(name, recipe, [place])


def _recipe(place: Place, label: str, client: str | None) -> Recipe:
    test = "test" if "test" in place.splits else None
    if place.kind == "images":
        if client is not None:
            raise UndriftError("A folder of images has no client column; put the images into a parquet file for that.")
        return ImageFolder(place.name, test=test)
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
        return Images(place.name, images[0], label, client, test)
    return Table(place.name, label, client, test)


@dataclass(frozen=True)
class Table:
    """Columns of numbers with one class per row, or with a number to predict if the labels are fractions."""

    hub: str
    label: str
    client: str | None
    test: str | None

    def decode(self, places: list[Place], write: Writer) -> None:
        place = places[0]
        every = place.features("train")
        features = {n: f for n, f in every.items() if n not in (self.label, self.client) and not _is_index(n)}
        if len(features) < len(every) - 1 - bool(self.client):
            log.warning("%s: the index column that pandas wrote is left out", place.name)
        kinds = {name: getattr(feature, "dtype", type(feature).__name__) for name, feature in features.items()}
        if wrong := [name for name, kind in kinds.items() if not kind.startswith(("int", "uint", "float", "bool"))]:
            if kinds[wrong[0]] == "null" and not any(map(len, place.batches("train", [wrong[0]]))):
                raise UndriftError(f"{place.name} has no rows to train on.")
            found = {"binary": "text that is not UTF-8", "null": "nothing"}.get(kinds[wrong[0]], kinds[wrong[0]])
            raise UndriftError(
                f"The column {quoted(wrong[0])} of {place.name} holds {found}, not numbers; turn it into numbers or "
                "leave it out of the file."
            )
        if not features:
            raise UndriftError(
                f"{place.name} has no columns besides {quoted(self.label)}, so there is nothing to learn from."
            )
        splits = ("train", *([self.test] if self.test else []))
        fractions, assumed = False, None
        if floats := getattr(every[self.label], "dtype", "").startswith("float"):
            fractions, assumed = self._assumed(place, splits)
        labels = None if fractions else Labels(place, self.label, whole=floats)
        codes: dict[Any, int] = {}
        whose = f"The column {quoted(self.client)} of {place.name}"
        columns = [*features, self.label, *([self.client] if self.client else [])]
        for split in splits:
            count = 0
            for table in place.batches(split, columns):
                x = np.stack([self._numbers(table[name], name, place, split, count) for name in features], 1)
                y = table[self.label]
                write.append(f"{split}_x", x)
                write.append(
                    f"{split}_y",
                    labels.read(y, split, count) if labels else self._numbers(y, self.label, place, split, count),
                )
                if self.client and split == "train":
                    write.append("train_key", encoded(table[self.client].to_pylist(), codes, whose))
                count += len(x)
            if not count:
                raise UndriftError(f"The {split} split of {place.name} has no rows.")
        if labels:
            labels.check()
        names = labels.names if labels else None
        write.notes |= {"classes": names, "fractions": fractions, "clients": list(map(str, codes)), "assumed": assumed}

    def _assumed(self, place: Place, splits: tuple[str, ...]) -> tuple[bool, str | None]:
        """Whether float labels are numbers to predict, and a warning if they are all whole, so that we must guess."""
        seen: set[float] = set()
        for table in (table for split in splits for table in place.batches(split, [self.label])):
            y = table[self.label].to_numpy()
            if y.dtype.kind not in "fiu" or not (y == np.floor(y)).all() or len(seen) > MOST:
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

    @staticmethod
    def _numbers(column: Any, name: str, place: Place, split: str, begin: int) -> np.ndarray:
        try:
            with np.errstate(over="ignore"):  # values that are too large become infinite and are reported below
                numbers = column.to_numpy().astype(np.float32)
        except (ValueError, TypeError) as error:
            raise UndriftError(
                f"The column {quoted(name)} of the {split} split of {place.name} is not all numbers."
            ) from error
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if len(wrong):
            row, given = int(wrong[0]), column[int(wrong[0])].as_py()
            large = f" (it is {given!r}, too large for 32 bits)" if given is not None and abs(given) < np.inf else ""
            raise UndriftError(
                f"Row {begin + row} of the {split} split of {place.name} has no finite {quoted(name)}{large}; clean "
                "or drop that row."
            )
        return numbers

    def open(self, arrays: dict[str, Tensor], notes: Notes) -> Source:
        train = {"x": arrays["train_x"], "y": arrays["train_y"]}
        test = None
        if "test_x" in arrays:
            test = Rows({"x": arrays["test_x"], "y": arrays["test_y"]}, torch.arange(len(arrays["test_y"])))
        return Source(
            train,
            np.zeros(len(train["y"]), np.int64) if notes["fractions"] else train["y"].numpy(),
            test=test,
            keys=arrays["train_key"].numpy() if "train_key" in arrays else None,
            task=Task("mse") if notes["fractions"] else Task(),
            names=notes["classes"],
            clients=notes["clients"] or None,
        )


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
        log.warning("%s: only train and test are read, not %s", root, listed(sorted(others)))
    found = [(split, tuple(_in_classes(folder))) for split, folder in splits]
    if not dict(found).get("train"):
        raise UndriftError(f"{root} has neither parquet files nor images in one subfolder per class.")
    return Place(str(root), "images", tuple(found))


def _in_classes(folder: Path) -> list[Path]:
    """The images in the subfolders, each of which is a class; hidden ones are skipped."""
    classes = [each for each in folders_in(folder) if not each.name.startswith(".")]
    return sorted(file for each in classes for file in files_below(each, ENDINGS))


def _is_index(column: str) -> bool:
    """Whether pandas gives this name to an index that it writes."""
    return column in ("", "Unnamed: 0") or column.startswith("__index_level_")
