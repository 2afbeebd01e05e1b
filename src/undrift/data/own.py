"""A user's own data: arrays, a torch `Dataset`, a parquet or CSV file, a folder of pictures, any set of the hub."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.data import tables
from undrift.data.cache import Notes, Writer
from undrift.data.dataset import Rows, Task, as_pair
from undrift.data.labels import Labels, encoded
from undrift.data.pictures import PictureFolder, Pictures
from undrift.data.source import Source
from undrift.data.sources import Recipe, opened
from undrift.data.tables import Place
from undrift.errors import UndriftError

log = logging.getLogger("undrift")

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


def in_memory(data: Any, test: Any = None) -> Source:
    """A pair (x, y), or a torch `Dataset` of such pairs, with its own test set where one is given."""
    x, y = _stacked(data, "the training set")
    labels = np.zeros(len(y), np.int64)  # numbers to predict are all alike to a partition
    if not y.is_floating_point() or (y.dim() == 2 and y.shape[1] > 1):
        labels = (y if y.dim() == 1 else y.flatten(1).argmax(1)).numpy()  # of several labels the first
    rows = None
    if test is not None:
        held = dict(zip("xy", _stacked(test, "the test set"), strict=True))
        if not len(held["y"]):
            raise UndriftError("The test set has no rows; leave test out, or give it some.")
        rows = Rows(held, torch.arange(len(held["y"])))
    return Source({"x": x, "y": y}, labels, test=rows)


def on_disk(where: str | Path, label: str, client: str | None, data_dir: str | Path | None) -> Source:
    """A file, a folder, or a data set of the hub by its id: pictures or numbers, with a label and perhaps a client."""
    place = _find(where, data_dir)
    name = "".join(c if c.isalnum() else "-" for c in Path(where).stem)
    return opened(name, _recipe(place, label, client), [place])


def _recipe(place: Place, label: str, client: str | None) -> Recipe:
    test = "test" if "test" in place.splits else None
    if place.kind == "pictures":
        if client is not None:
            raise UndriftError("A folder of pictures has no client column; put them into a parquet file for that.")
        return PictureFolder(place.name, test=test)
    if not isinstance(label, str) or label == client:
        raise UndriftError(f"label must be the name of a column, and another than client's, not {label!r}.")
    features = place.features("train")
    if client is None and "client" in features:
        client = "client"
    for column in (label, *([client] if client else [])):
        if column not in features:
            raise UndriftError(
                f"{place.name} has no column {column!r}; its columns are {', '.join(features)}. "
                "Name the right ones: label=…, client=…."
            )
    pictures = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if pictures:
        return Pictures(place.name, pictures[0], label, client, test)
    return Table(place.name, label, client, test)


@dataclass(frozen=True)
class Table:
    """Columns of numbers, with a class each, or a number to predict where the labels are fractions."""

    hub: str
    label: str
    client: str | None
    test: str | None

    def decode(self, places: list[Place], write: Writer) -> None:
        place = places[0]
        every = place.features("train")
        features = {n: f for n, f in every.items() if n not in (self.label, self.client) and not _is_index(n)}
        if len(features) < len(every) - 1 - bool(self.client):
            log.warning("%s: the column of row numbers that pandas wrote is left out", place.name)
        kinds = {name: getattr(feature, "dtype", type(feature).__name__) for name, feature in features.items()}
        if wrong := [name for name, kind in kinds.items() if not kind.startswith(("int", "uint", "float", "bool"))]:
            kind = {"binary": "text that is not UTF-8", "null": "nothing"}.get(kinds[wrong[0]], kinds[wrong[0]])
            raise UndriftError(
                f"The column {wrong[0]!r} of {place.name} holds {kind}, not numbers; turn it into numbers or leave it "
                "out of the file."
            )
        if not features:
            raise UndriftError(f"{place.name} has no columns beside {self.label!r}, so nothing to learn from.")
        fractions = getattr(place.features("train")[self.label], "dtype", "").startswith("float")
        labels = None if fractions else Labels(place, self.label)
        codes: dict[Any, int] = {}
        whose = f"The column {self.client!r} of {place.name}"
        columns = [*features, self.label, *([self.client] if self.client else [])]
        for split in ("train", *([self.test] if self.test else [])):
            count = 0
            for table in place.rows(split, columns):
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
        names = labels.names if labels else None
        write.notes |= {"classes": names, "fractions": fractions, "clients": list(map(str, codes))}

    @staticmethod
    def _numbers(column: Any, name: str, place: Place, split: str, begin: int) -> np.ndarray:
        try:
            numbers = column.to_numpy().astype(np.float32)
        except ValueError as error:
            raise UndriftError(
                f"The column {name!r} of the {split} split of {place.name} is not all numbers."
            ) from error
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if len(wrong):
            raise UndriftError(
                f"Row {begin + int(wrong[0])} of the {split} split of {place.name} has no finite {name!r}; clean or "
                "drop that row."
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
    path = Path(where).expanduser()
    if path.is_file():
        kind = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix.lower())
        if kind is None:
            raise UndriftError(f"{path} is no parquet or CSV file and no folder; give one of those.")
        return Place(str(path), kind, (("train", (path,)),))
    if path.is_dir():
        return tables.in_folder(path, str(path)) or _pictures(path)
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(where)) and path.suffix.lower() not in (".csv", ".parquet"):
        return tables.hub(str(where), None, data_dir)
    raise UndriftError(f"There is no file or folder {where}.")


def _pictures(root: Path) -> Place:
    below = {folder.name.lower(): folder for folder in sorted(root.iterdir()) if folder.is_dir()}
    splits = [(split, below[split]) for split in ("train", "test") if split in below] or [("train", root)]
    if "train" in below and (others := below.keys() - {"train", "test"}):
        log.warning("%s: %s stands beside train and test and is not read", root, ", ".join(sorted(others)))
    found = [(s, tuple(sorted(f for f in d.glob("[!.]*/**/*") if f.suffix.lower() in ENDINGS))) for s, d in splits]
    if not dict(found).get("train"):
        raise UndriftError(f"{root} has neither parquet files nor pictures in a subfolder a class.")
    return Place(str(root), "pictures", tuple(found))


def _is_index(column: str) -> bool:
    """What pandas calls its row numbers when it writes them."""
    return column in ("", "Unnamed: 0") or column.startswith("__index_level_")


def _stacked(data: Any, whose: str) -> tuple[Tensor, Tensor]:
    if isinstance(data, tuple | list):
        return as_pair(data, whose)
    samples = [data[i] for i in range(len(data))]
    try:
        xs, ys = zip(*samples, strict=True)
        x, y = torch.stack([_tensor(x) for x in xs]), torch.stack([torch.as_tensor(y) for y in ys])
    except (RuntimeError, TypeError, ValueError) as error:
        raise UndriftError(
            f"The samples of {whose} must be pairs (x, y) that stack into two arrays ({error})."
        ) from error
    return as_pair((x, y), whose)


def _tensor(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    pixels = np.array(x)
    if not hasattr(x, "mode"):
        return torch.from_numpy(pixels)
    return torch.from_numpy(pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None])  # PIL: channels last
