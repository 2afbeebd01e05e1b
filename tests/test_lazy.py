"""Data that are read when they are needed: the bits of data in memory, and what a run notices of changes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import undrift as ud
from tests.problems import same_bits

LOCAL = ud.Local(epochs=2, batch_size=4, lr=0.05)


def conv(classes: int = 3) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 9, classes)
        )


@pytest.fixture
def folder(tmp_path):
    """Pictures of three classes, to train and to test on."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 9), ("test", 3)):
        for label in ("cats", "dogs", "owls"):
            (tmp_path / "pictures" / split / label).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "pictures" / split / label / f"{i}.png")
    return tmp_path / "pictures"


@pytest.mark.parametrize(("engine", "normalize"), [("plain", False), ("lanes", True), ("auto", False)])
def test_a_folder_gives_the_bits_of_one_that_was_decoded(folder, engine, normalize):
    whole, lazy = (
        ud.load(folder, ud.Dirichlet(0.5), clients=3, client_test_fraction=0.2, normalize=normalize, lazy=lazy)
        for lazy in (False, True)
    )
    assert lazy.names == whole.names == ["cats", "dogs", "owls"] and repr(lazy) == repr(whole)
    for a, b in zip(lazy[0] + lazy.test, whole[0] + whole.test, strict=True):
        assert torch.allclose(a, b, rtol=1e-6) and a.dtype == b.dtype
    a, b = (ud.train(conv(), data, rounds=2, local=LOCAL, engine=engine, personalize_every=1) for data in (lazy, whole))
    assert a.choices["data"] == "disk" and b.choices["data"] == "device"
    if normalize:  # means are summed up in another order
        assert all(torch.allclose(a.params[name], w, rtol=1e-4, atol=1e-6) for name, w in b.params.items())
    else:
        assert same_bits(a.params, b.params) and a.history[-1]["accuracy"] == b.history[-1]["accuracy"]


def test_a_changed_picture_is_noticed(folder, tmp_path):
    def run(**options):
        data = ud.load(folder, ud.IID(), clients=3, lazy=True)
        return ud.train(conv(), data, local=LOCAL, out=tmp_path / "run", checkpoint_every=1, **options)

    run(rounds=1)
    moved = folder.rename(tmp_path / "moved").rename(folder)  # to where it was: the times of files stay
    assert moved == folder and len(run(rounds=2, resume=True).history) == 2
    changed = folder / "train" / "dogs" / "4.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(changed)
    with pytest.raises(ud.UndriftError, match="with training data"):
        run(rounds=3, resume=True)
    data = ud.load(folder, ud.IID(), clients=3, lazy=True)
    Image.fromarray(np.ones((8, 8, 3), np.uint8)).save(changed)
    with pytest.raises(ud.UndriftError, match=r"4.png has changed since the data were loaded"):
        ud.train(conv(), data, rounds=1, local=LOCAL)


def test_pictures_that_cannot_be_used_are_named(folder):
    Image.fromarray(np.zeros((9, 8, 3), np.uint8)).save(folder / "train" / "owls" / "7.png")
    data = ud.load(folder, ud.IID(), clients=3, lazy=True)
    with pytest.raises(ud.UndriftError, match=r"7.png is 3×9×8 but others 3×8×8; bring all"):
        ud.train(conv(), data, rounds=1, local=LOCAL)
    (folder / "train" / "owls" / "7.png").write_bytes(b"no picture")
    data = ud.load(folder, ud.IID(), clients=3, lazy=True)
    with pytest.raises(ud.UndriftError, match=r"7.png cannot be decoded"):
        ud.train(conv(), data, rounds=1, local=LOCAL)


@dataclass
class Squares(Dataset):
    """Pictures that are made when they are asked for; `form` is how samples look."""

    form: str = "pair"
    count: int = 40
    noise: float = 0.0
    broken: int | None = None

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        x = torch.full((3, 8, 8), float(i)).sin_() + self.noise * float(os.urandom(1)[0])
        if i == self.broken:
            x[0, 0, 0] = torch.nan
        return {"pair": (x, i % 3), "three": (x, x[0], i % 3), "dict": {"x": x, "label": i % 3}}[self.form]


class Known(Squares):
    read = 0

    @property
    def targets(self):
        return [i % 3 for i in range(self.count)]

    def __getitem__(self, i):
        type(self).read += 1
        return super().__getitem__(i)


class Fatal(Known):
    """Ends the process that reads one of its samples."""

    def __getitem__(self, i):
        return super().__getitem__(i) if i != 8 else os._exit(1)


class Three(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = conv()

    def forward(self, x, *rest):
        return self.inner(x)


@pytest.mark.parametrize(("form", "workers"), [("pair", None), ("three", None), ("dict", None), ("pair", 2)])
def test_a_dataset_gives_the_bits_of_one_that_was_stacked(form, workers):
    whole, lazy = (
        ud.load(Squares(form), ud.Dirichlet(0.5), clients=4, test=Squares(form, 9), **options)
        for options in ({}, {"lazy": True, "workers": workers})
    )
    a, b = (ud.train(Three(), data, rounds=2, local=LOCAL, lanes=2) for data in (lazy, whole))
    assert a.choices["data"] == "disk" and same_bits(a.params, b.params)
    assert a.history[-1]["loss"] == b.history[-1]["loss"]


def test_labels_that_are_known_are_not_read():
    Known.read = 0
    data = ud.load(Known(count=2000), ud.IID(), clients=4, lazy=True)
    assert Known.read < 50 and data.label_counts().sum() == 2000


def test_what_makes_a_dataset_unfit(caplog):
    with pytest.raises(ud.UndriftError, match="gives other values each time"):
        ud.load(Squares(noise=1.0), ud.IID(), clients=4, lazy=True)
    data = ud.load(Squares(broken=7), ud.IID(), clients=4, lazy=True)
    with pytest.raises(ud.UndriftError, match="Sample 7 of the training set has NaN in its x"):
        ud.train(conv(), data, rounds=1, local=LOCAL)
    assert "engine" not in caplog.text  # the plain one was not tried, which would fail too
    data = ud.load(Fatal(), ud.IID(), clients=4, lazy=True, workers=2)
    with pytest.raises(ud.UndriftError, match="A process that reads the training set has ended"):
        ud.train(conv(), data, rounds=1, local=LOCAL)
    for name, options in (("digits", {}), ((1, 2), {"workers": 2}), (Squares(), {"lazy": True, "workers": 0})):
        with pytest.raises(ud.UndriftError, match=r"Leave lazy out|True where workers are given|workers must be"):
            ud.load(name, ud.IID(), clients=4, **({"lazy": True} if name == "digits" else {}), **options)
    with pytest.raises(ud.UndriftError, match='data_on="device" reads all data'):
        ud.train(conv(), ud.load(Squares(), ud.IID(), clients=4, lazy=True), rounds=1, local=LOCAL, data_on="device")


def test_the_identity_of_a_dataset():
    def digest(**options):
        return ud.load(Squares(**options), ud.IID(), clients=4, lazy=True).digests["training data"]

    assert digest() == digest() and len({digest(), digest(count=41), digest(broken=0), digest(form="three")}) == 4


def test_arrays_in_files(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    y = np.arange(60) % 3
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    whole, lazy = (
        ud.load((values, y), ud.IID(), clients=4, test_fraction=0.2, lazy=values is mapped) for values in (x, mapped)
    )
    a, b = (ud.train(conv(), data, rounds=2, local=LOCAL) for data in (lazy, whole))
    assert a.choices["data"] == "disk" and same_bits(a.params, b.params)
    parts = [ud.load((some, y[:40]), ud.IID(), clients=4, lazy=True).digests for some in (mapped[:40], mapped[20:])]
    assert parts[0] != parts[1]
    pair = ud.load(((mapped, mapped[:, 0]), y), ud.IID(), clients=4, lazy=True)
    assert [t.shape[1:] for t in pair[0][0]] == [(3, 8, 8), (8, 8)]
    with pytest.raises(ud.UndriftError, match=re.escape("60 x but 59 y")):
        ud.load((mapped, y[:59]), ud.IID(), clients=4, lazy=True)
