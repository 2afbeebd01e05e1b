"""What the command line says about itself, and the options of `run`, `resume` and `report`."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console

import undrift as ud
from tests.experiments import GOOD, changed, toml, undrift
from undrift import models
from undrift.columns import directions, lower_is_better
from undrift.data import sources
from undrift.errors import UndriftError
from undrift.files import lock
from undrift.metrics import METRICS
from undrift.tools import listing, plugins
from undrift.tools.cli import app
from undrift.tools.report import watch
from undrift.tools.run_folders import main_figure
from undrift.training import provenance
from undrift.training.early_stopping import as_rule
from undrift.training.run import Run
from undrift.training.run_folder import history

SMALL = GOOD | {"rounds": 3, "local": {"steps": 2, "batch_size": 8, "lr": 0.1}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of three rounds."""
    where = tmp_path_factory.mktemp("finished")
    (where / "e.toml").write_text(toml(SMALL))
    undrift("run", where / "e.toml", "--out", where / "r")
    return where / "r"


@pytest.fixture
def here(tmp_path, monkeypatch, one_core, finished):
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(toml(SMALL))
    shutil.copytree(finished, "r")
    return tmp_path


# Help


def commands(group=None, path=()):
    """Every command of the command line, with the words that call it."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("words", [path for path, _ in commands() if path != ("reproduce",)], ids=" ".join)
def test_help_has_arguments_in_capitals_no_type_for_flags_and_an_example(words):
    text = undrift(*words, "--help")
    assert "<bool>" not in text and "{" not in text and "Of what" not in text and "Optional" not in text
    usage = next(line for line in text.splitlines() if "Usage:" in line)
    command = dict(commands())[words]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            assert parameter.name.upper() in usage and f" {parameter.name} " not in usage
        elif not parameter.hidden:
            assert parameter.help.endswith((".", "…")) and parameter.help[0].isupper(), parameter.name
    if not hasattr(command, "commands"):
        shown = text[text.index(" Example") :]
        assert f"   undrift {' '.join(words)}" in shown or "   flwr run" in shown
        assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.parametrize("words", [path for path, _ in commands() if path[0] in ("run", "compare", "report")])
def test_a_default_that_is_no_value_is_in_the_help(words):
    assert "[default: (" in undrift(*words, "--help"), "it was once swallowed as markup"


# Lists


@pytest.mark.parametrize("kind", ["methods", "optimizers", "partitions", "data", "models", "losses", "metrics"])
def test_a_list_breaks_lines_between_words_and_says_whole_sentences(kind):
    entries = getattr(listing, kind)()
    said = " ".join(" ".join(lines) for lines in entries.values())
    assert all(lines and all(re.search(r"[.)]$", line) for line in lines) for lines in entries.values())
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None, markup=False, highlight=False)
    listing.show(entries, console)
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert set(" ".join(lines).split()) <= {*said.split(), *entries}, "a word is cut"
    file = undrift("list", kind).splitlines()
    assert [line.split()[0] for line in file] == list(entries), "in a file, one line each"


def test_methods_have_the_papers_name_the_reference_and_the_parameters():
    entries = listing.methods()
    assert (
        entries["FedProx"][0].endswith("Li et al., 2020.") and entries["FedProx"][1] == "Parameters: mu, target=None."
    )
    assert entries["FedRS"][0].endswith("Li and Zhan, 2021.")
    assert "SCAFFOLD" in entries["Scaffold"][0] and "FedAvgM" in entries["FedAvgM"][0]
    assert entries["FedAdam"][0].count("FedAdam") == 1
    assert entries["FirstStepOnly"][0].endswith(" Mo et al., 2021.") and "Figure" not in entries["FirstStepOnly"][0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One line.\n\nReference: Li, Sahu and Smith, *Federated\nOptimization*, 2020.", "Li et al., 2020."),
        ("One line.\n\nReference: Li et al., *A, b and c: d*, MLSys 2020, https://x.org.", "Li et al., 2020."),
        ("One line.\n\nHsu, Qi, and Brown, *Measuring*\n(2019), as FedAvgM.", "Hsu et al., 2019."),
        ("One line. Without `a = *b*`, in 2020.", ""),
        (None, ""),
    ],
)
def test_references_are_found_in_docstrings(text, found):
    assert listing.reference(SimpleNamespace(__doc__=text)) == found if text else listing.reference(object()) == ""


def test_every_data_set_says_its_task_and_its_source():
    entries = listing.data()
    assert {*sources.RECIPES, "digits"} <= entries.keys() == set(sources.names())
    assert len({lines[0] for lines in entries.values()}) == len(entries)
    assert "uoft-cs/cifar10 on the Hugging Face hub" in entries["cifar10"][1]
    assert (
        "needs a folder audiomnist in --data-dir" in entries["audiomnist"][1] and "Speech" in entries["audiomnist"][0]
    )


# Flags in messages


def test_messages_of_data_show_name_flags(here):
    Path("own.csv").write_text("a,b,who\n1,0,x\n2,1,y\n,1,y\n")
    with pytest.raises(UndriftError, match=r"--label …, --client …"):
        undrift("data", "show", "own.csv")
    with pytest.raises(UndriftError, match=r"--missing drop"):
        undrift("data", "show", "own.csv", "--label", "b", "--drop", "who")


# --force


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_force_replaces_a_run(here):
    with pytest.raises(UndriftError, match="r already contains a run"):
        undrift("run", "e.toml", "--out", "r", "--set", "seed=1")
    undrift("report", "r")
    undrift("run", "e.toml", "--out", "r", "--set", "seed=1", "--force")
    undrift("run", "e.toml", "--out", "new", "--set", "seed=1", "--force")
    assert files(Path("r")).keys() == files(Path("new")).keys()
    for name in ("model.safetensors", "config.toml"):
        assert Path("r", name).read_bytes() == Path("new", name).read_bytes()
    assert len(history(Path("r"))) == 3


def test_force_touches_nothing_but_a_run(here):
    Path("mine").mkdir()
    Path("mine/config.toml").write_text("precious = true")
    Path("r/notes.txt").write_text("mine")
    Path("elsewhere.json").write_text("{}")
    shutil.copytree("r", "linked")
    Path("linked/notes.txt").unlink()
    Path("linked/checkpoint/mine.txt").write_text("mine")
    for folder, why in (
        ("mine", "--force replaces only runs"),
        ("r", r"notes.txt is not one of the files that --force removes"),
        ("linked", r"mine.txt is not one of the files"),
        ("e.toml", "e.toml is not a folder"),
    ):
        before = files(here)
        with pytest.raises(UndriftError, match=why):
            undrift("run", "e.toml", "--out", folder, "--force")
        assert files(here) == before
    Path("linked/checkpoint/mine.txt").unlink()
    Path("linked/metrics.jsonl").unlink()
    Path("linked/metrics.jsonl").symlink_to(here / "elsewhere.json")
    with pytest.raises(UndriftError, match=r"metrics.jsonl is not one of the files"):
        undrift("run", "e.toml", "--out", "linked", "--force")
    with pytest.raises(UndriftError, match="--force needs --out"):
        undrift("run", "e.toml", "--force")


def nan_model(classes, shape):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
    model[1].bias.data[3] = float("nan")
    return model


def test_force_removes_nothing_if_the_new_experiment_is_wrong(here):
    models.register_model("nanm", nan_model)
    before = files(Path("r"))
    for wrong in (
        "local.lr=fast(1)", "participation=50", "lanes=-1", "model=nanm", "track=nosuch",
        "stop_when=EarlyStopping('nosuch')", "on_nonfinite=maybe",
    ):  # fmt: skip
        with pytest.raises(UndriftError):
            undrift("run", "r/config.toml", "--out", "r", "--force", "--set", wrong)
        assert files(Path("r")) == before, wrong


def test_force_removes_nothing_before_the_new_run_can_start(here, monkeypatch):
    def fails(run):
        raise UndriftError("not enough memory, say")

    before = files(Path("r"))
    with monkeypatch.context() as patched:
        patched.setattr(Run, "start", fails)
        with pytest.raises(UndriftError, match="not enough memory"):
            undrift("run", "r/config.toml", "--out", "r", "--force")
    assert files(Path("r")) == before
    undrift("run", "r/config.toml", "--out", "r", "--force", "--set", "seed=5")
    assert "seed = 5" in Path("r/config.toml").read_text()


def test_force_replaces_no_run_that_is_in_use(here):
    before = files(Path("r"))
    with lock(Path("r")), pytest.raises(UndriftError, match="Another process uses r"):
        undrift("run", "e.toml", "--out", "r", "--force")
    assert files(Path("r")) == before


def test_force_removes_a_report_that_was_half_written(here):
    left = Path("r/.report.html.0123456789abcdef.partial")
    left.write_text("<!doctype")
    undrift("run", "e.toml", "--out", "r", "--force")
    assert not left.exists() and len(history(Path("r"))) == 3


def test_a_run_that_is_half_removed_is_still_one(here, monkeypatch):
    unlink, removed = Path.unlink, []

    def dies(file, **options):
        if len(removed) == 4:
            raise KeyboardInterrupt
        removed.append(file.name)
        unlink(file, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", dies)
        undrift("run", "e.toml", "--out", "r", "--force", exit_code=130)
    assert len(removed) == 4 and Path("r/run.json").exists()
    undrift("run", "e.toml", "--out", "r", "--force")
    assert len(history(Path("r"))) == 3


# undrift resume --set, --rounds


def test_more_rounds_and_settings_that_may_change(here):
    undrift("run", "e.toml", "--set", "rounds=6", "--out", "whole")
    undrift("resume", "r", "--rounds", 6, "--set", "evaluate_every=2", "--set", "checkpoint_every=1")
    assert Path("r/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()
    rows, whole = history(Path("r")), history(Path("whole"))
    assert [row["round"] for row in rows if "loss" in row] == [1, 2, 3, 4, 6]
    assert rows[-1]["loss"] == whole[-1]["loss"] and [row["steps"] for row in rows] == [row["steps"] for row in whole]
    assert "evaluate_every = 2" in Path("r/config.toml").read_text()
    said = undrift("resume", "r")
    assert "r is finished; to train it further" in said and "no effect" not in said


def test_settings_without_effect_on_a_finished_run_are_named(here):
    before = files(Path("r"))
    said = undrift("resume", "r", "--set", "evaluate_every=2")
    assert said.endswith("with --rounds. Without more rounds, the new evaluate_every has no effect.\n")
    assert files(Path("r")) == before


@pytest.mark.parametrize(
    ("assignment", "why"),
    [
        ("local.lr=0.2", r"--set: local.lr decides the result, so a resumed run must keep it. It may change .*device"),
        ("seed=4", "seed decides the result"),
        ("lanes=1", "lanes may change the last digits .* add --allow-version-change"),
        ("local.rl=0.2", "There is no key 'local.rl'"),
        ("rounds=2", "already trained 3 rounds"),
    ],
)
def test_what_a_resumed_run_must_keep_is_refused(here, assignment, why):
    before = files(Path("r"))
    with pytest.raises(UndriftError, match=why):
        undrift("resume", "r", "--set", assignment)
    assert files(Path("r")) == before


# --import


STRETCH = """import undrift as ud
from dataclasses import dataclass

@dataclass(frozen=True)
class Stretch(ud.Part):
    def update(self, delta, client):
        return ud.tree_map(lambda d: 1.1 * d, delta)
"""
MODULE = "stretch_of_a_test"


@pytest.fixture
def say(here, monkeypatch):
    """What a command says in a new process, from the folder `elsewhere`; a module is in the folder `project`."""
    Path("project").mkdir()
    Path("elsewhere").mkdir()
    Path("project", f"{MODULE}.py").write_text(STRETCH)
    Path("project/e.toml").write_text(toml(SMALL | {"method": "Stretch()"}))
    path = [folder for folder in sys.path if folder]

    def say(*words: str) -> str:
        sys.modules.pop(MODULE, None)
        monkeypatch.setattr(sys, "path", list(path))
        monkeypatch.setattr(plugins, "_added", [])
        monkeypatch.setattr(plugins, "_recorded", {})
        monkeypatch.setattr(plugins, "_excluded", [])
        monkeypatch.setattr(provenance, "modules", {})
        monkeypatch.chdir(here / "elsewhere")
        try:
            return undrift(*words)
        finally:
            monkeypatch.chdir(here)

    yield say
    sys.modules.pop(MODULE, None)


def found_modules(run: str) -> dict[str, str]:
    return json.loads(Path(run, "run.json").read_text())["body"]["started"]["modules"]


def test_modules_next_to_the_experiment_file_are_found_and_remembered(here, say):
    assert "after 3 rounds" in say("run", "../project/e.toml", "--import", MODULE, "--out", "../runs/s")
    assert found_modules("runs/s") == {MODULE: str(here / "project")}
    assert "project" not in Path("runs/s/config.toml").read_text()
    assert "after 4 rounds" in say("resume", "../runs/s", "--trust", "--rounds", "4")
    assert "files, in" in say("publish", "../runs/s", "--trust", "--to", "../hub")
    shutil.move(Path("project", f"{MODULE}.py"), "runs/s")
    with pytest.raises(UndriftError, match=r"searched for among installed packages and in .*elsewhere, .*project"):
        say("resume", "../runs/s", "--trust", "--rounds", "5")  # never in the run's own folder


def test_the_workers_of_a_sweep_remember_modules_too(here, say):
    say("sweep", "../project/e.toml", "--import", MODULE, "--seeds", "2", "--workers", "2", "--out", "../runs/s")
    assert [found_modules(f"runs/s/seed={seed}") for seed in (0, 1)] == [{MODULE: str(here / "project")}] * 2
    assert "after 4 rounds" in say("resume", "../runs/s/seed=1", "--trust", "--rounds", "4")


@pytest.mark.long
def test_the_workers_of_a_sweep_find_modules_where_a_run_did(here, say):
    say("run", "../project/e.toml", "--import", MODULE, "--out", "../runs/s")
    say("sweep", "../runs/s", "--trust", "--seeds", "2", "--workers", "2", "--out", "../runs/t")
    assert found_modules("runs/t/seed=1") == {MODULE: str(here / "project")}


# undrift report


def test_watching_waits_for_a_run_that_has_no_folder_yet(here, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(watch, "PAUSE", 0.02)
    waiting = threading.Thread(target=watch.wait_for, args=([Path("later"), Path("r")], said.append), daemon=True)
    waiting.start()
    waiting.join(0.1)
    Path("later").mkdir()
    waiting.join(0.1)
    assert waiting.is_alive() and said == ["waiting for later …"]
    shutil.copy("r/config.toml", "later/config.toml")
    waiting.join(5)
    assert not waiting.is_alive()
    undrift("report", "later", "--out", "page.html")
    with pytest.raises(UndriftError, match=r"e.toml is not a run"):
        undrift("report", "e.toml", "--watch")


def test_watching_ends_if_a_file_appears_where_a_run_was_expected(here, monkeypatch):
    monkeypatch.setattr(watch, "PAUSE", 0.02)
    naps = iter(range(5))

    def sleep(seconds):
        next(naps)  # ends the test, where it would wait forever
        Path("later").write_text("not a folder")

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(UndriftError, match=r"later is not a run\. Name a folder"):
        watch.wait_for([Path("later"), Path("never")], lambda line: None)


def test_the_folder_of_a_study_stands_for_its_final_runs(here):
    for name in ("tuning/a", "final/b", "final/c"):
        shutil.copytree("r", Path("study", name))
    assert undrift("report", "study", "--out", "page.html") == "2 runs, in page.html\n"


# The leading metric, and which way is better


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"round": 1, "lr": 0.1, "loss": 0.5, "f1": 0.1, "accuracy": 0.2}, "f1"),
        ({"loss": 0.5, "accuracy": 0.2, "f1": 0.1, "class_accuracy": [0.1]}, "accuracy"),
        ({"loss": 0.5, "confusion_matrix": [[1]], "mae": 0.3}, "mae"),
        ({"validation_loss": 0.5, "validation_r2": 0.3}, "validation_r2"),
        ({"loss": 0.5, "mine": 0.1, "validation_loss": 0.4, "validation_mine": 0.2}, "mine"),
        ({"loss": 0.5, "drift": 0.1}, "loss"),
        ({"seconds": 0.5}, None),
    ],
)
def test_the_first_metric_of_a_run_leads(row, found):
    assert main_figure(row) == ((found, row[found]) if found else None)


def test_one_rule_says_which_way_is_better():
    assert {name for name in METRICS if lower_is_better(name)} == {"mae", "perplexity"}
    assert all(lower_is_better(name) == lower for name, lower in directions(METRICS).items())


def test_early_stopping_asks_the_metric_which_way_is_better():
    rows = [{"round": i + 1, "validation_regret": value} for i, value in enumerate([0.9, 0.5, 0.6, 0.7])]
    rule = ud.EarlyStopping("validation_regret", patience=2)
    assert as_rule(rule)(rows) == "validation_regret has not improved for 2 rounds; it was 0.9 in round 1"
    said = {"regret": True}
    assert as_rule(rule, said)(rows).endswith("it was 0.5 in round 2")
    assert as_rule("EarlyStopping('validation_regret', patience=2, better='higher')", said)(rows)
    assert "0.9" in as_rule("EarlyStopping('validation_regret', 2, better='higher')", said)(rows)


def test_a_sweep_chooses_by_the_metric_that_its_runs_list_first(here):
    settings = changed("data.validation_fraction", 0.1) | {"metrics": ["f1", "accuracy"], "rounds": 1}
    Path("e.toml").write_text(toml(settings))
    said = undrift("sweep", "e.toml", "--grid", "local.lr=[0.001, 0.2]", "--out", "s")
    assert "best by validation f1: local.lr=0.2" in said
