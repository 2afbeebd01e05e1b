"""Warnings of samples whose digits or scale get lost, and silence where nothing does."""

from __future__ import annotations

import logging

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import undrift as ud
from undrift.data import warn_once

LOCAL = ud.Local(steps=2, batch_size=8, lr=0.01)
RNG = np.random.default_rng(0)
LABELS = np.arange(60) % 3
OTHER = RNG.normal(size=60)
IDS = RNG.integers(0, 10**9, 60)


def columns(first, dtype=np.float64) -> ud.FederatedDataset:
    x = np.stack([np.asarray(first, np.float64), OTHER], 1).astype(dtype)
    return ud.FederatedDataset.from_clients([(x[i::4], LABELS[i::4]) for i in range(3)], test=(x[3::4], LABELS[3::4]))


class Looks(nn.Module):
    """Looks an identifier up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rest = nn.Embedding(97, 3), nn.Linear(1, 3)

    def forward(self, x):
        return self.table(x[:, 0].long() % 97) + self.rest(x[:, 1:])


class Given(Looks):
    """Gets it as an input of its own."""

    def forward(self, ids, x):
        return self.table(ids % 97) + self.rest(x)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))

    def forward(self, x):
        return self.layers(x)


def warnings_of(caplog, module, data, **options) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        ud.train(module, data, rounds=1, local=LOCAL, **options)
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_model_that_reads_digits_which_are_rounded(dtype, caplog):
    said = warnings_of(caplog, Looks(), columns(IDS, dtype))
    assert said.count("have more digits than float32") == 1 and "outputs depend on them. Give identifiers" in said


@pytest.mark.parametrize("first", [1.7e9 + 60 * RNG.random(60), 2**24 + np.arange(60)], ids=["times", "numbers"])
def test_differences_that_are_rounded(first, caplog):
    said = warnings_of(caplog, Norms(), columns(first))
    assert said.count("have more digits than float32") == 1 and "are what tells samples apart" in said


ORDINARY = {
    "unit": RNG.normal(size=60),
    "revenue": RNG.integers(10**8, 10**9, 60),
    "constant": np.full(60, 1.7e9 + 1),
    "noise of rounding": 1 + 1e-15 * RNG.normal(size=60),
    "days": 20_000 + np.arange(60),
}


@pytest.mark.parametrize("first", ORDINARY.values(), ids=list(ORDINARY))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("module", [Norms, lambda: nn.Linear(2, 3)])
def test_digits_that_nobody_misses(first, dtype, module, caplog):
    assert "digits" not in warnings_of(caplog, module(), columns(first, dtype))


def test_identifiers_that_are_whole_stay_exact(caplog):
    """Integers beside floats, small ones among floats, and models in double precision."""
    x = (IDS, OTHER[:, None])
    data = ud.load((x, LABELS), ud.IID(), 3, test=(x, LABELS))
    assert "digits" not in warnings_of(caplog, Given(), data)
    assert "digits" not in warnings_of(caplog, Looks(), columns(IDS % 1000))
    assert "digits" not in warnings_of(caplog, Looks().double(), columns(IDS))
    assert (data[0][0][0] == torch.tensor(IDS)[data.index[data.offsets[0] : data.offsets[1]]]).all()


def test_columns_of_a_table_that_are_rounded(caplog, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warn_once, "warned", set())
    table = pd.DataFrame({"when": 1.7e9 + 60 * RNG.random(60), "one": 1.0, "other": OTHER, "label": LABELS})
    table.assign(when=table["when"] - 1.7e9).to_csv("fine.csv", index=False)
    table.to_csv("times.csv", index=False)
    with caplog.at_level(logging.WARNING):
        ud.load("fine.csv", ud.IID(), 3, test_fraction=0.2)
    assert not caplog.records
    for data in ("times.csv", table):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            ud.load(data, ud.IID(), 3, test_fraction=0.2)
        assert "the column 'when' is rounded to 32 bits" in caplog.text and " becomes 17000000" in caplog.text


def test_the_warning_of_a_table_comes_from_the_cache_too(caplog, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"number": 2**24 + np.arange(60), "label": LABELS}).to_csv("numbers.csv", index=False)
    for _ in range(2):
        monkeypatch.setattr(warn_once, "warned", set())
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            ud.load("numbers.csv", ud.IID(), 3)
        assert "16777217 becomes 16777216" in caplog.text
