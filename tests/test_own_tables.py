"""Users' own data, by client and in tables: names, own test sets, columns, missing values, sizes, LEAF and PFLlib."""

from __future__ import annotations

import io
import json
import os
import pickle
import tracemalloc
import zipfile

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import undrift as ud
from tests.experiments import deadline
from undrift.data.images import resize_image
from undrift.data.partition_summary import partition_summary
from undrift.data.safe_pickle import load_arrays
from undrift.tools.cli import app
from undrift.tools.config import checked
from undrift.tools.experiment import arguments

RNG = np.random.default_rng(0)
LOCAL = ud.Local(steps=2, batch_size=4, lr=0.1)
refused = ud.UndriftError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))


def pair(n, features=4):
    return RNG.normal(size=(n, features)).astype("float32"), RNG.integers(0, 3, n)


# ---- clients that are split already -----------------------------------------------------------------------------


def test_clients_by_name_with_test_sets_of_their_own(tmp_path):
    train = {"north": pair(9), "south": pair(12), "east": pair(6)}
    tests = {"south": pair(5), "north": pair(7)}
    data = ud.FederatedDataset.from_clients(train, test=tests)
    assert data.client_names == ["north", "south", "east"] and data.sizes.tolist() == [9, 12, 6]
    assert data.client_test.sizes.tolist() == [7, 5, 0]
    assert np.array_equal(data.client_test[0][0], tests["north"][0]) and len(data.test[1]) == 12
    result = ud.train("logistic", data, rounds=1, local=LOCAL, out=tmp_path / "run")
    row = result.history[0]
    assert row["by_client"]["name"] == ["north", "south"] and row["by_client"]["client"] == [0, 1]
    model = ud.models.get("logistic", classes=3, shape=(4,))
    right = {}
    for name, (x, y) in tests.items():
        z = torch.func.functional_call(model, result.params, (torch.tensor(x),))
        right[name] = (z.argmax(1).numpy() == y).mean()
    assert row["by_client"]["accuracy"] == pytest.approx([right["north"], right["south"]])
    assert row["accuracy"] == pytest.approx((7 * right["north"] + 5 * right["south"]) / 12)  # of all tests together
    assert json.loads((tmp_path / "run/partition.json").read_text())["names"] == ["north", "south", "east"]
    listed = ud.FederatedDataset.from_clients(list(train.values()), test=[tests["north"], tests["south"], None])
    assert (
        listed.digests == data.digests and listed.client_names is None and partition_summary(data)["names"][2] == "east"
    )


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ({"west": pair(3)}, "test has data of west, which no client is called"),
        ([pair(3)], "test has 1 pairs for 2 clients"),
        ([pair(3), pair(3, 5)], "Client south's test samples are .5,. .* make them alike"),
        ([pair(3, 5), None], "Client north's test samples are .5,. .* unlike those to train on"),
        ({"south": (np.full((2, 4), np.nan, "float32"), np.zeros(2, int))}, "Client south, sample 0 has NaN in its x"),
    ],
)
def test_wrong_test_sets(test, said):
    train = {"north": pair(9), "south": pair(12)}
    with pytest.raises(refused, match=said):
        ud.FederatedDataset.from_clients(train, test=test)
    with pytest.raises(refused, match="both as dicts"):
        ud.FederatedDataset.from_clients(list(train.values()), test={"north": pair(2)})
    with pytest.raises(refused, match="the same name"):
        ud.FederatedDataset.from_clients({1: pair(2), "1": pair(2)})


def test_one_test_pair_is_still_one(caplog):
    x, y = pair(2)
    for test in ((x, y), [x, y], ([[1.0] * 4] * 2, [0, 1]), (torch.tensor(x), list(torch.tensor(y)))):
        data = ud.FederatedDataset.from_clients([pair(5), pair(5)], test=test)
        assert data.client_test is None and len(data.test[1]) == 2
    plain = ud.FederatedDataset.from_clients([pair(5)], task=ud.Task(classes=3))
    ud.train("logistic", plain, rounds=1, local=LOCAL)
    assert "no test set, so the history will have no loss" in caplog.text


# ---- tables -----------------------------------------------------------------------------------------------------


def frame(rows=40):
    made = pd.DataFrame(RNG.normal(size=(rows, 3)), columns=list("abc"))
    return made.assign(name="bob", label=np.arange(rows) % 2, site=np.where(np.arange(rows) % 4 < 3, "x", "y"))


def test_a_frame_a_file_and_a_dataset_are_the_same_data():
    table = frame()
    table.to_csv("t.csv", index=False)
    options = {"client": "site", "drop": ["name"], "test_fraction": 0.2}
    wanted = ud.load("t.csv", ud.ByKey(), **options)
    assert wanted.client_names == ["x", "y"] and wanted[0][0].shape[1] == 3
    in_memory = datasets.Dataset.from_pandas(table, preserve_index=False)
    for given in (table, in_memory, table.assign(site=table["site"].astype("category"))):
        assert ud.load(given, ud.ByKey(), **options).digests == wanted.digests
    assert len(os.listdir("cache")) == 1  # what is in memory stays there
    both = ud.load(table, ud.IID(), 2, columns=["c", "a"], test=frame(10))
    assert len(both.test[1]) == 10 and both[0][0].shape[1] == 2
    with pytest.raises(refused, match="must be a DataFrame, like the data"):
        ud.load(table, ud.IID(), 2, columns=["a"], test=(np.zeros((2, 1)), np.zeros(2)))


def test_columns_have_an_order_and_words_are_refused_with_a_way_out(caplog):
    table = frame()
    x = ud.load(table, ud.IID(), 1, columns=["c", "a"])[0][0]
    order = ud.load(table, ud.IID(), 1, columns=["a", "c"])[0][0]
    assert torch.equal(x, order[:, [1, 0]])
    for options, said in (
        ({}, r"column 'name' of the data frame holds .*string.*drop=\['name', 'site'\]"),
        ({"drop": ["nme"]}, "'nme' is none of its columns"),
        ({"columns": ["label"]}, "'label' is the label or the client"),
        ({"columns": ["a"], "drop": ["b"]}, "give one of them"),
        ({"drop": "name"}, "drop must be a list of columns' names"),
        ({"columns": ["a"], "missing": "median"}, 'missing must be "drop" or "mean"'),
        ({"columns": ["a"], "resize": 8}, "resize does not suit a table of numbers"),
    ):
        with pytest.raises(refused, match=said):
            ud.load(table, ud.IID(), 2, **options)
    with pytest.raises(refused, match="columns does not suit arrays"):
        ud.load(pair(5), ud.IID(), 2, columns=["a"])
    with pytest.raises(refused, match="drop does not suit digits"):
        ud.load("digits", ud.IID(), 2, drop=["a"])
    ud.load(datasets.Dataset.from_pandas(table), ud.IID(), 2)
    assert "the text in name, site is left out" in caplog.text


@pytest.mark.parametrize("file", [True, False])
def test_missing_values(file, caplog):
    table = frame().drop(columns="name")
    table.loc[3, "b"] = np.nan
    table["flag"] = pd.array(RNG.random(40) < 0.5, dtype="boolean")
    table.loc[7, "flag"] = pd.NA
    table.to_csv("t.csv", index=False)
    given = "t.csv" if file else table
    whole = np.ones(40, bool)
    whole[[3, 7]] = False
    features = table[["a", "b", "c", "flag"]].astype(float)
    with pytest.raises(refused, match=r"Row 3 of the train split of .* has no finite 'b'.*missing=\"mean\""):
        ud.load(given, ud.ByKey(), client="site")
    dropped = ud.load(given, ud.IID(), 1, client="site", missing="drop")
    assert torch.equal(dropped.store["x"], torch.tensor(features[whole].to_numpy(), dtype=torch.float32))
    assert "2 incomplete rows were left out" in caplog.text
    filled = ud.load(given, ud.IID(), 1, client="site", missing="mean")
    wanted = features.fillna(features.mean())
    assert np.allclose(filled.store["x"], wanted, rtol=1e-6) and len(filled.store["y"]) == 40
    assert "2 empty cells were filled" in caplog.text
    assert filled.digests["training data"] != dropped.digests["training data"]
    caplog.clear()
    table.loc[7, "flag"] = True
    for missing, one in (("drop", "1 incomplete row was left out"), ("mean", "1 empty cell was filled with its")):
        ud.load(table, ud.IID(), 1, client="site", missing=missing)
        assert one in caplog.text
    table.loc[5, "a"] = np.inf
    with pytest.raises(refused, match=r"Row 5 .* has no finite 'a'; clean or drop that row.$"):
        ud.load(table, ud.IID(), 1, client="site", missing="mean")
    table.loc[:, "a"] = np.nan
    with pytest.raises(refused, match="'a' of the data frame has no value at all"):
        ud.load(table, ud.IID(), 1, client="site", missing="mean")
    with pytest.raises(refused, match="no complete rows"):
        ud.load(table, ud.IID(), 1, client="site", missing="drop")


def test_missing_labels_are_dropped_or_refused():
    table = frame().drop(columns=["name", "site"])
    table["label"] = table["label"].astype(object)
    table.loc[[2, 4], "label"] = None
    table["label"] = pd.array(table["label"], dtype="Int64")
    assert ud.load(table, ud.IID(), 1, missing="drop").classes == 2
    assert len(ud.load(table, ud.IID(), 1, missing="drop").store["y"]) == 38
    for missing in (None, "mean"):
        with pytest.raises(refused, match="Row 2 of the train split of the data frame has no label"):
            ud.load(table, ud.IID(), 1, missing=missing)
    wrong = table.copy()
    wrong.loc[10, "label"] = -5
    with pytest.raises(refused, match="Row 10 of the train split of the data frame has label -5"):
        ud.load(wrong, ud.IID(), 1, missing="drop")
    floats = table.assign(label=table["label"].astype(float) + 0.5)  # numbers to predict
    kept = ud.load(floats, ud.IID(), 1, missing="drop")
    assert kept.task.loss == "mse" and len(kept.store["y"]) == 38
    with pytest.raises(refused, match=r"Row 2 .* has no finite 'label'"):
        ud.load(floats, ud.IID(), 1, missing="mean")


def test_data_show():
    table = frame()
    table.loc[3, "b"] = np.nan
    table.to_csv("t.csv", index=False)
    options = ["--client", "site", "--partition", "ByKey()", "--drop", "name", "--missing", "drop"]
    shown = CliRunner().invoke(app, ["data", "show", "t.csv", *options])
    assert shown.exit_code == 0 and "39 samples over 2 clients" in shown.output


def test_in_experiment_files(tmp_path):
    frame().to_csv("t.csv", index=False)
    data = {"name": "t.csv", "partition": "ByKey()", "client": "site", "drop": ["name"], "missing": "mean"}
    text = {"model": "logistic", "rounds": 1, "data": data | {"test_fraction": 0.2}, "metrics": ["accuracy", "f1"],
            "local": {"steps": 1, "lr": 0.1}}  # fmt: skip
    result = ud.train(**arguments(checked(text, "a test")), out=tmp_path / "run")
    assert "f1" in result.history[0]
    written = (tmp_path / "run/config.toml").read_text()
    assert 'drop = ["name"]' in written and 'missing = "mean"' in written and "# resize: not set" in written
    again = arguments(checked(text | {"data": text["data"] | {"drop": ["name", "a"]}}, "a test"))
    assert again["data"].digests != ud.load(**text["data"]).digests
    with pytest.raises(refused, match="was started with training data"):
        ud.train(**again, out=tmp_path / "run", resume=True)
    with pytest.raises(refused, match=r"data\.resize"):
        checked(text | {"data": data | {"resize": 0}}, "a test")


# ---- pictures ---------------------------------------------------------------------------------------------------


def test_pictures_of_several_sizes(tmp_path):
    for name in ("cat", "dog"):
        os.makedirs(f"pics/{name}")
        for i in range(4):
            Image.fromarray(RNG.integers(0, 255, (8 + i, 9, 3), dtype=np.uint8)).save(f"pics/{name}/{i}.png")
    with pytest.raises(refused, match="but others 3×8×9; bring all images to one size, such as resize=32"):
        ud.load("pics", ud.IID(), 2)
    data = ud.load("pics", ud.IID(), 2, resize=6)
    assert data[0][0].shape == (4, 3, 6, 6)
    lazily = ud.load("pics", ud.IID(), 2, resize=6, lazy=True)
    assert torch.equal(lazily[1][0], data[1][0])
    other = ud.load("pics", ud.IID(), 2, resize=(6, 7), lazy=True)
    assert other[0][0].shape == (4, 3, 6, 7) and other.digests != lazily.digests
    for wrong in (0, (1, 2, 3), "small", True, 10**6):
        with pytest.raises(refused, match="resize must be a size"):
            ud.load("pics", ud.IID(), 2, resize=wrong)
    flat = np.full((3, 10, 20), 7, np.uint8)
    assert (resize_image(flat, (5, 4)) == 7).all() and resize_image(flat, (10, 20)) is flat


# ---- LEAF and PFLlib --------------------------------------------------------------------------------------------


def leaf(split, users, file="all.json"):
    os.makedirs(f"leaf/{split}", exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": np.asarray(x).tolist(), "y": list(y)} for user, (x, y) in users.items()},
    }
    with open(f"leaf/{split}/{file}", "w") as opened:
        json.dump(content, opened)


def test_leaf(caplog):
    train = {"ann": (RNG.normal(size=(6, 4)), [0, 1] * 3), "bob": (RNG.normal(size=(4, 4)), [1, 2] * 2)}
    test = {"bob": (RNG.normal(size=(3, 4)), [0, 1, 2]), "eve": (RNG.normal(size=(2, 4)), [0, 0])}
    leaf("train", {"bob": train["bob"]}, "b.json")
    leaf("train", {"ann": train["ann"]}, "a.json")
    leaf("test", test)
    data = ud.load("leaf", ud.ByKey())
    assert data.client_names == ["ann", "bob"] and data.sizes.tolist() == [6, 4]
    assert (
        data.client_test.sizes.tolist() == [0, 3]
        and len(data.test[1]) == 5
        and "eve have test data only" in caplog.text
    )
    assert np.allclose(data[1][0], train["bob"][0], rtol=1e-6) and data[1][1].tolist() == [1, 2, 1, 2]
    assert np.allclose(data.client_test[1][0], test["bob"][0], rtol=1e-6)
    assert "by_client" in ud.train("logistic", data, rounds=1, local=LOCAL).history[0]
    mixed = ud.load("leaf", ud.IID(), 5)
    assert len(mixed) == 5 and mixed.client_test is None and len(mixed.test[1]) == 5
    with pytest.raises(refused, match="leave client_test_fraction out"):
        ud.load("leaf", ud.ByKey(), client_test_fraction=0.2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not of LEAF's form"),
        ('{"users": ["a"]}', "is not of LEAF's form"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2]], "y": [1]}}}', "do not agree"),
        ('{"users": ["a"], "num_samples": [3], "user_data": {"a": {"x": [[1]], "y": [1]}}}', "do not agree"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2, 3]], "y": [1, 1]}}}', "differ in shape"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["to be"], "y": ["o"]}}}', "are text, not numbers"),
        ('{"users": [], "user_data": {}}', "have no samples"),
        (
            '{"users": ["a"], "num_samples": 3, "user_data": {"a": {"x": [[1]], "y": [1]}}}',
            "num_samples must be a list",
        ),
        ('{"users": [], "user_data": {}, "num_samples": 1' + "[" * 100_000, "is not of LEAF's form"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2]], "y": [3, null]}}}', "user a: the label of sample 1"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2]], "y": ["no", null]}}}', "the label of sample 1 is None"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2]], "y": [1, "2"]}}}', "the label of sample 0 is 1"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2]], "y": [[1, 2], [1, null]]}}}', "sample 0 is"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [2]], "y": [[1, 2], [1]]}}}', "its labels differ in shape"),
        (
            '{"users": ["a", "b"], "user_data": {"a": {"x": [[1]], "y": ["10"]}, "b": {"x": [[1]], "y": [9]}}}',
            "labels of a are text and those of b are numbers",
        ),
    ],
)
def test_damaged_leaf(content, said):
    os.makedirs("leaf/train")
    with open("leaf/train/a.json", "w") as opened:
        opened.write(content)
    with pytest.raises(refused, match=said):
        ud.load("leaf", ud.ByKey())


def test_labels_of_leaf_that_are_words():
    leaf("train", {"ann": (np.ones((3, 2)), ["no", "yes", "no"])})
    leaf("test", {"ann": (np.ones((1, 2)), ["yes"])})
    data = ud.load("leaf", ud.ByKey())
    assert data.names == ["no", "yes"] and data[0][1].tolist() == [0, 1, 0] and data.test[1].tolist() == [1]
    leaf("test", {"ann": (np.ones((1, 2)), [1])})
    with pytest.raises(refused, match="labels of ann are text and those of ann's test data are numbers"):
        ud.load("leaf", ud.ByKey())
    leaf("test", {"ann": (np.ones((1, 2)), ["maybe"])})
    with pytest.raises(refused, match="the label 'maybe', which none to train on has"):
        ud.load("leaf", ud.ByKey())


def pfl(i, x, y, split="train"):
    os.makedirs(f"pfl/{split}", exist_ok=True)
    with open(f"pfl/{split}/{i}.npz", "wb") as opened:
        np.savez_compressed(opened, data={"x": x, "y": y})


def test_pfllib():
    kinds = ("float32", "float64", "uint8", "int64")
    for i in range(11):
        pfl(i, RNG.normal(size=(4, 1, 3, 3)).astype("float32"), np.arange(4) % 3)
        pfl(i, np.full((2, 1, 3, 3), i, "float32"), np.arange(2), "test")
    data = ud.load("pfl", ud.ByKey())
    assert data.client_names == [str(i) for i in range(11)] and data[0][0].shape == (4, 1, 3, 3)
    assert (data.client_test[10][0] == 10).all() and len(data.test[1]) == 22
    for kind in kinds:  # every type, order of bytes and order of axes is what was written
        six = np.arange(6, dtype=kind).reshape(2, 3)
        for x in (six, np.asfortranarray(six), six[:0]):
            np.savez("one.npz", data={"x": x.astype(np.dtype(kind).newbyteorder(">")), "y": x[:, 0]})
            found = load_arrays("one.npz")
            assert np.array_equal(found["x"], x) and found["x"].dtype == x.dtype and found["x"].shape == x.shape
    np.savez("plain.npz", x=np.ones((2, 3)), y=np.zeros(2))  # as the message recommends
    assert load_arrays("plain.npz")["x"].sum() == 6


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


def forged(content: bytes) -> None:
    """An npz file whose "data" are this pickle."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|O", "fortran_order": False, "shape": ()})
    os.makedirs("pfl/train", exist_ok=True)
    with zipfile.ZipFile("pfl/train/0.npz", "w") as archive:
        archive.writestr("data.npy", head.getvalue() + content)


def test_no_pickle_is_executed():
    os.makedirs("pfl/train")
    fine = {"x": np.ones((2, 2)), "y": np.zeros(2)}
    for bad in ({"x": Evil(), "y": np.zeros(2)}, fine | {"z": Evil()}, fine | {"x": np.array([Evil()])}, Evil()):
        with open("pfl/train/0.npz", "wb") as opened:
            np.savez(opened, data=bad)
        with pytest.raises(refused, match=r"it names (posix|nt)\.system.*if it is yours, write it again"):
            ud.load("pfl", ud.ByKey())
    names = [b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nload\n(S'x'\ntR.", b"cnumpy.core.multiarray\nscalar\n."]
    names += [b"cnumpy\nndarray.tofile\n.", b"c__main__\nEvil\n.", b"\x80\x04\x8c\x02os\x8c\x06system\x93."]
    for content in names:
        forged(content)
        with pytest.raises(refused, match="which is no part of an array"):
            ud.load("pfl", ud.ByKey())
    assert not os.path.exists("owned") and not os.path.exists("pfl/train/owned")


def test_forged_arrays_are_refused():
    """Shapes that do not fit the bytes, types that are no numbers, and attributes of our own classes."""
    start = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"

    def outer(inner: bytes) -> bytes:  # fmt: skip
        return start + b"(I1\n(tcnumpy\ndtype\n(S'O8'\nI0\nI1\ntRI00\n(l" + inner + b"atb."

    def array(kind: bytes, shape: bytes, content: bytes) -> bytes:
        return start + b"(I1\n" + shape + b"cnumpy\ndtype\n(S'" + kind + b"'\nI0\nI1\ntRI00\n" + content + b"tb"

    eight = b"C\x08" + bytes(8)
    good = array(b"f8", b"(I1\nt", eight)
    forged(outer(b"(dS'x'\n" + good + b"sS'y'\n" + good + b"s"))
    assert load_arrays("pfl/train/0.npz")["x"].tolist() == [0.0]
    bad = [array(b"f8", b"(I9\nt", eight), array(b"O8", b"(I1\nt", eight), array(b"V8", b"(I1\nt", eight),
           array(b"f8", b"(I-1\nt", eight), array(b"f8", b"I1\n", eight), array(b"f8", b"(I1\nt", b"(lI1\na"),
           b"I5\n", b"(lI5\na", start, b"cnumpy\ndtype\n", b"cnumpy\ndtype\n(S'f8'\ntR"]  # fmt: skip
    for inner in bad:
        forged(outer(b"(dS'x'\n" + inner + b"sS'y'\n" + good + b"s"))
        with pytest.raises(refused, match="cannot be read"):
            ud.load("pfl", ud.ByKey())
    for content in (b"", b"garbage", pickle.dumps([1]), b"cnumpy\ndtype\n(dS'text'\nS'f8'\nsb.", b"Pname\n."):
        forged(content)
        with pytest.raises(refused, match="cannot be read"):
            ud.load("pfl", ud.ByKey())


def test_a_small_pickle_does_not_become_large():
    """Tuples doubled by the memo: as text, or hashed as a key, forty of them would take terabytes."""
    doubled = b"K\x01" + 40 * b"q\x01h\x01\x86"
    bombs = [
        b"\x80\x02cnumpy\ndtype\n" + doubled + b"\x85R.",
        b"\x80\x04" + doubled + b"\x8c\x01a\x93.",
        b"\x80\x02}" + doubled + b"K\x01s.",
    ]
    for content in bombs:
        forged(content)
        with pytest.raises(refused, match="cannot be read") as found:
            ud.load("pfl", ud.ByKey())
        assert len(str(found.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04" + b"(t" * 110_000 + b".",
        b"\x80\x04" + b"N" * 100_000 + b"(t" * 50_000 + b".",
        b"\x80\x04}("
        + b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(70_000))
        + b"u.",
    ],
    ids=["marks", "a long stack", "keys with one hash"],
)
def test_reading_a_pickle_takes_a_time_proportional_to_its_size(content):
    forged(content)
    with deadline(5), pytest.raises(refused, match="cannot be read"):
        ud.load("pfl", ud.ByKey())


def test_a_pickle_without_a_mark_is_damaged():
    forged(b"\x80\x04NNt.")
    with pytest.raises(refused, match="its pickle is damaged"):
        ud.load("pfl", ud.ByKey())


def npy(shape: tuple[int, ...], zeros: int) -> bytes:
    """The beginning of an array's file, and some zeros."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return head.getvalue() + bytes(zeros)


@pytest.mark.parametrize("kind", ["compressed", "only its header", "pickled"])
def test_a_small_file_does_not_fill_the_memory(kind):
    os.makedirs("pfl/train")
    with zipfile.ZipFile("pfl/train/0.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        if kind == "pickled":
            with archive.open("data.npy", "w") as opened:
                for _ in range(5):
                    opened.write(bytes(2**26))
        else:
            claimed, zeros = ((1 << 26) + 2**20, 2**28 + 2**22) if kind == "compressed" else (1 << 40, 0)
            archive.writestr("x.npy", npy((claimed,), zeros))
            archive.writestr("y.npy", npy((1,), 4))
    tracemalloc.start()
    with pytest.raises(
        refused, match=r"0.npz: (x|data).npy unpacks to [\d,]+ bytes of memory, and .* with np.savez\.$"
    ):
        ud.load("pfl", ud.ByKey())
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_large_arrays_that_are_hardly_compressed_are_read(monkeypatch):
    monkeypatch.setattr("undrift.data.safe_pickle.MOST_BYTES", 100)
    x = RNG.normal(size=(50, 4)).astype("float32")
    pfl(0, x, np.arange(50) % 2)
    np.savez_compressed("pfl/train/1.npz", x=x, y=np.arange(50) % 2)
    assert len(ud.load("pfl", ud.ByKey())) == 2


@pytest.mark.parametrize(
    ("x", "y"), [(1.0, 2), (np.ones((2, 3)), 1), (1.0, np.arange(2)), (np.ones((3, 2)), np.arange(2))]
)
def test_arrays_without_samples_are_refused(x, y):
    pfl(0, np.ones((2, 3)), np.arange(2))
    pfl(1, np.asarray(x), np.asarray(y))
    with pytest.raises(refused, match=r"1.npz has x of shape .* and y of shape .*; both need one entry per sample\."):
        ud.load("pfl", ud.ByKey())


def test_clients_whose_names_are_numbers_of_other_scripts():
    for name in ("10", "2", "²", "٣", "9" * 50):
        pfl(name, np.ones((2, 3)), np.arange(2))
    assert ud.load("pfl", ud.ByKey()).client_names == ["2", "10", "9" * 50, "²", "٣"]


@pytest.mark.parametrize("name", ["a.json", "0.npz"])
def test_pipes_among_the_files_of_clients(name):
    os.makedirs("piped/train")
    os.mkfifo(f"piped/train/{name}")
    with deadline(20), pytest.raises(refused, match=r"cannot be read .*it is not a regular file"):
        ud.load("piped", ud.ByKey())


def test_leaf_users_who_only_test():
    """LEAF's split by user: nobody who tests has trained."""
    for split, users in (("train", "ab"), ("test", "cd")):
        os.makedirs(f"split/{split}")
        own = {user: {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]} for user in users}
        content = {"users": list(users), "num_samples": [2, 2], "user_data": own}
        with open(f"split/{split}/all.json", "w") as file:
            json.dump(content, file)
    data = ud.load("split", ud.ByKey())
    assert data.client_test is None and len(data.test_rows.index) == 4
    run = ud.train("logistic", data, rounds=1, local=ud.Local(steps=1, lr=0.1))
    assert "accuracy" in run.history[-1] and "client_accuracy" not in run.history[-1]


def test_images_with_a_json_file_beside_them_are_images():
    for split, label in (("train", "a"), ("train", "b"), ("test", "a"), ("test", "b")):
        os.makedirs(f"pictures/{split}/{label}")
        for i in range(3):
            Image.fromarray(np.full((4, 4), 40 * i, np.uint8)).save(f"pictures/{split}/{label}/{i}.png")
    with open("pictures/train/info.json", "w") as file:
        json.dump({"made": "by hand"}, file)
    assert ud.load("pictures", ud.IID(), clients=2).sizes.sum() == 6


# ---- partitions -------------------------------------------------------------------------------------------------


def test_the_least_size_of_a_dirichlet_partition(caplog):
    one, other = ud.Dirichlet(0.1, min_samples=10), ud.Dirichlet(0.1, least=10)
    assert one == other == ud.Dirichlet(0.1, least=10, min_samples=10) and repr(one) == repr(other)
    assert "Dirichlet(alpha=0.1, capped=False, least=10)" == repr(one)
    data = ud.load("digits", one, clients=20)
    assert data.sizes.min() >= 10 and data.digests == ud.load("digits", "Dirichlet(0.1, min_samples=10)", 20).digests
    assert ud.load("digits", ud.Dirichlet(0.1), clients=20).sizes.min() < 10
    for wrong, said in (
        (lambda: ud.Dirichlet(0.1, least=5, min_samples=10), "two names of one number"),
        (lambda: ud.Dirichlet(0.1, min_samples=-1), r"Dirichlet\(min_samples\) must be a whole number from 0"),
        (lambda: ud.load("digits", ud.Dirichlet(0.1, min_samples=100), 20), "cannot have 100 samples each"),
        (lambda: ud.load("digits", ud.Dirichlet(0.01, min_samples=50), 20), "a smaller min_samples, or fewer clients"),
    ):
        with pytest.raises(refused, match=said):
            wrong()
    assert not caplog.messages
    ud.load("digits", ud.IID(), clients=5000)
    assert caplog.messages == [
        "3,562 of 5,000 clients have no samples, as there are only 1,438 to train on; ask for fewer clients"
    ]
