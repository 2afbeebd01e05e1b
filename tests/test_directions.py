"""Runs with metrics of one name, of which lower values are better in one and higher ones in the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import undrift as ud
from undrift import metrics
from undrift.columns import direction, directions
from undrift.errors import UndriftError
from undrift.files import seal
from undrift.metrics import get_metrics
from undrift.tools.cli import app
from undrift.tools.compare import lower_is_better_in
from undrift.tools.report.gather import gather
from undrift.tools.run_folders import RunFolder
from undrift.tools.study.file import Cell
from undrift.tools.study.run import Outcome, lower_of

LOCAL = ud.Local(epochs=1, batch_size=32, lr=0.2)
RULE = ud.EarlyStopping("validation_grade", patience=2)
FILE = """
model = "logistic"
rounds = 3
metrics = ["grade"]
[data]
name = "digits"
clients = 4
validation_fraction = 0.2
[local]
epochs = 1
batch_size = 32
lr = 0.1
"""
STUDY = """
[study]
tuning_seeds = [100]
seeds = [0, 1]
[study.tune]
local.lr = [0.001, 0.2]
[study.methods]
FedAvg = "FedAvg()"
FedNova = "FedNova()"
"""


def confidence(higher: bool | None):
    """A metric that grows from round to round."""

    def grade(output, target):
        return output.softmax(-1).amax(-1)

    if higher is not None:
        grade.higher_is_better = higher
    return grade


@pytest.fixture(scope="module")
def data():
    return ud.load("digits", ud.IID(), clients=4, validation_fraction=0.2, client_test_fraction=0.2)


def train(data, higher: bool | None, out: Path | None = None, rounds: int = 4, **settings) -> ud.Result:
    return ud.train(
        "logistic", data, rounds=rounds, local=LOCAL, metrics={"grade": confidence(higher)}, out=out, **settings
    )


@pytest.fixture(scope="module")
def folders(data, tmp_path_factory):
    """Runs whose rows differ in nothing but the worst tenth of the clients."""
    here = tmp_path_factory.mktemp("runs")
    for name, higher in (("higher", True), ("lower", False), ("by its name", None)):
        train(data, higher, here / name)
    return here


def command(*arguments: str, exit_code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == exit_code, found.output
    return found.output + str(found.exception or "")


def bests(run: RunFolder) -> tuple[float, float, float]:
    return tuple(run.best(name) for name in ("grade", "validation_grade", "client_grade_worst"))


@pytest.mark.parametrize("order", [("higher", "lower"), ("lower", "higher")])
def test_reading_one_run_leaves_the_other_as_it_was(folders, order):
    alone = {name: bests(RunFolder.read(folders / name)) for name in order}
    runs = {name: RunFolder.read(folders / name) for name in order}
    assert {name: bests(run) for name, run in runs.items()} == alone
    grades = [row["grade"] for row in runs["higher"].rows]
    assert grades == [row["grade"] for row in runs["lower"].rows] and grades == sorted(grades)
    assert (runs["higher"].best("grade"), runs["lower"].best("grade")) == (grades[-1], grades[0])
    target = sum(grades) / len(grades)
    assert runs["lower"].until("grade", target) is runs["lower"].rows[0]
    assert runs["higher"].until("grade", target) is not runs["higher"].rows[0]


@pytest.mark.parametrize("order", [("higher", "lower"), ("lower", "higher")])
def test_a_report_judges_each_run_by_its_own(folders, order):
    alone = {name: gather([folders / name]) for name in order}
    both = gather([folders / name for name in order])
    for group, run, name in zip(both["groups"], both["runs"], order, strict=True):
        (one,), (own,) = alone[name]["groups"], alone[name]["runs"]
        assert group["cells"] | {"time": ""} == one["cells"] | {"time": ""} and group["figures"] == one["figures"]
        assert run["records"] == own["records"]
        assert len(run["records"]["test.grade"]["value"]) == (4 if name == "higher" else 1)
        assert run["records"]["test.grade"]["lower"] == (name == "lower")


def test_runs_that_disagree_are_not_compared(folders):
    both = [str(folders / "higher"), str(folders / "lower")]
    said = command("compare", *both, exit_code=1)
    assert "These runs cannot be compared by 'grade': lower values are better in " in said
    assert said.index(both[1]) < said.index(f"and higher ones in {both[0]}")
    for other in ("loss", "validation_loss", "client_grade_std"):
        command("compare", *both, "--metric", other)
    command("compare", both[0], str(folders / "by its name"))


def test_a_run_without_the_metric_does_not_disagree(folders, data, tmp_path):
    ud.train("logistic", data, rounds=1, local=LOCAL, out=tmp_path / "none")
    lower, other = RunFolder.read(folders / "lower"), RunFolder.read(tmp_path / "none")
    assert lower_is_better_in([other, lower], "grade") and lower_is_better_in([lower, other], "validation_grade")
    assert not lower_is_better_in([other, lower], "accuracy") and lower_is_better_in([other, lower], "loss")


def test_the_worst_tenth_is_that_of_the_run(folders):
    """Also of functions, which say which way is better as objects do."""
    higher, lower = (RunFolder.read(folders / name).rows[-1] for name in ("higher", "lower"))
    assert higher["client_grade"] == pytest.approx(lower["client_grade"])
    assert higher["client_grade_worst"] < higher["client_grade"] < lower["client_grade_worst"]


@pytest.mark.parametrize("higher", [True, False])
def test_early_stopping_follows_the_run_whatever_happens_beside_it(folders, data, higher):
    """While it trains, the other run is read, and another one with its metric is trained."""
    others = []

    def beside(row):
        others.append(RunFolder.read(folders / ("lower" if higher else "higher")))
        train(data, not higher, rounds=1)

    alone = train(data, higher, stop_when=RULE)
    found = train(data, higher, stop_when=RULE, on_round=beside)
    assert others and len(found.history) == len(alone.history) == (4 if higher else 3)
    assert found.stopped_early == alone.stopped_early
    assert bool(found.stopped_early) == (not higher)


def test_a_rule_that_is_called_by_another_knows_what_is_registered(monkeypatch):
    rows = [{"round": t, "validation_grade": value} for t, value in enumerate((3.0, 2.0, 1.0), 1)]
    assert RULE(rows)
    monkeypatch.setitem(metrics.METRICS, "grade", confidence(False))
    assert RULE(rows) is None


def test_one_of_undrifts_under_another_name_keeps_its_direction(tmp_path):
    x, y = torch.randn(60, 3), torch.randn(60)
    data = ud.FederatedDataset.from_clients([(x[:30], y[:30])], test=(x[30:], y[30:]))
    model, local = torch.nn.Linear(3, 1), ud.Local(steps=1, lr=0.1)
    ud.train(model, data, rounds=2, local=local, loss="mse", metrics={"score": "mae"}, out=tmp_path / "r")
    run = RunFolder.read(tmp_path / "r")
    assert run.lower("score") and run.best("score") == min(row["score"] for row in run.rows)


def test_preparing_another_run_changes_nothing(folders):
    run = RunFolder.read(folders / "lower")
    before = bests(run)
    get_metrics({"grade": confidence(True)}, torch.nn.functional.cross_entropy)
    assert bests(run) == before and bests(RunFolder.read(folders / "lower")) == before


def test_folders_that_do_not_say_are_judged_by_the_name(folders, data, tmp_path):
    train(data, False, tmp_path / "old")
    body = json.loads((tmp_path / "old/run.json").read_bytes())["body"]
    for said in ({}, {"lower_is_better": None}, {"lower_is_better": {"grade": 3}}):
        kept = {name: value for name, value in body["choices"].items() if name != "lower_is_better"}
        seal(tmp_path / "old/run.json", {**body, "choices": kept | said})
        run = RunFolder.read(tmp_path / "old")
        assert not run.lower("grade") and run.lower("loss") and run.rows
    (tmp_path / "old/run.json").unlink()  # which may be missing
    assert RunFolder.read(tmp_path / "old").best("grade") == max(
        row["grade"] for row in RunFolder.read(tmp_path / "old").rows
    )


# ---- sweeps and studies ------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch, one_core):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.toml").write_text(FILE)
    (tmp_path / "s.toml").write_text(FILE + STUDY)
    yield tmp_path
    metrics.METRICS.pop("grade", None)


def register(higher: bool | None) -> None:
    ud.register_metric("grade", confidence(higher))


def test_a_study_keeps_what_it_found_when_the_metric_has_turned(here):
    settings = {}
    for name, higher in (("up", True), ("down", False)):
        register(higher)
        command("study", "s.toml", "--workers", "1", "--out", name)
        settings[name] = [c["setting"]["local.lr"] for c in json.loads(Path(name, "study.json").read_bytes())["cells"]]
    assert settings == {"up": [0.2, 0.2], "down": [0.001, 0.001]}
    found = {name: Path(name, "study.md").read_text() for name in settings}
    for name, higher in (("up", False), ("down", True)):  # whose runs are finished: only their folders are read
        register(higher)
        command("study", "s.toml", "--workers", "1", "--out", name)
        assert Path(name, "study.md").read_text() == found[name]
    said = command("compare", "up", "down", exit_code=1)
    assert "cannot be compared by 'grade'" in said


def test_a_sweep_whose_runs_disagree_chooses_none(here):
    for higher, grid in ((True, "local.lr=[0.001]"), (False, "local.lr=[0.001, 0.2]")):
        register(higher)
        said = command("sweep", "e.toml", "--workers", "1", "--grid", grid, "--out", "w", exit_code=0 if higher else 1)
    assert "cannot be compared by 'validation_grade': lower values are better in w/local.lr=0.2" in said


def test_a_cell_whose_runs_disagree_has_no_choice():
    rows = [{"round": 1, "grade": 0.5, "validation_grade": 0.5}]
    ways = {"a": {"grade": True}, "b": {"grade": False}, "c": {}}
    runs = [RunFolder(Path(name), {}, rows, directions=said) for name, said in ways.items()]
    outcome = Outcome(Cell("", "FedAvg", {}, "FedAvg()", {}))
    outcome.tried = [({}, [("validation_grade", 0.5)])]
    assert lower_of(outcome, runs[:1]) and not lower_of(outcome, runs[1:2])
    with pytest.raises(UndriftError, match="cannot be compared by 'validation_grade'"):
        lower_of(outcome, runs[:2])
    with pytest.raises(UndriftError, match=r"run in c does not say whether .* 'validation_grade' .*higher_is_better"):
        lower_of(outcome, runs[2:])


def test_nothing_is_chosen_by_a_metric_that_does_not_say_which_way_is_better(here):
    """Before anything is trained, and among runs that are there already."""
    sentence = "settings are chosen by 'grade', and nothing says whether lower or higher values of it are better"
    register(None)
    command("sweep", "e.toml", "--workers", "1", "--seeds", "2", "--out", "seeds")  # where nothing is chosen
    grid = ("sweep", "e.toml", "--workers", "1", "--grid", "local.lr=[0.1, 0.2]", "--out", "w")
    assert sentence in command(*grid, exit_code=1)
    assert sentence in command("study", "s.toml", "--workers", "1", exit_code=1)
    assert not Path("w").exists() and not Path("runs").exists()
    for lr in (0.1, 0.2):
        command("sweep", "e.toml", "--workers", "1", "--grid", f"local.lr=[{lr}]", "--out", "w")
    register(False)
    assert "local.lr=0.1,seed=0 does not say whether lower or higher values of 'validation_grade'" in command(
        *grid, exit_code=1
    )
    assert "warning: nothing says whether lower or higher values of grade are better" in command("compare", "w")
    command(*grid[:-1], "again")
    assert json.loads(Path("again/sweep.json").read_bytes())["best"] == "local.lr=0.1"


def test_names_of_undrifts_metrics_say_which_way_is_better():
    scalar = {name for name, metric in metrics.METRICS.items() if getattr(metric, "scalar", True)}
    assert all(direction(name, directions(metrics.METRICS)) is not None for name in scalar)
    assert direction("error_rate") is direction("brier") is direction("validation_distance") is None
    assert direction("client_top2_accuracy_worst") is False and direction("tuned_quantile_loss") is True
