"""How much clients' data differ, and the picture of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import undrift as ud
from undrift.data import partition_summary
from undrift.data.partition_summary import class_counts, heterogeneity, label_distance
from undrift.tools.cli import app, main


def test_the_distance_of_mixes():
    assert label_distance(np.array([[5, 5], [50, 50], [0, 0]])) == 0
    assert label_distance(np.array([[10, 0], [0, 10]])) == 0.5
    # By size: 30 samples at distance |1 − 0.75|, 10 at |0 − 0.75|.
    assert label_distance(np.array([[30, 0], [0, 10]])) == pytest.approx((30 * 0.25 + 10 * 0.75) / 40)


def test_dirichlet_from_near_iid_to_far_from_it():
    found = {
        p: heterogeneity(ud.load("digits", p, 10)) for p in ("IID()", "Dirichlet(100)", "Dirichlet(0.05)", "Shards(2)")
    }
    distances = {p: round(f["label_distance"], 3) for p, f in found.items()}
    assert distances["IID()"] < 0.02 < distances["Dirichlet(100)"] < 0.1 < 0.6 < distances["Dirichlet(0.05)"]
    assert found["Dirichlet(100)"]["label_distance_by_chance"] == pytest.approx(0.09, abs=0.03)
    assert found["Shards(2)"]["classes_per_client"] <= 2
    assert found["IID()"]["largest"] - found["IID()"]["smallest"] <= 1


def tags() -> ud.FederatedDataset:
    y = torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 1, 1]])
    pairs = [(torch.zeros(2, 1), y[:2]), (torch.zeros(1, 1), y[2:])]
    return ud.FederatedDataset.from_clients(pairs, task=ud.Task("binary_cross_entropy", classes=3))


def test_a_sample_with_several_labels_counts_for_each():
    assert class_counts(tags()).tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("clients", [5, 70])
def test_the_picture_is_drawn(tmp_path, clients):
    partition_summary.draw(ud.load("digits", ud.Dirichlet(0.1), clients), "digits", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "</svg>" in text and text.count("<path") > 10


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["data", "show", "digits", "--partition", "Dirichlet(0.1)", "--clients", "4"])
    assert done.exit_code == 0 and "1,438 samples over 4 clients" in done.output and "label distance: 0." in done.output
    assert (tmp_path / "digits-Dirichlet-0-1-4.png").stat().st_size > 5000
    done = CliRunner().invoke(app, ["data", "show", "digits", "--picture", "who.svg"])
    assert done.exit_code == 0 and (tmp_path / "who.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["digts"], "error: There is no data set called 'digts'. Did you mean 'digits'?\n"),
        (
            ["digits", "--partition", "Dirichlt(1)"],
            "error: There is no partition called 'Dirichlt'. Did you mean 'Dirichlet'?\n",
        ),
        (["digits", "--clients", "0"], "error: --clients must be a whole number from 1, not 0.\n"),
        (["digits", "--picture", "a.xyz"], "error: "),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["undrift", "data", "show", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(sentence) and not list(tmp_path.iterdir())
