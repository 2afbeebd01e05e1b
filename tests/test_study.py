"""Studies: settings are chosen per method and partition on validation data, and reported on fresh seeds."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.experiments import changed, toml, undrift
from undrift.errors import UndriftError
from undrift.tools import live_table, tables
from undrift.tools.cli import app
from undrift.tools.config import read
from undrift.tools.report import figures
from undrift.tools.report.gather import gather
from undrift.tools.run_folders import Label, RunFolder, find_runs, read_labels
from undrift.tools.study import results
from undrift.tools.study.file import Range, read_study
from undrift.tools.study.run import Outcome, new_point, prepare, run_study, validation_figure
from undrift.tools.study.search import Grid, Suggested

STUDY = """
model = "mlp"
engine = "plain"
rounds = 2
participation = 0.5
[data]
name = "digits"
clients = 4
validation_fraction = 0.2
client_test_fraction = 0.2
[local]
epochs = 1
batch_size = 32
[study]
tuning_seeds = [100]
seeds = [0, 1]
baseline = "FedAvg"
[study.tune]
local.lr = [0.001, 0.2]
[study.partitions]
IID = "IID()"
"label skew" = { data.partition = "Shards(5)", rounds = 3, local.steps = 2, local.epochs = "decay(1, 1)" }
[study.methods]
FedAvg = "FedAvg()"
Prox = { method = "FedProx(mu={mu})", mu = [0.1, 1.0], local.lr = 0.1 }
"""
SMALL = STUDY.replace(', local.steps = 2, local.epochs = "decay(1, 1)"', "")


@pytest.fixture
def here(tmp_path, monkeypatch, one_core):
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SMALL)
    return tmp_path


def understood(text: str):
    Path("s.toml").write_text(text)
    return read_study(read("s.toml"), "s.toml")


def rows(file: Path) -> list[dict]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


# ---- the file ----------------------------------------------------------------------------------------------------


def test_what_a_file_means(here):
    study = understood(SMALL)
    assert [(cell.partition, cell.method) for cell in study.cells] == [
        ("IID", "FedAvg"), ("IID", "Prox"), ("label skew", "FedAvg"), ("label skew", "Prox"),
    ]  # fmt: skip
    avg, prox = study.cells[2:]
    assert avg.choices == {"local.lr": [0.001, 0.2]} and prox.choices == {"local.lr": [0.1], "mu": [0.1, 1.0]}
    settings = prox.chosen({"local.lr": 0.1, "mu": 1.0}, 7, "s.toml")
    assert settings["method"] == "FedProx(mu=1.0)" and settings["seed"] == 7 and settings["rounds"] == 3
    assert settings["data"]["partition"] == "Shards(5)" and settings["local"]["lr"] == 0.1
    assert "study" not in settings and prox.fixed == {"local.lr": 0.1} and prox.tuned
    assert Grid(prox).ask() == [{"local.lr": 0.1, "mu": 0.1}, {"local.lr": 0.1, "mu": 1.0}]


def test_lists_of_partitions_are_values_and_lists_of_methods_are_choices(here):
    text = SMALL.replace('IID = "IID()"', "IID = { local.steps = [1, 2, 3, 4] }")
    cell = understood(text).cells[0]
    assert cell.settings["local"]["steps"] == [1, 2, 3, 4] and cell.choices == {"local.lr": [0.001, 0.2]}


def test_labels_in_other_scripts_have_folders_of_their_own(here):
    text = SMALL.split("[study.partitions]")[0].replace('"FedAvg"', '"甲"')
    study = understood(f'{text}[study.methods]\n"甲" = "FedAvg()"\n"乙" = "FedNova()"\n')
    names = [new_point(cell, {"local.lr": 0.1}, 0, "f").name for cell in study.cells]
    assert len(set(names)) == 2 and all(name.isascii() for name in names)


def test_a_metric_without_validation_data_is_named(here):
    row = {"round": 1, "accuracy": 0.5, "validation_accuracy": 0.5, "client_accuracy": 0.4}
    run = RunFolder(Path("r"), {}, [row])
    assert validation_figure(run, "accuracy", 1) == ("validation_accuracy", 0.5)
    with pytest.raises(UndriftError, match="'client_accuracy', which is not measured on validation data"):
        validation_figure(run, "client_accuracy", 1)


def test_without_partitions_and_with_labels_that_are_methods(here):
    text = SMALL.split("[study.partitions]")[0] + '[study.methods]\n"FedNova()" = {}\nFedAvg = "FedAvg()"\n'
    study = understood(text)
    assert [(cell.partition, cell.expression) for cell in study.cells] == [("", "FedNova()"), ("", "FedAvg()")]


WRONG = {
    "the seed 1 is in both study.seeds and study.tuning_seeds": ("tuning_seeds = [100]", "tuning_seeds = [100, 1]"),
    "study.seeds lists a seed twice": ("seeds = [0, 1]", "seeds = [0, 0]"),
    "add study.tuning_seeds": ("tuning_seeds = [100]\n", ""),
    "The key 'study.seeds' is missing": ("\nseeds = [0, 1]", ""),
    "There is no key 'study.baselin'. Did you mean 'baseline'?": ("baseline", "baselin"),
    "study.baseline is 'FedSGD'; the methods are FedAvg, Prox": ('"FedAvg"\n[study.tune', '"FedSGD"\n[study.tune'),
    "{mu} has no values": ("mu = [0.1, 1.0], ", ""),
    "'nu' is neither in braces": ("mu = [0.1, 1.0], ", "mu = [0.1, 1.0], nu = 3, "),
    "'local.lrr' is neither in braces": ("local.lr = [0.001", "local.lrr = [0.001"),
    "study.methods.Prox: data.clients must be the same for all methods": (
        "mu = [0.1, 1.0], ",
        "mu = 1, data.clients = 3, ",
    ),
    "seed must be the same for all partitions; set it in study.seeds": ('"IID()"', "{ seed = 3 }"),
    "has an empty list": ("[0.001, 0.2]", "[]"),
    "a grid needs lists of values, and local.lr is a range": ("[0.001, 0.2]", "{ low = 0.001, high = 0.2 }"),
    "a grid tries all, so leave it out": ("baseline", "trials = 3\nbaseline"),
    "add it, such as trials = 20": ("baseline", 'search = "random"\nbaseline'),
    "The key 'study.search' is wrong": ("baseline", 'search = "best"\nbaseline'),
    "must be a method in quotes": ('"FedAvg()"', "3"),
    "must be a partition in quotes": ('"IID()"', "3"),
    "There is no method called 'FedAvgg'": ('"FedAvg()"', '"FedAvgg()"'),
    "There is no partition called 'IDI'": ('"IID()"', '"IDI()"'),
    "data.validation_fraction is 0. Settings are chosen on validation data": ("validation_fraction = 0.2\n", ""),
    "study.metric is 'acuracy', which is not among the metrics of the runs. Did you mean 'accuracy'?": (
        "baseline",
        'metric = "acuracy"\nbaseline',
    ),
    "'client_accuracy_worst', which is not measured on validation data": (
        "baseline",
        'metric = "client_accuracy_worst"\nbaseline',
    ),
    "study.metric is 'confusion_matrix', which is not a number": ("baseline", 'metric = "confusion_matrix"\nbaseline'),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_files_are_refused_before_anything_runs(here, sentence):
    before, after = WRONG[sentence]
    assert before in SMALL
    Path("s.toml").write_text(SMALL.replace(before, after))
    done = CliRunner().invoke(app, ["study", "s.toml"])
    assert sentence in str(done.exception), done.exception
    assert [path.name for path in here.iterdir()] == ["s.toml"]


def metrics(text: str) -> list[list[str] | None]:
    return [cell.settings.get("metrics") for cell in prepare(understood(text), "s.toml").cells]


def test_the_metric_of_a_study_is_measured_by_its_runs(here):
    """In a study of which `metrics` does not list it, it is added, and other metrics stay."""
    for name in ("accuracy", "loss", "validation_accuracy"):
        assert metrics(SMALL.replace("baseline", f'metric = "{name}"\nbaseline')) == [None] * 4
    text = SMALL.replace("baseline", 'metric = "validation_f1"\nbaseline')
    assert metrics(text) == [["accuracy", "f1"]] * 4
    assert metrics(f'metrics = ["auroc", "f1"]\n{text}') == [["auroc", "f1"]] * 4
    assert metrics(f'metrics = "auroc"\n{text}') == [["auroc", "f1"]] * 4
    free = text.replace("[0.001, 0.2]", "0.2").replace("[0.1, 1.0]", "0.1")
    assert metrics(free.replace("validation_f1", "client_f1_worst")) == [["accuracy", "f1"]] * 4
    assert metrics(free.replace("validation_f1", "own_column")) == [None] * 4  # a part may add it to the history


def test_a_study_by_another_metric_and_its_folder_with_other_settings(here, monkeypatch):
    monkeypatch.setattr(results, "draw", lambda *drawn: [])
    text = SMALL.replace("baseline", 'metric = "auroc"\nbaseline').replace("rounds = 2", "rounds = 1")
    text = text.split("[study.partitions]")[0].replace("[0.001,", "[1e-9, 1e-8,")
    text += '[study.methods]\nFedAvg = "FedAvg()"\n'
    Path("s.toml").write_text(text)
    said = undrift("study", "s.toml", "--workers", 1)
    assert "last auroc" in said and "settings tried" in said
    assert "FedAvg: local.lr 0.2 chosen at the edge of its range; consider widening it" in said.splitlines()
    found = json.loads(Path("runs/s/study.json").read_text())
    assert found["chosen_by"] == "validation_auroc" and 0 < found["cells"][0]["tried"][0]["validation"][0] < 1
    Path("s.toml").write_text(text.replace('"auroc"', '"f1"'))
    with pytest.raises(UndriftError, match="is a run with other settings; choose another --out for this study"):
        undrift("study", "s.toml", "--workers", 1)


def test_ranges_that_are_none(here):
    for wrong in ("{ low = 1.0, high = 0.1 }", "{ low = 0.0, high = 1.0, log = true }", "{ low = 1.0 }"):
        with pytest.raises(UndriftError, match="range"):
            understood(
                SMALL.replace("[0.001, 0.2]", wrong).replace("baseline", 'search = "random"\ntrials = 2\nbaseline')
            )


def test_other_commands_say_what_a_study_is_for(here):
    with pytest.raises(UndriftError, match=r"s\.toml is a study; run it with: undrift study s\.toml"):
        undrift("run", "s.toml")


# ---- both phases -------------------------------------------------------------------------------------------------


def few_figures(monkeypatch) -> None:
    """Each takes a while, and they are drawn alike."""
    every = figures.figures
    keep = ("accuracy", "accuracy_over_bytes")
    monkeypatch.setattr(figures, "figures", lambda p: {name: own for name, own in every(p).items() if name in keep})


def test_a_study_from_the_file_to_the_paper(here, monkeypatch):
    few_figures(monkeypatch)
    said = undrift("study", "s.toml", "--workers", 1, "--out", "s")
    found = json.loads(Path("s/study.json").read_text())
    assert found["chosen_by"] == "validation_accuracy" and found["seeds"] == [0, 1]
    cells = {(cell["partition"], cell["name"]): cell for cell in found["cells"]}
    assert len(cells) == 4 and "label skew" in said and "difference to FedAvg [95% interval]" in said
    for cell in cells.values():
        best = max(cell["tried"], key=lambda one: one["validation"][0])
        assert cell["setting"] == best["setting"] and len(cell["tried"]) == 2
        assert cell["seeds"] == [0, 1] and all(0 < value < 1 for value in cell["values"]) and "client_worst" in cell
    assert cells["IID", "FedAvg"]["setting"] == {"local.lr": 0.2}
    runs = sorted(folder.name for folder in Path("s/tuning").iterdir() if folder.is_dir())
    assert runs[:2] == ["IID,FedAvg,local.lr=0.001,seed=100", "IID,FedAvg,local.lr=0.2,seed=100"] and len(runs) == 8
    final = sorted(folder.name for folder in Path("s/final").iterdir() if folder.is_dir())
    assert final[0] == "IID,FedAvg,local.lr=0.2,seed=0" and len(final) == 8
    last = rows(Path("s/final") / final[0] / "metrics.jsonl")[-1]
    assert cells["IID", "FedAvg"]["values"][0] == last["accuracy"]
    chosen = rows(Path("s/tuning") / runs[1] / "metrics.jsonl")[-1]  # on validation data, not on test data
    assert cells["IID", "FedAvg"]["tried"][1]["validation"] == [chosen["validation_accuracy"]]
    assert Path("s/study.tex").read_text().count(r"\midrule") == 2
    assert (
        Path("s/figures/accuracy.pdf").read_bytes().startswith(b"%PDF")
        and Path("s/figures/accuracy_over_bytes.pdf").exists()
    )
    names = [
        group["name"] for group in gather(find_runs([Path("s")]))["groups"]
    ]  # undrift report has the study's labels
    assert names == ["FedAvg, IID", "Prox, IID", "FedAvg, label skew", "Prox, label skew"]
    before = {file: file.read_bytes() for file in Path("s").glob("*/*/model.safetensors")}
    for gone in (Path("s/tuning") / runs[0] / "model.safetensors", Path("s/final") / final[3] / "model.safetensors"):
        gone.unlink()  # as if it had been killed before these runs were over
    written = Path("s/study.json").read_text()
    undrift("study", "s.toml", "--workers", 1, "--out", "s")
    assert {file: file.read_bytes() for file in before} == before and Path("s/study.json").read_text() == written
    labelled = [f"{name.split(',')[1]}=s/final/{name}" for name in final[:4]]
    said = undrift("compare", *labelled, "--baseline", "FedAvg", "--csv", "t/c.csv", "--latex", "c.tex", "--last", 2)
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["FedAvg", "Prox"]
    assert Path("t/c.csv").read_text().count("\n") == 3 and r"\toprule" in Path("c.tex").read_text()


def test_nothing_to_tune_means_no_tuning(here, monkeypatch):
    monkeypatch.setattr(results, "draw", lambda *drawn: [])  # which takes a while
    text = (
        SMALL.replace("[0.001, 0.2]", "0.2").replace("mu = [0.1, 1.0]", "mu = 0.1").replace("tuning_seeds = [100]", "")
    )
    Path("s.toml").write_text(text.replace("validation_fraction = 0.2\nclient", "client"))
    undrift("study", "s.toml", "--workers", 1)
    assert not Path("runs/s/tuning").exists() and len(list(Path("runs/s/final").glob("*/model.safetensors"))) == 8
    found = json.loads(Path("runs/s/study.json").read_text())
    assert found["chosen_by"] is None and found["search"] is None and found["cells"][1]["method"] == "FedProx(mu=0.1)"


class Made:
    """Runs that are not run: their validation accuracy is a function of their settings."""

    def __init__(self, value) -> None:
        self.value, self.asked = value, []

    def __call__(self, points, folder, ended):
        found = {}
        for point in points:
            self.asked.append(point.name)
            value = self.value(point.settings)
            loss = None if math.isnan(value) else 1.0
            row = {"round": 1, "clients": [0], "accuracy": 0.5, "validation_accuracy": value, "loss": loss}
            if value != math.inf:
                found[point.name] = RunFolder(folder / point.name, {"seed": point.settings["seed"]}, [row])
            ended(point)
        return found


def ran(text: str, value) -> tuple[list[Outcome], Made]:
    study = understood(text)
    prepare(study, "s.toml")
    outcomes, made = [Outcome(cell) for cell in study.cells], Made(value)
    run_study(outcomes, study, Path("out"), "s.toml", made)
    return outcomes, made


def test_each_cell_has_a_choice_of_its_own(here):
    def value(settings):
        skewed, lr = settings["data"]["partition"] == "Shards(5)", settings["local"]["lr"]
        return (lr if skewed else -lr) if settings["method"] == "FedAvg()" else float(settings["method"][-4:-1])

    outcomes, made = ran(SMALL, value)
    assert [o.chosen for o in outcomes] == [
        {"local.lr": 0.001}, {"local.lr": 0.1, "mu": 1.0}, {"local.lr": 0.2}, {"local.lr": 0.1, "mu": 1.0},
    ]  # fmt: skip
    assert all(len(o.runs) == 2 and o.left == 0 for o in outcomes) and len(made.asked) == 8 + 8


def test_methods_whose_settings_are_the_same_share_a_run_and_its_label(here):
    text = SMALL.split("[study.partitions]")[0] + '[study.methods]\nFedAvg = "FedAvg()"\nSame = "FedAvg()"\n'
    ran(text, lambda settings: 0.5)
    assert set(read_labels(Path("out/final")).values()) == {Label("", "FedAvg = Same")}


def test_a_setting_that_diverged_is_never_chosen_and_one_that_failed_decides_nothing(here):
    text = SMALL.replace("tuning_seeds = [100]", "tuning_seeds = [100, 101]")
    lost = lambda s: math.nan if (s["local"]["lr"], s["seed"]) == (0.2, 101) else s["local"]["lr"]  # noqa: E731
    outcomes, _ = ran(text, lost)
    assert outcomes[0].chosen == {"local.lr": 0.001} and outcomes[1].chosen == {"local.lr": 0.1, "mu": 0.1}  # the first
    outcomes, _ = ran(text, lambda s: math.nan)
    assert outcomes[0].chosen is None and "each diverged on a tuning seed" in outcomes[0].why and not outcomes[0].runs
    failed = lambda s: math.inf if (s["local"]["lr"], s["seed"]) == (0.001, 101) else 0.5  # noqa: E731
    outcomes, made = ran(text, failed)
    assert outcomes[0].chosen is None and "a tuning run failed" in outcomes[0].why and len(outcomes[1].runs) == 2
    assert not any(name.startswith("IID,FedAvg") and "seed=0" in name for name in made.asked)


def test_choices_at_the_edge_of_what_was_tried_are_mentioned(here):
    text = SMALL.replace("[0.001, 0.2]", "[0.2, 0.001, 0.05]").replace("mu = [0.1, 1.0]", "mu = [0.1, 1.0, 0.5]")
    peak = {"FedAvg()": 0.05, "FedProx(mu=0.5)": 0.1}  # IID: neither is at an edge

    def value(settings):
        if settings["data"]["partition"] == "Shards(5)":  # the lowest learning rate, and the highest mu
            return -settings["local"]["lr"] + (settings["method"] == "FedProx(mu=1.0)")
        return -abs(settings["local"]["lr"] - peak.get(settings["method"], 9))

    outcomes, _ = ran(text, value)
    Path("out").mkdir(exist_ok=True)
    blocks, asked = results.write(outcomes, understood(text), Path("out"))
    lines = [
        "label skew, FedAvg: local.lr 0.001 chosen at the edge of its range; consider widening it",
        "label skew, Prox: mu 1 chosen at the edge of its range; consider widening it",
    ]
    assert tables.notes(blocks) == lines
    assert Path("out/study.md").read_text().endswith("".join(f"\n- {line}" for line in lines) + "\n")
    cells = json.loads(Path("out/study.json").read_text())["cells"]
    assert [cell["at_edge"] for cell in cells] == [[], [], ["local.lr"], ["mu"]]
    assert [cell["settings_tried"] for cell in cells] == [3] * 4
    table = csv.DictReader(io.StringIO(Path("out/study.csv").read_text()))
    assert [row["at_edge"] for row in table] == ["", "", "local.lr", "mu"]
    assert "| settings tried | setting |" in tables.markdown(blocks, asked)
    cell = replace(outcomes[0].cell, choices={"local.lr": [1, 2, 3], "mu": [0.1, 0.2, 0.3], "pair": [1, 2]})
    assert cell.at_edge({"local.lr": 3, "mu": 0.1, "pair": 2}) == ["local.lr", "mu"]  # of two, both are edges
    row = {"name": "A", "setting": {"local.lr": 3, "mu": 0.1}, "at_edge": ["local.lr", "mu"]}
    both = "A: local.lr 3, mu 0.1 chosen at the edge of their ranges; consider widening them"
    assert tables.notes({"": [row]}) == [both]
    cell = replace(
        cell, choices={"a": Range(low=1, high=5), "b": [True, False, None], "c": ["x", "y", "z"], "d": [0.5]}
    )
    assert cell.at_edge({"a": 5, "b": True, "c": "x", "d": 0.5}) == ["a"]


def test_loss_is_minimised(here):
    text = SMALL.replace("baseline", 'metric = "loss"\nbaseline')
    study = understood(text)
    outcomes = [Outcome(cell) for cell in study.cells]

    def runner(points, folder, ended):
        found = Made(lambda s: 0.5)(points, folder, ended)
        for point in points:
            found[point.name].rows[-1]["validation_loss"] = point.settings["local"]["lr"]
        return found

    run_study(outcomes, study, Path("out"), "s.toml", runner)
    assert outcomes[0].chosen == {"local.lr": 0.001}


# ---- comparisons -------------------------------------------------------------------------------------------------


def test_compare_takes_what_a_pattern_names(here):
    text = toml(changed("data.validation_fraction", 0.2))
    Path("e.toml").write_text(text)
    undrift("sweep", "e.toml", "--seeds", 2, "--workers", 1, "--out", "runs/s")
    whole = undrift("compare", "runs/s")
    names = sorted(map(str, Path("runs/s").iterdir()))
    said = undrift("compare", *names)  # also the files that a sweep leaves beside its runs
    skipped = "skipped: runs/s/seed=0.json, runs/s/seed=1.json, runs/s/sweep.json (not a run)"
    assert skipped in said.splitlines() and whole in said
    (Path("runs") / "empty").mkdir()
    Path("runs/s/seed=1/model.safetensors").unlink()
    said = undrift("compare", "mine=runs/s", "runs/empty")
    assert "skipped: runs/s/seed=1 (not finished); runs/empty (not a run)" in said and "mine" in said
    labelled = undrift("compare", "mine=runs/s/seed=0*", "--markdown", "t.md")
    assert "| mine | 1 |" in Path("t.md").read_text() and "mine" in labelled
    with pytest.raises(UndriftError, match="is given twice, under different labels"):
        undrift("compare", "one=runs/s/seed=0", "other=runs/s/seed=0")
    with pytest.raises(UndriftError, match=r"is not finished. Finish it first: undrift resume"):
        undrift("compare", "runs/s/seed=1")
    with pytest.raises(UndriftError, match=r"runs/empty is not a run"):
        undrift("compare", "runs/empty")
    with pytest.raises(UndriftError, match=r"The experiment file nowhere.* does not exist"):
        undrift("compare", "mine=nowhere")
    undrift("run", "e.toml", "--set", "seed=1", "--set", "method=FedProx(mu=0.1)", "--out", "other")
    said = undrift("compare", "runs/s/seed=0", "other", "--baseline", "FedAvg()")
    assert (
        "warning: the groups have different seeds (FedAvg(): 0; FedProx(mu=0.1): 1)" in said
        and "no common seed" in said
    )


# ---- search ------------------------------------------------------------------------------------------------------

SEARCH = SMALL.replace("[0.001, 0.2]", "{ low = 0.001, high = 1.0, log = true }")
SEARCH = SEARCH.replace("baseline", 'search = "bayesian"\ntrials = 14\nbaseline')


def closeness(settings) -> float:
    return -abs(math.log(settings["local"]["lr"] / 0.03)) if settings["local"]["lr"] < 0.5 else math.nan


@pytest.mark.parametrize("kind", ["random", "bayesian"])
def test_search_is_seeded_and_repeats_its_trials(here, kind):
    pytest.importorskip("optuna")
    text = SEARCH.replace("bayesian", kind)
    first, made = ran(text, closeness)
    again, repeated = ran(text, closeness)
    assert made.asked == repeated.asked
    for o in first[::2]:
        assert len(o.tried) == 14 and all(0.001 <= values["local.lr"] <= 1 for values, _ in o.tried)
        best = max((figures[0][1], values["local.lr"]) for values, figures in o.tried if not math.isnan(figures[0][1]))
        assert o.chosen == {"local.lr": best[1]}
    for o in first[1::2]:
        assert {values["mu"] for values, _ in o.tried} == {0.1, 1.0}
    assert repr(first[0].tried) == repr(again[0].tried)
    if kind == "random":  # in one batch, trials with the same settings are one run
        assert len(made.asked) == len(set(made.asked)) < 2 * 28 + 8
    other, _ = ran(text.replace("[100]", "[99]"), closeness)
    assert other[0].tried[0][0] != first[0].tried[0][0]


def test_bayesian_search_learns_and_whole_numbers_stay_whole(here):
    pytest.importorskip("optuna")
    text = SEARCH.replace("low = 0.001, high = 1.0", "low = 1, high = 1000").replace("trials = 14", "trials = 30")
    cell = understood(text.replace("local.lr = {", "local.batch_size = {")).cells[0]
    far = []
    for seed in range(5):
        search, tried = Suggested(cell, "bayesian", 30, seed), []
        while asked := search.ask():
            tried += [values["local.batch_size"] for values in asked]
            search.tell([-abs(math.log(values["local.batch_size"] / 50)) for values in asked])
        assert len(tried) == 30 and all(isinstance(value, int) for value in tried)
        far.append([abs(math.log(value / 50)) for value in tried])
    assert sum(sum(own[20:]) for own in far) < 0.7 * sum(sum(own[:10]) for own in far)


def test_without_optuna_there_is_a_sentence(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UndriftError, match=r'search = "bayesian" needs Optuna: pip install "undrift\[search\]"'):
        prepare(understood(SEARCH), "s.toml")


# ---- killed ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_killed_study_goes_on_to_the_same_results(here, monkeypatch):
    monkeypatch.setattr(results, "draw", lambda *drawn: [])
    text = SMALL.replace("rounds = 2", "rounds = 12").replace("rounds = 3", "rounds = 12")
    Path("s.toml").write_text(text.split('"label skew"')[0] + text[text.index("[study.methods]") :])
    undrift("study", "s.toml", "--workers", 1, "--out", "whole")
    command = [sys.executable, "-m", "undrift", "study", "s.toml", "--workers", "1", "--out", "broken"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    end = time.monotonic() + 300
    while len(list(Path("broken").glob("*/*/metrics.jsonl"))) < 3:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("broken/study.json").exists()
    undrift("study", "s.toml", "--workers", 1, "--out", "broken")
    assert Path("whole/study.json").read_text() == Path("broken/study.json").read_text()
    files = sorted(file.relative_to("whole") for file in Path("whole").glob("*/*/metrics.jsonl"))
    assert len(files) == 8
    for file in files:
        assert rows("whole" / file) == rows("broken" / file)
        model = file.parent / "model.safetensors"
        assert ("whole" / model).read_bytes() == ("broken" / model).read_bytes()


# ---- what is going on --------------------------------------------------------------------------------------------


def test_the_board_shows_the_runs_in_progress(here, capsys, monkeypatch):
    shown = live_table.LiveTable(Console(width=100, force_terminal=True))
    folders = [here / name for name in ("a", "b", "old", "waiting")]
    for folder in folders[:3]:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"round": 7, "accuracy": 0.25}\n{"round": 8, "acc')
    os.utime(here / "old" / "metrics.jsonl", (0, 0))  # left by an earlier command
    shown.add_runs(dict.fromkeys(folders, 20), 3)
    assert (
        shown.line() == "3 of 7 runs; running: a (round 7 of 20, accuracy 0.2500), b (round 7 of 20, accuracy 0.2500)"
    )
    shown.end_run(here / "b")
    assert shown.line().startswith("4 of 7 runs; about 0:00:00 left; running: a (round 7 of 20, accuracy 0.2500)")
    with shown.console.capture() as captured:
        shown.console.print(shown.render())
    assert "a  " in captured.get() and "round 7 of 20" in captured.get() and "4/7" in captured.get()
    monkeypatch.setattr(live_table, "EVERY", 0.01)
    with live_table.LiveTable(Console(file=io.StringIO())) as quiet:
        quiet.add_runs({here / "a": 20}, 0)
        end = time.monotonic() + 60
        while "0 of 1 runs" not in capsys.readouterr().err:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_the_last_row_of_a_long_history(here):
    file = here / "metrics.jsonl"
    file.write_text("".join(f'{{"round": {t}, "x": "{"y" * 99}"}}\n' for t in range(5000)))
    assert live_table.last_row(file)["round"] == 4999
    file.write_text("")
    assert live_table.last_row(file) == {}
    file.write_text('{"round": 1, "x": "' + "y" * live_table.TAIL)
    assert live_table.last_row(file) == {}
