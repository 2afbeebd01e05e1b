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
        (
            {**TABLE, "age": [1, None, 3, 4, 5, 6]},
            {"label": "outcome", "client": "site"},
            "Row 1 of the train split .* has no finite 'age'; clean or drop that row",
        ),
        (
            {"a": [1, 2], "label": [0, -1]},
            {},
            "Row 1 of the train split .* has label -1, which must be from 0 to 99,999",
        ),
        ({"a": [1, 2], "label": ["x", None]}, {}, "Row 1 of the train split .* has no label; drop that row"),
        ({"label": [0, 1]}, {}, "has no columns besides 'label', so there is nothing to learn from"),
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
        "is neither a parquet or CSV file": tmp_path / "notes.txt",
        "has neither parquet files nor images": tmp_path / "empty",
        "broken.csv cannot be read": tmp_path / "broken.csv",
        "load needs a name, a path, a pair": {"x": [1], "y": [0]},
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


def test_pandas_row_numbers_are_no_feature(tmp_path):
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "label": [0, 0, 1, 1]})
    frame.to_csv(tmp_path / "t.csv")  # with the index, as pandas does by default
    frame[frame.a > 1].to_parquet(tmp_path / "t.parquet")
    assert ud.load(tmp_path / "t.csv", everything, 1)[0][0].tolist() == [[1], [2], [3], [4]]
    assert ud.load(tmp_path / "t.parquet", everything, 1)[0][0].tolist() == [[2], [3], [4]]


def test_clients_keep_their_number_and_name_whatever_is_held_back(tmp_path):
    rows = [(f"site {i // 2}", i % 2, i) for i in range(60)]
    pd.DataFrame(rows, columns=["client", "label", "a"]).to_csv(tmp_path / "t.csv", index=False)
    for seed in range(2):
        data = ud.load(tmp_path / "t.csv", ud.ByKey(), seed=seed, validation_fraction=0.4, test_fraction=0.2)
        assert len(data) == 30 and data.client_names[10] == "site 10"
        for client in data.nonempty:
            assert set((data[client][0][:, 0] // 2).tolist()) == {float(client)}


def test_the_test_share_does_not_depend_on_how_a_path_is_written(tmp_path, monkeypatch):
    pd.DataFrame({"a": range(40), "label": [0, 1] * 20}).to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.chdir(tmp_path)
    tests = [
        ud.load(p, ud.IID(), 2, test_fraction=0.25).test[0].flatten().tolist()
        for p in ("t.csv", "./t.csv", tmp_path / "t.csv")
    ]
    assert tests[0] == tests[1] == tests[2]


def test_deep_grey_pictures_are_scaled_not_cut_off(tmp_path):
    for name, value in (("a", 1000), ("b", 60000)):
        (tmp_path / "deep" / name).mkdir(parents=True)
        Image.fromarray(np.full((4, 4), value, np.uint16)).save(tmp_path / "deep" / name / "0.png")
    x, _ = ud.load(tmp_path / "deep", everything, 1)[0]
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [1000 // 257, 60000 // 257]


def test_several_labels_a_sample():
    y = np.array([[1, 0, 1], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
    data = ud.load((np.ones((4, 2), np.float32), y), ud.LabelSplit(), 3, test=(np.ones((4, 2), np.float32), y))
    assert data.sizes.tolist() == [2, 1, 1], "dealt out by the first label"
    with pytest.raises(ud.UndriftError, match='choose loss="binary_cross_entropy"'):
        ud.train("logistic", data, rounds=1, local=ud.Local(steps=1, lr=0.1))
    options = {"loss": "binary_cross_entropy", "metrics": "recall_at_5"}
    assert (
        ud.train("logistic", data, rounds=1, local=ud.Local(steps=1, lr=0.1), **options).history[0]["recall_at_5"] == 1
    )


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        (lambda labels, clients, rng, keys: rng.random(len(labels)), "a whole number from 0 to 1"),
        (lambda labels: labels, "must be a function of"),
        (lambda labels, clients, rng, keys: labels + 5, "a whole number from 0 to 1"),
    ],
)
def test_wrong_partitions_of_ones_own_are_one_sentence(partition, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.load((np.ones((6, 2)), np.arange(6) % 2), partition, 2)


def test_the_second_load_of_a_file_reads_the_cache(tmp_path, monkeypatch):
    file = Path(tmp_path / "t.csv")
    pd.DataFrame({"a": [1, 2], "label": [0, 1]}).to_csv(file, index=False)
    first = ud.load(file, ud.IID(), 1)
    kept = list((tmp_path / "cache").iterdir())
    assert torch.equal(ud.load(file, ud.IID(), 1)[0][0], first[0][0]) and list((tmp_path / "cache").iterdir()) == kept
