"""Real federations on this machine: SuperLink and SuperNodes with TLS and keys. Needs Flower; `make flower` has it.

One SuperLink serves all runs of this file, several at a time, since a run mostly waits.
"""

from __future__ import annotations

import http.client
import shutil
from pathlib import Path

import pytest

from tests.federated import FOUR, Near, here, near
from tests.flower_problem import spoiled
from tests.flower_runs import LONG, NODES, QUICK, app, assert_all_ended, problem, rows, until, weights
from tests.problems import distance, same_bits
from undrift.files import write_text
from undrift.flower.up import federation

__all__ = ["problem"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The four experiments, and one with a node that spoils its replies, all on one SuperLink at a time."""
    folder = tmp_path_factory.mktemp("flower")
    with federation(folder / "grounds", NODES) as grounds:
        started = {}
        for name, changes in FOUR.items():
            started[name] = grounds.submit(app(folder / name, changes | QUICK), folder / name / "out")
        spoiling = app(folder / "spoiled", FOUR["scaffold"] | QUICK | {"rounds": 4})
        shutil.copy(Path(__file__).with_name("flower_client.py"), spoiling)
        write_text(spoiling / "app" / "client.py", "from flower_client import app_for\n\napp = app_for(__file__)\n")
        started["spoiled"] = grounds.submit(spoiling, folder / "spoiled" / "out")
        ended = {name: grounds.wait(run, folder / name / "out", LONG) for name, run in started.items()}
        yield grounds, folder, ended
    assert_all_ended(folder)


@pytest.mark.parametrize("name", FOUR)
def test_an_experiment_gives_the_parameters_of_a_local_run(runs, name, tmp_path):
    _, folder, ended = runs
    assert ended[name] == (True, "")
    local = here(FOUR[name])
    assert distance(weights(folder / name / "out"), dict(local.model.state_dict())) < 1e-9
    bits = near(tmp_path, FOUR[name], Near(tmp_path, FOUR[name], NODES))
    assert same_bits(weights(folder / name / "out"), dict(bits.model.state_dict()))
    assert [row["clients"] for row in rows(folder / name / "out")] == [row["clients"] for row in local.history]
    assert rows(folder / name / "out")[-1]["accuracy"] == pytest.approx(local.history[-1]["accuracy"])


def test_spoiled_replies_are_refused_and_the_node_goes_on_from_its_last_accepted_state(runs, tmp_path):
    _, folder, ended = runs
    assert ended["spoiled"] == (True, "")
    changes = FOUR["scaffold"] | QUICK | {"rounds": 4}
    link = Near(tmp_path, changes, NODES, lambda kind, node, _, r: spoiled(r) if kind == "train" and node else r)
    expected, found = near(tmp_path, changes, link), rows(folder / "spoiled" / "out")
    assert [row["refused"] for row in found] == [[1, 3, 5], [1, 3, 5], [1, 3, 5], []]
    reasons = [row["nodes"]["node-1"] for row in found[:3]]
    assert "NaN" in reasons[0] and "(1, 6)" in reasons[1] and "lacks" in reasons[2]
    assert distance(weights(folder / "spoiled" / "out"), dict(expected.model.state_dict())) < 1e-9


def test_a_node_without_a_registered_key_gets_nothing(runs):
    grounds, folder, _ = runs
    grounds.node("stranger", {"name": "stranger", "partition-id": 0, "num-partitions": 1, "state": str(folder / "x")})
    log = grounds.folder / "logs" / "stranger.log"
    until(lambda: "Failed to activate SuperNode" in log.read_text())
    grounds.stop("stranger")
    assert len(grounds.flwr("supernode", "list", "local")["nodes"]) == NODES
    assert not (folder / "x").exists()


def test_a_connection_without_tls_is_refused(runs):
    plain = http.client.HTTPConnection("127.0.0.1", runs[0].port, timeout=LONG)
    plain.request("POST", "/v1/fleet/register-node")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        plain.getresponse()
