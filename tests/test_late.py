"""Columns that are read late, as on a GPU that is behind the host: the history is the same."""

from __future__ import annotations

import pytest
import torch

import undrift as ud
from tests.problems import make_clients, net, same_bits
from undrift.training.history import Clock


@pytest.fixture
def behind(monkeypatch):
    """The device is not done with a round before the host has launched the next."""
    monkeypatch.setattr(Clock, "_passed", lambda self, moment: False)


def trained(rounds=5, **options):
    torch.manual_seed(0)
    clients = make_clients([23, 5, 41, 10])
    everyone = [clients[i] for i in range(4)]
    data = ud.FederatedDataset.from_clients(everyone, test=clients[0], validation=clients[2])
    return ud.train(net(), data, rounds=rounds, local=ud.Local(steps=3, batch_size=8, lr=0.1), **options)


def rows(run):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in run.history]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("drift", [False, True])
def test_the_same_history(every, drift, monkeypatch):
    wanted = trained(evaluate_every=every, drift=drift)
    monkeypatch.setattr(Clock, "_passed", lambda self, moment: False)
    found = trained(evaluate_every=every, drift=drift)
    assert rows(found) == rows(wanted) and [list(row) for row in found.history] == [list(row) for row in wanted.history]
    assert "accuracy" in found.history[-1] and "validation_loss" in found.history[-1]
    assert all(("loss" in row) == (row["round"] % every == 0 or row["round"] == 5) for row in found.history)


def test_columns_have_one_order(behind):
    """Those of the test set come before those of clients' own data, in every round and in the last."""
    data = ud.load("digits", ud.Dirichlet(0.3), clients=6, client_test_fraction=0.2)
    run = ud.train("logistic", data, rounds=3, local=ud.Local(steps=2, lr=0.1))
    for row in run.history:
        names = list(row)
        assert names.index("seconds") < names.index("loss") < names.index("accuracy") < names.index("client_loss")


def test_evaluation_does_not_wait(behind, monkeypatch):
    """Nothing is read from the device before the next round has been launched."""
    import undrift.training.evaluation as module

    order = []
    read, federated = module.read_columns, ud.training.loop.federated_round
    monkeypatch.setattr(module, "read_columns", lambda *args: order.append("read") or read(*args))
    monkeypatch.setattr(ud.training.loop, "federated_round", lambda *args: order.append("round") or federated(*args))
    trained(4)
    assert order == ["round"] + ["round", "read", "read"] * 2 + ["round", "read", "read", "read", "read"]


def test_a_loss_that_is_not_finite_stops_the_round_that_had_it(monkeypatch):
    """The loss of the test set, of 23 samples, is NaN if the outputs are as large as after round 3."""
    third = torch.inf

    def loss(output, target):
        value = torch.nn.functional.cross_entropy(output, target, reduction="none")
        at = (output.abs().mean() - third).abs() < 1e-9
        return torch.where(at, torch.nan, value) if len(output) == 23 else value

    grown = trained(loss=loss, metrics={"size": lambda output, target: output.abs().mean(1)})
    third = grown.history[2]["size"]
    soon = trained(loss=loss)
    monkeypatch.setattr(Clock, "_passed", lambda self, moment: False)
    late = trained(loss=loss)
    assert late.stopped == soon.stopped and soon.stopped.startswith("Round 3: the test loss is nan")
    assert len(late.history) == 2 and rows(late) == rows(soon) and same_bits(late.params, soon.params)


def test_early_stopping_and_listeners_wait(behind):
    seen = []
    run = trained(on_round=lambda row: seen.append(row["accuracy"]))
    assert seen == [row["accuracy"] for row in run.history]
    run = trained(20, stop_when=lambda history: history[-1]["loss"] < 10 and len(history) == 3)
    assert len(run.history) == 3


def test_a_resumed_run_has_the_same_rows(behind, tmp_path):
    whole = trained(6)
    trained(4, out=tmp_path / "run", checkpoint_every=2)
    resumed = trained(6, out=tmp_path / "run", resume=True, checkpoint_every=2)
    assert rows(resumed) == rows(whole)
