"""Figures of client drift: by hand on quadratics, from single updates on uneven clients, and without any effect."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import undrift as ud
from tests import cuda_graphs
from tests.problems import Point, make_clients, net, quadratics, same_bits
from undrift.training.drift import FIGURES

SIZES = [23, 5, 0, 41, 10, 17, 1]
LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.5)
CONSTANT = replace(LOCAL, momentum=0.0)
ENGINES = [("plain", None), ("lanes", 1), ("lanes", 3), ("lanes", 6)]


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_two_quadratics_by_hand(engine):
    """Losses ½·(w − 1)² and ½·3·(w + 2)² from w = 0, two steps of rate 0.1."""
    run = ud.train(
        Point(),
        quadratics([(1.0, 1.0), (3.0, -2.0)]),
        rounds=1,
        local=ud.Local(steps=2, lr=0.1),
        engine=engine,
        drift=True,
    )
    a, b = [0.0, 0.1], [0.0, -0.6]  # the weights before each step
    first, second = a[1] - 0.1 * (a[1] - 1), b[1] - 0.3 * (b[1] + 2)
    mean = (first + second) / 2
    wanted = {
        "train_loss_first": (0.5 * (a[0] - 1) ** 2 + 1.5 * (b[0] + 2) ** 2) / 2,
        "train_loss": (0.5 * (a[1] - 1) ** 2 + 1.5 * (b[1] + 2) ** 2) / 2,
        "update_norm": (first - second) / 2,
        "update_norm_max": -second,
        "mean_update_norm": -mean,
        "server_step": -mean,
        "agreement": -mean / ((first - second) / 2),
        "cosine": 0.0,  # one of them goes the mean's way, the other against it
    }
    row = run.history[0]
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, abs=1e-15)
    assert row["client_norms"] == pytest.approx({"1": -second, "0": first}) and list(row["client_norms"]) == ["1", "0"]
    assert "layer_agreement" not in row and "cosine_min" not in row


def test_clients_that_agree_and_clients_that_do_not_move():
    same = ud.train(Point(), quadratics([(1.0, 1.0)] * 3), rounds=1, local=ud.Local(steps=2, lr=0.1), drift=True)
    assert same.history[0]["agreement"] == pytest.approx(1) and same.history[0]["cosine"] == pytest.approx(1)
    still = ud.train(Point(), quadratics([(1.0, 0.0)] * 3), rounds=1, local=ud.Local(steps=2, lr=0.1), drift="layers")
    names = ("update_norm", "update_norm_max", "mean_update_norm", "server_step", "agreement", "cosine")
    assert [still.history[0][name] for name in names] == [0.0] * 6
    assert still.history[0]["layer_agreement"] == {}


@dataclass(frozen=True)
class Gathered(ud.Part):
    """The mean of single updates, which it puts aside."""

    seen: list = None

    def aggregate(self, updates, state, server):
        self.seen.append((updates, server.client_weights, server.cohort))
        weights = server.client_weights / server.client_weights.sum()
        return ud.tree_map(lambda u: torch.tensordot(weights.to(u.dtype), u, 1), updates), state


def by_hand(updates, weights, cohort) -> dict:
    """The definitions, with every client's update at hand."""
    p = (weights / weights.sum()).numpy()
    by_layer = {name: u.flatten(1).numpy() for name, u in updates.items()}
    whole = np.concatenate(list(by_layer.values()), 1)
    mean, norms = p @ whole, np.linalg.norm(whole, axis=1)
    cosines = whole @ mean / norms / np.linalg.norm(mean)
    length = {name: np.linalg.norm(p @ u) / (p @ np.linalg.norm(u, axis=1)) for name, u in by_layer.items()}
    longest = cohort[np.argsort(-norms)][:5]
    return {
        "update_norm": p @ norms,
        "update_norm_max": norms.max(),
        "mean_update_norm": np.linalg.norm(mean),
        "agreement": np.linalg.norm(mean) / (p @ norms),
        "cosine": p @ cosines,
        "cosine_min": cosines.min(),
        "layer_agreement": length,
        "client_norms": {str(c): norms[list(cohort).index(c)] for c in longest},
        "client_cosines": dict(zip(map(str, cohort), cosines, strict=True)),
    }


@pytest.mark.parametrize(("engine", "lanes"), ENGINES)
@pytest.mark.parametrize("method", [ud.FedAvg(), ud.FedProx(0.5) + ud.FedNLR(), ud.FedRS(0.5)], ids=str)
def test_figures_are_those_of_single_updates(method, engine, lanes):
    seen: list = []
    run = ud.train(
        net(), make_clients(SIZES), method + Gathered(seen), rounds=3, local=LOCAL, participation=4, engine=engine,
        lanes=lanes, drift="layers",
    )  # fmt: skip
    for row, (updates, weights, cohort) in zip(run.history, seen, strict=True):
        for name, value in by_hand(updates, weights, cohort).items():
            assert row[name] == pytest.approx(value, rel=1e-9), name


def loss_by_hand(data: ud.FederatedDataset, steps: int, rate: float) -> tuple[float, float]:
    """The mean losses of full batches, before the first and the last step."""
    found = []
    for i in np.flatnonzero(data.sizes):
        model, (x, y) = net(), data[int(i)]
        losses = []
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for w, g in zip(model.parameters(), grads, strict=True):
                    w.sub_(rate * g)
            losses.append(float(loss.detach()))
        found.append((losses[0], losses[-1]))
    p = data.sizes[data.sizes > 0] / data.sizes.sum()
    return tuple(p @ np.array(found))


@pytest.mark.parametrize(("engine", "lanes"), ENGINES)
@pytest.mark.parametrize("steps", [1, 3])
def test_training_losses(engine, lanes, steps):
    data = make_clients(SIZES)
    local = ud.Local(steps=steps, batch_size=None, lr=0.2)
    row = ud.train(net(), data, rounds=1, local=local, engine=engine, lanes=lanes, drift=True).history[0]
    wanted = loss_by_hand(data, steps, 0.2)
    assert (row["train_loss_first"], row["train_loss"]) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_figures_through_graphs(monkeypatch, compile):
    local = ud.Local(steps=[1, 9, 3, 2, 5, 1, 4], batch_size=4, lr=0.1)
    given = {"rounds": 3, "local": local, "device": "cpu", "drift": "layers"}
    plain = ud.train(net(), make_clients(SIZES), ud.Scaffold(), engine="plain", **given)
    graphs = cuda_graphs.put_in_place(monkeypatch)
    found = ud.train(net(), make_clients(SIZES), ud.Scaffold(), engine="lanes", lanes=3, compile=compile, **given)
    assert found.choices["engine"] == "lanes" and sum(graph.replays for graph in graphs) > 10
    for row, wanted in zip(found.history, plain.history, strict=True):
        for name in set(FIGURES) & wanted.keys():
            assert row[name] == pytest.approx(wanted[name], rel=1e-9), name


def test_one_lane_after_another_takes_no_loss_over():
    """With one client per lane after another, a client of one step has its own first loss, not its lane's."""
    data = make_clients([23, 5, 41, 10])
    local = ud.Local(steps=[1, 5, 2, 1], batch_size=None, lr=0.2)
    rows = [
        ud.train(net(), data, rounds=2, local=local, engine="lanes", lanes=lanes, drift=True).history
        for lanes in (1, 2, 4)
    ]
    for name in ("train_loss_first", "train_loss", "cosine"):
        assert [row[name] for row in rows[0]] == pytest.approx([row[name] for row in rows[1]], rel=1e-12)
        assert [row[name] for row in rows[0]] == pytest.approx([row[name] for row in rows[2]], rel=1e-12)


@dataclass(frozen=True)
class Some(ud.Part):
    """Cohorts of 4, 0, 2 and 1 clients."""

    def plan(self, plan, state, server):
        count = (4, 0, 2, 1)[plan.round % 4]
        return replace(plan, clients=plan.clients[:count], steps=plan.steps[:count]), state


@pytest.mark.parametrize("engine", ["plain", "lanes"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (ud.FedAvg(), {}),
        (ud.Scaffold() + ud.FedNLR(), {"participation": 3, "local": CONSTANT}),
        (ud.FedDyn(0.1), {"faults": ud.Faults(dropout=0.3, nan=0.2), "on_nonfinite": "skip"}),
        (ud.FedAvg(), {"max_norm_ratio": 1.5, "min_clients": 2}),
        (Some(), {}),
    ],
    ids=["FedAvg", "Scaffold + FedNLR", "faults", "norms", "plan"],
)
def test_figures_change_nothing_else(engine, method, options):
    def train(drift):
        given = {"local": LOCAL, **options}
        return ud.train(net(), make_clients(SIZES), method, rounds=4, engine=engine, drift=drift, **given)

    off, on = train(False), train("layers")
    assert same_bits(off.params, on.params)
    for before, after in zip(off.history, on.history, strict=True):
        assert {**before, "seconds": 0} == {name: after[name] for name in before} | {"seconds": 0}
        added = {"agreement", "train_loss"} if before["steps"] else {"server_step"}  # nobody trains
        assert set(FIGURES) >= after.keys() - before.keys() >= added
        assert np.isfinite([after[name] for name in FIGURES if isinstance(after.get(name), float)]).all()


def test_clients_that_do_not_count_are_left_out():
    """Of those that drop out or send NaN nothing is in the figures: they are those of the clients that are left."""
    seen: list = []
    run = ud.train(
        net(), make_clients(SIZES), ud.FedAvg() + Gathered(seen), rounds=4, local=LOCAL, drift=True,
        faults=ud.Faults(nan=0.4), on_nonfinite="skip",
    )  # fmt: skip
    assert any(row["skipped"] for row in run.history)
    for row, (updates, weights, cohort) in zip(run.history, seen, strict=True):
        wanted = by_hand(updates, weights, cohort)
        for name in ("update_norm", "update_norm_max", "agreement", "cosine"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-9), name


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_losses_of_clients_that_do_not_count_are_left_out(engine):
    data, local = make_clients(SIZES), ud.Local(steps=1, batch_size=None, lr=0.1)
    options = {"faults": ud.Faults(nan=0.5), "on_nonfinite": "skip", "engine": engine, "drift": True}
    row = ud.train(net(), data, rounds=1, local=local, **options).history[0]
    left = [c for c in row["clients"] if c not in row["skipped"]]
    assert 0 < len(left) < len(row["clients"])
    losses = [float(torch.nn.functional.cross_entropy(net()(data[c][0]), data[c][1]).detach()) for c in left]
    assert row["train_loss"] == pytest.approx(np.average(losses, weights=data.sizes[left]), rel=1e-12)


def test_clients_that_fill_up_a_cohort_have_no_losses():
    rows = [
        ud.train(net(), make_clients(SIZES), Some(), rounds=4, local=LOCAL, drift=True, **options).history
        for options in ({"engine": "plain"}, {"engine": "lanes", "lanes": 6})
    ]
    for plain, lanes in zip(*rows, strict=True):
        assert ("train_loss" in lanes) == ("train_loss" in plain) == bool(plain["clients"])
        assert lanes.get("train_loss", 0.0) == pytest.approx(plain.get("train_loss", 0.0), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision(dtype):
    def train(dtype):
        data = make_clients(SIZES, dtype)
        return ud.train(net(dtype), data, Gathered([]), rounds=2, local=CONSTANT, drift="layers").history[-1]

    found, wanted = train(dtype), train(torch.float32)
    for name in ("cosine", "cosine_min", "agreement", "update_norm", "train_loss"):
        assert found[name] == pytest.approx(wanted[name], rel=0.1), name


def test_a_round_in_which_nobody_counts_has_no_figures():
    faults = ud.Faults(dropout=lambda t: 1.0 if t == 1 else 0.0)
    rows = ud.train(net(), make_clients(SIZES), rounds=3, local=LOCAL, drift=True, faults=faults).history
    assert rows[1].keys() & set(FIGURES) == {"server_step"} and rows[1]["server_step"] == 0
    assert "agreement" in rows[0] and "agreement" in rows[2]


@pytest.mark.parametrize("options", [{"faults": ud.Faults(dropout=0.5)}, {"max_norm_ratio": 1.0}])
def test_clients_that_are_left_out_are_not_named(options):
    seen: list = []
    data = make_clients(SIZES)
    run = ud.train(net(), data, ud.FedAvg() + Gathered(seen), rounds=4, local=LOCAL, drift=True, **options)
    assert any(row.get("dropped") or row.get("left_out") for row in run.history)
    for row in run.history:
        gone = {str(c) for c in (*row.get("dropped", ()), *row.get("left_out", ()))}
        assert not gone & (row["client_norms"].keys() | row["client_cosines"].keys())
        assert row["cosine_min"] == min(row["client_cosines"].values())


def test_a_personal_head_does_not_drift():
    """What stays with its client is not part of an update."""

    @dataclass(frozen=True)
    class Head(ud.Part):
        personal: tuple[str, ...] = ("3.*",)

    row = ud.train(net(), make_clients(SIZES), Head(), rounds=2, local=LOCAL, drift="layers").history[-1]
    assert row["layer_agreement"].keys() == {"0.weight", "0.bias"} and 0 < row["layer_agreement"]["0.weight"] < 1


def test_scaffold_makes_clients_agree():
    data = ud.load("digits", ud.Dirichlet(0.1), clients=10)
    local = ud.Local(epochs=1, batch_size=32, lr=0.1)
    runs = [ud.train("mlp", data, method, rounds=8, local=local, drift=True) for method in (ud.FedAvg(), ud.Scaffold())]
    plain, corrected = ([row["agreement"] for row in run.history] for run in runs)
    assert corrected[-1] > plain[-1] + 0.2


def test_a_killed_run_has_the_same_figures(tmp_path):
    given = {"model": net(), "data": make_clients(SIZES), "local": LOCAL, "drift": "layers"}
    whole = ud.train(**given, rounds=4)
    ud.train(**given, rounds=2, out=tmp_path / "run", checkpoint_every=1)
    resumed = ud.train(**given, rounds=4, out=tmp_path / "run", resume=True)
    for one, other in zip(whole.history, resumed.history, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_runs_side_by_side_have_their_own_figures():
    data = make_clients(SIZES)

    def task(seed):
        options = {"local": CONSTANT, "participation": 4, "engine": "lanes", "drift": True}
        return lambda: ud.train(net(), data, ud.Scaffold(), rounds=3, seed=seed, **options)

    alone = [task(seed)() for seed in (0, 1)]
    together = ud.side_by_side([task(0), task(1)])
    assert together[0].choices["beside"] == ["run 1"]
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one.history, other.history, strict=True):
            for name in ("cosine", "train_loss", "update_norm_max"):
                assert b[name] == pytest.approx(a[name], rel=1e-9), name


@pytest.mark.parametrize("drift", ["layer", 1.0, None])
def test_other_values_are_refused(drift):
    with pytest.raises(ud.UndriftError, match="drift must be True, False"):
        ud.train(net(), make_clients(SIZES), rounds=1, local=LOCAL, drift=drift)


def test_a_metric_of_the_same_name_is_refused():
    metrics = {"cosine": lambda output, target: output[:, 0]}
    with pytest.raises(ud.UndriftError, match="'cosine' has the name of a column"):
        ud.train(net(), make_clients(SIZES), rounds=1, local=LOCAL, drift=True, metrics=metrics)
