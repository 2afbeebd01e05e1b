"""Clients on the threads of a CPU: the same training, the same bits each time, and torch's threads as they were."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

import undrift as ud
from tests.parts import METHOD
from tests.problems import distance, make_clients, net, same_bits
from undrift.engine import threads
from undrift.engine.threads import at_once
from undrift.training import threads as rule
from undrift.training.build import prepare
from undrift.training.settings import Settings

SIZES = [23, 5, 0, 41, 10, 17, 1]
SETTINGS = {
    "rounds": 3,
    "local": ud.Local(epochs=2, batch_size=8, lr=0.1, weight_decay=0.01),
    "participation": 5,
    "device": "cpu",
    "rehearse": False,
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


# ---- how many threads a run has ----------------------------------------------------------------------------------


@pytest.fixture
def default(monkeypatch):
    """A machine of four cores on which nobody has chosen a number of threads."""
    before = torch.get_num_threads()
    for name in rule.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rule.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(rule.os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    torch.set_num_threads(4)
    yield monkeypatch
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


def chosen(**settings) -> tuple[int, str, int]:
    """The number of threads, why, and how many there were in a round."""
    seen = []
    options = {**SETTINGS, "rounds": 1, "on_round": lambda row: seen.append(torch.get_num_threads())} | settings
    found = ud.train(net(), make_clients(SIZES), **options).choices
    return found["threads"], found["threads_why"], seen[0]


def test_a_small_model_has_one_thread_and_the_process_its_own_again(default):
    assert chosen() == (1, "a local step is too small to gain from more", 1)
    assert chosen(threads=2) == (2, "set by threads", 2)
    default.setenv("OMP_NUM_THREADS", "4")
    assert chosen() == (4, "set by OMP_NUM_THREADS", 4)


def test_what_the_user_has_set_stays(default):
    torch.set_num_threads(3)
    assert chosen() == (3, "set by torch.set_num_threads", 3)
    torch.set_num_threads(2)  # or one thread per physical core, as torch may choose by itself
    assert chosen()[0] == 1
    torch.set_num_threads(4)


def test_a_run_that_starts_during_another_does_not_take_over_its_threads(default):
    """A Python thread has the number of torch's threads that was set last: later ones kept that of the first run."""
    torch.set_num_threads(3)
    started, second, ended = threading.Event(), threading.Event(), threading.Event()
    data, found = make_clients(SIZES), []

    def train(count, on_round):
        found.append(ud.train(net(), data, **SETTINGS | {"rounds": 1}, threads=count, on_round=on_round).choices)

    def first():
        train(1, lambda row: (started.set(), second.wait(30)))
        ended.set()

    def other():
        assert started.wait(30)
        train(None, lambda row: (second.set(), ended.wait(30)))

    def in_a_new_thread(*functions):
        with ThreadPoolExecutor(len(functions)) as pool:
            return [running.result() for running in [pool.submit(function) for function in functions]]

    in_a_new_thread(first, other)
    assert [(own["threads"], own["threads_why"]) for own in found] == [
        (1, "set by threads"), (3, "set by torch.set_num_threads")
    ]  # fmt: skip
    assert in_a_new_thread(torch.get_num_threads) == [3]
    torch.set_num_threads(4)


def test_a_step_that_is_large_enough_has_all_threads(default):
    """net() is 6 × 7 and 7 × 4 weights; a forward pass of a batch of 8 in 5 lanes takes two operations for each."""
    count = sum(p.numel() for p in net().parameters() if p.ndim == 2)
    work = 2 * 8 * count
    assert rule.forward_flops(prepare(Settings(model=net(), data=make_clients(SIZES), **SETTINGS)).model, 8) == work
    lanes = ud.train(net(), make_clients(SIZES), **SETTINGS).choices["lanes"]
    default.setattr(rule, "STEP_FLOPS", lanes * work)
    assert chosen()[0] == 4
    default.setattr(rule, "STEP_FLOPS", lanes * work + 1)
    assert chosen()[0] == 1


def test_the_rule_counts_without_drawing_or_changing_the_model(default):
    model = torch.nn.Sequential(net(), torch.nn.BatchNorm1d(4).double(), torch.nn.Dropout(0.5))
    state, drawn = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    for engine in ("plain", "lanes"):
        prepare(Settings(model=model, data=make_clients([6, 6]), **{**SETTINGS, "engine": engine, "participation": 2}))
    assert same_bits(state, model.state_dict()) and torch.equal(drawn, torch.get_rng_state())


def test_the_number_stands_in_the_runs_file_and_repeats(default, tmp_path):
    data = ud.load("digits", "IID()", 4)
    local = ud.Local(steps=1, batch_size=4, lr=0.1)
    ud.train("logistic", data, rounds=1, local=local, out=tmp_path / "r")
    assert "\nthreads = 1\n" in (tmp_path / "r" / "config.toml").read_text()
    with pytest.raises(ud.UndriftError, match="threads must be a whole number from 1"):
        ud.train("logistic", data, rounds=1, local=local, threads=0)


def test_large_convolutions_keep_all_cores(default):
    """What `choose` trains one client at a time counts on them."""
    x, y = torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])
    data = ud.FederatedDataset.from_clients([(x, y)] * 2)
    settings = Settings(model="vgg9", data=data, rounds=1, local=ud.Local(steps=1, batch_size=2, lr=0.1), device="cpu")
    run = prepare(settings)
    assert run.choices["lanes"] == 1 and run.choices["threads"] == 4
    assert run.engine.engine.threads == 4


# ---- forks -------------------------------------------------------------------------------------------------------

FORK = """
import json, logging, os, sys
import torch
import undrift as ud

logging.basicConfig(stream=sys.stdout, format="%(message)s")
torch.set_num_threads(2)
data, local = ud.load("digits", ud.IID(), clients=4), ud.Local(steps=2, lr=0.1)

def train(**options):
    return ud.train("mlp", data, rounds=1, local=local, device="cpu", **options)

first = train({first})
child = os.fork()
if not child:
    x = torch.randn(2000, 2000)
    (x @ x).exp()
    found = train({second})
    alike = all(torch.equal(first.params[name], found.params[name]) for name in found.params)
    print(json.dumps([found.choices["threads"], found.choices["threads_why"], alike]), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize(("first", "second"), [("threads=2", "threads=2"), ("threads=2", ""), ("", "")])
def test_a_fork_after_training_trains_too(first, second):
    """A21: it hung, as OpenMP waited for threads that the fork does not have."""
    code = FORK.format(first=first, second=second)
    env = {name: value for name, value in os.environ.items() if name not in rule.THREADS}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as done:
        try:
            said, _ = done.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(done.pid, signal.SIGKILL)
    *warned, found, after = said.splitlines()
    assert json.loads(found) == [1, rule.FORKED, True] and after == "2"
    assert warned == ([f'threads=2: {rule.FORKED}; start processes with the method "spawn" instead.'] if second else [])
