"""A real federation whose nodes have named classes and columns of their own. Needs Flower; `make flower` has it."""

from __future__ import annotations

import pytest

from tests.federated import here
from tests.flower_runs import LONG, NODES, app, assert_all_ended, problem, rows, weights
from tests.hospitals import edited, hospitals
from tests.problems import distance
from undrift.flower.up import federation

__all__ = ["problem"]


def test_nodes_agree_on_what_classes_and_columns_mean_or_are_refused_by_name(tmp_path, monkeypatch):
    """One node lacks a class and has its columns in another order. Later, it has a column of another name."""
    monkeypatch.setenv("UNDRIFT_CACHE", str(tmp_path / "cache"))
    changes, own = hospitals(tmp_path, first=1)
    changes["method"] = "Scaffold() + FedRS(0.5)"
    with federation(tmp_path / "grounds", NODES, own) as grounds:
        out = tmp_path / "right" / "out"
        run = grounds.submit(app(tmp_path / "right", changes), out)
        assert grounds.wait(run, out, LONG) == (True, "")
        trained = weights(out)
        edited(own[1], lambda table: table.rename(columns={"age": "Age"}))
        other = tmp_path / "refused" / "out"
        run = grounds.submit(app(tmp_path / "refused", changes), other)
        well, why = grounds.wait(run, other, LONG)
        assert not well and "The columns of the node node-1 are not those of node-0: 'age' is missing, and 'Age'" in why
        assert not rows(other) and not (other / "federation.json").exists()
        run = grounds.submit(app(tmp_path / "later", changes | {"rounds": 3}), out)  # it knows the federation
        assert grounds.wait(run, out, LONG) == (True, "")
    assert_all_ended(tmp_path)
    found = rows(out)
    assert [row["missing"] for row in found] == [[], [], [2]]
    assert "Its columns are not those that the federation agreed on: 'age' is missing" in found[2]["nodes"]["node-1"]
    local = here(changes)
    assert distance(trained, dict(local.model.state_dict())) < 1e-12
    assert found[1]["accuracy"] == local.history[1]["accuracy"]
    assert found[1]["loss"] == pytest.approx(local.history[1]["loss"], rel=1e-9)
