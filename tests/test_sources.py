"""Data sets by name, from a made-up folder in hub layout; what is wrong with a folder is said in a sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import undrift as ud
from tests import hub
from undrift.data import cache, sources, tables
from undrift.data.text import split_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub.make(tmp_path_factory.mktemp("hub"))


@pytest.fixture(autouse=True)
def places(folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDRIFT_DATA", str(folder))
    monkeypatch.setenv("UNDRIFT_CACHE", str(folder.parent / f"{folder.name}-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


SHAPES = {
    "cifar10": ((3, 32, 32), 40, 20, 10),
    "cifar100": ((3, 32, 32), 40, 20, 10),
    "cinic10": ((3, 32, 32), 40, 20, 10),
    "mnist": ((1, 28, 28), 40, 20, 10),
    "fashion_mnist": ((1, 28, 28), 40, 20, 10),
    "emnist": ((1, 28, 28), 40, 20, 10),
    "femnist": ((1, 28, 28), 48, 12, 4),
    "chars74k_hnd": ((1, 28, 28), 48, 12, 4),
    "audiomnist": ((1, 40, 64), 48, 12, 4),
    "speech_commands": ((1, 40, 64), 2, 2, 2),
    "shakespeare": ((80,), None, None, None),
    "shakespeare_roles": ((80,), None, None, None),
    "stackoverflow": ((None,), 4, 1, 5),
    "stackoverflow_tags": ((None,), 4, 1, 5),
    "ag_news": ((64,), 2, 1, 2),
}


def test_every_name_is_tried_here():
    assert {*SHAPES, "digits"} == set(sources.names())


@pytest.mark.parametrize("name", SHAPES)
def test_every_data_set_loads_and_loads_again_without_reading_a_table(name, monkeypatch):
    shape, train, test, classes = SHAPES[name]
    first = ud.load(name, ud.IID(), 2, seed=3)
    monkeypatch.setattr(tables, "_datasets", lambda: pytest.fail("the second time comes from the cache"))
    again = ud.load(name, ud.IID(), 2, seed=3)
    for client in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first[client], again[client], strict=True))
    x, y = first[0]
    assert len(x.shape) == len(shape) + 1 and all(n in (None, m) for n, m in zip(shape, x.shape[1:], strict=True))
    assert len(y) == len(x) == first.sizes[0]
    if train:
        assert (first.sizes.sum(), len(first.test_rows), first.outputs) == (train, test, classes)


def test_pictures_are_what_was_encoded():
    data = ud.load("cifar10", lambda labels, *_: np.zeros(len(labels), int), 1)
    x, y = data[0]
    for row in (0, 17, 39):  # on both sides of where one file ends and the next begins
        assert np.array_equal(
            (x[row] * 255).round().byte().numpy(), hub.pixels("train", row, (32, 32, 3)).transpose(2, 0, 1)
        )
        assert y[row] == row % 10
    assert data.names == [f"class {c}" for c in range(10)]
    assert np.array_equal((data.test[0][5, 0] * 255).round().byte().numpy(), hub.pixels("test", 5, (32, 32, 3))[..., 0])


def test_grey_pictures_stay_grey_in_a_format_that_has_colours_only():
    data = ud.load("mnist", lambda labels, *_: np.zeros(len(labels), int), 1)
    assert np.array_equal((data[0][0][3, 0] * 255).round().byte().numpy(), hub.pixels("train", 3, (28, 28)))


def test_writers_from_the_data_set_beside():
    data = ud.load("mnist", ud.ByKey())
    assert len(data) == 7 and data.sizes.tolist() == [6, 6, 6, 6, 6, 5, 5]


def test_natural_clients_each_give_a_fifth_to_the_test_set():
    data = ud.load("femnist", ud.ByKey())
    assert data.sizes.sum() == 48 and len(data.test_rows) == 12
    assert data.label_counts().sum(0).tolist() == [12] * 4, "of every class alike"
    assert (data.sizes >= 15).all(), "and of every writer about alike"


def test_normalised_pictures_have_mean_0_and_spread_1():
    data = ud.load("cifar10", ud.IID(), 1, normalize=True)
    x = data[0][0]
    assert x.mean((0, 2, 3)).abs().max() < 1e-5 and (x.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    raw = ud.load("cifar10", ud.IID(), 1)
    mean, std = (raw.store[name] for name in ("mean", "std"))
    assert torch.allclose(data.test[0], (raw.test[0] - mean) / std)


def windows(text: str) -> list[tuple[str, str]]:
    return [(text[p : p + 80], text[p + 80]) for p in range(len(text) - 80)]


@pytest.mark.parametrize("name", ["shakespeare_roles", "shakespeare"])
def test_windows_are_cut_from_each_roles_own_text(name):
    """Both ways to store the text give LEAF's windows, a role's first four fifths to train on, the rest to test."""
    data = ud.load(name, ud.ByKey())
    spoken = [text for text in hub.TEXTS.values() if len(text) > 80]
    assert len(data) == len([t for t in spoken if len(t) * 4 // 5 > 80])
    letters = sorted(set("".join(hub.TEXTS.values() if name == "shakespeare_roles" else spoken)))
    assert data.names == letters and data.task.vocabulary == len(letters)

    def said(pair: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[str, str]]:
        x, y = pair
        rows = zip(x.tolist(), y.tolist(), strict=True)
        return [("".join(letters[c] for c in before), letters[after]) for before, after in rows]

    for client, text in enumerate(spoken):
        assert said(data[client]) == windows(text[: len(text) * 4 // 5])
    assert said(data.test) == [pair for text in spoken for pair in windows(text[len(text) * 4 // 5 :])]
    assert "".join(letters[c] for c in data.store["x"][:20].tolist()) == spoken[0][:20]


def test_the_text_is_stored_once():
    data = ud.load("shakespeare_roles", ud.ByKey())
    assert data.store["x"].dtype == torch.uint8 and len(data.store["x"]) == sum(map(len, hub.TEXTS.values()))
    assert data.store["y"].data_ptr() == data.store["x"].data_ptr() + 80


def test_only_the_speakers_with_the_most_text_train():
    every, some = ud.load("shakespeare_roles", ud.ByKey()), ud.load("shakespeare_roles", ud.ByKey(largest=1))
    sizes = every.offsets[1:] - every.offsets[:-1]
    chosen = sorted(np.argsort(-sizes, kind="stable")[:1])
    assert len(some) == 1 and len(every) == 2
    for mine, theirs in enumerate(chosen):
        assert torch.equal(some[mine][0], every[theirs][0]) and some.client_names[mine] == every.client_names[theirs]
    assert len(some.test[0]) == len(every.test[0])
    held = ud.load("shakespeare_roles", ud.ByKey(largest=1), validation_fraction=0.2)
    assert 0 < len(held.validation[0]) < sizes[chosen].sum()


def test_bags_of_words_and_tags():
    data = ud.load("stackoverflow_tags", lambda labels, *_: np.zeros(len(labels), int), 1, test_size=1)
    counts: dict[str, int] = {}
    for title, _ in hub.QUESTIONS:
        for word in split_words(title):
            counts[word] = counts.get(word, 0) + 1
    vocabulary = sorted(counts, key=lambda w: (-counts[w], w))
    tags = ["python", "c#", "javascript", "c++", "sorting"]  # by count, then by the alphabet
    assert data.names == tags
    seen = [*zip(*(t.tolist() for t in data[0]), strict=True), *zip(*(t.tolist() for t in data.test), strict=True)]
    for title, own in hub.QUESTIONS:
        bag = [split_words(title).count(word) / len(split_words(title)) for word in vocabulary]
        ones = [float(tag in own) for tag in tags]
        assert any(np.allclose(x, bag) and y == ones for x, y in seen), title


def test_posts_without_a_title_are_left_out_and_users_are_clients():
    data = ud.load("stackoverflow", ud.ByKey())
    assert sorted(data.sizes.tolist()) in ([1, 3], [2, 2]) and len(data.test_rows) == 1


def test_words_of_news():
    data = ud.load("ag_news", lambda labels, *_: np.zeros(len(labels), int), 1)
    known = ["peace", "a", "and", "at", "goal", "last"]
    x, y = data[0]
    assert x[0].tolist() == [0] * 61 + [2 + known.index(w) for w in ("peace", "at", "last")] and y.tolist() == [0, 1]
    unknown = [2 + known.index(w) if w in known else 1 for w in ("a goal unheard of " * 20).split()]
    assert data.test[0][0].tolist() == unknown[:64]  # words that only the test set has are unknown
    assert data.task.vocabulary == 8


def test_a_tone_lights_its_band():
    data = ud.load("speech_commands", lambda labels, *_: np.zeros(len(labels), int), 1)
    low, high = (x[0, :, 30].argmax().item() for x in data[0][0])
    mel = [2595 * np.log10(1 + hertz / 700) for hertz in (300, 3000, 8000)]
    assert abs(low - (41 * mel[0] / mel[2] - 1)) < 1 and abs(high - (41 * mel[1] / mel[2] - 1)) < 1


def test_losses_and_metrics_beyond_one_label():
    tags = ud.load("stackoverflow_tags", ud.IID(), 2)
    result = ud.train("logistic", tags, rounds=2, local=ud.Local(steps=2, batch_size=2, lr=0.5))
    x, y = tags.test
    z = x @ result.params["1.weight"].T + result.params["1.bias"]
    top = z.topk(5).indices
    assert result.history[-1]["recall_at_5"] == pytest.approx(float(y.gather(1, top).sum() / y.sum()))
    assert result.history[-1]["loss"] == pytest.approx(
        float(torch.nn.functional.binary_cross_entropy_with_logits(z, y)), rel=1e-5
    )
    assert "accuracy" not in result.history[-1]


def test_the_cache_is_a_safetensors_file_and_mended_when_broken(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "new"))
    ud.load("mnist", ud.IID(), 2)
    (file,) = (tmp_path / "new").iterdir()  # and no leftovers
    arrays = load_file(file)
    assert arrays["train_x"].shape == (40, 1, 28, 28) and arrays["train_x"].dtype == torch.uint8
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert len(ud.load("mnist", ud.ByKey())) == 7
    assert file.read_bytes() == whole
    assert cache.cache_folder() == tmp_path / "new"


def test_data_that_change_are_decoded_again(tmp_path):
    hub.pictures(tmp_path, "uoft-cs/cifar10", {"train": 6, "test": 2}, (32, 32, 3), 2, image="img")
    assert ud.load("cifar10", ud.IID(), 1, data_dir=tmp_path).sizes.tolist() == [6]
    hub.pictures(tmp_path, "uoft-cs/cifar10", {"train": 9, "test": 2}, (32, 32, 3), 2, image="img")
    assert ud.load("cifar10", ud.IID(), 1, data_dir=tmp_path).sizes.tolist() == [9]


def test_no_window_that_is_held_back_overlaps_one_that_is_trained_on(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdef "), 2000 + 300 * i)) for i in range(3)]
    hub.write(tmp_path, "shakespeare_roles", "train", {"character_id": list("xyz"), "text": texts})
    options = {"server_fraction": 0.1, "validation_fraction": 0.1, "client_test_fraction": 0.2, "data_dir": tmp_path}
    data = ud.load("shakespeare_roles", ud.ByKey(), **options)
    parts = [
        data.index,
        data.client_test.index,
        data.server_rows.index,
        data.validation_rows.index,
        data.test_rows.index,
    ]
    seen = [{p + i for p in part.tolist() for i in range(81)} for part in parts]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert not one & other, "not a character is shared"
    windows = sum(len(text) * 4 // 5 - 80 for text in texts)
    assert [len(part) / windows for part in parts[2:4]] == pytest.approx([0.1, 0.1], abs=0.01)
    assert len(parts[1]) / (len(parts[0]) + len(parts[1])) == pytest.approx(0.2, abs=0.03)


def test_size_of_the_test_set():
    whole, some = (ud.load("cifar10", ud.IID(), 2, test_size=size) for size in (None, 7))
    assert len(some.test_rows) == 7 and len(whole.test_rows) == 20
    assert torch.equal(some.test[0], ud.load("cifar10", ud.IID(), 5, seed=9, test_size=7).test[0])


def broken(root: Path, what: str) -> None:
    """A folder with something wrong in it."""
    rows = {"train": 6, "test": 2}
    hub.pictures(root, "uoft-cs/cifar10", rows, (32, 32, 3), 2, image="img", parts=2)
    files = sorted((root / "uoft-cs/cifar10").glob("train-*"))
    good = [hub.encoded(hub.pixels("train", i, (32, 32, 3))) for i in range(6)]
    features = {"img": hub.Image(), "label": hub.ClassLabel(names=["a", "b"])}
    if what == "column":
        hub.write(root, "uoft-cs/cifar10", "train", {"picture": good, "label": [0] * 6}, parts=2)
    elif what == "truncated":
        files[1].write_bytes(files[1].read_bytes()[:-200])
    elif what == "scrambled":
        middle = len(files[1].read_bytes()) // 2
        data = bytearray(files[1].read_bytes())
        data[100:middle] = bytes(middle - 100)
        files[1].write_bytes(data)
    elif what == "not parquet":
        files[0].write_text("<html>404</html>")
    elif what == "missing file":
        files[1].unlink()
    elif what == "missing split":
        (root / "uoft-cs/cifar10/test-00000-of-00001.parquet").unlink()
    elif what == "picture":
        bad = [*good[:4], {"bytes": b"not a picture", "path": None}, good[5]]
        hub.write(root, "uoft-cs/cifar10", "train", {"img": bad, "label": [0] * 6}, features, parts=2)
    elif what == "size":
        odd = [*good[:5], hub.encoded(hub.pixels("train", 5, (28, 28, 3)))]
        hub.write(root, "uoft-cs/cifar10", "train", {"img": odd, "label": [0] * 6}, features, parts=2)
    elif what == "label":
        plain = {"img": hub.Image(), "label": hub.Value("int64")}
        hub.write(root, "uoft-cs/cifar10", "train", {"img": good, "label": [0, 1, 0, -1, 0, 1]}, plain, parts=2)
    elif what == "range":
        import json

        import pyarrow.parquet as pq

        for file in files:  # what a hand-made file may say: two classes declared, a third one used
            table = pq.read_table(file)
            shifted = table.set_column(1, "label", [[2] * len(table)])
            assert json.loads(table.schema.metadata[b"huggingface"])
            pq.write_table(shifted.replace_schema_metadata(table.schema.metadata), file)
    elif what == "no label":
        hub.write(root, "uoft-cs/cifar10", "train", {"img": good, "label": [0, 1, None, 0, 1, 1]}, features, parts=2)
    elif what == "empty":
        hub.write(root, "uoft-cs/cifar10", "test", {"img": [], "label": []}, features)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("column", r"uoft-cs/cifar10 has no column 'img'; its columns are picture, label\."),
        ("truncated", r"train-00001-of-00002.parquet cannot be read \(.*\); get or write that file again\."),
        ("scrambled", r"train-00001-of-00002.parquet cannot be read \(.*\); get or write that file again\."),
        ("not parquet", r"train-00000-of-00002.parquet cannot be read \(.*\); get or write that file again\."),
        ("missing file", r"has 1 of the 2 files of its train split; get the others\."),
        ("missing split", r"uoft-cs/cifar10 has no test split; it has train\."),
        (
            "picture",
            r"Row 4 of the train split of uoft-cs/cifar10 cannot be decoded \(.*\); get or write that file again",
        ),
        ("size", r"Row 5 of the train split of uoft-cs/cifar10 is 3×28×28 but others 3×32×32; bring all images"),
        ("label", r"Row 3 of the train split of uoft-cs/cifar10 has label -1, which must be from 0 to 99,999"),
        ("range", r"Row 0 of the train split of uoft-cs/cifar10 has label 2, which must be from 0 to 1"),
        ("no label", r"Row 2 of the train split of uoft-cs/cifar10 has no label; drop that row\."),
        ("empty", r"The test split of uoft-cs/cifar10 has no rows\."),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_sentence(tmp_path, monkeypatch, what, sentence):
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    broken(tmp_path, what)
    with pytest.raises(ud.UndriftError) as error:
        ud.load("cifar10", ud.IID(), 2, data_dir=tmp_path)
    assert re.search(sentence, str(error.value)) and "\n" not in str(error.value)
    assert not list((tmp_path / "cache").glob("*")), "nothing half-written"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ud.load("cifar11", ud.IID(), 2), "There is no data set called 'cifar11'. Did you mean 'cifar10'?"),
        (
            lambda: ud.load("cifar10", ud.IID(), 2, data_dir="/no/such"),
            "There is no data folder /no/such; set UNDRIFT_DATA",
        ),
        (lambda: ud.load("cifar10", ud.ByKey()), "ByKey() needs data with a client column"),
        (
            lambda: ud.load("ag_news", ud.IID(), 2, normalize=True),
            "normalize is for images that are read from files",
        ),
        (lambda: ud.load("cifar10", ud.IID(), 2, test_fraction=0.1), "cifar10 has a test set of its own"),
        (lambda: ud.load("cifar10", ud.IID(), 2, test_size=0), "test_size must be a whole number from 1"),
        (lambda: ud.load("cifar10", ud.IID(), 2, augment=3), "augment must be CropFlip(), or a function of (x, key)"),
        (lambda: ud.load("cifar10", ud.IID(), 2, augment="CropFlop()"), "There is no augmentation called 'CropFlop'"),
        (lambda: ud.load("cifar10", ud.IID(), 2, test=(1, 2)), "test is for arrays and torch Datasets"),
        (lambda: ud.load(7, ud.IID(), 2), "load needs a name, a path, a pair (x, y) or a torch Dataset"),
        (
            lambda: ud.load("digits", ud.IID(), 2, server_fraction=0.5, validation_fraction=0.5),
            "leave nothing to train on",
        ),
    ],
)
def test_wrong_arguments_are_one_sentence(call, sentence):
    with pytest.raises(ud.UndriftError) as error:
        call()
    assert sentence in str(error.value)


def test_no_network_and_no_folder(tmp_path, monkeypatch):
    """In a process of its own: the library reads HF_HUB_OFFLINE when it is imported."""
    code = "import undrift as ud; ud.load('cifar10', ud.IID(), 2, data_dir='.')"
    env = {"HF_HUB_OFFLINE": "1", "UNDRIFT_CACHE": str(tmp_path / "c"), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "uoft-cs/cifar10 could not be read from the Hugging Face hub" in last
    assert "put its parquet files into FOLDER/uoft-cs/cifar10 and set UNDRIFT_DATA=FOLDER" in last
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())


def test_what_is_on_no_hub_says_so(tmp_path):
    with pytest.raises(
        ud.UndriftError, match="audiomnist is not on the hub; put its parquet files into FOLDER/audiomnist"
    ):
        ud.load("audiomnist", ud.IID(), 2, data_dir=tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ud.UndriftError, match="set UNDRIFT_CACHE to a writable folder"):
        ud.load("cifar10", ud.IID(), 2)
