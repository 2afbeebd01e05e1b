"""Run folders that the version before the layers wrote (`tests/before/`) are resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import undrift as ud

BEFORE = Path(__file__).parent / "before"


def resumed(method, folder):
    shutil.copytree(BEFORE / "stopped", folder)
    return ud.train(
        "logistic", ud.load("digits", ud.Dirichlet(0.5), clients=4), method, rounds=4, participation=2, seed=1,
        local=ud.Local(epochs=1, batch_size=32, lr=0.1), checkpoint_every=1, device="cpu", out=folder, resume=True,
        allow_version_change=True,
    )  # fmt: skip


def test_a_run_of_the_former_scaffold_is_not_resumed_as_another_method(tmp_path):
    """Its control variates were averaged with 1/N beside a mean by samples."""
    with pytest.raises(ud.UndriftError, match=r"method Scaffold\(\).*is Scaffold\(variates='uniform'\) now"):
        resumed(ud.Scaffold(), tmp_path / "run")
    files = {file.name: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert files == {file.name: file.read_bytes() for file in (BEFORE / "stopped").rglob("*") if file.is_file()}
    with pytest.raises(ud.UndriftError) as caught:
        resumed(ud.FedAvg(), tmp_path / "again")
    assert "variates" not in str(caught.value)


def test_a_run_that_was_stopped_is_resumed_and_ends_where_the_unbroken_one_did(tmp_path):
    """The versions may be others by now, so not to the bit."""
    result = resumed(ud.Scaffold(variates="uniform"), tmp_path / "run")
    wanted = load_file(BEFORE / "finished" / "model.safetensors")
    assert [row["round"] for row in result.history] == [1, 2, 3, 4]
    for name, weights in result.params.items():
        torch.testing.assert_close(weights, wanted[name], rtol=1e-4, atol=1e-6)
