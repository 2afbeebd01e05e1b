"""Federations whose nodes are in this process: all but Flower itself."""

from __future__ import annotations

import shutil

import pytest

from tests.federated import BASE, FOUR, Near, here, near
from tests.flower_problem import spoiled
from tests.problems import distance, same_bits
from undrift.errors import UndriftError
from undrift.flower.engine import Trouble
from undrift.flower.messages import decode

pytestmark = pytest.mark.usefixtures("flower_problem")


def test_figures_of_drift_stay_at_home(tmp_path):
    """What they need is not sent, and the history is without them."""
    with_them, without = (near(tmp_path / name, BASE | {"drift": name == "on"}) for name in ("on", "off"))
    assert same_bits(with_them.params, without.params)
    assert with_them.history[0].keys() == without.history[0].keys() and "agreement" not in with_them.history[0]


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


def test_metrics_from_sums_and_those_that_are_not(tmp_path):
    names = ["f1", "f1_weighted", "balanced_accuracy", "confusion_matrix", "perplexity", "accuracy"]
    changes = FOUR["adam"] | {"metrics": names, "rounds": 2}
    local, remote = here(changes).history[-1], near(tmp_path / "a", changes).history[-1]
    assert local["confusion_matrix"] == remote["confusion_matrix"] and len(local["confusion_matrix"]) > 2
    for column in ("f1", "f1_weighted", "balanced_accuracy", "perplexity", "client_f1", "client_perplexity_worst"):
        assert local[column] == pytest.approx(remote[column], rel=1e-6)
    assert local["by_client"]["f1"] == pytest.approx(remote["by_client"]["f1"], rel=1e-6)
    with pytest.raises(UndriftError, match="auroc cannot be computed from sums, which are all that nodes send"):
        near(tmp_path / "b", changes | {"metrics": ["accuracy", "auroc"]})


def test_spoiled_replies_are_refused_recorded_and_do_not_advance_the_nodes_state(tmp_path):
    """NaN, a wrong shape, a missing tensor; the node's fourth round starts where it began."""
    changes = FOUR["scaffold"] | {"rounds": 4, "evaluate_every": 10}
    bad = Near(tmp_path / "bad", changes, 2, lambda kind, node, _, r: spoiled(r) if kind == "train" and node else r)
    found = near(tmp_path / "bad", changes, bad)
    gone = near(tmp_path / "gone", changes, lossy(tmp_path / "gone", changes, lambda t: t < 3))
    assert [row["refused"] for row in found.history] == [[1, 3, 5]] * 3 + [[]]
    assert [row["missing"] for row in gone.history] == [[1, 3, 5]] * 3 + [[]]
    assert same_bits(found.params, gone.params)  # a refused round is one in which the node was not there
    reasons = [row["nodes"]["n1"] for row in found.history[:3]]
    assert "NaN" in reasons[0] and "(1, 6)" in reasons[1] and "lacks '0.weight'" in reasons[2]
    assert found.history[0]["steps"] < found.history[3]["steps"]


def lossy(folder, changes, lost, nodes: int = 2) -> Near:
    """Nodes of which the second does not answer in the rounds that `lost` says."""

    def spoil(kind, node, request, reply):
        return Trouble("gone") if kind == "train" and node == 1 and lost(decode(request)[1]["round"]) else reply

    return Near(folder, changes, nodes, spoil)


def test_clients_of_a_lost_node_are_left_out_as_if_the_plan_had_left_them_out(tmp_path):
    changes = FOUR["scaffold"] | {"evaluate_every": 10, "imports": ["tests.flower_problem"]}
    lost = near(tmp_path / "a", changes, lossy(tmp_path / "a", changes, lambda t: t == 1))
    local = here(changes | {"method": "Absent(1) + Scaffold() + FedNLR()"})
    assert distance(lost.params, local.params) < 1e-12


@pytest.mark.parametrize("name", ["scaffold", "personal"])
def test_a_server_that_starts_again_goes_on_to_the_same_bits(name, tmp_path):
    unbroken = near(tmp_path / "a", FOUR[name])
    link = Near(tmp_path / "b", FOUR[name])

    def dies(kind, node, request, reply):
        if kind == "train" and decode(request)[1]["round"] == 2 and node == 0:
            raise KeyboardInterrupt  # other nodes have trained, and kept what is of no use
        return reply

    link.spoil = dies
    with pytest.raises(KeyboardInterrupt):
        near(tmp_path / "b", FOUR[name], link)
    link.spoil = None
    again = near(tmp_path / "b", FOUR[name], link)
    assert same_bits(again.params, unbroken.params)
    assert len(again.history) == 3 and [kind for kind, _ in link.asked].count("hello") == 3


def test_a_round_that_too_few_nodes_answer_fails_and_can_be_started_again(tmp_path):
    link = lossy(tmp_path, FOUR["scaffold"], lambda t: t == 1)
    with pytest.raises(UndriftError, match=r"1 of 2 nodes .*\(n1: gone\)"):
        near(tmp_path, FOUR["scaffold"], link, replies=2)
    link.spoil = None
    found = near(tmp_path, FOUR["scaffold"], link, replies=2)
    unbroken = near(tmp_path / "a", FOUR["scaffold"], Near(tmp_path / "a", FOUR["scaffold"], 2))
    assert same_bits(found.params, unbroken.params) and len(found.history) == 3


def test_a_node_whose_state_is_gone_says_so(tmp_path):
    changes = FOUR["scaffold"] | {"evaluate_every": 10}
    link = Near(tmp_path, changes)

    def burn(kind, node, request, reply):
        if kind == "train" and node == 2 and decode(request)[1]["round"] == 0:
            shutil.rmtree(tmp_path / "state2")
        return reply

    link.spoil = burn
    found = near(tmp_path, changes, link)
    assert "cannot be read" in found.history[1]["nodes"]["n2"] and found.history[2]["missing"] == [2, 5]


WIDER = {
    "batch norm": {"model": "norm64", "method": "FedProx(0.1)", "local": BASE["local"] | {"drop_last": True}},
    "trained in place": {"model": "linked64", "evaluate_every": 1},
    "skip": {"on_nonfinite": "skip"},
    "single updates": {"method": "Median()"},
    "outliers": {"max_norm_ratio": 1.05, "min_clients": 2},
    "faults": {"faults": {"dropout": 0.3, "nan": 0.2}, "on_nonfinite": "skip"},
    "cohort measures": {"method": "FedNLR() + FedCurv(0.1)"},
    "kept optimizer": {"local": BASE["local"] | {"optimizer": "Adam()", "optimizer_state": "keep", "lr": 0.01}},
    "short batches": {"local": {"steps": 1, "batch_size": 50, "lr": 0.1, "momentum": 0.5}},
}


@pytest.mark.parametrize("name", WIDER)
def test_what_else_a_run_may_have(name, tmp_path):
    changes = {"evaluate_every": 10, "rounds": 2} | WIDER[name]
    local, remote = here(changes), near(tmp_path, changes)
    assert distance(remote.params, local.params) < 1e-11
    for one, other in zip(local.history, remote.history, strict=True):
        shared = one.keys() & other.keys() & {"clients", "steps", "skipped", "left_out", "survivors", "dropped"}
        assert {c: one[c] for c in shared} == {c: other[c] for c in shared}
        for column in one.keys() & other.keys() & {"loss", "client_loss"}:
            assert one[column] == pytest.approx(other[column], rel=1e-6)


FINISH = {"method": "CCVR(samples_per_class=20, epochs=2)", "rounds": 2, "evaluate_every": 10}
"""A method that measures over all clients once the last round is over."""


def test_what_is_measured_at_the_end_is_measured_on_all_nodes(tmp_path):
    local, remote = here(FINISH), near(tmp_path, FINISH)
    assert distance(remote.params, local.params) < 1e-10
    trained = here(FINISH | {"method": "FedAvg()"})
    assert distance(remote.params, trained.params) > 1e-6  # the end has an effect


def test_a_node_that_is_missing_at_the_end_is_named_and_the_run_can_be_finished(tmp_path):
    """Rounds may do without a node; what they have trained is kept, and the end is made up for once it is back."""
    link = Near(tmp_path, FINISH, 2, lambda kind, node, _, r: Trouble("gone") if kind == "measure" and node else r)
    with pytest.raises(
        UndriftError, match=r"CCVR measures .* after the last round, and n1 .*gone.*Start the run again"
    ):
        near(tmp_path, FINISH, link)
    link.spoil, link.asked = None, []
    again = near(tmp_path, FINISH, link)
    assert "train" not in dict(link.asked)
    unbroken = near(tmp_path / "a", FINISH, Near(tmp_path / "a", FINISH, 2))
    assert same_bits(again.params, unbroken.params) and len(again.history) == 2
