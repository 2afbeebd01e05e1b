"""Faulty clients: what is drawn, what a round with them comes to, and that the history accounts for all of them."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import undrift as ud
from tests import cuda_graphs
from tests.faulty import ALL, DATA, LOCAL, ROUNDS, SEED, train
from tests.parts import METHOD, Normed
from tests.problems import Point, distance, make_clients, net, quadratics, same_bits, split
from tests.reference import simulate
from undrift.engine import threads as threaded
from undrift.random import derive, philox
from undrift.training.client_failures import outliers, tree_norm
from undrift.training.history import Clock

EVERYONE = [0, 1, 3, 4, 5, 6]
METHODS = {
    "FedAvg": (ud.FedAvg(), []),
    "Scaffold": (ud.Scaffold(), [("Scaffold", None)]),
    "FedDyn": (ud.FedDyn(0.3), [("FedDyn", 0.3)]),
    "FedNova": (ud.FedNova(), [("FedNova", None)]),
    "TwoDLRD": (ud.TwoDLRD(window=1, C=0.5), [("TwoDLRD", {"window": 1, "C": 0.5})]),
}


@dataclass(frozen=True)
class Fate:
    """The definition, one client at a time: four draws below their probabilities, and one for a straggler's steps."""

    t: int
    client: int
    faults: ud.Faults

    def hit(self, place: int, probability: float) -> bool:
        return philox((0, 0, 0, 0), derive(SEED, "faults", self.t, self.client))[place] / 2**32 < probability

    @property
    def dropped(self) -> bool:
        return self.hit(0, self.faults.dropout)

    @property
    def nan(self) -> bool:
        return self.hit(2, self.faults.nan) and not self.dropped

    @property
    def explodes(self) -> bool:
        return self.hit(3, self.faults.explode) and not self.dropped and not self.nan

    @property
    def straggles(self) -> bool:
        return self.hit(1, self.faults.stragglers) and not self.dropped

    def steps(self, planned: int) -> int:
        share = philox((1, 0, 0, 0), derive(SEED, "faults", self.t, self.client))[0] / 2**32
        return 1 + math.floor(share * (planned - 1)) if self.straggles else planned


def planned(t: int, client: int) -> int:
    return len(ud.batches(DATA, LOCAL, client=client, round=t, seed=SEED))


def reference(parts, faults: ud.Faults, counts, rounds: int = ROUNDS) -> dict[str, torch.Tensor]:
    """The equations, over the clients whose fate `counts`."""
    cohorts = [[c for c in EVERYONE if counts(Fate(t, c, faults))] for t in range(rounds)]
    return simulate(
        net(), DATA, LOCAL, cohorts, parts, SEED,
        steps=lambda t, c: Fate(t, c, faults).steps(planned(t, c)),
        factors=lambda t, c: faults.explode_factor if Fate(t, c, faults).explodes else 1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "engine"), [*((name, "plain") for name in METHODS), ("FedAvg", "lanes")])
def test_dropouts_and_stragglers_are_what_the_equations_say_without_them(name, engine):
    """The mean over the survivors, each after the steps that it took; what the others keep stays as it was."""
    method, parts = METHODS[name]
    faults = ud.Faults(dropout=0.4, stragglers=0.5)
    run = train(method, faults, engine)
    cut = name != "TwoDLRD"  # it may plan a single step
    expected = reference(parts, faults, lambda fate: not fate.dropped)
    assert distance(run.params, expected) < 1e-12
    for t, row in enumerate(run.history):
        fates = [Fate(t, c, faults) for c in EVERYONE]
        assert row["clients"] == EVERYONE and row["dropped"] == [f.client for f in fates if f.dropped]
        slow = [f.client for f in fates if f.straggles and planned(t, f.client) > 1]
        assert row["stragglers"] == slow or not cut
        assert row["survivors"] == len(EVERYONE) - len(row["dropped"]) and row["round_skipped"] is False
    assert sum(len(row["dropped"]) for row in run.history) > 5 and len({len(r["dropped"]) for r in run.history}) > 2


@pytest.mark.parametrize(("name", "engine"), [*((name, "lanes") for name in METHODS), ("Scaffold", "plain")])
def test_whoever_fails_counts_for_nothing(name, engine):
    """All faults at once, with NaN skipped and explosions left out: the equations over the clients that are left."""
    method, parts = METHODS[name]
    run = train(method, ALL, engine, on_nonfinite="skip", max_norm_ratio=50)
    assert distance(run.params, reference(parts, ALL, lambda f: not (f.dropped or f.nan or f.explodes))) < 1e-12
    for t, row in enumerate(run.history):
        fates = [Fate(t, c, ALL) for c in EVERYONE]
        assert row["skipped"] == [f.client for f in fates if f.nan]
        assert row["left_out"] == [f.client for f in fates if f.explodes]
    assert sum(len(row["skipped"]) for row in run.history) >= 2 <= sum(len(row["left_out"]) for row in run.history)


@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "FedNova"])
def test_explosions_count_where_nobody_asks_to_leave_them_out(name):
    """All that a client sends is computed from the weights that exploded."""
    method, parts = METHODS[name]
    faults = ud.Faults(explode=0.2, explode_factor=5.0)
    runs = [train(method, faults, engine, rounds=3) for engine in ("lanes", "plain")]
    for run in runs:
        assert distance(run.params, reference(parts, faults, lambda fate: True, rounds=3)) < 1e-12
    assert distance(runs[0].params, train(method, engine="plain", rounds=3).params) > 0.05


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_nan_stops_a_run_that_does_not_skip_it(engine):
    """Dropouts are no reason to stop; the client that returns NaN is, and is named."""
    faults = ud.Faults(dropout=0.3, nan=0.1)
    first = next((t, c) for t in range(ROUNDS) for c in EVERYONE if Fate(t, c, faults).nan)
    run = train(ud.Scaffold(), faults, engine)
    assert first[0] > 0 and any(row["dropped"] for row in run.history)
    assert run.stopped.startswith(f"Round {first[0] + 1}: client {first[1]} sent or kept non-finite values.")
    before = train(ud.Scaffold(), ud.Faults(dropout=0.3), engine, rounds=first[0])
    assert same_bits(run.params, before.params) and len(run.history) == first[0]
    whoever = train(ud.FedAvg(), ud.Faults(dropout=0.3, nan=1.0), engine)
    assert whoever.stopped.startswith("Round 1: every client that answered sent non-finite values.")


COLUMNS = {
    "faults": (ud.Faults(), {"dropped", "stragglers"}),
    "max_norm_ratio": (1e6, {"left_out"}),
    "min_clients": (4, set()),
}


@pytest.mark.parametrize(
    ("engine", "names"), [("lanes", [*COLUMNS]), ("plain", [*COLUMNS]), *(("plain", [name]) for name in COLUMNS)]
)
def test_same_bits_where_nothing_happens(engine, names):
    """Faults of probability 0, and rules that nobody breaks: the run without them, but for its columns."""
    settings = {"engine": engine, "participation": 4, "rounds": 2}
    clean = train(ud.Scaffold() + ud.FedNLR(), **settings)
    run = train(ud.Scaffold() + ud.FedNLR(), **settings, **{name: COLUMNS[name][0] for name in names})
    assert same_bits(run.params, clean.params)
    new = {"survivors", "round_skipped"}.union(*(COLUMNS[name][1] for name in names))
    for row, before in zip(run.history, clean.history, strict=True):
        rest = before.keys() - {"seconds"}
        assert row.keys() - before.keys() == new and {k: row[k] for k in rest} == {k: before[k] for k in rest}


@pytest.mark.parametrize(
    ("method", "graphs"),
    [
        (METHOD, True),
        (ud.FedCurv(0.1) + ud.SignAgreement(2) + ud.ServerAdam(0.1), False),
        (ud.FedDyn(0.1) + ud.FedNLR() + ud.CCVR(samples_per_class=5), False),
        (ud.TwoDLRD(1), False),
    ],
    ids=["every hook", "FedCurv", "FedDyn", "TwoDLRD"],
)
def test_lanes_are_the_plain_engine_whoever_fails(method, graphs, monkeypatch):
    """In captured graphs too: one graph serves all rounds, however few clients are left."""
    made = cuda_graphs.put_in_place(monkeypatch) if graphs else []
    rules = {"on_nonfinite": "skip", "max_norm_ratio": 50, "min_clients": 3}
    settings = {"model": net(dropout=0.3), "device": "cpu", "evaluate_every": ROUNDS, **rules}
    lanes, plain = (train(method, ALL, engine, **settings) for engine in ("lanes", "plain"))
    assert distance(lanes.params, plain.params) < 1e-12
    keys = ("clients", "dropped", "stragglers", "skipped", "left_out", "survivors", "round_skipped", "steps", "samples",
            "bytes_up", "bytes_down", "local_steps")  # fmt: skip
    for a, b in zip(lanes.history, plain.history, strict=True):
        assert [a[key] for key in keys] == [b[key] for key in keys]
    assert len({row["survivors"] for row in lanes.history}) > 2 and len(made) == graphs


def test_threads_train_what_the_plain_engine_does(monkeypatch):
    monkeypatch.setattr(threaded, "THREADS_BUSY", 0.0)
    threads = train(ud.Scaffold(), ALL, lanes=1, on_nonfinite="skip", max_norm_ratio=50, threads=3)
    plain = train(ud.Scaffold(), ALL, "plain", on_nonfinite="skip", max_norm_ratio=50)
    assert threads.choices["lanes"] == 1 and distance(threads.params, plain.params) < 1e-12


def test_running_statistics_are_those_of_the_clients_that_count():
    """Batch norm, one round: as if the others had no data."""
    faults, sizes = ud.Faults(dropout=0.5), [16, 24, 8, 16]
    whole = make_clients(sizes)
    gone = [Fate(0, c, faults).dropped for c in range(4)]
    clients = [(x[:0], y[:0]) if gone[c] else (x, y) for c, (x, y) in enumerate(whole[c] for c in range(4))]
    torch.manual_seed(1)
    model = Normed()
    run = train(ud.FedAvg(), faults, "plain", rounds=1, data=whole, model=model)
    without = ud.FederatedDataset.from_clients(clients, test=whole.server)
    expected = train(ud.FedAvg(), None, "plain", rounds=1, data=without, model=model)
    assert 0 < sum(gone) < 4 and run.history[0]["survivors"] == 4 - sum(gone)
    assert distance(dict(run.model.state_dict()), dict(expected.model.state_dict())) < 1e-12


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_personalisation_has_no_faults(engine):
    """Clients' own models are an evaluation: those of the clean run from the same weights, whoever fails."""
    settings = {"engine": engine, "data": split(), "personalize_every": 2, "participation": 2}
    clean = train(ud.Scaffold(), **settings)
    for faults, same in ((ud.Faults(), True), (ud.Faults(dropout=1.0), False)):
        run = train(ud.Scaffold(), faults, **settings)
        tuned = [row["tuned_loss"] for row in run.history if "tuned_loss" in row]
        assert len(tuned) == 3 and all(map(math.isfinite, tuned))
        assert (tuned == [row["tuned_loss"] for row in clean.history if "tuned_loss" in row]) is same


@pytest.mark.parametrize("late", [False, True])
def test_flags_may_be_read_a_round_late(monkeypatch, late):
    """As on a GPU, where the next round has begun by then."""
    if late:
        monkeypatch.setattr(Clock, "_passed", lambda self, moment: False)
    method, parts = METHODS["Scaffold"]
    run = train(method, ALL, "plain", on_nonfinite="skip", max_norm_ratio=50, evaluate_every=ROUNDS)
    assert distance(run.params, reference(parts, ALL, lambda f: not (f.dropped or f.nan or f.explodes))) < 1e-12
    assert [row["survivors"] for row in run.history] == [
        sum(not (f.dropped or f.nan or f.explodes) for f in (Fate(t, c, ALL) for c in EVERYONE)) for t in range(ROUNDS)
    ]


def test_the_history_accounts_for_every_client_sampled():
    """Each is a survivor, dropped, skipped or left out; work and bytes are of those that did it."""
    faults = ud.Faults(dropout=0.3, stragglers=0.2, nan=0.1, explode=0.1, explode_factor=1e6)
    settings = {"rounds": 30, "participation": 5, "evaluate_every": 30}
    run = train(ud.Scaffold(), faults, on_nonfinite="skip", max_norm_ratio=50, min_clients=2, **settings)
    clean = train(ud.Scaffold(), engine="plain", **settings)
    total, seen = 0, set()
    for t, (row, before) in enumerate(zip(run.history, clean.history, strict=True)):
        assert row["clients"] == before["clients"]  # who is sampled does not depend on who fails
        gone = row["dropped"] + row["skipped"] + row["left_out"]
        assert len(set(gone)) == len(gone) and set(gone) | set(row["stragglers"]) <= set(row["clients"])
        assert len(gone) + row["survivors"] == len(row["clients"])
        answered = [c for c in row["clients"] if c not in row["dropped"]]
        assert set(row["stragglers"]) <= set(answered) and set(row["skipped"] + row["left_out"]) <= set(answered)
        batches = {c: ud.batches(DATA, LOCAL, client=c, round=t, seed=SEED) for c in answered}
        steps = {c: Fate(t, c, faults).steps(len(batches[c])) for c in answered}
        assert row["stragglers"] == [c for c in answered if steps[c] < len(batches[c])]
        assert row["steps"] == sum(steps.values())
        assert row["samples"] == sum(len(b) for c in answered for b in batches[c][: steps[c]])
        assert row["bytes_down"] == before["bytes_down"] and row["bytes_up"] * 5 == before["bytes_up"] * len(answered)
        total += row["steps"]
        assert row["total_steps"] == total and row["round_skipped"] == (row["survivors"] < 2)
        seen |= {name for name in ("dropped", "skipped", "left_out", "stragglers", "round_skipped") if row[name]}
    assert len(seen) == 5


# ---- draws ---------------------------------------------------------------------------------------------------------


def test_draws_depend_on_seed_round_and_client_alone():
    everyone = np.arange(500)
    steps = np.full(500, 40)
    whole = ALL.draw(SEED, 7, everyone, steps)
    some = ALL.draw(SEED, 7, everyone[100:140:3], steps[100:140:3])
    for name in ("steps", "dropped", "stragglers", "factor"):
        assert np.array_equal(getattr(whole, name)[100:140:3], getattr(some, name), equal_nan=True)
    for other in (ALL.draw(SEED + 1, 7, everyone, steps), ALL.draw(SEED, 8, everyone, steps)):
        assert not np.array_equal(other.dropped, whole.dropped)
    for c in range(40):
        fate = Fate(7, c, ALL)
        assert whole.dropped[c] == fate.dropped and whole.stragglers[c] == fate.straggles
        assert fate.dropped or whole.steps[c] == fate.steps(40)


def test_draws_have_their_probabilities():
    """100,000 draws: within 0.01, which is more than six standard deviations."""
    many = np.arange(100_000)
    found = ALL.draw(0, 0, many, np.full(len(many), 5))
    exploded, nan = found.factor == 1e4, np.isnan(found.factor)
    assert abs(found.dropped.mean() - 0.25) < 0.01
    assert abs(found.stragglers[~found.dropped].mean() - 0.4) < 0.01  # independent of each other
    assert abs(nan[~found.dropped].mean() - 0.15) < 0.01
    assert abs(exploded[~nan].mean() - 0.15) < 0.01
    steps, counts = np.unique(found.steps[found.stragglers], return_counts=True)
    assert steps.tolist() == [1, 2, 3, 4] and abs(counts / counts.sum() - 0.25).max() < 0.01
    everybody = ud.Faults(dropout=1, nan=1.0).draw(0, 0, many, np.ones(len(many), int))
    assert everybody.dropped.all() and not ud.Faults().draw(0, 0, many, np.ones(len(many), int)).dropped.any()


@pytest.mark.parametrize(("work", "steps"), [(0.5, [1, 1, 2, 5]), (0.0, [1, 1, 1, 1]), (0.3, [1, 1, 1, 3])])
def test_stragglers_may_do_a_fixed_part_of_their_work(work, steps):
    planned = np.array([1, 2, 3, 10])
    found = ud.Faults(stragglers=1.0, straggler_work=work).draw(0, 0, np.arange(4), planned)
    assert found.steps.tolist() == steps and found.stragglers.tolist() == (steps < planned).tolist()
    assert not ud.Faults(stragglers=1.0, straggler_work=1.0).draw(0, 0, np.arange(4), planned).stragglers.any()


def test_probabilities_may_be_schedules():
    faults = ud.Faults(dropout=lambda t: float(t == 1), stragglers=ud.decay(1.0, 0.0))
    rows = train(ud.FedAvg(), faults, rounds=3).history
    assert [row["dropped"] for row in rows] == [[], EVERYONE, []]
    assert [bool(row["stragglers"]) for row in rows] == [True, False, False]


# ---- outliers ------------------------------------------------------------------------------------------------------


def test_who_is_an_outlier():
    def found(norms, ratio, counting=None):
        counting = np.ones(len(norms), bool) if counting is None else np.array(counting)
        return np.flatnonzero(outliers(np.array(norms, float), counting, ratio)).tolist()

    assert found([1, 1, 11, 1, 10], 10) == [2]  # ten times the median is not more than that
    assert found([1, 3, 19, 21], 1.8) == [3]  # the median of an even number: (3 + 19) / 2
    assert found([1, 1000], 2) == [] == found([1], 1)  # of two, none is twice their mean
    assert found([0, 0, 0, 5], 10) == []  # a median of 0 says nothing about the others
    assert found([0, 2, 2, 50], 10) == [3]
    assert found([1, 1, 9, 0, 0, 0], 10, [True, True, True, False, False, False]) == []
    assert found([1, 1, 9, 0, 0, 0], 10) == [2]
    assert found([0, 0], 10, [False, False]) == []
    assert found([1, 2, 3], 1) == [2]
    assert found([1, 1, math.inf], 10) == [2]


def test_norms_do_not_overflow():
    tree = {"a": torch.full((3,), 2e30), "b": torch.tensor([[1e30, -1e30]]), "none": torch.empty(0)}
    assert (
        float(tree_norm(tree)) == pytest.approx(math.sqrt(14) * 1e30) and float(tree_norm({"a": torch.zeros(3)})) == 0
    )


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_an_update_that_is_too_long_by_itself_is_left_out(engine, caplog):
    """No faults at all, and one client whose data pull fifty times as far: the round of the others alone."""
    pairs = [(1.0, 1.0), (1.0, 0.9), (1.0, 50.0), (1.0, 1.1)]
    settings = {"rounds": 3, "local": ud.Local(steps=2, lr=0.1), "engine": engine}
    caplog.set_level(logging.WARNING, "undrift.nonfinite")
    run = ud.train(Point(), quadratics(pairs), max_norm_ratio=10, **settings)
    expected = ud.train(Point(), quadratics([pair for pair in pairs if pair[1] < 50]), **settings)
    assert distance(run.params, expected.params) < 1e-12
    assert [row["left_out"] for row in run.history] == [[2]] * 3 and [r["survivors"] for r in run.history] == [3] * 3
    assert "round 1: left out client 2 (update too long)" in caplog.messages
    wide = ud.train(Point(), quadratics(pairs), max_norm_ratio=100, **settings)
    assert same_bits(wide.params, ud.train(Point(), quadratics(pairs), **settings).params)


def test_norms_are_of_the_update_and_not_of_its_weight():
    """A client with many samples has a large weight; its update is as long as the others'."""
    data = make_clients([200, 4, 4, 4])
    run = train(ud.FedAvg(), data=data, local=ud.Local(steps=1, lr=0.1), rounds=2, max_norm_ratio=5)
    assert [row["left_out"] for row in run.history] == [[], []]


# ---- rounds with too few survivors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "engine"), [*((name, "plain") for name in METHODS), ("Scaffold", "lanes")])
def test_a_round_with_too_few_survivors_changes_nothing(name, engine, caplog):
    """The equations with an empty cohort in such rounds: clients that trained in vain keep what they had, too."""
    method, parts = METHODS[name]
    faults = ud.Faults(dropout=0.4, stragglers=0.5)
    caplog.set_level(logging.WARNING, "undrift.nonfinite")
    run = train(method, faults, engine, rounds=8, min_clients=4)
    left = [[c for c in EVERYONE if not Fate(t, c, faults).dropped] for t in range(8)]
    assert [row["survivors"] for row in run.history] == [len(cohort) for cohort in left]
    skipped = [len(cohort) < 4 for cohort in left]
    assert [row["round_skipped"] for row in run.history] == skipped and 0 < sum(skipped) < 8
    steps = lambda t, c: Fate(t, c, faults).steps(planned(t, c))  # noqa: E731
    cohorts = [[] if skip else cohort for cohort, skip in zip(left, skipped, strict=True)]
    expected = simulate(net(), DATA, LOCAL, cohorts, parts, SEED, steps=steps)
    assert distance(run.params, expected) < 1e-12
    said = [record.getMessage() for record in caplog.records]
    t = skipped.index(True)
    few = len(left[t])
    assert (
        said[0] == f"round {t + 1}: the model is left unchanged, because {few} of 6 clients remain and 4 are required"
    )


@functools.cache
def two_rounds(method, engine):
    return train(method, None, engine, rounds=2)


@pytest.mark.parametrize(
    ("method", "engine"),
    [(ud.ServerSGD(momentum=0.9), "plain"), (ud.Scaffold() + ud.FedNLR(), "lanes"), (ud.FedDyn(0.1), "plain")],
    ids=["ServerSGD", "Scaffold", "FedDyn"],
)
@pytest.mark.parametrize("why", ["dropout", "nan"])
def test_without_survivors_everything_stays_as_it_was(why, method, engine):
    """Nobody answers, or nobody that is finite, in the third round, which might as well not have been."""
    faults = ud.Faults(**{why: lambda t: float(t == 2)})
    run = train(method, faults, engine, rounds=3, on_nonfinite="skip")
    before = two_rounds(method, engine)
    row = run.history[2]
    assert same_bits(run.params, before.params) and row["loss"] == before.history[-1]["loss"]
    assert row["dropped" if why == "dropout" else "skipped"] == EVERYONE
    assert (row["survivors"], row["round_skipped"]) == (0, True) and run.stopped is None
    if why == "dropout":
        nothing = {"fewest": 0, "mean": 0.0, "most": 0}
        assert (row["steps"], row["samples"], row["bytes_up"], row["local_steps"]) == (0, 0, 0, nothing)
        assert row["bytes_down"] == run.history[1]["bytes_down"]


@pytest.mark.parametrize(("min_clients", "needed"), [(5, 5), (0.5, 3), (0.51, 4), (1.0, 6), (0.01, 1), (None, 1)])
def test_how_many_must_be_left(min_clients, needed):
    faults = ud.Faults(dropout=ud.inverse(0.9, 2))
    rows = train(ud.FedAvg(), faults, "plain", min_clients=min_clients, evaluate_every=9).history
    assert [row["round_skipped"] for row in rows] == [row["survivors"] < needed for row in rows]
    assert len({row["survivors"] for row in rows}) > 2


def test_a_newcomer_that_drops_out_stays_new():
    """What a client has before its first round may depend on the weights of that round."""

    @dataclass(frozen=True)
    class First(ud.Part):
        """The sum over clients of how far the weights have come since their first round."""

        def keep(self, params):
            return {"since": params}

        def upload(self, delta, client):
            moved = ud.tree_map(lambda w, s: (w - s).abs().sum(), client.start, client.kept["since"])
            return {"moved": sum(moved.values())}, client.kept

        def start(self, params):
            return {"moved": torch.zeros((), dtype=torch.float64)}

        def transform(self, update, state, server):
            return update, server.totals.sums

        def history(self, state):
            return {"moved": float(state["moved"])}

    faults = ud.Faults(dropout=0.4)
    answered = [{c for c in EVERYONE if not Fate(t, c, faults).dropped} for t in range(2)]
    assert answered[1] - answered[0] and answered[1] & answered[0]
    for engine in ("lanes", "plain"):
        before, after = (train(First(), faults, engine, rounds=rounds) for rounds in (1, 2))
        start = {name: w.detach() for name, w in net().named_parameters()}
        moved = float(sum((w - start[name]).abs().sum() for name, w in before.params.items()))
        assert after.history[1]["moved"] == pytest.approx(moved * len(answered[0] & answered[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"dropout": 1.5}, r"Faults\(dropout\) is 1.5; it must be in \[0, 1\]."),
        ({"nan": -0.1}, r"Faults\(nan\) is -0.1; it must be in \[0, 1\]."),
        ({"stragglers": math.nan}, r"Faults\(stragglers\) is nan; it must be in"),
        ({"dropout": "0.3"}, r"Faults\(dropout\) must be a number or a function of the round"),
        ({"dropout": None}, r"Faults\(dropout\) must be a number or a function of the round"),
        ({"straggler_work": 2}, r"Faults\(straggler_work\) is 2; it must be in \[0, 1\]."),
        ({"explode_factor": 0.5}, r"Faults\(explode_factor\) is 0.5; it must be in \[1, inf\)."),
    ],
)
def test_faults_that_make_no_sense_are_refused(given, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.Faults(**given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"faults": {"dropout": 0.3}}, "faults must be a ud.Faults, not dict."),
        ({"faults": ud.Faults(dropout=lambda t: t)}, r"Faults\(dropout\) is 2 in round 2; it must be in \[0, 1\]."),
        ({"max_norm_ratio": 0.9}, "max_norm_ratio must be a number from 1, or None, not 0.9."),
        ({"max_norm_ratio": math.inf}, "max_norm_ratio must be a number from 1"),
        ({"max_norm_ratio": "10"}, "max_norm_ratio must be a number from 1"),
        ({"min_clients": 0}, "min_clients must be at least 1 client, not 0."),
        ({"min_clients": 7}, "min_clients is 7, but only 6 clients are sampled in a round."),
        ({"min_clients": 1.5}, r"min_clients as a fraction must be in \(0, 1\], not 1.5."),
        ({"min_clients": True}, r"min_clients must be a count \(an int\) or a fraction \(a float\), not True."),
    ],
)
def test_conditions_that_make_no_sense_are_refused(given, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        train(ud.FedAvg(), **given)
