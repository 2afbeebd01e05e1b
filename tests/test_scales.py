"""Tables whose columns have different scales: `normalize=True` against NumPy by hand, and the warning without it."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import undrift as ud
from undrift.data import cache, normalize, warn_once
from undrift.tools import parallel
from undrift.tools.cli import app
from undrift.tools.config import checked
from undrift.tools.experiment import arguments

ROWS = 120


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))


def frame(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    age, ratio = rng.normal(50, 10, rows), rng.normal(0, 0.1, rows)
    made = pd.DataFrame({"age": age, "income": rng.normal(4e4, 2e4, rows), "fixed": 0.1, "ratio": ratio})
    return made.assign(label=(ratio > 0).astype(int), site=np.array(["H03", "H11", "H5"])[np.arange(rows) % 3])


def by_hand(x):
    """The columns as pandas has them, normalized by the definition."""
    x = x.to_numpy(np.float64)
    std = x.std(0)
    return (x - x.mean(0)) / np.where(np.ptp(x, 0) == 0, 1, std)


FEATURES = ["age", "income", "fixed", "ratio"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame", "arrays"])
def test_normalized_columns_are_those_of_numpy(kind):
    table = frame()
    options = {"client": "site", "normalize": True}
    if kind == "arrays":
        data = ud.load((table[FEATURES].to_numpy("float32"), table["label"].to_numpy()), ud.IID(), 1, normalize=True)
    elif kind == "frame":
        data = ud.load(table, ud.IID(), 1, **options)
    else:
        (table.to_csv if kind == "csv" else table.to_parquet)(f"t.{kind}", index=False)
        data = ud.load(f"t.{kind}", ud.IID(), 1, **options)
    x, _ = data.take(data.store, torch.arange(ROWS))
    assert x.dtype == torch.float32 and np.allclose(x, by_hand(table[FEATURES]), atol=1e-5)
    assert (x[:, 2] == 0).all()  # a constant column is only centred
    got, y = data[0]
    assert torch.equal(got, x[data.index]) and np.array_equal(y, table["label"].to_numpy()[data.index])


def test_all_rows_of_the_training_split_count_and_none_of_a_test_set():
    table, test = frame(), frame(1, 30)
    held = ud.load(table, ud.ByKey(), client="site", normalize=True, test_fraction=0.25, server_fraction=0.25)
    wanted = torch.tensor(by_hand(table[FEATURES]), dtype=torch.float32)
    for x, index in ((held.test[0], held.test_rows.index), (held.server[0], held.server_rows.index)):
        assert torch.allclose(x, wanted[index], atol=1e-5)
    given = ud.load(table, ud.ByKey(), client="site", normalize=True, test=test)
    x = table[FEATURES].to_numpy()
    reference = (test[FEATURES].to_numpy() - x.mean(0)) / np.where(np.ptp(x, 0) == 0, 1, x.std(0))
    assert np.allclose(given.test[0], reference, atol=1e-5)


@pytest.mark.parametrize("missing", ["drop", "mean"])
def test_missing_values_are_treated_first(missing):
    table = frame()
    table.loc[[3, 50], "income"] = np.nan
    data = ud.load(table, ud.IID(), 1, client="site", missing=missing, normalize=True)
    x = table[FEATURES]
    x = x.dropna() if missing == "drop" else x.fillna(x.mean())
    assert np.allclose(data.take(data.store, torch.arange(len(x)))[0], by_hand(x), atol=1e-5)


def test_moments_in_batches_far_from_zero_are_those_of_numpy(monkeypatch):
    x = np.random.default_rng(0).normal(1e6, 1, (1000, 3))
    x[:, 1] = 0.1  # a constant whose mean is rounded
    found = normalize.Moments()
    for begin in range(0, 1000, 7):
        found.add(x[begin : begin + 7])
    found.add(x[:0])
    assert np.allclose(found.scales().mean, x.mean(0), rtol=1e-12)
    assert np.allclose(found.scales().std, [x[:, 0].std(), 0, x[:, 2].std()], rtol=1e-7) and found.scales().std[1] == 0
    monkeypatch.setattr(normalize, "CHUNK", 20)
    pair = (x[:, :2].copy(), np.arange(1000) % 2)
    data = ud.load(pair, ud.IID(), 1, normalize=True)
    assert data.store["mean"].dtype == torch.float64 and np.allclose(data.store["std"], [x[:, 0].std(), 1])


def test_unscaled_columns_are_learned_only_when_normalized():
    table = frame(rows=600).assign(income=np.random.default_rng(1).normal(400, 200, 600))
    options = {"client": "site", "test_fraction": 0.2}
    local = ud.Local(epochs=2, batch_size=16, lr=0.1)
    scores = {}
    for normalized in (False, True):
        data = ud.load(table, ud.ByKey(), normalize=normalized, **options)
        scores[normalized] = ud.train("mlp", data, rounds=5, local=local).history[-1]["accuracy"]
    assert scores[False] < 0.7 and scores[True] > 0.9


def test_the_identity_of_data_that_are_not_normalized_stays_as_it_was():
    table = frame()
    table.to_csv("t.csv", index=False)
    plain, other = (ud.load("t.csv", ud.ByKey(), client="site", normalize=on) for on in (False, True))
    assert set(plain.store) == {"x", "y"} and plain.digests != other.digests
    assert torch.equal(plain.store["x"], other.store["x"])
    assert len(list(cache.cache_folder().iterdir())) == 1  # the same file, as the statistics are not in the values
    again = ud.load(table, ud.ByKey(), client="site", normalize=True)
    assert again.digests == other.digests and again.origin is None and other.origin["normalize"] is True


def test_a_warning_names_the_extreme_columns_once(caplog):
    table = frame()
    for _ in range(2):
        ud.load(table, ud.ByKey(), client="site")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "normalize=True" in said[0] and "normalize = true" in said[0]
    income, ratio = table["income"].std(ddof=0), table["ratio"].std(ddof=0)
    assert f"'income' has a standard deviation of {income:,.0f}, 'ratio' has a standard" in said[0]
    assert f"{ratio:.3g}" in said[0] and "fixed" not in said[0]
    caplog.clear()
    warn_once.warned.clear()
    ud.load(table, ud.ByKey(), client="site", normalize=True)
    ud.load(table, ud.ByKey(), client="site", drop=["income", "fixed"])  # a factor of 100 or less
    ud.load(table.assign(label=1), ud.ByKey(), client="site", columns=["fixed"])
    assert not caplog.records


@pytest.mark.parametrize("x", [np.zeros((6, 2), int), np.zeros((6, 2, 2), "float32"), {"a": np.zeros((6, 2))}])
def test_what_cannot_be_normalized_is_refused(x):
    with pytest.raises(ud.UndriftError, match=r"normalize is for images .* tables and arrays with one row of floats"):
        ud.load((x, np.arange(6) % 2), ud.IID(), 2, normalize=True)


def test_normalized_clients_with_test_sets_of_their_own_and_lanes(tmp_path):
    x, y = frame()[FEATURES].to_numpy("float32"), frame()["label"].to_numpy()
    for split, rows in (("train", 20), ("test", 6)):
        (tmp_path / "pfl" / split).mkdir(parents=True)
        for i in range(3):
            np.savez(f"pfl/{split}/{i}.npz", data={"x": x[i::3][:rows], "y": y[i::3][:rows]})
    data = ud.load("pfl", ud.ByKey(), normalize=True)
    trained = np.concatenate([x[i::3][:20] for i in range(3)]).astype(np.float64)
    std = np.where(np.ptp(trained, 0) == 0, 1, trained.std(0))
    assert np.allclose(data.client_test[1][0], (x[1::3][:6] - trained.mean(0)) / std, atol=1e-4)
    results = [
        ud.train("mlp", data, rounds=2, local=ud.Local(epochs=1, batch_size=8, lr=0.1), engine=engine)
        for engine in ("plain", "lanes")
    ]
    one, two = (torch.cat([t.flatten() for t in result.params.values()]) for result in results)
    assert torch.allclose(one, two, atol=1e-5) and torch.isfinite(one).all()


def test_in_experiment_files_and_on_the_command_line(tmp_path):
    frame().to_csv("t.csv", index=False)
    text = {"model": "logistic", "rounds": 1, "local": {"steps": 1, "lr": 0.1},
            "data": {"name": "t.csv", "partition": "ByKey()", "client": "site", "normalize": True}}  # fmt: skip
    ud.train(**arguments(checked(text, "a test")), out=tmp_path / "run")
    assert "normalize = true" in (tmp_path / "run/config.toml").read_text()
    other = arguments(checked(text | {"data": text["data"] | {"normalize": False}}, "a test"))
    with pytest.raises(ud.UndriftError, match="was started with samples standardised, not take"):
        ud.train(**other, out=tmp_path / "run", resume=True)
    command = ["data", "show", "t.csv", "--client", "site", "--partition", "ByKey()", "--normalize"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "very different scales" not in shown.output
    lines = [line.split()[0] for line in shown.output.splitlines() if line.strip().startswith("H")]
    assert lines == ["H03", "H5", "H11"]  # by name, while their numbers are in order of appearance
    assert ud.load("t.csv", ud.ByKey(), client="site").client_names == ["H03", "H11", "H5"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_sweep_gives_a_warning_once(tmp_path, capfd, caplog, workers):
    """One worker or several: the process of the sweep reads the data first."""
    frame().to_csv("t.csv", index=False)
    text = 'model = "logistic"\nrounds = 1\n[local]\nsteps = 1\nlr = 0.1\n'
    data = f'[data]\nname = "{(tmp_path / "t.csv").as_posix()}"\npartition = "ByKey()"\nclient = "site"\n'
    points = 'validation_fraction = 0.2\n[sweep]\n"local.lr" = [0.1, 0.2]\n'
    (tmp_path / "e.toml").write_text(text + data + points)
    done = CliRunner().invoke(app, ["sweep", "e.toml", "--out", "s", "--workers", str(workers)])
    assert done.exit_code == 0, done.output
    assert len(json.loads((tmp_path / "s/sweep.json").read_text())["settings"]) == 2
    here = [record.levelname for record in caplog.records if "very different scales" in record.getMessage()]
    assert here.count("WARNING") == 1
    assert "very different scales" not in "".join(capfd.readouterr())  # of the workers


def test_a_worker_of_a_sweep_gives_no_warnings_about_data(monkeypatch, caplog):
    frame().to_csv("t.csv", index=False)
    text = {"model": "logistic", "rounds": 1, "local": {"steps": 1, "lr": 0.1},
            "data": {"name": "t.csv", "partition": "ByKey()", "client": "site", "test_fraction": 0.2}}  # fmt: skip
    for parent in ("the sweep", None):  # a worker, and the process of the sweep itself
        caplog.clear()
        warn_once.warned.clear()
        monkeypatch.setattr(parallel, "parent_process", lambda parent=parent: parent)
        assert parallel._train_one(None, text, f"runs/{parent}", "a test", 1, lambda: None) is None
        warned = any("very different scales" in record.getMessage() for record in caplog.records)
        assert warned == (parent is None)
