"""`ud.register_data`: functions that return tables, arrays, or data that are split into clients."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import undrift as ud
from undrift.data import sources
from undrift.tools.cli import app
from undrift.tools.config import checked
from undrift.tools.experiment import arguments

LOCAL = ud.Local(steps=1, batch_size=4, lr=0.1)
refused = ud.UndriftError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))


def frame(rows=60):
    rng = np.random.default_rng(0)
    made = pd.DataFrame(rng.normal(size=(rows, 3)), columns=list("abc"))
    return made.assign(note="n", ill=np.arange(rows) % 2, site=np.array(["H5", "H3", "H11"])[np.arange(rows) % 3])


OPTIONS = {"label": "ill", "client": "site", "drop": ["note"], "missing": "mean", "normalize": True}


@pytest.mark.parametrize("returned", [frame, lambda: (frame(), None), lambda: [frame(), None]])
def test_a_frame_takes_the_options_of_a_file(returned):
    table = frame()
    ud.register_data("df", returned)
    data = ud.load("df", ud.ByKey(), **OPTIONS)
    wanted = ud.load(table, ud.ByKey(), **OPTIONS)
    assert data.client_names == ["H5", "H3", "H11"] and data.origin["client"] == "site"
    assert torch.equal(data.store["x"], wanted.store["x"]) and len(data.test[1]) == 12  # a fifth, as of all names
    for options, said in (
        ({}, "no column 'label'; its columns are a, b, c, note, ill, site"),
        ({"label": "ill"}, r"drop=\['note', 'site'\]"),
        (OPTIONS | {"resize": 8}, "resize does not suit a table of numbers"),
    ):
        with pytest.raises(refused, match=said):
            ud.load("df", ud.IID(), 2, **options)


def test_two_frames_are_train_and_test():
    ud.register_data("df", lambda: (frame(), frame(9)))
    data = ud.load("df", ud.ByKey(), **OPTIONS)
    assert len(data.test[1]) == 9 and data.sizes.sum() == 60


def test_arrays_and_datasets_as_before():
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    for made in (((x, y), None), ((x, y), (x[:5], y[:5])), (TensorDataset(x, y), None)):
        ud.register_data("arrays", lambda made=made: made)
        data = ud.load("arrays", ud.IID(), 3)
        assert len(data) == 3 and len(data.test[1]) == (5 if made[1] else 6)
    with pytest.raises(refused, match=r"client is for tables, but the function of arrays returns arrays .* DataFrame"):
        ud.load("arrays", ud.ByKey(), client="site")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), r"two arrays; write \(\(x, y\), None\)"),
        (None, "not NoneType"),
        (7, "not int"),
        (np.zeros((4, 2)), "not ndarray"),
    ],
)
def test_what_else_a_function_returns_is_refused(made, said):
    ud.register_data("odd", lambda: made)
    with pytest.raises(refused, match=r"The function of odd must return a DataFrame, a FederatedDataset.*" + said):
        ud.load("odd", ud.IID(), 2)


def hospitals():
    rng = np.random.default_rng(0)
    own = {f"H{n}": (rng.normal(size=(n, 3)).astype("float32"), np.arange(n) % 2) for n in (12, 7, 9)}
    return ud.FederatedDataset.from_clients(own, test=own["H12"])


@pytest.mark.parametrize("partition", [None, "ByKey()", ud.ByKey()])
def test_data_that_are_split_keep_their_clients(partition, tmp_path):
    ud.register_data("hospitals", hospitals)
    data = ud.load("hospitals", partition, seed=3)
    assert data.client_names == ["H12", "H7", "H9"] and data.digests == hospitals().digests
    assert data.origin["partition"] == "ByKey()" and data.augment is None
    with_noise = ud.load("hospitals", partition, augment=lambda x, key: x)
    assert with_noise.augment is not None and hospitals().augment is None


def test_arguments_that_would_change_split_data_are_refused():
    ud.register_data("hospitals", hospitals)
    with pytest.raises(refused, match=r"has its own clients: the partition must be ByKey\(\) or left out, not IID\(\)"):
        ud.load("hospitals", ud.IID(), 3)
    for argument, value in {
        "clients": 3, "server_fraction": 0.1, "test_fraction": 0.1, "test_size": 4, "label": "ill", "client": "site",
        "columns": ["a"], "drop": ["a"], "missing": "mean", "resize": 8, "normalize": True, "lazy": True,
        "test": (torch.zeros(2, 3), torch.zeros(2)),
    }.items():  # fmt: skip
        with pytest.raises(refused, match=f"{argument} does not suit hospitals"):
            ud.load("hospitals", ud.ByKey(), **{argument: value})


def test_an_experiment_may_leave_the_partition_out_and_its_run_resumes(tmp_path):
    ud.register_data("hospitals", hospitals)
    text = {"model": "logistic", "rounds": 1, "data": {"name": "hospitals"}, "local": {"steps": 1, "lr": 0.1}}
    ud.train(**arguments(checked(text, "a test")), out=tmp_path / "run")
    assert 'partition = "ByKey()"' in (tmp_path / "run/config.toml").read_text()
    done = CliRunner().invoke(app, ["resume", str(tmp_path / "run"), "--set", "rounds=2"])
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    with pytest.raises(refused, match=r"must be ByKey\(\) or left out, not IID\(\)"):
        arguments(checked(text | {"data": text["data"] | {"partition": "IID()"}}, "a test"))
    digits = checked(text | {"data": {"name": "digits", "clients": 4}}, "a test")
    assert arguments(digits)["data"].origin["partition"] == "IID()"


CLINIC = """
import pandas as pd, undrift as ud

def clinic():
    table = pd.read_csv("raw.csv")
    return table.assign(c=table["c"].fillna(0) * 2)

ud.register_data("registered_clinic", clinic)
"""


def test_own_preprocessing_with_natural_clients_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    table = frame()
    table.loc[4, "c"] = np.nan
    table.to_csv("raw.csv", index=False)
    (tmp_path / "registered_clinic.py").write_text(CLINIC)
    (tmp_path / "e.toml").write_text(
        'model = "logistic"\nrounds = 1\n[local]\nsteps = 1\nlr = 0.1\n[data]\nname = "registered_clinic"\n'
        'partition = "ByKey()"\nlabel = "ill"\nclient = "site"\ndrop = ["note"]\nnormalize = true\n'
    )
    done = CliRunner().invoke(app, ["run", "e.toml", "--import", "registered_clinic", "--out", "run"])
    assert done.exit_code == 0 and "accuracy" in done.output, done.output
    assert '"names": ["H5", "H3", "H11"]' in (tmp_path / "run/partition.json").read_text()
    command = ["data", "show", "registered_clinic", "--import", "registered_clinic", "--label", "ill", "--client"]
    shown = CliRunner().invoke(app, [*command, "site", "--drop", "note", "--partition", "ByKey()"])
    assert shown.exit_code == 0 and re.findall(r"^\s*(H\d+)", shown.output, re.M) == ["H3", "H5", "H11"]


def test_split_data_are_shown_with_their_own_clients():
    calls = []
    ud.register_data("hospitals", lambda: calls.append(1) or hospitals())
    shown = CliRunner().invoke(app, ["data", "show", "hospitals"])
    assert shown.exit_code == 0 and "hospitals, ByKey()" in shown.output and len(calls) == 1
    assert sources.FUNCTIONS["hospitals"]() is not sources.FUNCTIONS["hospitals"]()  # it was not replaced
    assert re.findall(r"^\s*(H\d+)", shown.output, re.M) == ["H7", "H9", "H12"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "the data frame has no column 'label'; .*: --label …, --client …."),
        (["--label", "ill"], "leave it out: --drop note --drop 'two words' --drop site."),
        (["--label", "ill", "--drop", "nte"], "^--drop must name features of the data frame; 'nte' is none of"),
        (["--label", "ill", "--client", "site", "--missing", "most"], '^--missing must be "drop" or "mean"'),
        (["--label", "ill", "--resize", "8"], "^--resize does not suit a table of numbers"),
        (["--label", "ill", "--resize", "-1"], "^--resize must be a size such as 32, not -1"),
        (["--partition", "ByKey()", "--clients", "3"], "leave --clients out"),
        (["--clients", "0"], "^--clients must be"),
        (["--label", "ill", "--columns"], "pass --missing drop or --missing mean"),
    ],
)
def test_errors_on_the_command_line_name_flags(options, said):
    table = frame().assign(**{"two words": "x"})[["a", "b", "c", "note", "two words", "site", "ill"]]
    if "--columns" in options:
        options = options[:-1]
        table = table[["a", "b", "ill"]].assign(b=np.nan)
    ud.register_data("df", lambda: table)
    shown = CliRunner().invoke(app, ["data", "show", "df", *options])
    assert isinstance(shown.exception, refused) and re.search(said, str(shown.exception)), shown.exception


def test_flags_in_messages_about_images_and_scales():
    from undrift.tools.cli_helpers import as_flags

    assert as_flags("such as resize=32, or resize=[height, width].") == "such as --resize 32."
    assert as_flags("normalize is for images; leave it out.") == "--normalize is for images; leave it out."
    assert as_flags("Write normalize=True.") == "Write --normalize."
    assert as_flags("The client must be known.") == "The client must be known."
    assert as_flags("seed=3, data_dir='x y'") == "--seed 3, --data-dir 'x y'"
