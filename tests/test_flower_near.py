"""Federations whose nodes are in this process: all but Flower itself."""

from __future__ import annotations

import pytest

from tests.federated import FOUR, here, near
from tests.problems import distance


@pytest.mark.parametrize("name", FOUR)
def test_parameters_and_history_are_those_of_a_local_run(name, tmp_path):
    local, remote = here(FOUR[name]), near(tmp_path, FOUR[name])
    assert distance(remote.params, local.params) < 1e-12
    for one, other in zip(local.history, remote.history, strict=True):
        for column in ("clients", "steps", "samples", "bytes_up", "bytes_down"):
            assert one[column] == other[column]
        for column in ("loss", "accuracy", "client_accuracy", "client_loss_worst"):
            assert one[column] == pytest.approx(other[column], rel=1e-6)
        assert other["missing"] == other["refused"] == []
