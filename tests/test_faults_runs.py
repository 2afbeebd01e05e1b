"""Runs with faulty clients as files, folders, the command line, comparisons and trackers have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import undrift as ud
from tests.experiments import GOOD, StopError, stop_after, toml, undrift
from tests.faulty import ALL, train
from tests.problems import same_bits
from undrift.tools import cli, config, experiment
from undrift.tools.compare import group_runs
from undrift.tools.report.gather import gather
from undrift.tools.run_folders import RunFolder
from undrift.training.track import scalars

RULES = {"on_nonfinite": "skip", "max_norm_ratio": 50, "min_clients": 3}
FAULTS = {"dropout": 0.3, "stragglers": "decay(0.5, 0.9)", "nan": 0.2, "explode": 0.2, "explode_factor": 1e4}


def without_seconds(rows):
    return json.loads(json.dumps([{k: v for k, v in row.items() if k != "seconds"} for row in rows]))


def test_a_run_that_was_stopped_goes_on_with_the_same_faults(tmp_path):
    settings = {"faults": ALL, "engine": "plain", **RULES}
    whole = train(ud.Scaffold(), **settings)
    for resume, rounds in ((False, 2), (True, 4)):
        with pytest.raises(StopError):
            train(ud.Scaffold(), out=tmp_path / "r", resume=resume, on_round=stop_after(rounds), **settings)
    for name, other in {"faults": None, "max_norm_ratio": 10, "min_clients": 2}.items():
        with pytest.raises(ud.UndriftError, match=rf"was started with {name} .*, not {other}"):
            train(ud.Scaffold(), out=tmp_path / "r", resume=True, **{**settings, name: other})
    resumed = train(ud.Scaffold(), out=tmp_path / "r", resume=True, **settings)
    assert same_bits(resumed.params, whole.params)
    assert without_seconds(resumed.history) == without_seconds(whole.history)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("clean.toml").write_text(toml(GOOD | {"rounds": 4, "participation": 1.0}))
    Path("faulty.toml").write_text(toml(GOOD | {"rounds": 4, "participation": 1.0, **RULES, "faults": FAULTS}))
    return tmp_path


def test_experiment_files_have_faults_and_a_runs_own_file_repeats_it(here):
    said = undrift("run", "faulty.toml", "--out", "one")
    rows = RunFolder.read(Path("one")).rows
    lost = sum(len(row["skipped"]) + len(row["left_out"]) for row in rows)
    assert lost and f"{lost} client update" in said and any(row["dropped"] for row in rows)
    asked = config.read("one")
    assert asked["faults"] == {**FAULTS, "stragglers": "decay(initial=0.5, rate=0.9)"}
    assert {name: asked[name] for name in RULES} == RULES
    again = experiment.run(config.checked(config.read("one"), "one"), "two")
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()
    assert without_seconds(again.history) == without_seconds(rows)
    found = experiment.arguments(config.checked(config.read("faulty.toml"), "e"))
    assert found["faults"] == ud.Faults(**{**FAULTS, "stragglers": ud.decay(0.5, 0.9)})


def test_an_ordinary_run_says_nothing_of_faults(here):
    undrift("run", "clean.toml", "--out", "clean")
    asked = config.read("clean")
    assert not {"faults", "max_norm_ratio", "min_clients"} & asked.keys()
    new = {"dropped", "stragglers", "left_out", "survivors", "round_skipped"}
    assert not any(new & row.keys() for row in RunFolder.read(Path("clean")).rows)


def test_comparisons_reports_and_trackers_take_such_runs(here):
    undrift("run", "clean.toml", "--out", "clean")
    undrift("run", "clean.toml", "--out", "faulty", "--set", "faults.dropout=0.5", "--set", "min_clients=0.5")
    runs = [RunFolder.read(Path(name)) for name in ("clean", "faulty")]
    assert [*group_runs(runs)] == ["faults.dropout=None, min_clients=None", "faults.dropout=0.5, min_clients=0.5"]
    assert "faults.dropout=0.5" in undrift("compare", "clean", "faulty")
    payload = gather([Path("clean"), Path("faulty")])
    assert not {"dropped", "stragglers", "left_out"} & payload["runs"][1]["layers"].keys()
    assert payload["groups"][1]["cells"]["state"] == "finished"
    row = scalars(runs[1].rows[0])
    assert row["survivors"] + len(runs[1].rows[0]["dropped"]) == 4 and row["round_skipped"] in (0.0, 1.0)
    assert not any(name.startswith(("dropped", "stragglers")) for name in row)
    undrift("report", "faulty")


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("faults.droput=0.3", "There is no key 'faults.droput'. Did you mean 'dropout'?"),
        ("faults.dropout=1.5", "faults: Faults(dropout) is 1.5; it must be in [0, 1]."),
        ("faults.dropout=decy(0.1, 0.9)", "faults.dropout: There is no schedule called 'decy'. Did you mean 'decay'?"),
        ("faults.dropout=true", "The key 'faults.dropout' must be a whole number or a number or a string in quotes"),
        ("faults=3", "The key 'faults' must be a section, not 3."),
        ("min_clients=half", "The key 'min_clients' must be a whole number or a number, not 'half'."),
        ("max_norm_ratio=0.5", "max_norm_ratio must be a number from 1, or None, not 0.5."),
    ],
)
def test_a_wrong_file_is_refused(here, monkeypatch, capsys, assignment, sentence):
    monkeypatch.setattr("sys.argv", ["undrift", "run", "clean.toml", "--set", assignment])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and sentence in message and "Traceback" not in message
