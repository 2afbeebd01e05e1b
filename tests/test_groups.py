"""Clients begin and end in groups: every client once, in its own lane, with its own values."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import undrift as ud
from tests.problems import make_clients, net, same_bits
from undrift.engine import groups
from undrift.engine.groups import Beginning, Ending
from undrift.engine.lanes import LanesEngine
from undrift.engine.packing import pack, segments


@given(st.lists(st.integers(1, 9), min_size=1, max_size=23), st.integers(1, 8), st.booleans())
@settings(max_examples=150, deadline=None)
def test_lanes_hold_their_own_clients_and_each_ends_once(steps, lanes, vary):
    """A client's tree is its position; a lane that has another client's, or an old one's, is noticed."""
    counts = torch.tensor(steps).numpy()
    queues = pack(counts, min(lanes, len(steps)))
    plan, width = list(segments(counts, queues)), len(queues)
    order = [client for segment in plan for _, client in segment.begins]
    sizes = groups.sizes(len(steps), width, vary)
    begun, ended, held = [], [], None

    def begin(clients):
        begun.append(clients)
        return {"own": torch.tensor(clients), "state": (torch.tensor(clients).float()[:, None].expand(-1, 3),)}

    beginning, ending = Beginning(order, sizes.copy(), begin), Ending(sizes.copy())
    for segment in plan:
        held = beginning.fill(held, [lane for lane, _ in segment.begins])
        held = {"own": held["own"], "state": (held["state"][0].clone(),)}  # steps replace the state
        busy = dict([*segment.begins, *segment.ends])
        assert all(held["own"][lane] == client for lane, client in busy.items())
        for tree, clients in ending.add(segment.ends, held):
            assert tree["own"].tolist() == clients
            assert torch.equal(tree["state"][0], torch.tensor(clients).float()[:, None].expand(-1, 3))
            ended.append(list(clients))
        for lane, _ in segment.ends:  # what a lane goes on to compute must not reach those that wait to end
            held["state"][0][lane] = -1
            held["own"][lane] = -1
    assert sorted(chain(*begun)) == sorted(chain(*ended)) == list(range(len(steps)))
    assert [len(group) for group in begun] == [len(group) for group in ended] == sizes


def test_sizes():
    assert groups.sizes(40, 16, vary=False) == [16, 16, 8]
    assert groups.sizes(43, 16, vary=False) == [16, 16, 11]
    assert groups.sizes(43, 16, vary=True) == [16, 16, 8, 2, 1]
    assert groups.sizes(3, 3, vary=False) == groups.sizes(3, 3, vary=True) == [3]


def test_entries_that_are_not_adjacent_are_not_taken_as_a_range():
    tree = {"a": torch.arange(6), "b": [torch.arange(12).view(6, 2)]}
    for where in ([0, 5, 2], [3, 1, 2, 0], [2, 3, 4], [4]):
        assert groups.take(tree, where)["a"].tolist() == groups.copied(tree, where)["a"].tolist() == where
    groups.copy(tree, [0, 3, 2], {"a": torch.tensor([0, 7, 8, 9]), "b": [torch.full((4, 2), -1)]}, [1, 2, 3])
    assert tree["a"].tolist() == [7, 1, 9, 8, 4, 5] and tree["b"][0][:, 0].tolist() == [-1, 2, -1, -1, 8, 10]


SIZES = [23, 5, 41, 10, 17, 1, 33, 8]


def trained(method, lanes, sizes=SIZES):
    torch.manual_seed(0)
    local = ud.Local(epochs=2, batch_size=8, lr=0.1)
    options = {"engine": "lanes", "lanes": lanes, "rehearse": False}
    return ud.train(net(), make_clients(sizes), method, rounds=3, local=local, **options)


@pytest.mark.parametrize("method", [ud.FedAvg(), ud.Scaffold(), ud.FedCurv(0.1)], ids=["FedAvg", "Scaffold", "FedCurv"])
def test_few_calls_and_the_same_bits_each_time(method, monkeypatch):
    """Eight clients on three lanes, none of which end together: three groups begin, and three end, per round."""
    calls = {"begin": 0, "end": 0}
    for name in calls:
        original = getattr(LanesEngine, name)

        def counting(*args, original=original, name=name):
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(LanesEngine, name, counting)
    one = trained(method, 3)
    assert calls == {"begin": 9, "end": 9}
    assert same_bits(one.params, trained(method, 3).params)


def test_inputs_are_not_written_to(monkeypatch):
    """Lanes are written in place, but not the tensors of the round from which they were taken, the longest first."""
    seen, original = [], LanesEngine.run

    def run(engine, inputs, *rest):
        before = {name: t.clone() for name, t in inputs.clients.items()}
        found = original(engine, inputs, *rest)
        seen.append(all(torch.equal(before[name], t) for name, t in inputs.clients.items()))
        return found

    monkeypatch.setattr(LanesEngine, "run", run)
    trained(ud.FedAvg(), 3, sorted(SIZES, reverse=True))
    assert seen == [True] * 3
