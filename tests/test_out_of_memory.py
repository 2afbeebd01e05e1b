"""A cohort too large for the GPU: lanes are halved, the round starts again, and a resumed run repeats that."""

from __future__ import annotations

import pytest
import torch

import undrift as ud
from tests.problems import distance, make_clients, net, same_bits
from undrift.engine import fallback
from undrift.engine.lanes import LanesEngine

LOCAL = ud.Local(epochs=1, batch_size=4, lr=0.1)
SIZES = [9, 6, 3, 12, 7, 5]


@pytest.fixture
def room(monkeypatch):
    """Room for so many lanes, in rounds from the second on, with the calls that failed."""
    state = {"lanes": 2, "from": 1, "failed": []}
    train = LanesEngine.train

    def limited(self, queues, inputs, visit, skip):
        found = train(self, queues, inputs, visit, skip)
        if len(queues) > state["lanes"] and inputs.plan.round >= state["from"]:
            state["failed"].append((inputs.plan.round, len(queues)))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(LanesEngine, "train", limited)
    return state


@pytest.mark.parametrize("engine", ["auto", "lanes"])
def test_lanes_are_halved_until_they_fit(room, engine):
    data = make_clients(SIZES)
    found = ud.train(net(), data, rounds=4, local=LOCAL, engine=engine, lanes=6)
    assert room["failed"] == [(1, 6), (1, 3)]
    assert [row.get("lanes") for row in found.history] == [None, 2, None, None]
    assert {"engine": "lanes", "lanes": 2, "narrowed": 2}.items() <= found.choices.items()
    assert found.choices["why"] == "memory ran out with more lanes"
    room["lanes"] = 6
    wanted = ud.train(net(), data, rounds=4, local=LOCAL, lanes=6)
    assert distance(found.params, wanted.params) < 1e-12


def test_a_resumed_run_repeats_it(room, tmp_path):
    data, options = make_clients(SIZES), {"local": LOCAL, "lanes": 6, "checkpoint_every": 1}
    whole = ud.train(net(), data, ud.Scaffold(), rounds=5, out=tmp_path / "whole", **options)
    ud.train(net(), data, ud.Scaffold(), rounds=3, out=tmp_path / "part", **options)
    room["lanes"], room["failed"] = 6, []  # more memory than before: the run stays as it was
    again = ud.train(net(), data, ud.Scaffold(), rounds=5, out=tmp_path / "part", resume=True, **options)
    assert not room["failed"] and again.choices == whole.choices and same_bits(again.params, whole.params)


def test_the_last_lane_falls_back(room):
    data, room["lanes"] = make_clients(SIZES), 0
    found = ud.train(net(), data, rounds=3, local=LOCAL, lanes=5)
    assert room["failed"] == [(1, 5), (1, 3), (1, 2), (1, 1)]
    assert found.choices["engine"] == "plain" and found.choices["switched"] == 2
    assert found.history[1]["lanes"] == 1 and "more memory" in found.history[1]["switched"]
    with pytest.raises(torch.OutOfMemoryError):
        ud.train(net(), data, rounds=3, local=LOCAL, lanes=5, engine="lanes")


def test_a_round_whose_plan_chooses_clients(room):
    """Such cohorts are filled up to the number of lanes, which changes in the middle of a round."""
    from dataclasses import dataclass, replace

    @dataclass(frozen=True)
    class Few(ud.Part):
        def plan(self, plan, state, server):
            some = server.clients[: 2 + plan.round]
            return replace(plan, clients=some, steps=server.steps(some)), state

    data = make_clients(SIZES)
    found = ud.train(net(), data, Few(), rounds=4, local=LOCAL, lanes=6)
    assert found.choices["lanes"] == 2
    wanted = ud.train(net(), data, Few(), rounds=4, local=LOCAL, engine="plain")
    assert distance(found.params, wanted.params) < 1e-12


def test_memory_that_ran_out_behind_another_error():
    def error():
        try:
            raise torch.OutOfMemoryError("no room")
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    with pytest.raises(RuntimeError) as found:
        error()
    assert fallback.out_of_memory(found.value) and not fallback.out_of_memory(RuntimeError("shape"))
