"""What a run promises: bits that repeat, settings that mean off, a history, files, refusals."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import undrift as ud
from tests.problems import distance, make_clients, net, same_bits

LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.1)
OPTIONS = {"rounds": 5, "local": LOCAL, "participation": 0.5, "seed": 2}


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize(
    "method", [ud.FedProx(mu=0), ud.ServerSGD(lr=1, momentum=0), ud.FedProx(mu=0) + ud.ServerSGD()]
)
def test_off_is_fedavg_to_the_bit(engine, method):
    data, model = make_clients([23, 5, 0, 41, 10, 17, 1], torch.float32), net(torch.float32)
    plain = ud.train(model, data, ud.FedAvg(), engine=engine, **OPTIONS)
    assert same_bits(ud.train(model, data, method, engine=engine, **OPTIONS).params, plain.params)
    on = ud.train(model, data, ud.FedProx(mu=1e-3) + ud.ServerSGD(momentum=0.1), engine=engine, **OPTIONS)
    assert not same_bits(on.params, plain.params)


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_epochs_and_as_many_steps_are_the_same_bits(engine):
    data = make_clients([24, 20, 17], torch.float32)  # three batches of 8 each
    options = {"rounds": 3, "seed": 1, "engine": engine}
    epochs = ud.train(net(torch.float32, 0.3), data, local=ud.Local(epochs=2, batch_size=8, lr=0.1), **options)
    steps = ud.train(net(torch.float32, 0.3), data, local=ud.Local(steps=6, batch_size=8, lr=0.1), **options)
    listed = ud.train(net(torch.float32, 0.3), data, local=ud.Local(steps=[6, 6, 6], batch_size=8, lr=0.1), **options)
    assert same_bits(epochs.params, steps.params) and same_bits(epochs.params, listed.params)


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_a_schedule_is_its_numbers_one_round_at_a_time(uneven, engine):
    """Full batches and every client, so that rounds differ in nothing but the number: five one-round runs in a row."""
    local = ud.Local(steps=5, batch_size=None, lr=0.1)
    whole = ud.train(net(), uneven, ud.FedProx(mu=ud.decay(1, 0.5)), rounds=5, local=local, engine=engine)
    model = net()
    for t in range(5):
        model = ud.train(model, uneven, ud.FedProx(mu=0.5**t), rounds=1, local=local, engine=engine).model
    assert same_bits(whole.params, dict(model.named_parameters()))


SCRIPT = """
import sys, torch, undrift as ud
data = ud.load("digits", partition=ud.Dirichlet(alpha=0.1), clients=20, seed=0)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 10))
local = ud.Local(epochs=2, batch_size=32, lr=0.1, momentum=0.5)
method = "FedProx(mu=0.1) + ServerAdam(lr=0.01)"
ud.train(model, data, method, rounds=5, local=local, participation=0.4, seed=7, out=sys.argv[1], engine=sys.argv[2])
"""


@pytest.mark.parametrize("engine", ["lanes", pytest.param("plain", marks=pytest.mark.long)])
def test_two_processes_write_the_same_bits(tmp_path, monkeypatch, engine):
    """One of them is this one."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "a"), engine]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "b"), engine])
    with torch.random.fork_rng():
        exec(SCRIPT, {})
    a, b = (hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest() for name in "ab")
    assert a == b
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in "ab"
    ]
    for one, two in zip(*rows, strict=True):
        assert {**one, "seconds": 0} == {**two, "seconds": 0}


def test_another_seed_is_another_run(uneven):
    runs = [ud.train(net(), uneven, **{**OPTIONS, "seed": s}) for s in (0, 1)]
    assert [r["clients"] for r in runs[0].history] != [r["clients"] for r in runs[1].history]
    named = [ud.train("mlp", uneven, **{**OPTIONS, "seed": s, "rounds": 1}).params for s in (0, 0, 1)]
    assert same_bits(named[0], named[1]) and distance(named[2], named[0]) > 0.5


def test_history(uneven):
    run = ud.train(net(), uneven, rounds=5, local=LOCAL, participation=2, evaluate_every=2)
    assert [row["round"] for row in run.history] == [1, 2, 3, 4, 5]
    assert [("loss" in row) for row in run.history] == [False, True, False, True, True]
    total = 0
    for t, row in enumerate(run.history):
        assert row["clients"] == sorted(row["clients"]) and len(row["clients"]) == 2 and 2 not in row["clients"]
        batches = [ud.batches(uneven, LOCAL, client=c, round=t, seed=0) for c in row["clients"]]
        assert row["steps"] == sum(len(b) for b in batches) and row["samples"] == sum(
            len(s) for b in batches for s in b
        )
        total += row["steps"]
        assert row["total_steps"] == total and row["seconds"] > 0
    output = run.model(uneven.test[0])
    right = output.argmax(1) == uneven.test[1]
    last = run.history[-1]
    assert last["accuracy"] == pytest.approx(right.double().mean().item())
    assert last["loss"] == pytest.approx(torch.nn.functional.cross_entropy(output, uneven.test[1]).item())
    assert last["class_accuracy"] == pytest.approx(
        [right[uneven.test[1] == c].double().mean().item() for c in range(4)]
    )
    assert run.frame().shape[0] == 5 and "accuracy" in run.frame().columns


def test_the_callers_model_is_left_alone_and_the_result_is_loaded(uneven, tmp_path):
    model = net()
    run = ud.train(model, uneven, rounds=2, local=LOCAL, out=tmp_path / "run")
    assert same_bits(dict(model.named_parameters()), dict(net().named_parameters()))
    assert same_bits(dict(run.model.named_parameters()), run.params) and not run.model.training
    assert same_bits(load_file(tmp_path / "run" / "model.safetensors"), run.params)
    seen = []
    ud.train(model, uneven, rounds=2, local=LOCAL, on_round=seen.append)
    assert [row["round"] for row in seen] == [1, 2]


@pytest.mark.parametrize(("participation", "size"), [(3, 3), (1, 1), (1.0, 6), (0.5, 3), (0.01, 1), (0.25, 2)])
def test_participation(uneven, participation, size):
    run = ud.train(net(), uneven, rounds=1, local=LOCAL, participation=participation)
    assert len(run.history[0]["clients"]) == size


def test_losses_and_metrics():
    x = torch.randn(30, 6, dtype=torch.float64)
    data = ud.FederatedDataset.from_clients([(x[:20], x[:20, :2]), (x[20:], x[20:, :2])], test=(x, x[:, :2]))
    model, local = torch.nn.Linear(6, 2).double(), ud.Local(steps=50, lr=0.3)
    run = ud.train(
        model, data, rounds=4, local=local, loss="mse", metrics={"largest": lambda z, y: (z - y).abs().amax(1)}
    )
    assert run.history[-1]["loss"] < 1e-3 and "accuracy" not in run.history[-1]
    assert run.history[-1]["largest"] == pytest.approx((run.model(x) - x[:, :2]).abs().amax(1).mean().item())

    def own(z, y):
        return (z - y).abs().sum(1)

    def ratio(z, y):  # a pair is summed before it is divided
        return z.abs().sum(1), y.abs().sum(1)

    run = ud.train(model, data, rounds=1, local=local, loss=own, metrics={"ratio": ratio})
    assert run.history[0]["ratio"] == pytest.approx((run.model(x).abs().sum() / x[:, :2].abs().sum()).item())
    tags = ud.FederatedDataset.from_clients(
        [(x, (x[:, :2] > 0).double())], test=(x, (x[:, :2] > 0).double()), task=ud.Task(loss="binary_cross_entropy")
    )
    assert ud.train(model, tags, rounds=3, local=local).history[-1]["loss"] < 0.5


def test_bfloat16_keeps_parameters_in_float32():
    data = make_clients([23, 5, 41], torch.float32)
    runs = [ud.train(net(torch.float32), data, rounds=2, local=LOCAL, precision=p) for p in ("auto", "bfloat16")]
    assert runs[1].params["0.weight"].dtype == torch.float32
    assert 0 < distance(runs[1].params, runs[0].params) < 0.05


GOOD = {"rounds": 1, "local": LOCAL}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "FedAwg()"}, "no method called 'FedAwg'. Did you mean 'FedAvg'"),
        ({"model": "mpl"}, "no model called 'mpl'. Did you mean 'mlp'"),
        ({"model": 3}, "model must be an nn.Module, a function that makes one, or the name"),
        ({"model": torch.nn.Linear(5, 4)}, "does not take the clients' samples of shape (6,)"),
        ({"model": torch.nn.Linear(6, 3).double()}, "labels run from 0 to 3, but the model has 3 outputs"),
        ({"model": "cnn"}, "needs images"),
        ({"local": ud.Local(steps=1, lr=-1)}, "Local(lr) is -1"),
        ({"local": {"steps": 1}}, "local must be a ud.Local"),
        ({"data": [1]}, "data must be a ud.FederatedDataset"),
        ({"participation": 7}, "asks for 7 clients per round, but only 6 have data"),
        ({"participation": 0}, "at least 1 client"),
        ({"participation": 1.5}, "must be in (0, 1]"),
        ({"participation": True}, "must be a count"),
        ({"rounds": 0}, "rounds must be a whole number from 1"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"engine": "fast"}, 'engine must be "auto", "lanes" or "plain"'),
        ({"precision": "float16"}, 'precision must be "auto"'),
        ({"device": "tpu"}, "device 'tpu' is not available"),
        ({"lanes": 0}, "lanes must be a whole number"),
        ({"loss": "cros_entropy"}, "no loss called 'cros_entropy'. Did you mean 'cross_entropy'"),
        ({"loss": lambda z, y: z}, "one value per sample"),
        ({"metrics": ["acuracy"]}, "no metric called 'acuracy'. Did you mean 'accuracy'"),
        ({"evaluate_every": 0}, "evaluate_every must be"),
        ({"metrics": 5}, "metrics must be names"),
        ({"metrics": {"mean": lambda z, y: z.mean()}}, "The mean must return one value per sample"),
        ({"loss": "mse"}, "The loss does not take outputs (2, 4)"),
        ({"local": ud.Local(steps=1, lr=ud.inverse(1, 0))}, "Local(lr) must be a number or a function of the round"),
        ({"local": ud.Local(steps=1, lr="0.1")}, "Local(lr) must be a number"),
        ({"method": ud.FedProx(mu=lambda t: -t)}, None),
    ],
)
def test_bad_input_gets_a_sentence_and_writes_nothing(uneven, tmp_path, change, sentence):
    arguments = {"model": net(), "data": uneven, "rounds": 3, "local": LOCAL, "out": tmp_path / "run"} | change
    with pytest.raises(ud.UndriftError) as refusal:
        ud.train(arguments.pop("model"), arguments.pop("data"), arguments.pop("method", ud.FedAvg()), **arguments)
    assert (sentence or "FedProx(mu) is -1 in round 1") in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_float_labels_are_refused_for_cross_entropy(uneven):
    x, y = uneven[0]
    with pytest.raises(ud.UndriftError, match="whole-number labels, but the clients' are floats"):
        ud.train(net(), ud.FederatedDataset.from_clients([(x, y.double())]), **GOOD)
    with pytest.raises(ud.UndriftError, match="labels run from -1 to 2"):
        ud.train(net(), ud.FederatedDataset.from_clients([(x, y - 1)]), **GOOD)


def test_the_test_sets_faults_are_found_before_training(uneven):
    x, y = uneven[0]
    faults = {
        "test data's are floats": (x, y.double()),
        "does not take the test data's": (x[:, :5], y),
        "test data's labels have shape": (x, y[:, None]),
        "test data's labels run from": (x, y + 4),
    }
    for sentence, test in faults.items():
        with pytest.raises(ud.UndriftError, match=sentence):
            ud.train(net(), ud.FederatedDataset.from_clients([(x, y)], test=test), **GOOD)


def test_a_folder_that_holds_a_run_is_not_overwritten(uneven, tmp_path):
    ud.train(net(), uneven, **GOOD, out=tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ud.UndriftError, match="already contains a run"):
        ud.train(net(), uneven, **GOOD, out=tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
