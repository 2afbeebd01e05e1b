"""NaN and infinities are never passed over in silence: the run stops before them, or leaves out who sends them."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
from dataclasses import dataclass

import pytest
import torch

import undrift as ud
from tests import cuda_graphs
from tests.parts import Normed
from tests.problems import Point, distance, make_clients, net, quadratics, same_bits
from tests.reference import simulate
from undrift.training import nonfinite
from undrift.training.history import Clock
from undrift.tree import tree_finite

LOCAL = ud.Local(epochs=1, batch_size=8, lr=0.05)
EVERYONE = [0, 1, 3, 4, 5, 6]
ROUND, CLIENT = 2, 3


@dataclass(frozen=True)
class Poison(ud.Part):
    """In one round (counted from 0), one client, or all of them (−1), spoils one of the things that travel."""

    what: str = "update"
    client: int = CLIENT
    round: int = ROUND
    value: float = math.nan

    def keep(self, params):
        return {"mark": torch.zeros(())}

    def spoiled(self, client, what):
        hit = (client.round == self.round) & ((client.id == self.client) | (self.client < 0)) & (self.what == what)
        return torch.where(hit, self.value, 0.0)

    def gradient(self, g, params, client):
        return ud.tree_map(lambda g: g + self.spoiled(client, "gradient"), g)

    def update(self, delta, client):
        return ud.tree_map(lambda d: d + self.spoiled(client, "update"), delta)

    def upload(self, delta, client):
        kept = {"mark": client.kept["mark"] + 1 + self.spoiled(client, "keep")}
        return {"sum": torch.ones(()) + self.spoiled(client, "upload")}, kept


def train(method, rounds=4, engine="plain", data=None, **more):
    data = data if data is not None else make_clients([23, 5, 0, 41, 10, 17, 1])
    more = {"lanes": 3} | more if engine == "lanes" else more
    return ud.train(net(), data, method, rounds=rounds, local=LOCAL, engine=engine, **more)


def on_either(*lists):
    """Every combination on both engines; all but one engine for each, turn and turn about, are left to `make soak`."""
    for places in itertools.product(*(range(len(values)) for values in lists)):
        chosen = [values[place] for values, place in zip(lists, places, strict=True)]
        for turn, engine in enumerate(("lanes", "plain")):
            yield pytest.param(*chosen, engine, marks=[pytest.mark.long] * ((sum(places) + turn) % 2))


@functools.cache
def until_the_poison(engine):
    return train(ud.Scaffold() + Poison("nothing"), rounds=ROUND, engine=engine)


@pytest.mark.parametrize(
    ("what", "value", "engine"),
    list(on_either(["gradient", "update", "upload", "keep"], [math.nan, math.inf, -math.inf])),
)
def test_a_run_stops_before_the_round_and_names_the_client(what, value, engine):
    run = train(ud.Scaffold() + Poison(what, value=value), engine=engine)
    before = until_the_poison(engine)
    assert (
        run.stopped.startswith(f"Round {ROUND + 1}: client {CLIENT} sent or kept non-finite values.")
        and "on_nonfinite" in run.stopped
    )
    assert same_bits(run.params, before.params) and same_bits(dict(run.model.state_dict()), before.params)
    assert [row["round"] for row in run.history] == [1, 2] and before.stopped is None


@pytest.mark.parametrize(
    ("name", "what", "engine"),
    list(on_either(["FedAvg", "Scaffold", "FedDyn", "FedNova"], ["gradient", "upload", "keep"])),
)
def test_a_skipped_client_counts_for_nothing(name, what, engine, uneven):
    """Against the reference, in whose third round that client does not take part."""
    method, parts = {
        "FedAvg": (ud.FedAvg(), []),
        "Scaffold": (ud.Scaffold(), [("Scaffold", None)]),
        "FedDyn": (ud.FedDyn(0.3), [("FedDyn", 0.3)]),
        "FedNova": (ud.FedNova(), [("FedNova", None)]),
    }[name]
    run = train(method + Poison(what), 5, engine, uneven, on_nonfinite="skip")
    cohorts = [[c for c in EVERYONE if t != ROUND or c != CLIENT] for t in range(5)]
    assert distance(run.params, simulate(net(), uneven, LOCAL, cohorts, parts, 0)) < 1e-9
    assert [row["skipped"] for row in run.history] == [[], [], [CLIENT], [], []] and run.stopped is None


def test_running_statistics_leave_a_skipped_client_out():
    """Batch norm, one round: as if the client had no data."""
    sizes = [16, 24, 8, 16]
    whole, without = make_clients(sizes), make_clients(sizes)
    clients = [without[i] if i != 1 else (without[i][0][:0], without[i][1][:0]) for i in range(4)]
    without = ud.FederatedDataset.from_clients(clients, test=whole.server)
    torch.manual_seed(1)
    model, settings = Normed(), {"rounds": 1, "local": LOCAL, "engine": "plain"}
    run = ud.train(model, whole, Poison("gradient", 1, 0), on_nonfinite="skip", **settings)
    expected = ud.train(model, without, **settings)
    assert run.history[0]["skipped"] == [1]
    assert distance(dict(run.model.state_dict()), dict(expected.model.state_dict())) < 1e-12


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize("method", [ud.ServerSGD(momentum=0.9), ud.Scaffold() + ud.FedNLR(), ud.FedDyn(0.1)], ids=str)
def test_without_survivors_everything_stays_as_it_was(method, engine):
    """A round that nobody survives might as well not have been: the next one differs in its number alone."""
    run = train(method + Poison("gradient", client=-1), ROUND + 1, engine, on_nonfinite="skip")
    before = train(method + Poison("nothing"), ROUND, engine, on_nonfinite="skip")
    assert same_bits(run.params, before.params)
    assert run.history[ROUND]["skipped"] == EVERYONE and run.history[ROUND]["loss"] == before.history[-1]["loss"]


@dataclass(frozen=True)
class Counts(ud.Part):
    """Counts rounds in a state that, with `late`, has no form before its first one."""

    late: bool = False

    def start(self, params):
        return () if self.late else {"rounds": torch.zeros(())}

    def transform(self, update, state, server):
        return update, {"rounds": state["rounds"] + 1 if state else torch.ones(())}

    def history(self, state):
        return {"counted": float(state["rounds"]) if state else 0.0}


@pytest.mark.parametrize("late", [False, True])
def test_without_survivors_parts_keep_their_states(late):
    run = train(Counts(late) + Poison("gradient", client=-1), on_nonfinite="skip")
    assert [row["counted"] for row in run.history] == [1, 2, 2, 3]
    run = train(Counts(late) + Poison("gradient", client=-1, round=0), on_nonfinite="skip")
    assert [row["counted"] for row in run.history] == [0, 1, 2, 3]


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize(
    "method", [ud.FedAvg(), ud.Scaffold() + ud.FedNLR(), ud.FedDyn(0.1), ud.TwoDLRD(1) + ud.SignAgreement(2)], ids=str
)
def test_same_bits_when_nobody_is_skipped(method, engine):
    stop, skip = (train(method, engine=engine, on_nonfinite=choice) for choice in ("stop", "skip"))
    assert same_bits(stop.params, skip.params)
    rows = [
        [{k: v for k, v in row.items() if k not in ("seconds", "skipped")} for row in r.history] for r in (stop, skip)
    ]
    assert rows[0] == rows[1] and all(row["skipped"] == [] for row in skip.history)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
@pytest.mark.parametrize("late", [False, True])
def test_flags_may_be_read_a_round_late(monkeypatch, late, on_nonfinite):
    """As on a GPU, where the next round has begun by then: what it changed is undone too."""
    if late:
        monkeypatch.setattr(Clock, "_passed", lambda self, moment: False)
    method = ud.Scaffold() + Poison("gradient")
    run = train(method, 6, "lanes", participation=4, on_nonfinite=on_nonfinite, evaluate_every=6)
    if on_nonfinite == "stop":
        before = train(ud.Scaffold() + Poison("nothing"), ROUND, "lanes", participation=4, evaluate_every=6)
        assert CLIENT in train(ud.FedAvg(), ROUND + 1, participation=4).history[ROUND]["clients"]
        assert same_bits(run.params, before.params) and len(run.history) == ROUND and run.stopped
    else:
        assert run.history[ROUND]["skipped"] == [CLIENT] and len(run.history) == 6


@pytest.mark.parametrize("late", [False, True])
def test_what_clients_keep_goes_back_too(tmp_path, monkeypatch, late):
    """A stopped run, resumed, is the run that skipped from the start: every state was put back."""
    if late:
        monkeypatch.setattr(Clock, "_passed", lambda self, moment: False)
    settings = {"participation": 3, "seed": 1, "engine": "plain"}
    method = ud.Scaffold() + Poison("gradient")
    cohorts = [row["clients"] for row in train(ud.FedAvg(), ROUND + 1, **settings).history]
    assert set(cohorts[ROUND]) - {client for cohort in cohorts[:ROUND] for client in cohort}  # some are new to it
    stopped = train(method, 6, out=tmp_path / "run", **settings)
    assert stopped.stopped and json.loads((tmp_path / "run" / "stopped.json").read_text())["why"] == stopped.stopped
    assert not (tmp_path / "run" / "model.safetensors").exists()
    again = train(method, 6, out=tmp_path / "run", resume=True, **settings)
    assert again.stopped == stopped.stopped and same_bits(again.params, stopped.params)
    resumed = train(method, 6, out=tmp_path / "run", resume=True, on_nonfinite="skip", **settings)
    whole = train(method, 6, on_nonfinite="skip", **settings)
    assert same_bits(resumed.params, whole.params) and resumed.stopped is None
    assert not (tmp_path / "run" / "stopped.json").exists()
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in whole.history]


@dataclass(frozen=True)
class Explode(ud.Part):
    def transform(self, update, state, server):
        return ud.tree_map(lambda u: u * math.inf, update), state


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_servers_step_is_not_blamed_on_clients(on_nonfinite):
    run = train(Explode(), on_nonfinite=on_nonfinite)
    assert run.stopped.startswith("Round 1: every client's update is finite, but the server's step made")
    assert same_bits(run.params, dict(net().named_parameters())) and run.history == []


@pytest.mark.parametrize("late", [False, True])
def test_running_statistics_go_back_too(tmp_path, monkeypatch, late):
    if late:
        monkeypatch.setattr(Clock, "_passed", lambda self, moment: False)
    torch.manual_seed(1)
    model, data = Normed(), make_clients([16, 24, 8, 16])
    settings = {"local": LOCAL, "evaluate_every": 5}
    run = ud.train(model, data, Poison("gradient", 1), rounds=5, **settings)
    before = ud.train(model, data, Poison("nothing"), rounds=ROUND, **settings)
    assert run.stopped and same_bits(dict(run.model.state_dict()), dict(before.model.state_dict()))


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_servers_state_that_overflows_is_seen(on_nonfinite):
    """Adam's second moment becomes infinite, and its steps 0: nothing but the state shows it."""

    @dataclass(frozen=True)
    class Large(ud.Part):
        def transform(self, update, state, server):
            return ud.tree_map(lambda u: u + 1e25, update), state

    data = make_clients([9, 12], torch.float32)
    method = Large() + ud.ServerAdam(lr=0.1)
    run = ud.train(net(torch.float32), data, method, rounds=3, local=LOCAL, on_nonfinite=on_nonfinite)
    assert run.stopped.startswith("Round 1: every client's update is finite, but the server's step made")


def test_a_state_that_is_infinite_from_the_start_may_stay_so():
    @dataclass(frozen=True)
    class Best(ud.Part):
        def start(self, params):
            return {"best": math.inf}

    assert train(Best(), 2).stopped is None


@pytest.mark.parametrize("late", [False, True])
def test_what_fails_because_of_nan_is_not_what_is_reported(monkeypatch, late):
    """A part that cannot take NaN at the end of training, a metric that cannot, and a plan that cannot."""
    if late:
        monkeypatch.setattr(Clock, "_passed", lambda self, moment: False)
    wanted = f"Round {ROUND + 1}: client {CLIENT}"
    assert train(ud.CCVR() + Poison("gradient"), ROUND + 1).stopped.startswith(wanted)

    def strict(z, y):
        assert z.isfinite().all()
        return (z.argmax(1) == y).double()

    run = train(Poison("gradient"), ROUND + 1, metrics={"strict": strict})
    assert run.stopped.startswith(wanted) and len(run.history) == ROUND

    @dataclass(frozen=True)
    class Whole(ud.Part):
        def start(self, params):
            return {"n": torch.zeros(())}

        def plan(self, plan, state, server):
            int(state["n"])
            return plan, state

        def transform(self, update, state, server):
            return update, {"n": sum(u.sum() for u in update.values())}

    assert train(Whole() + Poison("gradient"), ROUND + 2).stopped.startswith(wanted)


def test_what_fails_for_another_reason_is_raised():
    @dataclass(frozen=True)
    class Fails(ud.Part):
        def observe(self, params, state, server):
            raise ZeroDivisionError

    with pytest.raises(ud.UndriftError, match=r"Fails.observe failed \(.*test_nonfinite.py:\d+\): ZeroDivisionError"):
        train(Fails(), 2)


def test_rounds_are_undone_on_the_stream_that_computes(monkeypatch):
    """Not on the one that reads figures: the next round may still be under way, in the same buffers."""
    inside = []

    class Reading:
        def __enter__(self):
            inside.append(True)

        def __exit__(self, *error):
            inside.pop()

    start, undo = Clock.__init__, nonfinite.FiniteGuard.undo

    def with_stream(self, device, alone=True):
        start(self, device)
        self.reading = Reading()

    def watched(self, error):
        assert not inside
        return undo(self, error)

    monkeypatch.setattr(Clock, "__init__", with_stream)
    monkeypatch.setattr(nonfinite.FiniteGuard, "undo", watched)
    assert train(Poison("gradient")).stopped


class Overflows(torch.nn.Module):
    """Its outputs overflow in evaluation mode once its bias has moved."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4).double()
        self.register_buffer("start", self.layer.bias.detach().clone())

    def forward(self, x):
        z = self.layer(x)
        return z if self.training else z + 1e308 * 1e10 * (self.layer.bias - self.start)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_finite_stops_the_run(on_nonfinite):
    run = ud.train(Overflows(), make_clients([9, 12]), rounds=2, local=LOCAL, on_nonfinite=on_nonfinite)
    assert run.stopped.startswith("Round 1: the test loss is nan, although all weights are finite")
    assert run.history == []


def test_a_cohort_that_diverges_is_told_so():
    run = ud.train(Point(1.0), quadratics([(10, 0), (10, 1)]), rounds=40, local=ud.Local(steps=40, lr=1.0))
    assert "every client of the cohort sent non-finite values. Training may have diverged" in run.stopped
    assert all(torch.isfinite(w).all() for w in run.params.values())


@pytest.mark.parametrize("graphs", [False, True])
def test_idle_lanes_and_padding_never_count(monkeypatch, graphs):
    """A lane that has finished repeats its last step; of this client 399 more of them overflow."""
    if graphs:
        cuda_graphs.put_in_place(monkeypatch)
    data = quadratics([(10.0, 0.0), (0.1, 1.0)])
    local = ud.Local(steps=[1, 400], lr=1.0)
    for choice in ("stop", "skip"):
        run = ud.train(Point(1.0), data, rounds=2, local=local, lanes=2, engine="lanes", on_nonfinite=choice)
        assert run.stopped is None and all(torch.isfinite(w).all() for w in run.params.values())
    diverges = ud.train(Point(1.0), data, rounds=1, local=ud.Local(steps=400, lr=1.0), lanes=2, engine="lanes")
    assert "client 0" in diverges.stopped


def test_a_row_with_nan_is_valid_json(tmp_path):
    @dataclass(frozen=True)
    class Tells(ud.Part):
        def history(self, state):
            return {"told": math.nan, "deep": {"a": [1.0, math.inf]}, "tensor": torch.tensor([math.nan, 2.0])}

    train(Tells(), 1, out=tmp_path / "run")

    def refuse(text):
        raise AssertionError(text)

    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=refuse)
    assert (row["told"], row["deep"], row["tensor"]) == (None, {"a": [1.0, None]}, [None, 2.0])


def test_what_is_wrong_from_the_start_is_refused():
    with pytest.raises(ud.UndriftError, match=r"on_nonfinite must be .* not 'ignore'"):
        train(ud.FedAvg(), on_nonfinite="ignore")
    model = net()
    model[3].bias.data[1] = math.inf
    with pytest.raises(ud.UndriftError, match=r"parameter '3.bias' is NaN or infinite"):
        ud.train(model, make_clients([9]), rounds=1, local=LOCAL)


def test_stops_and_skips_are_logged(caplog):
    caplog.set_level(logging.WARNING, "undrift.nonfinite")
    train(Poison("gradient"), on_nonfinite="skip")
    train(Poison("gradient"))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "round 3: skipped client 3 (non-finite update or state)"
    assert second.startswith("stopped: Round 3: client 3 sent or kept non-finite values")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_number_that_is_not_finite_is_seen(dtype):
    tree = {
        "a": torch.ones(3, 4, dtype=dtype),
        "n": [torch.arange(3), torch.empty(0)],
        "b": torch.zeros((), dtype=dtype),
    }
    largest = torch.finfo(dtype).max
    tree["a"][0, 0], tree["a"][0, 1] = largest, -largest
    assert tree_finite(tree) and tree_finite(()) and tree_finite({**tree, "c": torch.ones(2, dtype=torch.float64)})
    for value in (math.nan, math.inf, -math.inf):
        for name in ("a", "b"):
            spoiled = {**tree, name: tree[name].clone()}
            spoiled[name].view(-1)[-1] = value
            assert not tree_finite(spoiled)
