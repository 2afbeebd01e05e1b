"""Clients on the threads of a CPU: the same training, the same bits each time, and torch's threads as they were."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import undrift as ud
from tests.parts import METHOD
from tests.problems import distance, make_clients, net, same_bits
from undrift.engine import threads
from undrift.engine.threads import at_once

SIZES = [23, 5, 0, 41, 10, 17, 1]
SETTINGS = {
    "rounds": 3,
    "local": ud.Local(epochs=2, batch_size=8, lr=0.1, weight_decay=0.01),
    "participation": 5,
    "device": "cpu",
}


@pytest.fixture
def three_threads(monkeypatch):
    """Three threads, however idle they may be; gives the number of clients that each had in each round."""
    before, seen = torch.get_num_threads(), []

    def watched(function, queues):
        seen.append([len(queue) for queue in queues])
        return at_once(function, queues)

    monkeypatch.setattr(threads, "THREADS_BUSY", 0.0)
    monkeypatch.setattr(threads, "at_once", watched)
    torch.set_num_threads(3)
    yield seen
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def test_threads_train_what_lanes_and_the_plain_engine_do_every_hook_included(three_threads):
    data = make_clients(SIZES)
    one, again = (ud.train(net(dropout=0.3), data, METHOD, lanes=1, **SETTINGS) for _ in range(2))
    assert one.choices["lanes"] == 1 and same_bits(one.params, again.params)
    assert len(three_threads) == 6 and all(len(each) == 3 and sum(each) == 5 for each in three_threads)
    side = ud.train(net(dropout=0.3), data, METHOD, lanes=3, **SETTINGS)
    plain = ud.train(net(dropout=0.3), data, METHOD, engine="plain", **SETTINGS)
    assert distance(one.params, side.params) < 1e-12 and distance(one.params, plain.params) < 1e-12


@pytest.mark.parametrize("method", [ud.Scaffold(), ud.FedCurv(0.1), ud.FedDyn(0.1) + ud.FedNLR()])
def test_states_and_passes_come_from_every_thread(method, three_threads):
    data = make_clients(SIZES)
    threads = ud.train(net(), data, method, lanes=1, **SETTINGS)
    torch.set_num_threads(1)
    alone = ud.train(net(), data, method, lanes=1, **SETTINGS)
    torch.set_num_threads(3)
    assert distance(threads.params, alone.params) < 1e-12


def test_threads_that_would_wait_for_one_another_are_not_used(three_threads, monkeypatch):
    monkeypatch.setattr(threads, "THREADS_BUSY", 0.9)
    settings = {**SETTINGS, "participation": 1.0}
    ud.train(net(), make_clients([80, 8, 8, 8]), lanes=1, **settings)
    assert not three_threads
    ud.train(net(), make_clients([80, 80, 80]), lanes=1, **settings)
    assert three_threads == [[1, 1, 1]] * 3


def test_an_error_in_a_thread_is_the_runs(three_threads):
    @dataclass(frozen=True)
    class Broken(ud.Part):
        def gradient(self, g, params, client):
            raise RuntimeError("this hook is broken")

    with pytest.raises(ud.UndriftError, match="this hook is broken"):
        ud.train(net(), make_clients(SIZES), Broken(), lanes=1, **SETTINGS)


def test_clients_with_tests_of_their_own_are_visited_one_at_a_time(three_threads):
    data = ud.load("digits", ud.Dirichlet(0.3), clients=8, client_test_fraction=0.2)
    local = ud.Local(epochs=1, batch_size=32, lr=0.1)
    runs = []
    for count in (1, 4):
        runs.append(ud.train("cnn", data, rounds=2, local=local, lanes=count, personalize_every=1, device="cpu"))
    assert three_threads
    for one, other in zip(runs[0].history, runs[1].history, strict=True):
        assert one["tuned_accuracy"] == pytest.approx(other["tuned_accuracy"], abs=0.02)
