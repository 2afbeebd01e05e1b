"""A user's own data: arrays, a torch Dataset, a table, a folder of pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import undrift as ud
from tests import hub


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("UNDRIFT_DATA", raising=False)


def everything(labels: np.ndarray, *_: object) -> np.ndarray:
    return np.zeros(len(labels), int)


TABLE = {
    "age": [30, 41, 52, 28, 66, 70],
    "pressure": [1.5, 1.25, 0.5, 2.0, 1.0, 1.75],
    "outcome": ["well", "ill", "well", "well", "ill", "ill"],
    "site": ["north", "south", "north", "south", "north", "west"],
}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_with_labels_and_clients(tmp_path, ending):
    file = tmp_path / f"hospital.{ending}"
    getattr(pd.DataFrame(TABLE), f"to_{ending}")(file, index=False)
    data = ud.load(file, ud.ByKey(), label="outcome", client="site")
    assert len(data) == 3 and data.names == ["ill", "well"] and data.test is None
    x, y = data[0]  # clients come in the order in which the file names them
    assert x.tolist() == [[30, 1.5], [52, 0.5], [66, 1.0]] and y.tolist() == [1, 1, 0]
    held = ud.load(str(file), ud.IID(), 1, label="outcome", client="site", test_fraction=1 / 3)
    assert (held.sizes.sum(), len(held.test_rows)) == (4, 2)
    result = ud.train("mlp", data, rounds=2, local=ud.Local(steps=2, batch_size=2, lr=0.1))
    assert len(result.history) == 2


def test_a_column_called_client_needs_no_naming(tmp_path):
    frame = pd.DataFrame(TABLE).rename(columns={"site": "client", "outcome": "label"})
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert len(ud.load(tmp_path / "t.csv", ud.ByKey())) == 3


def test_fractions_as_labels_are_numbers_to_predict(tmp_path):
    pd.DataFrame({"a": [1.0, 2, 3, 4], "label": [0.5, 1.5, 2.5, 3.5]}).to_csv(tmp_path / "line.csv", index=False)
    data = ud.load(tmp_path / "line.csv", ud.IID(), 2, test_fraction=0.5)
    assert data.outputs == 1 and data.labels is None
    row = ud.train("logistic", data, rounds=1, local=ud.Local(steps=1, lr=0.1)).history[-1]
    assert "loss" in row and "accuracy" not in row


@pytest.mark.parametrize("splits", [False, True])
def test_a_folder_of_pictures(tmp_path, splits):
    for split, n in {"train": 4, "test": 2}.items():
        for name in ("cat", "dog"):
            folder = tmp_path / "pets" / (split if splits else ".") / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(n if splits else 3):
                Image.fromarray(hub.pixels(name, i, (8, 9, 3))).save(folder / f"{i}.png")
    data = ud.load(tmp_path / "pets", everything, 1)
    x, y = data[0]
    assert data.names == ["cat", "dog"] and y.tolist() == ([0] * 4 + [1] * 4 if splits else [0] * 3 + [1] * 3)
    assert np.array_equal(
        (x[-1] * 255).round().byte().numpy(), hub.pixels("dog", len(y) // 2 - 1, (8, 9, 3)).transpose(2, 0, 1)
    )
    assert (data.test is not None) == splits
    assert splits is False or data.test[1].tolist() == [0, 0, 1, 1]


def test_a_folder_in_hub_layout_by_its_path(tmp_path):
    hub.pictures(tmp_path, "somebody/pictures", {"train": 6, "test": 3}, (8, 8, 3), 2, client="owner")
    for where in (tmp_path / "somebody/pictures", "somebody/pictures"):
        data = ud.load(where, ud.ByKey(), client="owner", data_dir=tmp_path)
        assert data.sizes.tolist() == [2, 2, 2] and len(data.test_rows) == 3 and data.names == ["class 0", "class 1"]


class Squares(torch.utils.data.Dataset):
    def __init__(self, count: int, picture: bool) -> None:
        self.count, self.picture = count, picture

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[object, int]:
        pixels = np.full((4, 5, 3), i, np.uint8)
        return (Image.fromarray(pixels) if self.picture else torch.full((2,), float(i))), i % 3


@pytest.mark.parametrize("picture", [False, True])
def test_a_torch_dataset(picture):
    data = ud.load(Squares(9, picture), everything, 1, test=Squares(4, picture))
    x, y = data[0]
    assert y.tolist() == [0, 1, 2] * 3 and x.shape == ((9, 3, 4, 5) if picture else (9, 2))
    assert len(data.test_rows) == 4 and data.classes == 3
    assert torch.allclose(x[4], torch.full_like(x[4], 4 / 255 if picture else 4.0))


def test_arrays():
    x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1] * 3)
    data = ud.load((x, y), ud.LabelSplit(), 2, test=(x, y))
    assert data[0][0].tolist() == [[0, 1], [4, 5], [8, 9]] and len(data.test_rows) == 6


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        (
            TABLE,
            {},
            "has no column 'label'; its columns are age, pressure, outcome, site. Name the right ones: label=…",
        ),
        (TABLE, {"label": "outcome", "client": "ward"}, "has no column 'ward'"),
        (TABLE, {"label": "outcome"}, "The column 'site' of .* holds string, not numbers; turn it into numbers"),
        ({**TABLE, "age": [1, None, 3, 4, 5, 6]}, {"label": "outcome", "client": "site"}, "has NaN in its x"),
        ({"a": [1, 2], "label": [0, -1]}, {}, "Row 1 of the train split .* has label -1, which must be 0 or more"),
        ({"a": [1, 2], "label": ["x", None]}, {}, "Row 1 of the train split .* has no label; drop that row"),
        ({"label": [0, 1]}, {}, "has no columns beside 'label', so nothing to learn from"),
    ],
)
def test_wrong_tables_are_one_sentence(tmp_path, columns, options, sentence):
    pd.DataFrame(columns).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.load(tmp_path / "t.csv", ud.IID(), 2, **options)


def test_other_wrong_data_are_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken.csv").write_text("a,label\n1,2,3\n")
    wrong = {
        "There is no file or folder": tmp_path / "missing.csv",
        "is no parquet or CSV file": tmp_path / "notes.txt",
        "has neither parquet files nor pictures": tmp_path / "empty",
        "broken.csv cannot be read": tmp_path / "broken.csv",
        "must be pairs": Unpaired(),
        "must be a pair": ([1, 2, 3],),
    }
    for sentence, data in wrong.items():
        with pytest.raises(ud.UndriftError, match=sentence):
            ud.load(data, ud.IID(), 2)


class Unpaired(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> int:
        return i


def test_the_second_load_of_a_file_reads_the_cache(tmp_path, monkeypatch):
    file = Path(tmp_path / "t.csv")
    pd.DataFrame({"a": [1, 2], "label": [0, 1]}).to_csv(file, index=False)
    first = ud.load(file, ud.IID(), 1)
    kept = list((tmp_path / "cache").iterdir())
    assert torch.equal(ud.load(file, ud.IID(), 1)[0][0], first[0][0]) and list((tmp_path / "cache").iterdir()) == kept
