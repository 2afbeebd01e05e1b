"""Evaluation on clients' own held-out data, against the same written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import undrift as ud
from tests.problems import net, split
from undrift.training.evaluation import summarize

LOCAL = ud.Local(epochs=2, batch_size=4, lr=0.1, momentum=0.5)


def by_hand(values: list[float], highest_is_worst: bool) -> tuple[float, float, float]:
    worst = sorted(values, reverse=highest_is_worst)[: math.ceil(len(values) / 10)]
    return float(np.mean(values)), float(np.std(values)), float(np.mean(worst))


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_the_global_model_on_each_clients_own_data(engine):
    data = split()
    result = ud.train(net(), data, rounds=3, local=LOCAL, participation=2, engine=engine, evaluate_every=2)
    row = result.history[-1]
    losses, hits = [], []
    for client in (0, 1, 4):  # client 2 has nothing to train on, client 3 no test
        x, y = data.client_test[client]
        z = torch.func.functional_call(net(), result.params, (x,))
        losses.append(float(F.cross_entropy(z, y)))
        hits.append(float((z.argmax(1) == y).double().mean()))
    for name, values in (("loss", losses), ("accuracy", hits)):
        mean, std, worst = by_hand(values, name == "loss")
        assert row[f"client_{name}"] == pytest.approx(mean, rel=1e-12)
        assert row[f"client_{name}_std"] == pytest.approx(std, rel=1e-9, abs=1e-12)
        assert row[f"client_{name}_worst"] == pytest.approx(worst, rel=1e-12)
    assert row["by_client"]["client"] == [0, 1, 4] and row["by_client"]["loss"] == pytest.approx(losses)
    assert ["client_loss" in r for r in result.history] == [False, True, True]
    assert ["tuned_loss" in r for r in result.history] == [False, False, True]


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_one_more_local_epoch(engine):
    """Each client's own epoch of SGD with momentum and FedProx's pull, written out."""
    data, mu = split(), 0.3
    result = ud.train(net(), data, ud.FedProx(mu), rounds=2, local=LOCAL, participation=3, engine=engine, seed=8)
    losses = []
    for client in (0, 1, 4):
        x, y = data[client]
        model = net()
        model.load_state_dict(result.params)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        epoch = ud.Local(epochs=1, batch_size=4, lr=0.1)
        for rows in ud.batches(data, epoch, client=client, round=1, seed=8):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            for name, p in model.named_parameters():
                p.grad += mu * (p.detach() - result.params[name])
            optimizer.step()
        z, target = model(data.client_test[client][0]), data.client_test[client][1]
        losses.append(float(F.cross_entropy(z, target).detach()))
    mean, std, worst = by_hand(losses, True)
    row = result.history[-1]
    found = row["tuned_loss"], row["tuned_loss_std"], row["tuned_loss_worst"]
    assert found == pytest.approx((mean, std, worst), rel=1e-10)


@pytest.mark.parametrize("method", [ud.Scaffold(), ud.FedDyn(0.1) + ud.FedNLR(), ud.TwoDLRD(3), ud.FedCL(0.1)])
def test_tuning_clients_leaves_the_run_as_it_is(method):
    """Weights and everything else in the history are the same with and without."""
    data = ud.load("digits", ud.Dirichlet(0.5), 8, client_test_fraction=0.2, server_fraction=0.05)
    options = {"rounds": 4, "local": ud.Local(epochs=1, batch_size=16, lr=0.1), "participation": 3}
    often = ud.train("mlp", data, method, personalize_every=1, **options)
    data.client_test = None
    never = ud.train("mlp", data, method, **options)
    assert all(torch.equal(often.params[n], never.params[n]) for n in never.params)
    for a, b in zip(often.history, never.history, strict=True):
        assert "tuned_accuracy" in a and {k: a[k] for k in b if k != "seconds"} == {
            k: b[k] for k in b if k != "seconds"
        }


def test_the_worst_tenth():
    values = torch.arange(1.0, 26)
    row = summarize("client", {"accuracy": values / 100, "loss": values})
    assert row["client_accuracy_worst"] == pytest.approx(0.02) and row["client_loss_worst"] == 24.0


def test_a_client_whose_model_diverged_is_not_left_out():
    row = summarize("tuned", {"loss": torch.tensor([0.5, 0.6, math.inf, math.nan])})
    assert row["tuned_loss"] == row["tuned_loss_worst"] == math.inf  # a NaN is a client without a single label


def test_own_data_in_a_store_of_their_own():
    data = split()
    x = torch.full((6, 6), 100.0, dtype=torch.float64)
    data.client_test = ud.FederatedDataset.from_clients([(x, torch.full((6,), 2))] * len(data))
    row = ud.train(net(), data, rounds=1, local=LOCAL).history[-1]
    assert row["client_accuracy"] in (0.0, 1.0), "every sample is the same"


def test_bad_intervals_are_refused():
    for every in (0, -1, 1.5, "2"):
        with pytest.raises(ud.UndriftError, match="personalize_every must be a whole number from 1"):
            ud.train(net(), split(), rounds=1, local=LOCAL, personalize_every=every)
