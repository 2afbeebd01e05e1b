"""Trials of the contract of hooks: what every hook is promised, tried on both engines and beside shipped methods."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import undrift as ud
from tests import equations
from tests.experiments import StopError, stop_after
from tests.killing import left_by, sigkilled
from tests.parts import Normed
from tests.problems import distance, make_clients, net, same_bits
from undrift.random import normal, uniform
from undrift.training.build import prepare
from undrift.training.rounds import federated_round
from undrift.training.settings import Settings
from undrift.tree import tree_leaves

SIZES = [23, 5, 0, 41, 10, 17, 1]
LOCAL = ud.Local(epochs=1, batch_size=8, lr=0.1)
PLAIN, LANES = {"engine": "plain"}, {"engine": "lanes", "lanes": 3}
ON_BOTH = pytest.mark.parametrize("engine", [PLAIN, LANES], ids=["plain", "lanes"])
WEIGHTS, HEAD_BYTES = sum(p.numel() for p in net().parameters()) * 8, (32 + 4) * 8
HEAD_NAMES = ("3.weight", "3.bias")


def start() -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in net().named_parameters()}


def prepared(method, data=None, model=None, local=LOCAL, **more):
    given = {"model": model or net(), "data": make_clients(SIZES) if data is None else data, "rounds": 9, **more}
    return prepare(Settings(method=method, local=local, device="cpu", **given))


def played(run, rounds, skip=False):
    """The states before the first and after each of these rounds, and what happened in them."""
    states, done = [run.start()], []
    with torch.no_grad():
        for _ in range(rounds):
            after, one = federated_round(run, states[-1], skip)
            states.append(after)
            done.append(one)
    return states, done


def both(method, data=None, rounds=3, model=None, local=LOCAL, precision=1e-11, **more):
    """Runs on both engines, which must agree."""
    data = make_clients(SIZES) if data is None else data
    runs = [ud.train(model or net(), data, method, rounds=rounds, local=local, **e, **more) for e in (PLAIN, LANES)]
    assert distance(runs[1].params, runs[0].params) < precision
    for a, b in zip(runs[0].history, runs[1].history, strict=True):
        assert [a[k] for k in ("clients", "steps", "bytes_up", "bytes_down")] == [
            b[k] for k in ("clients", "steps", "bytes_up", "bytes_down")
        ]
    return runs[0]


def loss_gradient(model, w, x, y, extra=lambda z, w: 0.0):
    leaves = {n: t.detach().clone().requires_grad_() for n, t in w.items()}
    z = torch.func.functional_call(model, leaves, (x,))
    return dict(
        zip(w, torch.autograd.grad(F.cross_entropy(z, y) + extra(z, leaves), list(leaves.values())), strict=True)
    )


# ---- personal parameters --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head(ud.Part):
    """FedPer: the last layer is each client's own."""

    personal: tuple[str, ...] = ("3.*",)


def with_heads(kind, data, history, local=LOCAL):
    """FedProx, Scaffold and FedDyn with personal heads, by hand: the server's weights, and the heads by client."""
    w, heads, population = start(), {}, sum(n > 0 for n in data.sizes)
    zeros = {n: torch.zeros_like(t) for n, t in w.items()}
    c, own, mu = zeros, {}, 0.5
    for t, row in enumerate(history):
        deltas, change = {}, zeros
        for i in row["clients"]:
            x, y = data[i]
            begun = {**w, **heads.get(i, {})}
            now, mine = begun, own.get(i, zeros)
            batches = ud.batches(data, local, client=i, round=t, seed=0)
            for rows in batches:
                g = loss_gradient(net(), now, x[rows], y[rows])
                for n in g:
                    if kind == "FedProx":
                        g[n] = g[n] + mu * (now[n] - begun[n])
                    elif n not in HEAD_NAMES:
                        g[n] = g[n] + (c[n] - mine[n] if kind == "Scaffold" else mu * (now[n] - w[n]) - mine[n])
                now = {n: now[n] - local.lr * g[n] for n in now}
            heads[i] = {n: now[n] for n in HEAD_NAMES}
            deltas[i] = {n: zeros[n] if n in HEAD_NAMES else now[n] - w[n] for n in w}
            shift = deltas[i] if kind == "FedDyn" else {n: deltas[i][n] / (local.lr * len(batches)) for n in w}
            new = {n: mine[n] - (mu * shift[n] if kind == "FedDyn" else c[n] + shift[n]) for n in w}
            own[i] = {n: zeros[n] if n in HEAD_NAMES else t for n, t in new.items()}
            change = {n: change[n] + len(x) * (own[i][n] - mine[n]) for n in w}
        sizes = {i: 1 if kind == "FedDyn" else int(data.sizes[i]) for i in deltas}
        update = {n: sum(sizes[i] / sum(sizes.values()) * deltas[i][n] for i in deltas) for n in w}
        if kind == "Scaffold":
            c = {n: c[n] + change[n] / sum(data.sizes.tolist()) for n in w}
        if kind == "FedDyn":
            c = {n: c[n] - mu / population * sum(d[n] for d in deltas.values()) for n in w}
            update = {n: update[n] - c[n] / mu for n in w}
        w = {n: w[n] + update[n] for n in w}
    return w, heads


ABSENCES = {
    "all answer": {},
    "partial participation": {"participation": 3},
    "faults": {"participation": 4, "faults": ud.Faults(dropout=0.4, stragglers=0.3, nan=0.2)},
    "a rule on norms": {"participation": 4, "max_norm_ratio": 1.2},
}


@ON_BOTH
@pytest.mark.parametrize("mean", ["samples", "uniform"])
@pytest.mark.parametrize("absence", ABSENCES)
def test_scaffolds_variate_is_the_mean_of_all_clients_with_the_weights_of_the_mean(absence, mean, engine):
    """`c = Σ pᵢcᵢ` with pᵢ over all clients that have data, whoever answers."""
    run = prepared(ud.Scaffold() + ud.FedAvg(weighting=mean), **ABSENCES[absence], **engine)
    assert min(run.data.sizes) == 0, "one client has no data"
    assert run.total_weight == (sum(run.data.sizes) if mean == "samples" else sum(run.data.sizes > 0))
    states, done = played(run, 6, skip=absence == "faults")
    if absence in ("faults", "a rule on norms"):
        assert any(int(one.answers.outcome.size) < len(one.answers.clients) for one in done), "some did not count"
    own = states[-1].clients.parts[0]
    weights = {i: int(run.data.sizes[i]) if mean == "samples" else 1 for i in own}
    wanted = {n: sum(weights[i] / run.total_weight * own[i][n] for i in own) for n in start()}
    assert distance(states[-1].parts[0], wanted) < 1e-12


METHODS_WITH_HEADS = {"FedProx": ud.FedProx(0.5), "Scaffold": ud.Scaffold(), "FedDyn": ud.FedDyn(0.5)}


@ON_BOTH
@pytest.mark.parametrize("kind", METHODS_WITH_HEADS)
def test_personal_heads_beside_methods(kind, engine):
    run = prepared(METHODS_WITH_HEADS[kind] + Head(), participation=3, **engine)
    states, done = played(run, 4)
    w, heads = with_heads(kind, run.data, [{"clients": d.answers.clients.tolist()} for d in done])
    assert distance(states[-1].params, w) < 1e-11
    found = states[-1].clients.parts[len(run.composed.parts) - 1]
    assert found.keys() == heads.keys() and len(heads) > 3
    assert all(distance(found[i], heads[i]) < 1e-11 for i in heads)


@ON_BOTH
@pytest.mark.parametrize(
    "method", [ud.FedNLR(), ud.Scaffold(), ud.FedDyn(0.3), ud.ServerAdam(0.1)], ids=lambda m: type(m).__name__
)
def test_the_servers_head_stays_and_clients_keep_theirs(method, engine):
    run = prepared(method + Head(), participation=3, **engine)
    states, done = played(run, 4)
    place = len(run.composed.parts) - 1
    for before, after, one in zip(states, states[1:], done, strict=False):
        assert all(torch.equal(after.params[n], states[0].params[n]) for n in HEAD_NAMES)
        assert not torch.equal(after.params["0.weight"], before.params["0.weight"])
        for i, head in before.clients.parts[place].items():
            assert i in one.answers.clients or after.clients.parts[place][i] is head
    heads = list(states[-1].clients.parts[place].values())
    assert all(distance(a, b) > 1e-3 for j, a in enumerate(heads) for b in heads[:j])


def test_both_engines_have_the_same_heads_with_fednlr():
    states = [played(prepared(ud.FedNLR() + Head(), participation=4, **e), 3)[0][-1] for e in (PLAIN, LANES)]
    assert distance(states[1].params, states[0].params) < 1e-11
    plain, lanes = (state.clients.parts[2] for state in states)
    assert plain.keys() == lanes.keys() and all(distance(lanes[i], plain[i]) < 1e-11 for i in plain)


def test_personal_parameters_are_not_in_the_bytes():
    shared = WEIGHTS - HEAD_BYTES
    for method, copies in ((Head(), 1), (ud.Scaffold() + Head(), 2), (ud.SignAgreement(1) + Head(), 1)):
        row = both(method, rounds=2, participation=3).history[-1]
        up = 2 if copies == 2 or "Sign" in repr(method) else 1
        assert row["bytes_down"] == 3 * copies * shared and row["bytes_up"] == 3 * (up * shared + 8), method


@ON_BOTH
def test_everything_personal_is_local_training(engine):
    data = make_clients(SIZES)
    run = prepared(Head(("*",)), data, participation=3, **engine)
    states, done = played(run, 4)
    assert same_bits(states[-1].params, states[0].params)
    assert {d.bytes_down for d in done} == {0} and {d.bytes_up for d in done} == {3 * 8}
    alone: dict[int, Any] = {}
    for t, one in enumerate(done):
        for i in one.answers.clients.tolist():
            w, (x, y) = alone.get(i, start()), data[i]
            for rows in ud.batches(data, LOCAL, client=i, round=t, seed=0):
                g = loss_gradient(net(), w, x[rows], y[rows])
                w = {n: w[n] - 0.1 * g[n] for n in w}
            alone[i] = w
    assert all(distance(states[-1].clients.parts[1][i], alone[i]) < 1e-12 for i in alone)


@pytest.mark.parametrize(
    "pair", [(ud.FedCurv(5.0), ud.FedAvg()), (ud.FedProx(0.9, ud.TemporalEnsemble(0.5)), ud.FedProx(0.9))], ids=str
)
def test_penalties_that_come_from_others_do_not_reach_what_is_personal(pair):
    """FedCurv's is about the other clients' heads, and an average of the server's head is nobody's."""
    alone = [played(prepared(m + Head(("*",)), participation=4, **PLAIN), 4)[0][-1].clients for m in pair]
    first, second = (states.parts[max(states.parts)] for states in alone)
    assert first.keys() == second.keys() and all(distance(first[i], second[i]) < 1e-13 for i in first)


def test_personal_batch_norms_are_fedbn():
    """Li, Jiang, Zhang, Kamp and Dou (2021): weights, biases and running statistics of norms stay with their client."""
    data, local, model = make_clients([16, 24, 8]), ud.Local(steps=3, batch_size=8, lr=0.1), Normed()
    run = prepared(Head(("layers.1.*",)), data, model, local, participation=2, **PLAIN)
    states, done = played(run, 4)
    server, norms = copy.deepcopy(model.state_dict()), {}
    own = [n for n in server if n.startswith("layers.1.")]
    assert len(own) == 5
    for t, one in enumerate(done):
        cohort, total = one.answers.clients.tolist(), 0
        mean = {n: 0 * w for n, w in server.items()}
        for i in cohort:
            client = copy.deepcopy(model)
            client.load_state_dict({**server, **norms.get(i, {})})
            client.train()
            optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
            for rows in ud.batches(data, local, client=i, round=t, seed=0):
                optimizer.zero_grad()
                F.cross_entropy(client(data[i][0][rows]), data[i][1][rows]).backward()
                optimizer.step()
            after = copy.deepcopy(client.state_dict())
            norms[i], total = {n: after[n] for n in own}, total + int(data.sizes[i])
            mean = {n: mean[n] + int(data.sizes[i]) * after[n] for n in mean}
        server = {n: w if n in own else mean[n] / total for n, w in server.items()}
    assert distance(states[-1].params, {n: server[n] for n in states[-1].params}) < 1e-12
    kept = states[-1].clients.parts[1]
    assert kept.keys() == norms.keys()
    assert all(torch.allclose(kept[i][n].double(), norms[i][n].double(), rtol=1e-12) for i in norms for n in own)
    assert all(torch.equal(states[-1].tracked[n], states[0].tracked[n]) for n in states[0].tracked)
    assert len({int(own["layers.1.num_batches_tracked"]) for own in kept.values()}) > 1, "some trained more often"


KILLED = {"rounds": 5, "local": LOCAL, "participation": 3, "seed": 2, "engine": "lanes", "device": "cpu"}


def dying(folder: str) -> None:
    torch.set_num_threads(1)

    def on_round(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    method = ud.Scaffold() + Head()
    ud.train(net(), make_clients(SIZES), method, out=folder, checkpoint_every=2, on_round=on_round, **KILLED)


def test_heads_survive_a_kill_to_the_bit(tmp_path):
    data, method = make_clients(SIZES), ud.Scaffold() + Head()
    whole = ud.train(net(), data, method, **KILLED)
    sigkilled("tests.test_contract", "dying", tmp_path / "r")
    again = ud.train(net(), data, method, out=tmp_path / "r", resume=True, **KILLED)
    assert same_bits(again.params, whole.params) and left_by(again) == left_by(whole)


@pytest.mark.parametrize(
    ("personal", "sentence"),
    [
        (("head.*",), r"Head\(personal\) has 'head.\*', but the model has no parameter of such a name"),
        (("3.*", "4.*"), r"has '4.\*'"),
        ("3.*", r"must be a tuple of patterns such as \(\"head.\*\",\), not '3.\*'"),
        ((3,), "must be a tuple of patterns"),
    ],
)
def test_patterns_that_name_nothing_are_refused(personal, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        prepared(ud.FedAvg() + Head(personal))


def test_an_averaged_optimizer_does_not_go_with_personal_parameters():
    local = replace(LOCAL, optimizer=ud.Adam(), optimizer_state="average")
    with pytest.raises(ud.UndriftError, match=r'optimizer_state="average"\) would average the state of personal'):
        prepared(ud.FedAvg() + Head(), local=local)
    both(ud.FedAvg() + Head(), local=replace(local, lr=0.01, optimizer_state="keep"), participation=3)


# ---- begin ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elsewhere(ud.Part):
    """Starts from other weights, and shows what hooks see of them."""

    measures: ClassVar[str | None] = "before"

    def begin(self, params, client):
        return {n: 0.5 * w + 0.1 * (client.id + 1).to(w.dtype) for n, w in params.items()}

    def measure(self, params, batch, client):
        return {"at": {n: w * batch.mask.sum() for n, w in params.items()}, "n": batch.mask.sum()}

    def upload(self, delta, client):
        at = {n: t / client.measured["n"] for n, t in client.measured["at"].items()}
        trees = {"delta": delta, "at": at, "begun": client.begun, "start": client.start, "final": client.final}
        return trees, client.kept

    def transform(self, update, state, server):
        return update, {**server.totals.sums, "update": server.totals.update}

    def history(self, state):
        return {"seen": ud.tree_map(torch.clone, state)}


@ON_BOTH
def test_training_that_begins_elsewhere(engine):
    data, w0 = make_clients([23]), start()
    run = ud.train(net(), data, Elsewhere(), rounds=1, local=LOCAL, **engine)
    seen, (x, y) = run.history[0]["seen"], data[0]
    begun = w = {n: 0.5 * t + 0.1 for n, t in w0.items()}
    for rows in ud.batches(data, LOCAL, client=0, round=0, seed=0):
        g = loss_gradient(net(), w, x[rows], y[rows])
        w = {n: w[n] - 0.1 * g[n] for n in w}
    assert distance(seen["begun"], begun) == 0 and distance(seen["start"], w0) == 0
    assert distance(seen["at"], begun) < 1e-14, "measured before training, where it begins"
    assert distance(seen["final"], w) < 1e-13 and distance(run.params, w) < 1e-13
    assert distance(seen["delta"], {n: w[n] - begun[n] for n in w}) < 1e-12
    assert distance(seen["update"], {n: w[n] - w0[n] for n in w}) < 1e-12


def test_begin_beside_methods():
    for method in (ud.FedProx(0.5), ud.Scaffold(), ud.FedNLR()):
        both(method + Elsewhere(), participation=4)
    for method in (lambda: ud.FedNova() + Elsewhere(), lambda: Elsewhere() + ud.FedNova()):
        with pytest.raises(ud.UndriftError, match="FedNova assumes that clients start from the weights sent"):
            method()


@dataclass(frozen=True)
class Nearby(ud.Part):
    def begin(self, params, client):
        return {n: 0.9 * w for n, w in params.items()}


# ---- plans and empty cohorts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes(ud.Part):
    """Cohorts of these sizes, the first of those that were sampled."""

    sizes: tuple[int, ...]

    def plan(self, plan, state, server):
        count = self.sizes[plan.round]
        return replace(plan, clients=plan.clients[:count], steps=plan.steps[:count]), state


SHIPPED = {
    name: method for name, (method, _) in (equations.METHODS | {"FedNLR": equations.WITH_NLR["FedNLR"]}).items()
} | {"CCVR": ud.CCVR(samples_per_class=5)}


def test_every_method_is_tried_with_empty_cohorts():
    assert {type(method).__name__ for method in SHIPPED.values()} == set(ud.METHODS)


@pytest.mark.parametrize("name", SHIPPED)
def test_empty_cohorts(name):
    """In the first round, twice in a row, and in the last; what follows one works as ever."""
    method = SHIPPED[name] + Sizes((0, 3, 0, 0, 4, 0))
    data = make_clients(SIZES)
    run = both(method, data, rounds=6, precision=1e-9 if "Adam" in name or "Yogi" in name else 1e-10)
    assert [len(row["clients"]) for row in run.history] == [0, 3, 0, 0, 4, 0]
    assert all(torch.isfinite(w).all() for w in run.params.values())
    assert all(np.isfinite(row["loss"]) and row["steps"] == 0 for row in run.history[::5])
    assert distance(run.params, start()) > 1e-4, "it trained"
    rows = run.history
    assert [row["bytes_up"] > 0 for row in rows[:5]] == [False, True, False, False, True]
    assert rows[0]["steps_fraction"] == 1.0 and rows[0]["local_steps"] == {"fewest": 0, "mean": 0.0, "most": 0}


@ON_BOTH
def test_the_servers_momentum_goes_on_without_clients(engine):
    states, _ = played(prepared(ud.ServerSGD(momentum=0.9) + Sizes((4, 0, 0)), **engine), 3)
    steps = [{n: b.params[n] - a.params[n] for n in a.params} for a, b in itertools.pairwise(states)]
    assert distance(steps[1], {n: 0.9 * d for n, d in steps[0].items()}) < 1e-12
    assert distance(steps[2], {n: 0.81 * d for n, d in steps[0].items()}) < 1e-12


def test_running_statistics_stay_without_clients():
    local = ud.Local(steps=2, batch_size=4, lr=0.1)
    run = prepared(ud.FedAvg() + Sizes((2, 0, 2)), make_clients([16, 24, 8]), Normed(), local, **PLAIN)
    states, _ = played(run, 3)
    assert not same_bits(states[1].tracked, states[0].tracked)
    assert same_bits(states[2].tracked, states[1].tracked) and same_bits(states[2].params, states[1].params)
    assert not same_bits(states[3].tracked, states[2].tracked)


def test_a_run_with_empty_cohorts_resumes_to_the_bit(tmp_path):
    data, method = make_clients(SIZES), ud.Scaffold() + ud.ServerSGD(momentum=0.9) + Head() + Sizes((0, 3, 0, 4, 0))
    options = {"rounds": 5, "local": LOCAL, **LANES}
    whole = ud.train(net(), data, method, **options)
    for resume, rounds in ((False, 1), (True, 3)):
        with pytest.raises(StopError):
            ud.train(net(), data, method, out=tmp_path / "r", resume=resume, on_round=stop_after(rounds), **options)
    again = ud.train(net(), data, method, out=tmp_path / "r", resume=True, **options)
    assert same_bits(again.params, whole.params) and left_by(again) == left_by(whole)


RULES = {
    "skip": {"on_nonfinite": "skip"},
    "faults": {"faults": ud.Faults(dropout=0.3, stragglers=0.3)},
    "faults and skip": {"faults": ud.Faults(nan=0.3, dropout=0.2), "on_nonfinite": "skip"},
    "max_norm_ratio": {"max_norm_ratio": 2.0},
    "min_clients": {"min_clients": 2},
    "all": {"faults": ud.Faults(dropout=0.2), "max_norm_ratio": 3.0, "min_clients": 0.5, "on_nonfinite": "skip"},
}


@pytest.mark.parametrize("name", RULES)
def test_empty_cohorts_with_rules(name):
    rules = RULES[name]
    method = ud.Scaffold() + ud.ServerSGD(momentum=0.9) + Sizes((0, 4, 0, 4, 1))
    run = both(method, rounds=5, **rules)
    rows = run.history
    assert all(torch.isfinite(w).all() for w in run.params.values()) and len({tuple(row) for row in rows[:-1]}) == 1
    if "min_clients" in rules:
        assert [row["round_skipped"] for row in rows[:3]] == [True, False, True], "no client counts"
    elif name != "skip":
        assert not rows[0]["round_skipped"] and not rows[2]["round_skipped"], "a part asked for it"
    if name == "min_clients":
        assert rows[4]["round_skipped"] and rows[3]["loss"] == rows[4]["loss"]
    if "max_norm_ratio" in rules:
        assert rows[0]["left_out"] == rows[2]["left_out"] == []


def test_cohorts_of_any_size_are_traced_once():
    """Even clients: lanes that are not needed train a client that counts for nothing."""
    data, local = make_clients([16] * 6), ud.Local(steps=3, batch_size=8, lr=0.1)
    run = prepared(ud.FedProx(0.3) + Sizes((6, 3, 0, 1, 6)), data, local=local, **LANES)
    states, done = played(run, 5)
    assert [len(d.answers.clients) for d in done] == [6, 3, 0, 1, 6]
    lanes = run.engine.engine
    for traced in (lanes.stepper.step, lanes.start, lanes.conclude[False]):
        assert len(traced.programs) == 1
    plain, _ = played(prepared(ud.FedProx(0.3) + Sizes((6, 3, 0, 1, 6)), data, local=local, **PLAIN), 5)
    assert all(distance(a.params, b.params) < 1e-12 for a, b in zip(states, plain, strict=True))
    assert [d.answers.work.steps.sum() for d in done] == [18, 9, 0, 3, 18]


@dataclass(frozen=True)
class Others(ud.Part):
    """Other clients than were sampled, in no order, with steps of their own."""

    clients: tuple[int, ...]

    def plan(self, plan, state, server):
        return replace(plan, clients=list(self.clients), steps=[1 + c for c in self.clients]), state


@ON_BOTH
@pytest.mark.parametrize("clients", [(6, 0), (5, 3, 0, 1, 4), (4,)], ids=str)
def test_a_plan_may_name_fewer_more_and_other_clients(clients, engine):
    data, local = make_clients(SIZES), ud.Local(steps=2, batch_size=8, lr=0.1)
    run = ud.train(net(), data, Others(clients), rounds=1, local=local, **engine)
    w, total = start(), sum(len(data[c][0]) for c in clients)
    mean = {n: torch.zeros_like(t) for n, t in w.items()}
    for c in clients:
        now, (x, y) = w, data[c]
        for rows in ud.batches(data, replace(local, steps=1 + c), client=c, round=0, seed=0):
            g = loss_gradient(net(), now, x[rows], y[rows])
            now = {n: now[n] - 0.1 * g[n] for n in now}
        mean = {n: mean[n] + len(x) / total * now[n] for n in w}
    assert run.history[0]["clients"] == sorted(clients)
    assert run.history[0]["steps"] == sum(1 + c for c in clients)
    assert distance(run.params, mean) < 1e-13


@dataclass(frozen=True)
class Poisson(ud.Part):
    """Every client takes part with probability one half, on its own."""

    def plan(self, plan, state, server):
        drawn = uniform(server.key, (7,)) < 0.5
        clients = np.array([c for c in (0, 1, 3, 4, 5, 6) if drawn[c]], np.int64)
        return replace(plan, clients=clients, steps=np.full(len(clients), 2)), state


def test_draws_of_a_plan_repeat():
    cohorts = {}
    for seed, settings in ((0, PLAIN), (0, LANES), (1, PLAIN)):
        run = ud.train(net(), make_clients(SIZES), Poisson(), rounds=6, local=LOCAL, seed=seed, **settings)
        cohorts.setdefault(seed, []).append([row["clients"] for row in run.history])
    assert cohorts[0][0] == cohorts[0][1] != cohorts[1][0]
    assert len({tuple(cohort) for cohort in cohorts[0][0]}) > 3


# ---- several batches per step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoBatches(ud.Part):
    """The mean of the gradients on two batches."""

    batches: ClassVar[int] = 2

    def gradient(self, g, params, client):
        other = client.gradient(params, batch=1)
        return ud.tree_map(lambda a, b: (a + b) / 2, g, other)


@ON_BOTH
def test_two_batches_per_step(engine):
    data = make_clients([32, 24, 7])
    local = ud.Local(epochs=2, batch_size=8, lr=0.1)
    run = ud.train(net(), data, TwoBatches(), rounds=1, local=local, **engine)
    w, total = start(), 63
    mean = {n: torch.zeros_like(t) for n, t in w.items()}
    for c in range(3):
        rows = ud.batches(data, local, client=c, round=0, seed=0, method=TwoBatches())
        now, (x, y) = w, data[c]
        for a, b in zip(rows[::2], rows[1::2], strict=True):
            one, two = (loss_gradient(net(), now, x[part], y[part]) for part in (a, b))
            now = {n: now[n] - 0.05 * (one[n] + two[n]) for n in now}
        mean = {n: mean[n] + len(x) / total * now[n] for n in w}
    assert distance(run.params, mean) < 1e-13
    assert run.history[0]["steps"] == 4 + 3 + 1 and run.history[0]["samples"] == 2 * 63


def test_an_epoch_of_two_batches_per_step_sees_every_sample_once():
    data, local = make_clients([32, 24, 7]), ud.Local(epochs=1, batch_size=8, lr=0.1)
    for method in (TwoBatches(), ud.FedAvg() + TwoBatches(), "FedAvg() + TwoBatches()"):
        rows = ud.batches(data, local, client=0, round=0, seed=0, method=method)
        assert len(rows) == 4 and sorted(torch.cat(rows).tolist()) == list(range(32)), method
    odd = ud.batches(data, local, client=1, round=0, seed=0, method=TwoBatches())
    assert len(odd) == 4 and sorted(torch.cat(odd[:3]).tolist()) == list(range(24)), "the fourth is of the next epoch"
    alone = ud.batches(data, local, client=1, round=0, seed=0)
    assert len(alone) == 3 and all(torch.equal(a, b) for a, b in zip(alone, odd, strict=False))


@dataclass(frozen=True)
class Shows(ud.Part):
    """How far apart the gradients on the first and the second batch are, over a round."""

    batches: ClassVar[int] = 2

    def carry(self, params, client):
        return torch.zeros((), dtype=torch.float64)

    def step(self, g, carry, params, client):
        other = client.gradient(params, batch=1)
        return g, carry + sum((g[n] - other[n]).abs().sum() for n in g)

    def upload(self, delta, client):
        return client.carry, client.kept

    def transform(self, update, state, server):
        return update, server.totals.sums

    def history(self, state):
        return {"apart": float(state)}


def jitter(x, key):
    return x + 0.1 * normal(key, x.shape, x.dtype)


@ON_BOTH
@pytest.mark.parametrize("draws", ["none", "dropout", "augmentation"])
def test_the_second_batch_has_draws_of_its_own(draws, engine):
    """Both batches are all of a client's samples, so the gradients differ by their draws alone."""
    data, local = make_clients([9, 5]), ud.Local(steps=2, batch_size=None, lr=0.1)
    data.augment = jitter if draws == "augmentation" else None
    model = net(dropout=0.5 if draws == "dropout" else 0.0)
    row = ud.train(model, data, Shows(), rounds=1, local=local, **engine).history[0]
    assert row["apart"] > 0.1 if draws != "none" else row["apart"] < 1e-13


# ---- client.gradient and client.gradients ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SAM(ud.Part):
    """FedSAM: the gradient at the weights where the loss is highest nearby."""

    radius: ud.Number = 0.1
    replaces_gradient: ClassVar[bool] = True

    def gradient(self, g, params, client):
        norm = torch.sqrt(sum(t.square().sum() for t in g.values()))
        return client.gradient({n: w + self.radius * g[n] / norm for n, w in params.items()})


@dataclass(frozen=True)
class Same(ud.Part):
    """Asks for the step's own gradient, in this many copies of the weights."""

    copies: int = 0

    replaces_gradient: ClassVar[bool] = True

    def gradient(self, g, params, client):
        first = client.gradient(params)
        for _ in range(self.copies):
            again = client.gradient(ud.tree_map(torch.clone, params))
            first = {n: torch.where((again[n] - first[n]).abs() < 1e-14, first[n], torch.nan) for n in g}
        return first


class Counted(torch.nn.Module):
    """Counts forward passes in training mode."""

    calls = 0

    def __init__(self, dropout=0.0):
        super().__init__()
        self.inner = net(dropout=dropout)

    def forward(self, x):
        Counted.calls += self.training
        return self.inner(x)


def test_the_gradient_at_the_given_weights_is_free():
    data, local = make_clients([16, 16]), ud.Local(steps=3, batch_size=8, lr=0.1)
    counts = {}
    for method in (ud.FedAvg(), Same(), Same(copies=2), SAM()):
        run = prepared(method, data, Counted(), local, **PLAIN)
        Counted.calls = 0
        states, _ = played(run, 1)
        counts[repr(method)] = (Counted.calls, states[-1].params)
    found = [calls for calls, _ in counts.values()]
    assert found == [6, 6, 18, 12]
    plain, same, copied, sam = (params for _, params in counts.values())
    assert same_bits(plain, same) and same_bits(plain, copied) and distance(sam, plain) > 1e-3


@ON_BOTH
def test_the_same_weights_give_the_same_gradient_with_dropout_and_augmentation(engine):
    data = make_clients(SIZES)
    data.augment = jitter
    asked, plain = (
        ud.train(net(dropout=0.4), data, method, rounds=2, local=LOCAL, participation=4, **engine)
        for method in (Same(copies=1), ud.FedAvg())
    )
    assert distance(asked.params, plain.params) < 1e-13


def test_sharpness_agrees_on_both_engines():
    data = make_clients(SIZES)
    data.augment = jitter
    sam = both(SAM(0.2) + ud.FedProx(0.1), data, model=net(dropout=0.3), participation=4)
    plain = ud.train(net(dropout=0.3), data, ud.FedProx(0.1), rounds=3, local=LOCAL, participation=4)
    assert distance(sam.params, plain.params) > 1e-3
    with pytest.raises(ud.UndriftError, match="SAM replaces the gradient, so what FedProx does"):
        ud.FedProx(0.1) + SAM()
    with pytest.raises(ud.UndriftError, match=r"SAM replaces the gradient, so Local\(weight_decay\)"):
        prepared(SAM(), local=replace(LOCAL, weight_decay=0.1))
    both(SAM(), data, local=replace(LOCAL, optimizer=ud.SGD(weight_decay=0.1)), participation=3)


def test_sharpness_by_hand():
    data = make_clients([23])
    run = ud.train(net(), data, SAM(0.2), rounds=1, local=LOCAL, **LANES)
    w, (x, y) = start(), data[0]
    for rows in ud.batches(data, LOCAL, client=0, round=0, seed=0):
        g = loss_gradient(net(), w, x[rows], y[rows])
        norm = torch.sqrt(sum(t.square().sum() for t in g.values()))
        g = loss_gradient(net(), {n: w[n] + 0.2 * g[n] / norm for n in w}, x[rows], y[rows])
        w = {n: w[n] - 0.1 * g[n] for n in w}
    assert distance(run.params, w) < 1e-13


def test_gradients_at_other_weights_leave_running_statistics_alone():
    """With a rate of 0 the weights stay, so the statistics are those of a run that asks for no gradient."""
    data, local, model = make_clients([16, 24, 8]), ud.Local(steps=3, batch_size=8, lr=0.0), Normed()
    asked, plain = (ud.train(model, data, m, rounds=2, local=local, **PLAIN).model for m in (SAM(), ud.FedAvg()))
    assert same_bits(dict(asked.named_buffers()), dict(plain.named_buffers()))
    assert asked.layers[1].num_batches_tracked == 6


class Leaning(torch.nn.Linear):
    """In training, too, its outputs depend on a buffer, which every pass changes."""

    def __init__(self):
        super().__init__(6, 4, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.mean)


def test_gradients_at_other_weights_start_from_the_buffers_of_their_step():
    data, model = make_clients([23, 10]), Leaning()
    asked, plain = (ud.train(model, data, m, rounds=2, local=LOCAL, **PLAIN) for m in (Same(copies=2), ud.FedAvg()))
    assert same_bits(asked.params, plain.params) and torch.equal(asked.model.mean, plain.model.mean)


@dataclass(frozen=True)
class Asks(ud.Part):
    """Asks for a gradient in a hook, with these arguments."""

    where: str
    batch: int = 0

    def objective(self, losses, z, batch, params, client):
        if self.where == "objective":
            client.gradient(params)
        return losses

    def gradient(self, g, params, client):
        if self.where == "names":
            return client.gradient({"0.weight": params["0.weight"]})
        if self.where == "per sample":
            return ud.tree_map(lambda t: t.mean(0), client.gradients(params, batch=self.batch))
        return client.gradient(params, batch=self.batch) if self.where == "gradient" else g

    def prepare(self, client):
        return client.gradients(client.start) if self.where == "prepare" else ()


@ON_BOTH
@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (Asks("objective"), "client.gradient and client.gradients may be called in `gradient` and `step` only"),
        (Asks("prepare"), "client.gradient and client.gradients may be called in `gradient` and `step` only"),
        (Asks("gradient", 1), "asked for batch 1 of a step with 1; set the class attribute batches = 2"),
        (Asks("gradient", -1), "asked for batch -1"),
        (Asks("per sample", 2), "asked for batch 2 of a step with 1; set the class attribute batches = 3"),
        (Asks("names"), "takes weights as a dict with the parameters' own names"),
    ],
    ids=["objective", "prepare", "batch 1", "batch -1", "per sample", "names"],
)
def test_gradients_that_are_not_there_are_refused(part, sentence, engine):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.train(net(), make_clients([5, 6]), part, rounds=1, local=LOCAL, **engine)


@dataclass(frozen=True)
class PerSample(ud.Part):
    """Compares the sum of per-sample gradients with the step's own, and looks at padding."""

    def carry(self, params, client):
        return {"far": torch.zeros((), dtype=torch.float64), "padding": torch.zeros((), dtype=torch.float64)}

    def step(self, g, carry, params, client):
        each = client.gradients(params)
        per = torch.ceil(client.n / 8)
        real = torch.minimum(torch.tensor(8.0), client.n - 8 * torch.remainder(client.step, per))
        far = sum((t.sum(0) / real - g[n]).abs().sum() for n, t in each.items())
        padding = sum(t[1:].abs().sum() for t in each.values())
        return g, {"far": carry["far"] + far, "padding": carry["padding"] + torch.where(real == 1, padding, 0.0)}

    def upload(self, delta, client):
        return client.carry, client.kept

    def transform(self, update, state, server):
        return update, server.totals.sums

    def history(self, state):
        return {name: float(x) for name, x in state.items()}


@ON_BOTH
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_per_sample_have_the_steps_gradient_as_their_mean(dropout, engine):
    data = make_clients(SIZES)
    data.augment = jitter
    run = ud.train(net(dropout=dropout), data, PerSample(), rounds=2, local=LOCAL, **engine)
    assert all(row["far"] < 1e-12 and row["padding"] == 0 for row in run.history)
    plain = ud.train(net(dropout=dropout), data, rounds=2, local=LOCAL, **engine)
    assert distance(run.params, plain.params) < 1e-13


class Tanh2(torch.nn.Module):
    """A module that vmap does not take, since it looks at its values."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4).double()

    def forward(self, x):
        z = self.layer(x)
        return torch.tanh(z) if float(z.detach().sum()) > -1e9 else z


def test_gradients_per_sample_of_a_model_that_vmap_does_not_take():
    torch.manual_seed(3)
    run = ud.train(Tanh2(), make_clients(SIZES), PerSample(), rounds=1, local=LOCAL)
    assert run.choices["engine"] == "plain" and run.history[0]["far"] < 1e-12


@dataclass(frozen=True)
class DPSGD(ud.Part):
    """Abadi et al. (2016): clipped per-sample gradients, their sum with noise, divided by the batch size."""

    bound: ud.Number
    noise: ud.Number
    batch_size: int
    replaces_gradient: ClassVar[bool] = True

    def gradient(self, g, params, client):
        each = client.gradients(params)
        norms = torch.sqrt(sum(t.flatten(1).square().sum(1) for t in each.values()))
        factor = torch.clamp(self.bound / norms.clamp(min=1e-12), max=1.0)
        total = {n: torch.einsum("b,b...->...", factor, t) for n, t in each.items()}
        drawn = {n: normal(client.key.stream_at(i), w.shape, w.dtype) for i, (n, w) in enumerate(params.items())}
        return {n: (t + self.noise * self.bound * drawn[n]) / self.batch_size for n, t in total.items()}


def test_differentially_private_sgd_agrees_on_both_engines_and_with_a_loop():
    run = both(DPSGD(0.5, 0.3, 8), model=net(dropout=0.2), participation=4)
    quiet = both(DPSGD(0.5, 0.0, 8), rounds=1, participation=4)
    assert distance(run.params, quiet.params) > 1e-2
    data, total = make_clients(SIZES), 0
    mean = {n: torch.zeros_like(t) for n, t in start().items()}
    for c in quiet.history[0]["clients"]:
        w, (x, y) = start(), data[c]
        for rows in ud.batches(data, LOCAL, client=c, round=0, seed=0):
            g = {n: torch.zeros_like(t) for n, t in w.items()}
            for r in rows.tolist():
                one = loss_gradient(net(), w, x[r : r + 1], y[r : r + 1])
                norm = torch.sqrt(sum(t.square().sum() for t in one.values()))
                g = {n: g[n] + one[n] * min(1.0, 0.5 / float(norm)) for n in g}
            w = {n: w[n] - 0.1 * g[n] / 8 for n in w}
        mean, total = {n: mean[n] + len(x) * w[n] for n in w}, total + len(x)
    assert distance(quiet.params, {n: t / total for n, t in mean.items()}) < 1e-13


# ---- objective and carry --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features(ud.Part):
    """A penalty on the features, plus a term that is zero if they are those of evaluation mode."""

    weight: float

    def objective(self, losses, z, batch, params, client):
        apart = (batch.features - client.model.features(params, batch.x)).square().sum(1)
        return losses + self.weight * batch.features.square().sum(1) + 1e6 * apart


@ON_BOTH
def test_features_of_a_step_are_those_of_its_forward_pass(engine):
    data = make_clients([23])
    run = ud.train(net(), data, Features(0.05), rounds=1, local=LOCAL, **engine)
    w, (x, y) = start(), data[0]
    for rows in ud.batches(data, LOCAL, client=0, round=0, seed=0):

        def extra(z, w, rows=rows):
            return 0.05 * torch.tanh(F.linear(x[rows], w["0.weight"], w["0.bias"])).square().sum(1).mean()

        g = loss_gradient(net(), w, x[rows], y[rows], extra)
        w = {n: w[n] - 0.1 * g[n] for n in w}
    assert distance(run.params, w) < 1e-13
    assert distance(ud.train(net(), data, rounds=1, local=LOCAL, **engine).params, w) > 1e-3


@dataclass(frozen=True)
class Wrong(ud.Part):
    """Returns something else than it should."""

    what: str

    def carry(self, params, client):
        return {"a": torch.zeros(2, dtype=torch.float64)}

    def objective(self, losses, z, batch, params, client):
        return {"scalar": losses.mean(), "column": losses[:, None], "number": 1.0}.get(self.what, losses)

    def step(self, g, carry, params, client):
        changed = {
            "structure": {**carry, "b": carry["a"]},
            "dtype": {"a": carry["a"].float()},
            "shape": {"a": carry["a"].sum()},
            "python": {"a": 1.0},
        }
        return g, changed.get(self.what, carry)


@ON_BOTH
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("scalar", r"Wrong.objective must return one loss per sample, of shape \(\d,\), not \(\)"),
        ("column", r"Wrong.objective must return one loss per sample, of shape \(\d,\), not \(\d, 1\)"),
        ("number", "Wrong.objective must return one loss per sample"),
        ("structure", "Wrong.step must not change the structure of its carry"),
        (
            "dtype",
            r"Wrong.step must not change shapes and types of its carry: it made \(2,\) torch.float32 of a tensor",
        ),
        ("shape", r"Wrong.step must not change shapes and types of its carry: it made \(\) torch.float64 of a tensor"),
        ("python", r"must not change shapes and types of its carry: it made \(\) float of a tensor"),
    ],
)
def test_losses_and_carries_of_another_form_are_refused(what, sentence, engine):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.train(net(), make_clients([5, 6]), Wrong(what), rounds=1, local=LOCAL, **engine)


@dataclass(frozen=True)
class Slowing(ud.Part):
    """A rate that its own carry decides: 1/2 in the first step, 1/3 in the second."""

    by_name: bool = False

    def carry(self, params, client):
        return torch.ones((), dtype=torch.float64)

    def step(self, g, carry, params, client):
        return g, carry + 1

    def rate(self, k, client):
        rate = 1 / client.carry
        return {n: rate if n.startswith("0") else 0.5 for n in client.start} if self.by_name else rate

    def upload(self, delta, client):
        return {"sum": client.rate_sum, "carry": client.carry}, client.kept

    def transform(self, update, state, server):
        return update, server.totals.sums

    def history(self, state):
        return {"rate_sum": {n: float(x) for n, x in state["sum"].items()}, "carry": float(state["carry"])}


@ON_BOTH
@pytest.mark.parametrize("by_name", [False, True])
def test_a_rate_may_depend_on_the_carry_and_be_a_number_by_parameter(by_name, engine):
    local = ud.Local(steps=3, batch_size=8, lr=0.1)
    row = ud.train(net(), make_clients([16]), Slowing(by_name), rounds=1, local=local, **engine).history[0]
    assert row["carry"] == 4
    assert row["rate_sum"]["0.weight"] == pytest.approx(0.1 * (1 / 2 + 1 / 3 + 1 / 4), rel=1e-14)
    assert row["rate_sum"]["3.bias"] == pytest.approx(0.15 if by_name else 0.1 * (1 / 2 + 1 / 3 + 1 / 4), rel=1e-14)


# ---- aggregate ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Median(ud.Part):
    """The median of the clients' updates, and what the server knows of them."""

    def start(self, params):
        return {"cohort": torch.zeros(0, dtype=torch.int64), "weights": torch.zeros(0)}

    def aggregate(self, updates, state, server):
        assert all(len(u) == len(server.cohort) == len(server.client_weights) for u in updates.values())
        state = {"cohort": torch.as_tensor(server.cohort), "weights": server.client_weights}
        return ud.tree_map(lambda u: u.median(0).values, updates), state

    def history(self, state):
        return {"counted": state["cohort"].tolist(), "weighed": state["weights"].tolist()}


def spoiled(clients):
    """Clients whose updates are NaN."""
    data = make_clients(SIZES)
    for c in clients:
        data.store["x"][data.index[data.offsets[c]]] = torch.nan
    return data


@ON_BOTH
def test_the_median_of_the_updates(engine):
    data = make_clients(SIZES)
    run = ud.train(net(), data, Median(), rounds=1, local=LOCAL, participation=5, **engine)
    updates = {}
    for c in run.history[0]["clients"]:
        w, (x, y) = start(), data[c]
        for rows in ud.batches(data, LOCAL, client=c, round=0, seed=0):
            g = loss_gradient(net(), w, x[rows], y[rows])
            w = {n: w[n] - 0.1 * g[n] for n in w}
        updates[c] = {n: w[n] - start()[n] for n in w}
    median = {n: t + torch.stack([u[n] for u in updates.values()]).median(0).values for n, t in start().items()}
    assert distance(run.params, median) < 1e-13
    assert run.history[0]["counted"] == list(updates) and run.history[0]["weighed"] == [data.sizes[c] for c in updates]


def test_clients_that_are_skipped_are_not_aggregated():
    data = spoiled([3, 5])
    run = both(Median(), data, rounds=3, participation=5, on_nonfinite="skip")
    for row in run.history:
        assert set(row["skipped"]) == {3, 5} & set(row["clients"])
        assert row["counted"] == [c for c in row["clients"] if c not in (3, 5)]
        assert row["weighed"] == [data.sizes[c] for c in row["counted"]]
    assert any(row["skipped"] for row in run.history)
    assert all(torch.isfinite(w).all() for w in run.params.values())


def test_aggregation_with_rules_and_empty_cohorts():
    run = both(Median() + Sizes((0, 4, 0, 5, 1)), rounds=5)
    assert [len(row["counted"]) for row in run.history] == [0, 4, 4, 5, 1], "it is not called without clients"
    dropped = both(Median(), rounds=4, faults=ud.Faults(dropout=0.4))
    assert all(row["counted"] == [c for c in row["clients"] if c not in row["dropped"]] for row in dropped.history)
    nobody = both(Median(), rounds=2, faults=ud.Faults(dropout=lambda t: float(t == 1)))
    assert nobody.history[1]["round_skipped"] and nobody.history[0]["counted"] == nobody.history[1]["counted"]


@dataclass(frozen=True)
class Krum(Median):
    pass


def test_what_an_aggregation_may_stand_beside():
    for make in (lambda: Median() + ud.Scaffold(), lambda: ud.SignAgreement(2) + Median()):
        with pytest.raises(ud.UndriftError, match="Median may reject a client's update, which would stay in what"):
            make()
    with pytest.raises(ud.UndriftError, match="Median and Krum both aggregate the clients' updates; keep one"):
        Median() + Krum()
    both(Median() + ud.FedNLR() + ud.ServerSGD(momentum=0.5), participation=4)
    adam = replace(LOCAL, lr=0.01, optimizer=ud.Adam(), optimizer_state="keep")
    both(Median() + Head(), participation=4, local=adam)
    with pytest.raises(ud.UndriftError, match=r'Median may reject.*Local\(optimizer_state="average"\)'):
        prepared(Median(), local=replace(adam, optimizer_state="average"))


# ---- what the server's hooks see ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half(ud.Part):
    """Sends its update in half the bytes."""

    def update_bytes(self, size, params):
        assert params.keys() <= set(start()) and size == sum(w.numel() for w in params.values()) * 8
        return size // 2


def test_update_bytes_are_in_the_history():
    row = both(Half(), rounds=1, participation=3).history[0]
    assert row["bytes_down"] == 3 * WEIGHTS and row["bytes_up"] == 3 * (WEIGHTS // 2 + 8)
    row = both(ud.Scaffold() + Half() + Head(), rounds=1, participation=3).history[0]
    shared = WEIGHTS - HEAD_BYTES
    assert row["bytes_up"] == 3 * (shared // 2 + shared + 8)


SEEN: list[tuple[str, Any, Any]] = []
"""What `Sees` saw: the hook, the server, and the first argument."""


@dataclass(frozen=True)
class Sees(ud.Part):
    def plan(self, plan, state, server):
        SEEN.append(("plan", server, plan))
        return plan, state

    def broadcast(self, params, state, server):
        SEEN.append(("broadcast", server, params))
        return ()

    def aggregate(self, updates, state, server):
        SEEN.append(("aggregate", server, updates))
        return ud.tree_map(lambda u: u.mean(0), updates), state

    def upload(self, delta, client):
        return client.n, client.kept

    def transform(self, update, state, server):
        SEEN.append(("transform", server, update))
        return ud.tree_map(lambda u: 2 * u, update), state

    def refine(self, params, state, server):
        SEEN.append(("refine", server, params))
        return ud.tree_map(lambda w: w + 1, params), state

    def observe(self, params, state, server):
        SEEN.append(("observe", server, params))
        return state

    def finish(self, params, state, server):
        SEEN.append(("finish", server, params))
        return params


@ON_BOTH
def test_what_each_hook_of_the_server_sees(engine):
    data = make_clients(SIZES)
    SEEN.clear()
    run = ud.train(net(), data, Sees(), rounds=2, local=LOCAL, participation=3, rehearse=False, **engine)
    order = ["plan", "broadcast", "aggregate", "transform", "refine", "observe"]
    assert [hook for hook, _, _ in SEEN] == [*order, *order, "finish"]
    sent = [start(), None, None]
    for place, (hook, server, given) in enumerate(SEEN):
        t = min(place // 6, 1)
        row = run.history[t]
        assert server.round == t and server.population == 6 and server.data is not None
        if hook in ("plan", "finish"):
            assert server.cohort is None and server.client_weights is None
        else:
            assert server.cohort.tolist() == row["clients"]
            assert server.client_weights.tolist() == [data.sizes[c] for c in row["clients"]]
        if hook in ("plan", "broadcast", "aggregate"):
            assert server.totals is None, hook
        elif hook != "finish":
            assert float(server.totals.sums) == float(server.totals.weight) == data.sizes[row["clients"]].sum()
            assert float(server.totals.size) == 3
        if hook != "finish":
            assert same_bits(server.params, sent[t]), hook
        if hook == "transform":
            assert same_bits(given, server.totals.update)
        if hook == "refine":
            assert distance(given, {n: w + 2 * server.totals.update[n] for n, w in sent[t].items()}) < 1e-14
        if hook == "observe":
            sent[t + 1] = given
    last = SEEN[-1][1]
    assert same_bits(last.params, sent[2]) and same_bits(run.params, sent[2])
    assert float(last.totals.size) == 6 and last.totals.update is None


@dataclass(frozen=True)
class Mime(ud.Part):
    """The gradient over all of the cohort's data at the weights sent, which clients receive."""

    measures: ClassVar[str | None] = "cohort"
    replaces_gradient: ClassVar[bool] = True

    def measure(self, params, batch, client):
        def loss(w):
            return (client.loss(client.model(w, batch.x), batch.y) * batch.mask).sum()

        assert client.received is None
        return {"g": torch.func.grad(loss)(params), "n": batch.mask.sum()}

    def broadcast(self, params, state, server):
        assert float(server.totals.size) == len(server.cohort) and server.totals.update is None
        assert float(server.totals.weight) == float(server.client_weights.sum())
        n = torch.clamp(server.totals.sums["n"], min=1.0)
        return {name: g / n for name, g in server.totals.sums["g"].items()}

    def gradient(self, g, params, client):
        return client.received


@dataclass(frozen=True)
class Uninvolved(ud.Part):
    def broadcast(self, params, state, server):
        assert server.totals is None, "the totals are those of parts that measure the cohort"
        return ()


def test_a_measurement_over_the_cohort():
    data, local = make_clients(SIZES), ud.Local(steps=2, batch_size=8, lr=0.1)
    run = both(Mime() + Uninvolved(), data, rounds=3, local=local, participation=3)
    w = start()
    for row in run.history:
        x, y = (torch.cat([data[c][k] for c in row["clients"]]) for k in (0, 1))
        g = loss_gradient(net(), w, x, y)
        w = {n: w[n] - 0.2 * g[n] for n in w}
        assert row["bytes_down"] == 3 * 2 * WEIGHTS
        assert row["bytes_up"] == 3 * (WEIGHTS + 8 + WEIGHTS + 8), "its sums, and the count among them"
    assert distance(run.params, w) < 1e-12
    empty = both(Mime() + Sizes((0, 3, 0)), data, local=local)
    assert all(torch.isfinite(t).all() for t in empty.params.values())


# ---- beside local work ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Momentum(ud.Part):
    """A user's part with the name of one of undrift's own."""

    rho: ud.Number

    def carry(self, params, client):
        return ud.tree_map(torch.zeros_like, params)

    def step(self, g, carry, params, client):
        v = {n: self.rho * carry[n] + g[n] for n in g}
        return v, v


def test_a_part_may_have_the_name_of_one_that_stands_for_local_work():
    own = both(Momentum(0.5), participation=3)
    local = replace(LOCAL, momentum=0.5)
    theirs = ud.train(net(), make_clients(SIZES), rounds=3, local=local, participation=3)
    assert distance(own.params, theirs.params) < 1e-13
    twice = both(Momentum(0.5), participation=3, local=local)
    assert distance(twice.params, own.params) > 1e-4


def test_state_at_the_server_stays_finite_with_everything_at_once():
    """Personal heads, an optimizer of one's own, groups, plans of any size, and a part that aggregates."""
    local = replace(LOCAL, lr=0.01, optimizer=ud.AdamW(), optimizer_state="keep", clip_norm=1.0,
                    groups={"*.bias": ud.Group(0.5, 0.0)}, step_schedule=ud.warmup(2))  # fmt: skip
    method = ud.FedProx(0.1) + Nearby() + Median() + Head() + Sizes((4, 0, 2, 5)) + ud.ServerAdam(0.01)
    run = both(method, rounds=4, local=local, precision=1e-9)
    assert all(torch.isfinite(leaf).all() for leaf in tree_leaves(run.params))


# ---- found by a review ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meddling(ud.Part):
    """Measures what is personal, and changes everything at the server."""

    measures: ClassVar[str | None] = "cohort"
    seen: list[Any] = field(default_factory=list)

    def measure(self, params, batch, client):
        return ud.tree_map(lambda w: w * batch.mask.sum(), params)

    def transform(self, update, state, server):
        self.seen.append(server.totals.measured)
        return ud.tree_map(lambda u: u + 1.0, update), state

    def refine(self, params, state, server):
        return ud.tree_map(lambda w: w / 2, params), state


@ON_BOTH
def test_what_is_personal_neither_reaches_the_server_nor_changes_there(engine):
    method = Head() + Meddling()
    run = ud.train(net(), make_clients(SIZES), method, rounds=2, local=LOCAL, **engine)
    for name, w in start().items():
        assert torch.equal(run.params[name], w) == (name in HEAD_NAMES)
        assert all(bool(m[name].any()) == (name not in HEAD_NAMES) for m in method.parts[1].seen)


@ON_BOTH
def test_the_result_has_each_clients_own_weights(engine, tmp_path):
    data = make_clients(SIZES)
    given = {"rounds": 2, "local": LOCAL, "participation": 3, **engine}
    run = ud.train(net(), data, Head(), **given, out=tmp_path / "run")
    took_part = {c for row in run.history for c in row["clients"]}
    never = next(c for c in range(len(SIZES)) if SIZES[c] and c not in took_part)
    for client in (*took_part, never):
        own = run.own_params(client)
        for name, w in own.items():
            assert torch.equal(w, run.params[name]) == (name not in HEAD_NAMES or client == never)
    with pytest.raises(ud.UndriftError, match="no client 2 with data"):
        run.own_params(2)
    again = ud.train(net(), data, Head(), **given, out=tmp_path / "run", resume=True)
    with pytest.raises(ud.UndriftError, match="does not have clients' own weights"):
        again.own_params(0)
    plain = ud.train(net(), data, rounds=1, local=LOCAL, **engine)
    assert same_bits(plain.own_params(0), plain.params)


@dataclass(frozen=True)
class TopShare(ud.Part):
    share: ud.Number

    def update_bytes(self, size, params):
        return int(size * self.share)


def test_update_bytes_have_the_rounds_numbers():
    rows = both(TopShare(share=ud.decay(0.5, 0.5)), rounds=2, participation=3).history
    assert rows[0]["bytes_up"] - rows[1]["bytes_up"] == 3 * (WEIGHTS // 2 - WEIGHTS // 4)


def test_an_averaged_state_in_half_precision_does_not_overflow():
    data = make_clients([1500] * 3, torch.float16)
    local = ud.Local(steps=2, batch_size=64, lr=0.01, optimizer=ud.SGD(momentum=0.9), optimizer_state="average")
    assert len(ud.train(net(torch.float16), data, rounds=2, local=local, engine="plain").history) == 2


@dataclass(frozen=True)
class SignOfSGD(ud.SGD):
    def step(self, g, carry, params, client):
        return ud.tree_map(torch.sign, g), carry


@pytest.mark.parametrize("method", [ud.Scaffold(), ud.FedNova()], ids=lambda part: type(part).__name__)
def test_a_subclass_of_sgd_may_have_steps_that_cannot_be_accounted_for(method):
    with pytest.raises(ud.UndriftError, match="cannot account for the steps of SignOfSGD"):
        prepared(method, local=replace(LOCAL, optimizer=SignOfSGD()))


@ON_BOTH
def test_fedcurv_and_feddyn_beside_a_part_that_begins_elsewhere(engine):
    """What they keep is of the local model, and of how far it is from the weights sent."""
    for method in (ud.FedCurv(0.5), ud.FedDyn(0.3)):
        run = prepared(Elsewhere() + method, participation=2, **engine)
        (_, state), (done,) = played(run, 1)
        kept = state.clients.parts[1]
        alone = prepared(Elsewhere() + Final() + method, participation=2, **engine)
        (_, other), _ = played(alone, 1)
        finals = other.clients.parts[1]
        for client in done.answers.clients.tolist():
            for n, w0 in start().items():
                if isinstance(method, ud.FedDyn):
                    assert torch.allclose(kept[client][n], -0.3 * (finals[client][n] - w0), atol=1e-12)
                else:
                    assert torch.allclose(kept[client]["Fw"][n], kept[client]["F"][n] * finals[client][n], atol=1e-12)


@dataclass(frozen=True)
class Final(ud.Part):
    """Keeps the weights that a client ends with."""

    reads_rates: ClassVar[bool] = False

    def keep(self, params):
        return params

    def upload(self, delta, client):
        return (), client.final
