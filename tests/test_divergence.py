"""Runs that stay finite and have not learned: which they are, and how they are marked."""

from __future__ import annotations

import json
import logging
import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import undrift as ud
from tests.experiments import GOOD, StopError, stop_after, toml, undrift
from undrift.files import seal
from undrift.tools.cli import app
from undrift.tools.report.gather import gather
from undrift.tools.run_folders import RunFolder
from undrift.training.learning_checks import CHANCE, DIVERGED, divergence
from undrift.training.run_folder import recorded

LOG10 = math.log(10)
TINY = "[study]\ntuning_seeds = [100]\nseeds = [0, 1]\n[study.tune]\nlocal.lr = [0.3]\n[study.methods]\n"


def history(losses, accuracies=(), column: str = "loss", **last) -> list[dict]:
    """The rows of a run: an accuracy or None for each loss, and columns of the last row."""
    found = [{"round": t, column: loss} for t, loss in enumerate(losses, 1)]
    for row, accuracy in zip(found, accuracies, strict=False):
        if accuracy is not None:
            row[column.replace("loss", "accuracy")] = accuracy
    found[-1] |= last
    return found


def tenths(accuracy: float) -> dict:
    return {"class_accuracy": [accuracy] * 10}


STUCK = ([2.32] * 10, [0.1] * 10)


@pytest.mark.parametrize(
    ("rows", "kind", "what"),
    [
        (history([1e6], [0.1], **tenths(0.1)), DIVERGED, "the test loss ended at 1e+06, far above the 2.303 of chance"),
        (history([900.0] * 4, [0.1] * 4, **tenths(0.1)), DIVERGED, "with an accuracy of 0.1"),
        (history(*STUCK, **tenths(0.1)), CHANCE, "after 10 rounds, the model is no better than chance on 10 classes"),
        (history([5.0] * 10, [0.1] * 10, **tenths(0.1)), DIVERGED, "no better than chance"),
        (history([2.0, *[2.4] * 9], [0.8, *[0.1] * 9], **tenths(0.1)), CHANCE, "of 0.1 after 0.8 in round 1"),
        (history([1.0] * 4 + [600.0], [0.8] * 4 + [0.3], **tenths(0.3)), DIVERGED, "of 0.3 after 0.8 in round 1"),
        # A model that only knows the class of 95% of the samples.
        (history([5e4], [0.95], class_accuracy=[1.0, 0.0]), DIVERGED, "far above the 0.6931 of chance"),
        (history([0.8] * 10, [0.95] * 10, class_accuracy=[1.0, 0.0, None]), CHANCE, "on 2 classes"),
        # Every client's own models are bad, too.
        (history(*STUCK, **tenths(0.1), client_accuracy=0.12, client_loss=2.31, tuned_accuracy=0.4), CHANCE, "chance"),
        (history([1.0, 2.0, 3.0, 400.0]), DIVERGED, "the test loss ended at 400, and was 1 in round 1"),
        (history([1.0, 1e5]), DIVERGED, "the test loss ended at 1e+05"),
        (history([-1.0, -2.0, 3.0, 1e4]), DIVERGED, "ended at 1e+04, and was -1 in round 1"),
        (history([1.0, 1.0, 1.0, 1e4], column="client_loss"), DIVERGED, "the loss on clients' own test data ended"),
    ],
)
def test_runs_that_have_not_learned(rows, kind, what):
    found = divergence(rows, ["accuracy"], {})
    assert (found.kind, what in found.what) == (kind, True), found.what
    assert str(found)[0].isupper() and "learning rate" in str(found)


@pytest.mark.parametrize("column", ["validation_loss", "client_loss"])
def test_without_a_test_set_the_number_of_classes_decides(column):
    rows = history([1e6] * 4, [0.1] * 4, column)
    assert divergence(rows, ["accuracy"], {}, classes=10).kind == DIVERGED
    assert divergence(rows, ["accuracy"], {}) is None  # which is not known
    assert divergence(history(*STUCK, column), ["accuracy"], {}, classes=10).kind == CHANCE
    assert divergence(history(*STUCK, column), ["accuracy"], {}, classes=1) is None


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"round": 1, "clients": [0]}],  # never evaluated
        history([3.0, None], **tenths(0.1)),  # a run that is marked already
        history([3.0, math.nan], **tenths(0.1)),
        history([50.0, 500.0, 900.0], [0.1] * 3, **tenths(0.1)),  # too early
        history([2.32] * 9, [0.1] * 9, **tenths(0.1)),
        [{"round": t} for t in range(1, 96)] + history([2.32] * 4, [0.1] * 4, **tenths(0.1)),  # too few evaluations
        history([0.3 * 2**t for t in range(12)], [0.9] * 12, **tenths(0.9)),  # the loss rises beside a good accuracy
        history([0.5, 1.0, 2.0, 1e6], [0.7, 0.8, 0.84, 0.84], **tenths(0.84)),
        history([2.3 - 0.03 * t for t in range(10)], [0.1] * 10, **tenths(0.1)),  # it learns, if slowly
        history([0.7 - 0.04 * t for t in range(12)], [0.95] * 12, class_accuracy=[1.0, 0.0]),  # of a dominant class
        history([0.15] * 12, [0.95] * 12, class_accuracy=[1.0, 0.0]),
        history([2.3] * 10, [0.35] * 10, **tenths(0.35)),
        history(*STUCK, class_accuracy=[0.1]),  # of a test set with one class
        history(*STUCK, **tenths(0.1), client_accuracy=0.6, client_loss=1.1),  # clients have models of their own
        history(*STUCK, **tenths(0.1), client_accuracy=0.9, client_loss=4.0),
        history(*STUCK, **tenths(0.1), client_accuracy=0.1, client_loss=2.3, tuned_accuracy=0.9, tuned_loss=0.3),
        history([1.0, 50.0, 60.0, 90.0]),
        history([1.0, 9e3]),
        history([0.001, -0.5, -0.2, 0.2]),
        history([-3.0, -5.0, -4.0, 200.0]),
        history([4.3] * 20),
        [*history([1.0] * 4 + [1e4], f1=0.6), {"round": 6, "loss": 1e5, "f1": 0.7}],
        history([1.0] * 4 + [1e4], client_loss=0.5),
    ],
)
def test_runs_that_are_not_accused(rows):
    assert divergence(rows, ["accuracy", "f1"], {}) is None


def test_other_metrics_of_the_run_decide_with_their_direction():
    rows = [*history([1.0] * 4 + [1e4], grade=0.5), {"round": 6, "loss": 1e5, "grade": 0.4}]
    assert divergence(rows, ["grade"], {}).kind == DIVERGED
    assert divergence(rows, ["grade"], {"grade": True}) is None
    assert divergence(rows, [], {"grade": True}).kind == DIVERGED  # a column of a part


# ---- real runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Personal(ud.Part):
    """Clients keep nearly all of the model to themselves, so the shared one is hardly trained."""

    personal = ("1.*", "3.weight")


@pytest.fixture(scope="module")
def data():
    return ud.load("digits", ud.Dirichlet(0.3), clients=10, validation_fraction=0.1, client_test_fraction=0.2)


def train(data, lr: float = 0.2, rounds: int = 10, model="mlp", method="FedAvg()", **more) -> ud.Result:
    local = ud.Local(epochs=1, batch_size=32, lr=lr)
    return ud.train(model, data, method, rounds=rounds, local=local, participation=0.5, **more)


def layered() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)]
        return torch.nn.Sequential(*layers)


def split_of(x, y, clients: int = 10) -> ud.FederatedDataset:
    held = len(y) // 5
    parts = [(x[held + i :: clients], y[held + i :: clients]) for i in range(clients)]
    return ud.FederatedDataset.from_clients(parts, test=(x[:held], y[:held]))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    whole = ud.load("digits", ud.IID(), clients=1)
    return whole[0]


@pytest.mark.parametrize(
    ("lr", "rounds", "words"),
    [
        (1e7, 2, "far above the 2.303 of chance, with an accuracy of 0."),
        (1e7, 10, "Training has diverged: try a smaller learning rate"),
        (100.0, 10, "Training has diverged"),
        (3.0, 10, "no better than chance on 10 classes"),  # all units are dead
        (0.0, 10, "much too large or too small"),
        (1e-7, 10, "much too large or too small"),
    ],
)
def test_learning_rates_with_which_nothing_is_learned(data, caplog, lr, rounds, words):
    caplog.set_level(logging.WARNING, "undrift.nonfinite")
    found = train(data, lr, rounds)
    assert found.stopped is None and words in found.diverged and f"warning: {found.diverged}" in repr(found)
    assert [r.getMessage() for r in caplog.records if r.name == "undrift.nonfinite"] == [found.diverged]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rounds": 1},
        {"rounds": 3, "lr": 0.0},
        {"rounds": 9, "lr": 1e-7},
        {"lr": 1e-7, "evaluate_every": 5},
        {"method": ud.FedProx(0.1) + ud.ServerSGD(momentum=0.5)},
        {"method": "Scaffold()"},
        {"method": "FedDyn(0.1)"},
        {"model": "logistic", "lr": 1e4},  # a perceptron: the loss is in the thousands, the accuracy above 0.8
        {"loss": "squared_hinge"},
        {"metrics": ["f1"], "lr": 1e-7},
        {"faults": ud.Faults(dropout=0.3), "min_clients": 2},
        {"model": layered(), "method": Personal()},
        {"stop_when": ud.EarlyStopping("validation_loss", patience=1, min_delta=9.0), "rounds": 30},
    ],
)
def test_ordinary_runs_are_not_accused(data, settings):
    assert train(data, **settings).diverged is None


def test_a_shared_model_at_chance_whose_clients_have_good_ones(data):
    found = train(data, 0.3, 20, layered(), Personal())
    rows = [{k: v for k, v in row.items() if not k.startswith(("client_", "tuned_"))} for row in found.history]
    assert found.history[-1]["client_accuracy"] > 0.5 and found.diverged is None
    assert divergence(rows, ["accuracy"], {}).kind == CHANCE


def test_label_noise_and_labels_that_say_nothing():
    x, y = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn, kept = torch.randint(0, 10, y.shape), torch.rand(len(y)) < 0.4
    for noise, found in ((torch.where(kept, y, drawn), None), (drawn, "check the labels")):
        ran = train(split_of(x, noise), 0.5, 12)
        assert (ran.diverged is None) if found is None else (found in ran.diverged)


def test_a_class_with_most_of_the_samples():
    x, y = digits()
    data = split_of(x, (y == 3).long())
    slow, fast = train(data, 0.02), train(data, 1e7)
    assert slow.history[-1]["class_accuracy"] == [1.0, 0.0] and slow.diverged is None
    assert fast.history[-1]["accuracy"] > 0.85 and "Training has diverged" in fast.diverged


def test_regression():
    x, _ = digits()
    x = x.flatten(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        data, model = split_of(x, x @ torch.randn(64)), torch.nn.Linear(64, 1)
    more = {"model": model, "loss": "mse", "metrics": ["mae", "r2"]}
    assert train(data, 0.01, **more).diverged is None
    assert "the test loss ended at" in train(data, 0.3, 4, **more).diverged.lower()


def test_data_without_a_test_set(data):
    alone = deepcopy(data)
    alone.test_rows = None
    row = train(alone, 1e7, 4).history[-1]
    assert "loss" not in row and "validation_loss" in row
    assert "validation loss ended at" in train(alone, 1e7, 4).diverged


# ---- folders and commands ----------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_same_verdict_as_a_whole_one(data, tmp_path):
    whole = train(data, 0.0, out=tmp_path / "whole")
    with pytest.raises(StopError):
        train(data, 0.0, out=tmp_path / "cut", checkpoint_every=1, on_round=stop_after(6))
    assert "diverged" not in recorded(tmp_path / "cut")
    resumed = train(data, 0.0, out=tmp_path / "cut", resume=True)
    again = train(data, 0.0, out=tmp_path / "cut", resume=True)  # which only reads it
    assert whole.diverged == resumed.diverged == again.diverged
    for name in ("whole", "cut"):
        assert recorded(tmp_path / name)["diverged"]["kind"] == CHANCE
    assert RunFolder.read(tmp_path / "cut").diverged == RunFolder.read(tmp_path / "whole").diverged
    short = train(data, 0.0, 5, out=tmp_path / "short")
    assert short.diverged is None and recorded(tmp_path / "short")["diverged"] is None
    assert train(data, 0.0, 12, out=tmp_path / "short", resume=True).diverged
    assert RunFolder.read(tmp_path / "short").mark == CHANCE


def test_a_folder_is_judged_by_what_the_run_said_about_itself(data, tmp_path):
    train(data, 1e7, 4, out=tmp_path / "r")
    now, body = RunFolder.read(tmp_path / "r"), recorded(tmp_path / "r")
    assert now.diverged and now.mark == DIVERGED and not now.lost
    seal(tmp_path / "r/run.json", body | {"diverged": None})
    assert RunFolder.read(tmp_path / "r").mark is None
    seal(tmp_path / "r/run.json", body | {"diverged": {"kind": 3}})
    with pytest.raises(ud.UndriftError, match=r"run\.json is damaged"):
        RunFolder.read(tmp_path / "r")


@pytest.fixture
def here(tmp_path, monkeypatch, one_core):
    monkeypatch.chdir(tmp_path)
    settings = deepcopy(GOOD) | {"rounds": 4}
    settings["data"]["validation_fraction"] = 0.2
    Path("e.toml").write_text(toml(settings))
    return tmp_path


def test_the_commands_say_it(here):
    done = CliRunner().invoke(app, ["run", "e.toml", "--set", "local.lr=1e7", "--out", "r"], catch_exceptions=False)
    assert done.exit_code == 0 and done.stderr.startswith("warning: The test loss ended at")
    assert "Training has diverged: try a smaller learning rate" in done.stderr
    longer = CliRunner().invoke(app, ["resume", "r", "--rounds", "5"], catch_exceptions=False)
    assert longer.exit_code == 0 and longer.stderr.startswith("warning: The test loss ended at")
    fine = CliRunner().invoke(app, ["run", "e.toml", "--out", "fine"], catch_exceptions=False)
    assert fine.exit_code == 0 and "warning" not in fine.output
    said = undrift("compare", "wild=r", "fine", "--markdown", "t.md", "--latex", "t.tex", "--csv", "t.csv")
    note = f"wild: {RunFolder.read(Path('r')).diverged.what}"
    assert note in said and "1 (1 diverged)" in said
    assert f"- {note}" in Path("t.md").read_text() and "| 1 (1 diverged) |" in Path("t.md").read_text()
    assert f"% {note}" in Path("t.tex").read_text() and "1 (1 diverged)" in Path("t.tex").read_text()
    assert "ended at" not in Path("t.csv").read_text()
    payload = gather([Path("r"), Path("fine")])
    assert [group["cells"]["state"] for group in payload["groups"]] == ["finished, diverged", "finished"]
    assert [(run["mark"], bool(run["diverged"])) for run in payload["runs"]] == [("diverged", True), (None, False)]


def test_sweeps_mark_them(here):
    said = undrift("sweep", "e.toml", "--grid", "local.lr=[0.1, 1e7]", "--seeds", 2, "--workers", 1, "--out", "s")
    assert "2 (2 diverged)" in said and "best by validation accuracy: local.lr=0.1" in said
    assert "local.lr=10000000.0: the test loss ended at" in said and "(seed 0; 2 of 2 runs)" in said
    fine, lost = json.loads(Path("s/sweep.json").read_bytes())["settings"]
    assert fine["remark"] is None and not fine["diverged"] and lost["accuracy"]["mean"] < 0.3
    assert lost["diverged"] == lost["runs"] and lost["at_chance"] == [] and "ended at" in lost["remark"]


def test_studies_mark_them(here):
    Path("s.toml").write_text(
        f"{Path('e.toml').read_text()}\n{TINY}"
        + 'FedAvg = "FedAvg()"\nWild = { method = "FedAvg()", local.lr = [1e7] }\n'
    )
    said = undrift("study", "s.toml", "--workers", 1, "--out", "s")
    assert "Wild: the test loss ended at" in said and "2 (2 diverged)" in said
    assert "- Wild: the test loss ended at" in Path("s/study.md").read_text()
    wild = json.loads(Path("s/study.json").read_bytes())["cells"][1]
    assert wild["counted"] == "2 (2 diverged)" and "ended at" in wild["remark"] and wild["mean"] < 0.3
