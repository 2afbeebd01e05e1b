"""`Local(drop_last=True)`: the short last batch of a pass over a client's samples is left out."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import undrift as ud
from tests.problems import distance, make_clients, net
from undrift.tools import config
from undrift.tools.experiment import arguments
from undrift.training.build import prepare
from undrift.training.config_writer import config_toml
from undrift.training.settings import Settings

SIZES = [13, 5, 3, 1, 20]


def dropping(**more) -> ud.Local:
    return ud.Local(**{"epochs": 2, "batch_size": 5, "lr": 0.1, "drop_last": True} | more)


def test_whole_batches_of_fresh_permutations():
    """Those of a run that keeps them all, without each permutation's short one; a small client keeps its only one."""
    data = make_clients(SIZES)
    every = ud.Local(epochs=2, batch_size=5, lr=0.1)
    for client, size in enumerate(SIZES):
        found = ud.batches(data, dropping(), client=client, round=1, seed=4)
        wanted = [b for b in ud.batches(data, every, client=client, round=1, seed=4) if len(b) == min(5, size)]
        assert len(found) == 2 * max(1, size // 5)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_steps_go_through_whole_batches_pass_after_pass():
    data, local = make_clients(SIZES), dropping(epochs=None, steps=5)
    found = ud.batches(data, local, client=0, round=0, seed=0)
    assert [len(b) for b in found] == [5] * 5
    for k in (0, 2):
        assert len(set(torch.cat(found[k : k + 2]).tolist())) == 10, "no sample twice in a pass"
    assert torch.equal(found[2], ud.batches(data, dropping(), client=0, round=0, seed=0)[2]), "the second pass begins"


def test_step_counts():
    sizes = np.array([*SIZES, 0])
    ids = np.arange(len(sizes))
    assert dropping(epochs=1).step_counts(0, ids[:-1], sizes[:-1]).tolist() == [2, 1, 1, 1, 4]
    assert dropping(epochs=1).step_counts(0, ids[:-1], sizes[:-1], per_step=2).tolist() == [1, 1, 1, 1, 2]
    assert dropping().per_epoch(sizes).tolist() == [2, 1, 1, 1, 4, 0]
    assert dropping().last_batches(sizes[:-1]).tolist() == [5, 5, 3, 1, 5]
    assert ud.Local(epochs=1, batch_size=5, lr=0.1).last_batches(sizes[:-1]).tolist() == [3, 5, 3, 1, 5]
    assert ud.Local(epochs=1, lr=0.1).last_batches(sizes[:-1]).tolist() == SIZES


@pytest.mark.parametrize(
    ("sizes", "batch_size", "kept", "dropped"),
    [
        ([13, 20], 5, True, False),
        ([13, 4], 5, True, True),
        ([10, 20], 5, False, False),
        ([10, 20, 0], 5, False, False),
        ([3, 3], 5, False, False),
        ([3, 2], 5, True, True),
    ],
)
def test_whether_a_batch_may_be_short(sizes, batch_size, kept, dropped):
    """As lanes see it: by the batches that a run has, some is narrower than the widest."""
    data, sizes = make_clients([n for n in sizes if n]), np.array(sizes)
    for drop, wanted in ((False, kept), (True, dropped)):
        local = dropping(batch_size=batch_size, drop_last=drop)
        each = [len(b) for i in range(len(data)) for b in ud.batches(data, local, client=i, round=0, seed=0)]
        assert local.may_be_short(sizes) == wanted == (min(each) < max(each))


@pytest.mark.parametrize("engine", ["plain", "lanes"])
def test_a_run_takes_these_batches(engine):
    """FedNova, by hand: τ_i steps each, Δ = τ̄ Σ p_i Δ_i / τ_i with τ̄ = Σ p_i τ_i (no momentum)."""
    data, local, start = make_clients(SIZES), dropping(), net()
    run = ud.train(start, data, ud.FedNova(), rounds=1, local=local, seed=3, engine=engine, device="cpu")
    shares = np.array(SIZES) / sum(SIZES)
    updates, steps = [], []
    for i in range(len(data)):
        model, taken = net(), ud.batches(data, local, client=i, round=0, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in taken:
            optimizer.zero_grad()
            F.cross_entropy(model(data[i][0][rows]), data[i][1][rows]).backward()
            optimizer.step()
        updates.append({n: w.detach() - dict(start.named_parameters())[n] for n, w in model.named_parameters()})
        steps.append(len(taken))
    scale = sum(p * k for p, k in zip(shares, steps, strict=True))
    wanted = {
        n: (w + sum(scale * p / k * u[n] for p, k, u in zip(shares, steps, updates, strict=True))).detach()
        for n, w in start.named_parameters()
    }
    assert distance(run.params, wanted) < 1e-12
    assert run.history[0]["samples"] == 2 * (10 + 5 + 3 + 1 + 20)


def test_it_is_part_of_a_runs_file_and_identity():
    given = Settings(model=net(), data=make_clients(SIZES), rounds=1, local=dropping(), device="cpu")
    section = tomllib.loads(config_toml(prepare(given), given))["local"]
    assert section["drop_last"] is True
    whole = {"model": "mlp", "rounds": 1, "data": {"name": "digits", "partition": "IID()", "clients": 2}}
    assert arguments(config.checked({**whole, "local": section}, "e"))["local"] == dropping()


def test_a_resumed_run_must_drop_as_before(tmp_path):
    data, settings = make_clients(SIZES), {"out": tmp_path / "run", "checkpoint_every": 1, "device": "cpu"}
    ud.train(net(), data, rounds=1, local=dropping(), **settings)
    with pytest.raises(ud.UndriftError, match="drop_last"):
        ud.train(net(), data, rounds=2, local=dropping(drop_last=False), **settings, resume=True)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ud.UndriftError, match="needs a batch_size"):
        ud.Local(epochs=1, lr=0.1, drop_last=True)
    with pytest.raises(ud.UndriftError, match="must be True or False"):
        dropping(drop_last="yes")
