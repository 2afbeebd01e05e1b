"""Run folders that the version before the layers wrote (`tests/before/`): read, reported, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

import undrift as ud
from undrift.tools.compare import read_runs
from undrift.tools.report.gather import gather

BEFORE = Path(__file__).parent / "before"


def test_a_finished_run_is_compared_and_reported():
    runs, problems = read_runs([BEFORE / "finished"])
    assert not problems and len(runs) == 1 and len(runs[0].rows) == 4
    assert runs[0].settings["method"] == "Scaffold()"
    assert runs[0].settings["local.optimizer_state"] == "reset", "as in the files of now, so both are one group"
    payload = gather([BEFORE / "finished"])
    assert not payload["left_out"] and "accuracy" in str(payload)


def test_a_run_that_was_stopped_is_resumed_and_ends_where_the_unbroken_one_did(tmp_path):
    """The versions may be others by now, so not to the bit."""
    shutil.copytree(BEFORE / "stopped", tmp_path / "run")
    result = ud.train(
        "logistic", ud.load("digits", ud.Dirichlet(0.5), clients=4), ud.Scaffold(), rounds=4, participation=2, seed=1,
        local=ud.Local(epochs=1, batch_size=32, lr=0.1), checkpoint_every=1, device="cpu", out=tmp_path / "run",
        resume=True, allow_version_change=True,
    )  # fmt: skip
    wanted = load_file(BEFORE / "finished" / "model.safetensors")
    assert [row["round"] for row in result.history] == [1, 2, 3, 4]
    for name, weights in result.params.items():
        torch.testing.assert_close(weights, wanted[name], rtol=1e-4, atol=1e-6)
