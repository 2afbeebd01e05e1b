"""The real data sets, where they are at hand: row counts, class counts and channel means as published.

They lie in the folder that UNDRIFT_DATA names, or in `../shared/data`; without it these tests are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import undrift as ud
from undrift.data import tables
from undrift.data.partition_summary import class_counts

FOLDER = Path(os.environ.get("UNDRIFT_DATA") or Path(__file__).parents[2] / "shared" / "data")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"the real data sets are not at hand ({FOLDER})")

PICTURES = {
    # rows to train on, rows to test on, shape, samples of each class (smallest, largest), mean by channel
    "cifar10": (50_000, 10_000, (3, 32, 32), (5000, 5000), (0.4914, 0.4822, 0.4465)),
    "cifar100": (50_000, 10_000, (3, 32, 32), (500, 500), (0.5071, 0.4866, 0.4409)),
    "mnist": (60_000, 10_000, (1, 28, 28), (5421, 6742), (0.1307,)),
    "fashion_mnist": (60_000, 10_000, (1, 28, 28), (6000, 6000), (0.2860,)),
    "chars74k_hnd": (2_728, 682, (1, 28, 28), (44, 44), (0.1331,)),
    "audiomnist": (7_680, 1_920, (1, 40, 64), (768, 768), (0.3073,)),
}


def load(name: str, partition: object = ud.IID(), clients: int | None = 1, **options: object) -> ud.FederatedDataset:
    if not any((FOLDER / hub).exists() for hub in HUBS.get(name, [name])):
        pytest.skip(f"{name} is not in {FOLDER}")
    return ud.load(name, partition, clients, data_dir=FOLDER, **options)


HUBS = {
    "cifar10": ["uoft-cs/cifar10"], "cifar100": ["uoft-cs/cifar100"], "mnist": ["ylecun/mnist"],
    "fashion_mnist": ["zalando-datasets/fashion_mnist"], "ag_news": ["fancyzhx/ag_news"],
}  # fmt: skip


LONG = ("cifar100", "mnist", "fashion_mnist")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in PICTURES])
def test_pictures(name):
    rows, test, shape, (fewest, most), mean = PICTURES[name]
    data = load(name)
    assert (int(data.sizes.sum()), len(data.test_rows)) == (rows, test)
    counts = class_counts(data)[0]
    assert (counts.min(), counts.max()) == (fewest, most)
    x, y = data.take(data.store, data.index[:100])
    assert x.shape[1:] == shape and 0 <= x.min() and x.max() <= 1 and y.max() < data.classes
    # CIFAR-100 is at hand with its pixels rounded to 6 bits, which raises its mean by less than 0.0025.
    tolerance = 0.0025 if name == "cifar100" else 0.0001
    found = np.concatenate([data.store["x"][:, c].double().mean().reshape(1) / 255 for c in range(shape[0])])
    assert np.abs(found - mean).max() < tolerance
    assert np.abs(data.store["mean"].flatten().numpy() - found).max() < 1e-6


def test_natural_clients():
    assert len(load("mnist", ud.ByKey(), None)) == 539
    assert len(load("chars74k_hnd", ud.ByKey(), None)) == 55
    assert len(load("audiomnist", ud.ByKey(), None)) == 60


def test_shakespeare():
    data = load("shakespeare_roles", ud.ByKey(), None)
    assert len(data) == 1120  # of 1,338 roles those with a window in their first four fifths
    assert len(data.store["x"]) == 4_314_632 and data.classes == data.task.vocabulary == 72
    (table,) = list(tables.hub_place("shakespeare_roles", None, FOLDER).batches("train", ["text"]))[:1]
    text = table["text"][0].as_py()
    x, y = data[0]
    letters = data.names
    assert "".join(letters[c] for c in x[1000].tolist()) == text[1000:1080] and letters[y[1000]] == text[1080]
    assert len(x) == len(text) * 4 // 5 - 80


def test_tags():
    data = load("stackoverflow_tags", ud.Dirichlet(0.1), 100)
    assert (int(data.sizes.sum()), len(data.test_rows), data.outputs) == (24_000, 6_000, 100)
    x, y = data[int(data.sizes.argmax())]
    assert x.shape[1] == 10_000 and y.sum(1).min() >= 1
    assert ((x.sum(1) - 1).abs() < 1e-5).float().mean() > 0.99  # a title may hold no frequent word


def test_news():
    data = load("ag_news")
    assert (int(data.sizes.sum()), len(data.test_rows)) == (20_392, 7_600)
    assert class_counts(data)[0].tolist() == [5085, 5054, 5046, 5207]
    assert data.names == ["World", "Sports", "Business", "Sci/Tech"] and data.task.vocabulary == 10_002
