"""The command line as a new user meets it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.experiments import GOOD, changed, toml, undrift
from undrift.errors import UndriftError
from undrift.tools import parallel, sweep
from undrift.tools.compare import brief_method, group_runs
from undrift.tools.report.summary import spread
from undrift.tools.run_folders import RunFolder
from undrift.tools.sweep import summary
from undrift.training.run_folder import recorded


@pytest.fixture
def here(tmp_path, monkeypatch, one_core):
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(toml(GOOD))
    return tmp_path


def test_help_reads_well_at_every_level():
    for command in (
        [],
        ["run"],
        ["resume"],
        ["compare"],
        ["sweep"],
        ["study"],
        ["report"],
        ["list"],
        ["data"],
        ["data", "show"],
    ):
        text = undrift(*command, "--help")
        assert "Usage" in text and len(text.splitlines()) > 5
    assert "Train the experiment described by a file" in undrift("--help") and "undrift 0." in undrift("--version")


def test_python_m_undrift_is_the_same(here):
    done = subprocess.run([sys.executable, "-m", "undrift", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == undrift("--version")


def test_help_does_not_wait_for_torch():
    script = "import sys; from undrift.tools import cli; cli.app(['--help'], standalone_mode=False); "
    script += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_completion_is_offered():
    assert "--install-completion" in undrift("--help")


def test_run_and_its_folder(here):
    said = undrift("run", "e.toml", "--set", "rounds=3", "--out", "runs/mine")
    about, *rounds, last = said.splitlines()
    assert about == "3 rounds, 2 of 4 clients per round, lanes engine on cpu"
    assert [line.split(",")[0] for line in rounds] == ["round 1/3", "round 2/3", "round 3/3"]
    assert last.startswith("accuracy 0.") and last.endswith("after 3 rounds, in runs/mine")
    assert {f.name for f in Path("runs/mine").iterdir()} == {
        *("run.json", "config.toml", "partition.json", "metrics.jsonl", "model.safetensors", "checkpoint")
    }
    undrift("run", "runs/mine", "--out", "again")
    assert Path("again/model.safetensors").read_bytes() == Path("runs/mine/model.safetensors").read_bytes()


def test_a_new_folder_every_time(here):
    for _ in range(2):
        undrift("run", "e.toml")
    assert len(list(Path("runs").iterdir())) == 2
    assert all("digits-FedAvg" in folder.name for folder in Path("runs").iterdir())


def test_a_users_own_method_model_and_data(here):
    Path("mine.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            import numpy as np
            import torch
            import undrift as ud

            @dataclass(frozen=True)
            class Halve(ud.Part):
                "Half of every update."
                by: ud.Number

                def update(self, delta, client):
                    return ud.tree_map(lambda d: d * self.by, delta)

            def two_blobs():
                x = np.random.default_rng(0).normal(size=(80, 3)).astype("float32")
                y = (np.arange(80) % 2).astype(int)
                return (x + 3 * y[:, None], y), (x, y)

            ud.register_model("tiny", lambda classes, shape, width=4: torch.nn.Sequential(
                torch.nn.Linear(shape[0], width), torch.nn.ReLU(), torch.nn.Linear(width, classes)))
            ud.register_data("two_blobs", two_blobs)
            """
        )
    )
    settings = changed("data.name", "two_blobs")
    settings |= {"model": "tiny(width=6)", "method": "Halve(by=0.5)"}
    Path("own.toml").write_text(toml(settings))
    undrift("run", "own.toml", "--import", "mine", "--out", "a")
    assert 'imports = ["mine"]' in Path("a/config.toml").read_text()
    undrift("run", "a", "--out", "b", "--trust")
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    assert "Half of every update." in undrift("list", "methods", "--import", "mine")


def test_compare_runs_and_files(here):
    Path("prox.toml").write_text(toml(changed("method", "FedProx(mu=0.1)")))
    said = undrift("compare", "e.toml", "prox.toml", "--seeds", 2, "--target", "0.05", "--out", "c")
    rows = {line.split("  ")[0]: line for line in said.splitlines()}
    assert " ± " in rows["FedAvg()"] and " ± " in rows["FedProx(mu=0.1)"]
    assert "rounds to 0.05" in said and "steps to 0.05" in said and "MB to 0.05" in said
    runs = sorted(path for path in Path("c").iterdir() if path.is_dir())
    assert len(runs) == 4
    assert undrift("compare", *runs, "--target", "0.05") == said


def test_comparisons_by_hand(here):
    rows = [
        [{"accuracy": a, "round": t + 1, "total_steps": 10 * t + 10, "total_bytes": 1e6} for t, a in enumerate(c)]
        for c in ((0.1, 0.5, 0.4), (0.2, 0.3, 0.6))
    ]
    runs = [
        RunFolder(Path(f"x{s}"), {"method": "FedAvg(weighting=None)", "seed": s, "local.lr": 0.1}, rows[s])
        for s in range(2)
    ]
    (own,) = group_runs(runs).values()
    assert [run.final("accuracy") for run in own] == [0.4, 0.6] and [run.best("accuracy") for run in own] == [0.5, 0.6]
    assert [run.until("accuracy", 0.3)["round"] for run in own] == [2, 2] and own[0].until("accuracy", 0.55) is None
    assert spread([0.4, 0.6]) == "0.5000 ± 0.1414" and spread([0.4]) == "0.4000" and spread([]) == "–"
    other = RunFolder(Path("y"), {"method": "FedAvg(weighting=None)", "seed": 0, "local.lr": 0.2}, rows[0])
    assert list(group_runs([*runs, other])) == ["local.lr=0.1", "local.lr=0.2"]
    assert (
        brief_method("FedProx(mu=0.1, target=None) + ServerSGD(lr=1.0, momentum=0.5)")
        == "FedProx(mu=0.1) + ServerSGD(momentum=0.5)"
    )


def test_a_sweep_chooses_on_validation_data_and_goes_on_where_it_stopped(here):
    Path("e.toml").write_text(toml(changed("data.validation_fraction", 0.2)) + '\n[sweep]\n"local.lr" = [0.001, 0.2]\n')
    said = undrift("sweep", "e.toml", "--seeds", 2, "--out", "s", "--workers", 1)
    assert "best by validation accuracy: local.lr=0.2" in said
    found = json.loads(Path("s/sweep.json").read_text())
    assert found["best"] == "local.lr=0.2" and found["chosen_by"] == "validation_accuracy"
    folders = sorted(folder.name for folder in Path("s").iterdir() if folder.is_dir())
    assert folders == [f"local.lr={lr},seed={seed}" for lr in (0.001, 0.2) for seed in (0, 1)]
    for row in found["settings"]:  # the mean of what the runs' own files say
        finals = [json.loads((Path("s") / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in row["runs"]]
        assert row["validation_accuracy"]["mean"] == pytest.approx(sum(r["validation_accuracy"] for r in finals) / 2)
    times = {f: (Path("s") / f / "model.safetensors").stat().st_mtime_ns for f in folders}
    (Path("s") / folders[0] / "model.safetensors").unlink()
    undrift("sweep", "e.toml", "--seeds", 2, "--out", "s", "--workers", 1)
    again = {f: (Path("s") / f / "model.safetensors").stat().st_mtime_ns for f in folders}
    assert [f for f in folders if times[f] != again[f]] == [folders[0]]


def test_long_settings_that_begin_alike_do_not_share_a_folder(here):
    long = "FedProx(mu=0.1, target=TemporalEnsemble(0.5)) + ServerSGD(lr=1.0, momentum=0.{})"
    Path("e.toml").write_text(toml(changed("data.validation_fraction", 0.2)))
    grid = f'method=["{long.format(1)}", "{long.format(9)}"]'
    undrift("sweep", "e.toml", "--grid", grid, "--out", "s", "--workers", 1)
    found = json.loads(Path("s/sweep.json").read_text())["settings"]
    assert [len(row["runs"]) for row in found] == [1, 1] and found[0]["accuracy"] != found[1]["accuracy"]


def test_a_sweeps_folder_is_its_own(here):
    undrift("sweep", "e.toml", "--out", "s", "--workers", 1)
    with pytest.raises(UndriftError, match="is a run with other settings; choose another --out"):
        undrift("sweep", "e.toml", "--out", "s", "--workers", 1, "--set", "local.lr=0.0001")


def test_what_diverges_is_not_the_best(here):
    Path("e.toml").write_text(toml(changed("data.validation_fraction", 0.2) | {"loss": "mse", "metrics": []}))
    rows = [[{"validation_loss": math.nan, "loss": math.nan}], [{"validation_loss": 0.5, "loss": 0.4}]]
    runs = [RunFolder(Path(f"r{i}"), {"method": "FedAvg()", "local.lr": 10.0**-i}, row) for i, row in enumerate(rows)]
    found = summary(runs, here)
    assert (
        found["best"] == "local.lr=0.1"
        and json.loads((here / "sweep.json").read_text())["settings"][0]["loss"]["mean"] is None
    )


def test_wrong_sweeps_are_refused_before_anything_runs(here, capsys, monkeypatch):
    from undrift.tools.cli import main

    wrong = {
        "data.validation_fraction is 0. A sweep chooses on validation data": ["--grid", "local.lr=[0.1, 0.2]"],
        "write it as key=[value, …]": ["--grid", "local.lr=0.1"],
        "There is no method called 'FedAgv'": ["--grid", 'method=["FedAvg()", "FedAgv()"]'],
        "There is no key 'local.lrr'": ["--grid", "local.lrr=[1, 2]"],
        "data: There is no data set called 'digitz'": ["--set", "data.name=digitz"],
    }
    for sentence, arguments in wrong.items():
        monkeypatch.setattr("sys.argv", ["undrift", "sweep", "e.toml", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2 and sentence in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["e.toml"]


@pytest.mark.parametrize("kind", ["methods", "optimizers", "partitions", "data", "models", "losses", "metrics"])
def test_lists(kind):
    lines = undrift("list", kind).splitlines()
    assert len(lines) > 1
    assert {
        "methods": "FedNLR",
        "optimizers": "AdamW",
        "partitions": "Shards",
        "data": "cifar10",
        "models": "resnet20",
    }.get(kind, "") in "\n".join(lines)


def test_resume_of_what_is_no_run(here, capsys, monkeypatch):
    from undrift.tools.cli import main

    for arguments, sentence in (
        (["resume", "nowhere"], "nowhere is not the folder of a run"),
        (["compare", "."], ". is not a run"),
    ):
        monkeypatch.setattr("sys.argv", ["undrift", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_runs_of_a_sweep_that_differ_only_in_numbers_train_in_one_program(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "_on_gpu", lambda *place: True)  # where they would take up little of it
    grid = {"local.lr": [0.1, 0.3], "method": ["FedAvg()", "FedProx(0.1)"], "seed": [0, 1]}
    settings = {**GOOD, "rounds": 2, "data": {**GOOD["data"], "validation_fraction": 0.1}}
    points = sweep.grid_points(settings, grid, "test")
    assert sorted(len(bundle) for bundle in parallel.bundle_points(points, 8)) == [4, 4]
    assert [len(bundle) for bundle in parallel.bundle_points(points, 1)] == [1] * 8
    said = {}
    runs = parallel.run_points(
        points,
        tmp_path / "sweep",
        "test",
        parallel.Parallel(),
        lambda point, message: said.update({point.name: message}),
    )
    assert len(runs) == 8 and set(said.values()) == {None}
    kept = recorded(tmp_path / "sweep" / points[0].name)["started"]["beside"]
    assert len(kept) == 3 and all("FedAvg" in name for name in kept)


def test_runs_of_a_sweep_are_shared_out(tmp_path, monkeypatch):
    """Every process gets some runs, and the processes that there are share the cores."""
    points = sweep.grid_points({**GOOD, "rounds": 2}, {"seed": list(range(8))}, "test")
    seen = []

    def finished(tasks, places):
        threads = {run[3] for (runs,) in tasks.values() for run in runs}
        seen.append(([len(bundle) for bundle in tasks], len(places), threads))
        return iter(())

    monkeypatch.setattr(parallel, "_train_bundles", finished)
    monkeypatch.setattr(parallel, "usable_cpus", lambda: 16)
    monkeypatch.setattr(parallel, "THREADS", ())  # whatever is set where this test runs
    for how in (
        parallel.Parallel(together=4),
        parallel.Parallel(together=8),
        parallel.Parallel(workers=2),
        parallel.Parallel(devices=["cuda:0", "cuda:1"]),
    ):
        parallel.run_points(points, tmp_path / "sweep", "test", how, lambda point, message: None)
    assert seen == [([4, 4], 2, {8}), ([8], 1, {16}), ([1] * 8, 2, {8}), ([4, 4], 2, {8})]


def test_a_sweep_on_a_cpu_trains_runs_as_one_program_if_asked(tmp_path):
    points = sweep.grid_points({**GOOD, "rounds": 2}, {"seed": [0, 1, 2, 3]}, "test")
    for together, others in ((None, 0), (2, 1), (4, 3)):
        out = tmp_path / str(together)
        how = parallel.Parallel(workers=1, together=together)
        runs = parallel.run_points(points, out, "test", how, lambda point, message: None)
        assert len(runs) == 4
        assert {len(recorded(run.folder)["started"].get("beside", [])) for run in runs} == {others}
