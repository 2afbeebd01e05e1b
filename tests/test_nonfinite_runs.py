"""Runs that NaN stopped, as the command line, comparisons, sweeps and the report show them."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from pathlib import Path

import pytest
from typer.testing import CliRunner

import undrift as ud
from tests.experiments import GOOD, toml, undrift
from undrift.tools.cli import app
from undrift.tools.report.gather import gather
from undrift.tools.run_folders import RunFolder, find_runs

SPOILS = '''
from dataclasses import dataclass
import torch
import undrift as ud

@dataclass(frozen=True)
class NanFromClient1(ud.Part):
    """Client 1 sends NaN from round 3 on."""

    def gradient(self, g, params, client):
        return ud.tree_map(lambda g: torch.where((client.id == 1) & (client.round >= 2), torch.nan, g), g)
'''


@pytest.fixture
def here(tmp_path, monkeypatch, one_core):
    """An experiment that goes well, and one whose third round does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("spoils.py").write_text(SPOILS)
    good = GOOD | {"rounds": 4, "participation": 1.0, "checkpoint_every": 1}
    Path("good.toml").write_text(toml(good))
    Path("bad.toml").write_text(toml(good | {"method": "NanFromClient1()", "imports": ["spoils"]}))
    return tmp_path


fails = functools.partial(undrift, exit_code=1)


def test_a_run_that_stops_says_why_and_can_be_resumed(here):
    said = fails("run", "bad.toml", "--out", "bad")
    assert "stopped. Round 3: client 1 sent or kept non-finite values. Training may have diverged" in said
    assert (
        "2 rounds are in bad; to continue without such clients: undrift resume bad --import spoils --on-nonfinite skip"
        in said
    )
    assert not Path("bad/model.safetensors").exists() and len(Path("bad/metrics.jsonl").read_text().splitlines()) == 2
    assert "stopped. Round 3" in fails("resume", "bad", "--trust")
    said = undrift("resume", "bad", "--import", "spoils", "--on-nonfinite", "skip")
    assert "after 4 rounds, 2 client updates left out, in bad" in said
    assert Path("bad/model.safetensors").exists() and not Path("bad/stopped.json").exists()
    assert 'on_nonfinite = "skip"' in Path("bad/config.toml").read_text()
    undrift("run", "bad", "--out", "again", "--trust")
    assert Path("again/model.safetensors").read_bytes() == Path("bad/model.safetensors").read_bytes()


def test_experiment_files_have_the_key(here):
    text = Path("bad.toml").read_text()
    Path("skip.toml").write_text(f'on_nonfinite = "skip"\n{text}')
    assert "2 client updates left out" in undrift("run", "skip.toml", "--out", "skip")
    assert 'on_nonfinite = "skip"' in Path("skip/config.toml").read_text()
    done = CliRunner().invoke(app, ["run", "skip.toml", "--set", "on_nonfinite=ignore"])
    assert done.exit_code != 0 and "on_nonfinite" in str(done.exception)


def test_compare_marks_them(here):
    undrift("run", "good.toml", "--out", "good")
    fails("run", "bad.toml", "--out", "bad")
    said = undrift("compare", "good", "bad")
    lines = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "1 (1 stopped)" in lines["NanFromClient1()"] and "–" in lines["NanFromClient1()"]
    assert "stopped" not in lines["FedAvg()"]
    run = RunFolder.read(Path("bad"))
    assert run.stopped and run.best("accuracy") > 0  # what it reached before stays known


def test_sweeps_go_on_and_never_choose_them(here):
    """A learning rate that overflows at once, beside one that does not."""
    said = fails(
        "sweep", "good.toml", "--grid", "local.lr=[1e38, 0.1]", "--set", "data.validation_fraction=0.2", "--out", "s",
        "--workers", 1, "--seeds", 2,
    )  # fmt: skip
    assert said.count("stopped. Round 1: every client of the cohort sent non-finite values") == 2
    assert "2 (2 stopped)" in said and "best by validation accuracy: local.lr=0.1" in said
    found = json.loads(Path("s/sweep.json").read_text())
    assert {row["name"]: len(row["stopped"]) for row in found["settings"]} == {"local.lr=1e+38": 2, "local.lr=0.1": 0}


def test_the_report_marks_them(here):
    fails("run", "bad.toml", "--out", "bad")
    undrift("run", "bad.toml", "--out", "skip", "--set", "on_nonfinite=skip")
    payload = gather(find_runs([Path("bad")]))
    assert payload["groups"][0]["cells"]["state"] == "2 of 4 rounds, stopped"
    assert payload["runs"][0]["stopped"].startswith("Round 3: client 1")
    assert gather([Path("skip")])["groups"][0]["cells"]["state"] == "finished, 2 client updates left out"
    undrift("report", "bad")
    assert "Round 3: client 1" in Path("bad/report.html").read_text()


def test_info_has_what_a_bug_report_needs():
    said = undrift("info")
    for word in ("undrift", "Python", "torch", "CUDA", "driver", "GPU", "threads"):
        assert word in said


def test_a_run_that_stopped_in_its_first_round_says_so_where_its_last_row_is_asked_for(tmp_path):
    data, local = ud.load("digits", ud.IID(), clients=4), ud.Local(steps=3, batch_size=8, lr=1e30)
    result = ud.train("mlp", data, rounds=2, local=local, out=tmp_path / "r")
    assert result.stopped and result.history == [] and len(result.frame()) == 0 and result.history[-1:] == []
    for kind in (IndexError, ud.UndriftError):
        with pytest.raises(kind, match=r"the run stopped in its first one\. Round 1: .*smaller learning rate"):
            result.history[-1]["accuracy"]
    for again in (copy.deepcopy(result.history), pickle.loads(pickle.dumps(result.history))):
        with pytest.raises(IndexError, match="stopped in its first one"):
            again[0]
