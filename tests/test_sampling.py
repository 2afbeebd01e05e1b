"""Local(sampling="balanced"): all classes that a client holds are equally likely in its batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import undrift as ud
from tests.problems import distance, make_clients, net, same_bits
from undrift.random import derive, philox
from undrift.tools.config import checked, read
from undrift.tools.experiment import arguments
from undrift.training.identity import describe

SIZES = [7, 1, 4, 10]
LOCAL = ud.Local(epochs=2, batch_size=3, lr=0.3, sampling="balanced")


def drawn(data: ud.FederatedDataset, client: int, t: int, epoch: int, seed: int) -> list[int]:
    """One pass over a client's data, written from the rule: a class, then one of its samples."""
    labels = data[client][1].tolist()
    classes = sorted({max(label, -1) for label in labels})
    key = tuple(int(word) for word in derive(seed, "batches", t, client))
    found = []
    for number in range(len(labels)):
        first, second, *_ = philox((number, epoch, 1, 0), key)
        held = [i for i, label in enumerate(labels) if max(label, -1) == classes[first * len(classes) >> 32]]
        found.append(held[second * len(held) >> 32])
    return found


@pytest.mark.parametrize("t", [0, 3])
def test_the_draws_are_those_of_the_rule(t):
    data = make_clients(SIZES)
    data.store["y"][data.index[:2]] = torch.tensor([-100, -1])  # samples without a label are one class
    for client, n in enumerate(SIZES):
        batches = ud.batches(data, LOCAL, client=client, round=t, seed=5)
        want = [drawn(data, client, t, epoch, 5)[i : i + 3] for epoch in range(2) for i in range(0, n, 3)]
        assert [batch.tolist() for batch in batches] == want


def test_classes_are_equally_likely():
    y = torch.cat([torch.full((n,), c) for c, n in enumerate([180, 15, 5])])
    data = ud.FederatedDataset.from_clients([(torch.zeros(200, 1), y)])
    local = ud.Local(steps=300, batch_size=20, lr=0.1, sampling="balanced")
    rows = torch.cat(ud.batches(data, local, client=0, round=0, seed=0))
    counts = torch.bincount(y[rows])
    assert len(rows) == 6000 and (counts - 2000).abs().max() < 5 * np.sqrt(6000 * 2 / 9)
    rare = torch.bincount(rows, minlength=200)[195:]
    assert (rare - 400).abs().max() < 5 * np.sqrt(400), "and samples within a class too"


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_training_is_that_of_a_loop_by_hand(engine):
    data, model = make_clients(SIZES), net()
    found = ud.train(net(), data, rounds=2, local=LOCAL, engine=engine).model
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for t in range(2):
        total = {n: torch.zeros_like(w) for n, w in weights.items()}
        for c, size in enumerate(SIZES):
            model.load_state_dict(weights)
            x, y = data[c]
            for epoch in range(2):
                order = drawn(data, c, t, epoch, 0)
                for i in range(0, size, 3):
                    rows = order[i : i + 3]
                    grads = torch.autograd.grad(F.cross_entropy(model(x[rows]), y[rows]), list(model.parameters()))
                    with torch.no_grad():
                        for p, g in zip(model.parameters(), grads, strict=True):
                            p.sub_(LOCAL.lr * g)
            for n, p in model.named_parameters():
                total[n] += size / sum(SIZES) * p.detach()
        weights = total
    assert distance(dict(found.named_parameters()), weights) < 1e-12


def test_a_clients_draws_do_not_depend_on_its_cohort():
    data = make_clients(SIZES)
    runs = [
        ud.train(net(), data, rounds=2, local=LOCAL, engine="lanes", lanes=lanes, participation=3) for lanes in (1, 3)
    ]
    assert distance(*(run.model.state_dict() for run in runs)) < 1e-12


def test_the_file_of_a_run_says_it_and_the_default_changes_nothing(tmp_path):
    data = ud.load("digits", ud.IID(), clients=3, test_size=20)
    local = ud.Local(steps=1, batch_size=4, lr=0.1, sampling="balanced")
    ud.train("logistic", data, rounds=1, local=local, out=tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    assert 'sampling = "balanced"' in file.read_text()
    assert arguments(checked(read(file), "the run"))["local"] == local
    plain = ud.Local(steps=1, batch_size=4, lr=0.1)
    assert describe(plain) == describe(ud.Local(steps=1, batch_size=4, lr=0.1, sampling="shuffle"))
    assert "sampling" not in describe(plain) and "sampling" in describe(local)
    runs = [ud.train("logistic", data, rounds=1, local=one) for one in (local, local, plain)]
    assert same_bits(*(run.model.state_dict() for run in runs[:2]))
    assert not same_bits(*(run.model.state_dict() for run in runs[1:]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sampling": "weighted"}, r'Local\(sampling\) must be "shuffle" or "balanced", not'),
        ({"sampling": "balanced", "batch_size": None}, "draws batches; give it a batch_size"),
    ],
)
def test_wrong_settings_get_a_sentence(change, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.Local(**({"steps": 1, "batch_size": 4, "lr": 0.1} | change))


def test_targets_must_be_classes():
    data = ud.FederatedDataset.from_clients([(torch.zeros(3, 2), torch.zeros(3, 1))])
    with pytest.raises(ud.UndriftError, match="needs labels that are classes"):
        ud.train(torch.nn.Linear(2, 1), data, rounds=1, local=LOCAL, loss="mse")
