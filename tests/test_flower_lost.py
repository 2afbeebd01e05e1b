"""Nodes and servers of real federations that are killed and come back. Needs Flower; `make flower` has it."""

from __future__ import annotations

import signal

import numpy as np

from tests.federated import FOUR, Near, near
from tests.flower_runs import LONG, NODES, QUICK, app, assert_all_ended, problem, rows, until, weights
from tests.problems import same_bits
from undrift.files import write_text
from undrift.flower.engine import Trouble
from undrift.flower.messages import decode
from undrift.flower.up import Grounds, federation

__all__ = ["problem"]


def own_data(folder, i):
    """Where a node has data of its own."""
    draw, n = np.random.default_rng(i), 20 + 11 * i
    lines = [
        ",".join(map(str, [*draw.normal(size=3).round(3), label])) for label in [0, 1, *draw.integers(0, 2, n).tolist()]
    ]
    write_text(folder / f"hospital-{i}.csv", "\n".join(["a,b,c,label", *lines]) + "\n")
    return {"data": str(folder / f"hospital-{i}.csv"), "test-fraction": 0.2}


def test_a_run_goes_on_without_a_killed_node_and_a_restarted_one_keeps_its_state(tmp_path):
    """Nodes with data of their own. Flower notices after at most a minute that one is gone."""
    changes = {"model": "mlp", "method": "Scaffold()", "rounds": 5} | QUICK
    own = [own_data(tmp_path, i) for i in range(NODES)]
    configs = [{"name": f"n{i}", "state": str(tmp_path / f"state-{i}"), **own[i]} for i in range(NODES)]
    with federation(tmp_path / "grounds", NODES, configs) as grounds:
        out = tmp_path / "app" / "out"
        run = grounds.submit(app(tmp_path / "app", changes), out)
        until(lambda: len(rows(out)) == 1)
        grounds.stop("node-1", signal.SIGKILL)
        assert grounds.wait(run, out, LONG) == (True, "")
        assert [row["missing"] for row in rows(out)] == [[]] + [[1]] * 4
        assert all(row["nodes"]["n1"].startswith("missing: ") for row in rows(out)[1:])
        grounds.node("node-1", configs[1])
        more = changes | {"rounds": 6}  # it takes part again, with the control variate of round 1
        run = grounds.submit(app(tmp_path / "more", more), out)
        assert grounds.wait(run, out, LONG) == (True, "")
    assert_all_ended(tmp_path)
    assert rows(out)[5]["missing"] == []

    def lost(kind, node, request, reply):
        return Trouble("gone") if kind == "train" and node and 0 < decode(request)[1]["round"] < 5 else reply

    link = Near(tmp_path / "near", more, NODES, lost, own=own)
    assert same_bits(weights(out), dict(near(tmp_path / "near", more, link).model.state_dict()))
    assert list(tmp_path.glob("state-1/*/client-1/round-6.safetensors"))


def test_a_server_that_is_killed_between_rounds_goes_on_to_the_same_bits(tmp_path):
    changes = FOUR["scaffold"] | QUICK
    with Grounds(tmp_path / "grounds") as grounds:
        place = app(tmp_path / "app", changes)
        out = tmp_path / "app" / "out"
        for life in range(2):
            grounds.link()
            for i in range(NODES):
                state = str(tmp_path / f"state{i}")
                grounds.register(f"node-{i}")
                config = {"name": f"node-{i}", "state": state, "partition-id": i, "num-partitions": NODES}
                grounds.node(f"node-{i}", config)
            run = grounds.submit(place, out)
            if life == 0:
                until(lambda: len(rows(out)) == 1 and (out / "run/checkpoint/round-1.json").exists())
                for name in list(grounds.processes):
                    grounds.stop(name, signal.SIGKILL)
                assert_all_ended(tmp_path)
                assert len(rows(out)) < 3
        assert grounds.wait(run, out, LONG) == (True, "")
    unbroken = near(tmp_path / "near", changes, Near(tmp_path / "near", changes, NODES))
    assert same_bits(weights(out), dict(unbroken.model.state_dict()))
    assert_all_ended(tmp_path)
    assert len(rows(out)) == 3
