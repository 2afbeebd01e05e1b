"""Ten methods of the literature, written with hooks (`field.py`), against their equations (`field_reference.py`)."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import undrift as ud
from tests import cuda_graphs
from tests import field as methods
from tests.field_reference import METHODS, SIZES, Case, Found, clients_with_tests, fedavg, gradient, median, tree
from tests.problems import distance, make_clients, net, same_bits
from undrift.engine import threads
from undrift.method.part import HOOKS
from undrift.training.checkpoint import Checkpoints
from undrift.tree import tree_leaves

SEED, BOUND = 3, 1e-10
LOCALS = {
    "mini-batches": ud.Local(epochs=2, batch_size=8, lr=0.1),
    "momentum and decay": ud.Local(epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.01),
}
ENGINES = {
    "plain": {"engine": "plain"},
    "two lanes": {"engine": "lanes", "lanes": 2},
    "three lanes": {"engine": "lanes", "lanes": 3},
    "one lane": {"engine": "lanes", "lanes": 1},
}
PERSONAL = ("FedPer", "FedRep", "Ditto")
REWEIGHED = ("PerFedAvg", "Mime")
"""Methods that also scale the weight decay in the gradient, of which their equations say nothing, or refuse it."""


def trained(name, method=None, local="mini-batches", rounds=5, own=True, **options):
    """A run of one of the methods, or of another in its place."""
    method = METHODS[name][0] if method is None else method
    data = clients_with_tests() if own else make_clients(SIZES)
    settings = {"rounds": rounds, "local": LOCALS[local], "seed": SEED, "evaluate_every": rounds}
    settings |= {} if name.startswith("Poisson") else {"participation": 4}  # that samples clients itself
    return ud.train(net(), data, method, **settings, **options)


def cohorts_of(run) -> list[list[int]]:
    return [row["clients"] for row in run.history]


@functools.cache
def sampled(rounds: int) -> tuple[list[list[int]], ...]:
    """The cohorts of every run with four of the six clients, whatever its method."""
    return tuple(cohorts_of(trained("FedAvg", ud.FedAvg(), rounds=rounds, own=False, engine="plain")))


@functools.cache
def expected(name: str, local: str = "mini-batches", rounds: int = 5) -> Found:
    return METHODS[name][1](Case(make_clients(SIZES), LOCALS[local], list(sampled(rounds)), SEED))


def off(run, wanted: Found) -> float:
    """How far a run is from its equations."""
    cohorts = wanted.cohorts or list(sampled(len(run.history)))
    return replace(wanted, cohorts=cohorts).distance(run, clients_with_tests())


def cases():
    """Every method on every engine; on one lane, and with momentum and decay, some."""
    for name in METHODS:
        for local in LOCALS:
            if local == "momentum and decay" and name in REWEIGHED:
                continue
            for engine in ENGINES:
                usual = local == "mini-batches" and (engine in ("plain", "two lanes") or name in ("Ditto", "Mime"))
                usual = usual or (engine == "three lanes" and name in ("FedSAM", "FedRep", "Ditto"))
                marks = [] if usual else pytest.mark.long
                yield pytest.param(name, local, engine, id=f"{name}, {local}, {engine}", marks=marks)


@pytest.mark.parametrize(("name", "local", "engine"), list(cases()))
def test_a_method_follows_its_equations(name, local, engine):
    run = trained(name, local=local, **ENGINES[engine])
    assert run.choices["engine"] == ENGINES[engine]["engine"]
    assert off(run, expected(name, local)) < BOUND
    assert distance(run.params, tree(expected(name, local, 1).w)) > 1e-2  # later rounds have their part in it


def test_the_cohorts_are_what_they_should_be():
    """Partial ones, whose clients come back at once and later, of odd and even sizes, and empty ones."""
    cohorts = sampled(5)
    assert {len(c) for c in cohorts} == {4} and len({tuple(c) for c in cohorts}) > 2
    assert set(cohorts[0]) & set(cohorts[1]) and set(cohorts[0]) - set(cohorts[1])
    sizes = [len(c) for c in expected("Poisson + Median").cohorts]
    assert sizes[0] == 0 and {1, 2, 3} <= set(sizes)
    batches = ud.batches(make_clients(SIZES), LOCALS["mini-batches"], client=0, round=0, seed=SEED)
    assert [len(batch) for batch in batches] == [8, 8, 7, 8, 8, 7]  # the last ones are short


def test_each_method_takes_at_most_thirty_lines():
    source = ast.parse(Path(methods.__file__).read_text(encoding="utf-8"))
    classes = [node for node in source.body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 10 and {node.name for node in classes} <= METHODS.keys()
    for node in classes:
        assert node.end_lineno - node.decorator_list[0].lineno < 30, node.name


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
def test_a_method_follows_its_equations_through_captured_graphs(name, compiled, monkeypatch):
    """With the stand-in for CUDA graphs, in which nothing may wait for the device."""
    graphs = cuda_graphs.put_in_place(monkeypatch)
    run = trained(name, engine="lanes", lanes=2, compile=compiled)
    assert sum(graph.replays for graph in graphs) > 10
    assert off(run, expected(name)) < BOUND


@pytest.mark.parametrize("name", ["MOON", "Ditto", "Median", "Mime", "Poisson"])
def test_threads_train_what_the_equations_say(name, monkeypatch):
    monkeypatch.setattr(threads, "THREADS_BUSY", 0.0)
    run = trained(name, engine="lanes", lanes=1, threads=2)
    assert off(run, expected(name)) < BOUND


@pytest.mark.parametrize("engine", ["plain", "two lanes"])
def test_fedprox_and_fedsam_commute(engine):
    """FedSAM adds a difference of two gradients of the loss alone, so FedProx's term stays as it is."""
    first, second = methods.FedSAM(rho=0.3), ud.FedProx(mu=0.5)
    one, other = (trained("FedSAM", m, own=False, **ENGINES[engine]) for m in (first + second, second + first))
    assert distance(one.params, other.params) < 1e-12
    assert distance(other.params, expected("FedSAM + FedProx").params) < BOUND
    assert distance(one.params, expected("FedSAM").params) > 1e-3


def test_what_replaces_the_gradient_comes_first():
    with pytest.raises(ud.UndriftError, match="PerFedAvg replaces the gradient, so what FedProx does to it would be"):
        ud.FedProx(0.1) + methods.PerFedAvg(0.1)
    with pytest.raises(ud.UndriftError, match="PerFedAvg replaces the gradient, so what Ditto does to it would be"):
        methods.Ditto(0.1) + methods.PerFedAvg(0.1)
    assert methods.PerFedAvg(0.1) + ud.FedProx(0.1)


# ---- every hook disconnected -------------------------------------------------------------------------------------
ATTRIBUTES = ("measures", "batches", "personal")


def connections():
    """Every hook of every method, and the attributes that decide what it trains."""
    for name, (method, _) in METHODS.items():
        if isinstance(method, ud.Method):
            continue
        for hook in sorted(HOOKS):
            if getattr(type(method), hook) is not getattr(ud.Part, hook):
                yield pytest.param(name, hook, id=f"{name}.{hook}")
        for attribute in ATTRIBUTES:
            if getattr(method, attribute) != getattr(ud.Part, attribute):
                yield pytest.param(name, attribute, id=f"{name}.{attribute}")


@pytest.mark.parametrize(("name", "hook"), list(connections()))
def test_a_disconnected_hook_is_noticed(name, hook, monkeypatch):
    """Take any hook away from any method: it is refused, or it no longer follows its equations."""
    local = "momentum and decay" if name == "FedRep" else "mini-batches"  # which needs both hooks with momentum alone
    method, wanted = METHODS[name][0], expected(name, local)
    assert off(whole(name, local), wanted) < BOUND
    if hook == "personal":
        method = replace(method, personal=())
    else:
        monkeypatch.setattr(type(method), hook, getattr(ud.Part, hook))
    try:
        broken = trained(name, method, local, engine="plain")
    except ud.UndriftError:  # what others stand on
        return
    assert off(broken, wanted) > 1e-6


@functools.cache
def whole(name, local="mini-batches"):
    return trained(name, local=local, engine="plain")


def test_every_hook_of_the_field_is_among_those_disconnected():
    """A hook that a method overrides and no test takes away would go unnoticed."""
    taken = {tuple(case.values) for case in connections()}
    classes = [kind for kind in vars(methods).values() if isinstance(kind, type) and issubclass(kind, ud.Part)]
    assert len(classes) == 10
    for kind in classes:
        assert {(kind.__name__, hook) for hook in HOOKS & vars(kind).keys()} <= taken, kind
    assert {"objective", "carry", "step", "own", "aggregate", "plan", "gradient"} <= {hook for _, hook in taken}


# ---- short batches: padding must count for nothing ---------------------------------------------------------------
@dataclass(frozen=True)
class Unmasked(ud.Part):
    """FedDecorr by one who has forgotten the mask."""

    beta: ud.Number

    def objective(self, losses, z, batch, params, client):
        return methods.FedDecorr(self.beta).objective(
            losses, z, replace(batch, mask=torch.ones_like(batch.mask)), params, client
        )


def test_batches_are_padded_in_lanes_and_the_mask_says_where():
    """Otherwise the agreement of the engines would say nothing about it."""
    lanes, plain = (
        trained("FedDecorr", Unmasked(0.5), own=False, rehearse=False, **ENGINES[e]) for e in ("two lanes", "plain")
    )
    assert distance(plain.params, expected("FedDecorr").params) < BOUND
    assert distance(lanes.params, plain.params) > 1e-4


@pytest.mark.parametrize("name", ["MOON", "FedDecorr"])
@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_objectives_agree_whatever_is_padded(name, batch_size):
    """Batches of one sample, ones that are short by two, and whole clients of 1 to 41 samples side by side."""
    local = ud.Local(steps=4, batch_size=batch_size, lr=0.1)
    data = make_clients(SIZES)
    settings = {"rounds": 2, "local": local, "seed": SEED, "participation": 4}
    lanes, plain = (ud.train(net(), data, METHODS[name][0], **settings, **ENGINES[e]) for e in ("two lanes", "plain"))
    assert distance(lanes.params, plain.params) < BOUND
    wanted = METHODS[name][1](Case(data, local, cohorts_of(plain), SEED))
    assert distance(plain.params, wanted.params) < BOUND


# ---- clients' own models -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["plain", "two lanes"])
@pytest.mark.parametrize("name", PERSONAL)
def test_clients_are_evaluated_with_weights_of_their_own(name, engine):
    """On their own data, by client and in the mean; who has never taken part has the global weights."""
    data = clients_with_tests()
    local, settings = LOCALS["mini-batches"], {"rounds": 2, "participation": 3, "seed": SEED}
    run = ud.train(net(), data, METHODS[name][0], local=local, **settings, **ENGINES[engine])
    wanted = METHODS[name][1](Case(data, local, cohorts_of(run), SEED))
    row, clients = run.history[-1], [0, 1, 3, 4, 5, 6]
    assert row["by_client"]["client"] == clients and wanted.own.keys() < set(clients)
    losses, shared = wanted.losses(data, clients), Found(wanted.w).losses(data, clients)
    assert row["by_client"]["loss"] == pytest.approx(losses, rel=BOUND)
    assert row["client_loss"] == pytest.approx(sum(losses) / len(losses), rel=BOUND)
    assert all((i in wanted.own) == (abs(a / b - 1) > 1e-4) for i, a, b in zip(clients, losses, shared, strict=True))
    x, y = data.test
    found = F.cross_entropy(torch.func.functional_call(net(), run.params, (x,)), y)
    assert row["loss"] == pytest.approx(float(found), rel=BOUND)  # the test data's is the global model's


def test_one_more_epoch_begins_with_the_clients_own_weights():
    """`tuned_loss` of FedPer, written out: a further epoch of body and head."""
    data, local, wanted = clients_with_tests(), LOCALS["mini-batches"], expected("FedPer")
    epoch, losses = replace(local, epochs=1), []
    for i in (0, 1, 3, 4, 5, 6):
        w = Case(data, epoch, [], SEED).sgd(wanted.own[i], 4, i, lambda v, k, x, y: gradient(v, x, y))
        losses += Found(w).losses(data, [i])
    assert whole("FedPer").history[-1]["tuned_loss"] == pytest.approx(sum(losses) / len(losses), rel=BOUND)


def test_what_is_personal_is_never_sent():
    """The head stays out of the bytes and out of the global weights, which keep its initial values."""
    sizes = {n: w.numel() * 8 for n, w in net().named_parameters()}
    body = sum(size for n, size in sizes.items() if n.startswith("0."))
    sent, all_sent = (
        trained(name, method, rounds=1, own=False, engine="plain").history[0]["bytes_down"]
        for name, method in (("FedPer", None), ("FedAvg", ud.FedAvg()))
    )
    assert (sent, all_sent) == (4 * body, 4 * sum(sizes.values()))
    start = dict(net().named_parameters())
    assert all(torch.equal(w, start[n]) for n, w in whole("FedPer").params.items() if n.startswith("3."))


# ---- with clients that fail, and in empty rounds -----------------------------------------------------------------
@pytest.mark.parametrize("engine", ["plain", "two lanes"])
def test_the_median_is_of_the_clients_that_answered(engine):
    run = trained("Median", own=False, faults=ud.Faults(dropout=0.4), **ENGINES[engine])
    answered = [[c for c in row["clients"] if c not in row["dropped"]] for row in run.history]
    assert {len(each) for each in answered} >= {2, 3}
    wanted = fedavg(Case(make_clients(SIZES), LOCALS["mini-batches"], answered, SEED), median)
    assert distance(run.params, wanted.params) < BOUND


@pytest.mark.parametrize("engine", ["plain", "two lanes"])
@pytest.mark.parametrize("name", ["Mime", "Ditto", "FedRep", "MOON"])
def test_an_empty_round_changes_nothing_of_what_methods_keep(name, engine):
    """Poisson sampling beside methods with state at the server and at the clients."""
    run = trained("Poisson", methods.Poisson(p=0.3) + METHODS[name][0], **ENGINES[engine])
    cohorts = expected("Poisson").cohorts
    assert cohorts_of(run) == cohorts and [] in cohorts
    wanted = METHODS[name][1](Case(make_clients(SIZES), LOCALS["mini-batches"], cohorts, SEED))
    assert off(run, replace(wanted, cohorts=cohorts)) < BOUND


@pytest.mark.parametrize("name", ["MOON", "FedRep", "Ditto", "Mime", "Poisson"])
def test_a_run_that_stopped_goes_on_with_what_methods_keep(name, tmp_path, monkeypatch):
    """At the server and at the clients, personal parameters included: to the bit, as if it had never stopped."""

    def stop(row):
        if row["round"] == 3:
            raise KeyboardInterrupt

    folder = {"out": tmp_path / "run", "engine": "plain"}
    with pytest.raises(KeyboardInterrupt):
        trained(name, on_round=stop, **folder)
    restored, read = [], Checkpoints.restore
    monkeypatch.setattr(
        Checkpoints, "restore", lambda self, last=None: restored.append(read(self, last)) or restored[-1]
    )
    run = trained(name, resume=True, **folder)
    assert same_bits(run.params, whole(name).params)
    assert run.history[-1]["by_client"] == whole(name).history[-1]["by_client"]
    # Matrix products may round differently where memory is not aligned, as in a mapped file.
    (state,) = restored
    kept = [dict(states.items()) for states in state.clients.parts.values()]
    tensors = tree_leaves((state.params, state.parts, state.tracked, kept))
    assert state.round == 3 and all(t.data_ptr() % 64 == 0 for t in tensors)
