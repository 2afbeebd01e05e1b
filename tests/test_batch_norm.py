"""Batch norm in lanes, against torch's own: in a hand-written loop, on the plain engine, and call by call."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrift as ud
from tests import cuda_graphs
from tests.norms import KeptInEvaluation, Layers, Pictures
from tests.problems import distance, make_clients, same_bits
from undrift.functional.batch_norm import LaneNorms

SIZES = [13, 7, 22, 3]
LOCAL = ud.Local(epochs=2, batch_size=5, lr=0.1)  # last batches of 3, 2, 2 and 3


def by_hand(model: nn.Module, data: ud.FederatedDataset, local: ud.Local, rounds: int, seed: int) -> dict:
    """FedAvg in plain PyTorch: all entries of the state dict are averaged, counters rounded."""
    server = copy.deepcopy(model.state_dict())
    for t in range(rounds):
        trained = []
        for i in range(len(data)):
            client = copy.deepcopy(model).train()
            client.load_state_dict(server)
            optimizer = torch.optim.SGD(client.parameters(), lr=local.lr)
            for rows in ud.batches(data, local, client=i, round=t, seed=seed):
                optimizer.zero_grad()
                F.cross_entropy(client(data[i][0][rows]), data[i][1][rows]).backward()
                optimizer.step()
            trained.append(client.state_dict())
        shares = data.sizes / data.sizes.sum()
        means = {n: sum(w * one[n].double() for w, one in zip(shares, trained, strict=True)) for n in server}
        server = {n: m if server[n].is_floating_point() else m.round().long() for n, m in means.items()}
    return server


@pytest.mark.parametrize("momentum", [0.1, None])
def test_lanes_are_a_hand_written_loop(momentum):
    data, model = make_clients(SIZES), Pictures(momentum)
    wanted = by_hand(model, data, LOCAL, rounds=3, seed=1)
    before = copy.deepcopy(model.state_dict())
    for lanes in (1, 2, 3) if momentum else (2,):
        run = ud.train(model, data, rounds=3, local=LOCAL, seed=1, engine="lanes", lanes=lanes, device="cpu")
        found = run.model.state_dict()
        assert all(distance({n: found[n]}, {n: w}) < 1e-8 for n, w in wanted.items())
        assert run.model.wide.momentum == momentum and type(run.model.wide.momentum) is type(momentum)
        assert int(found["flat.num_batches_tracked"]) == int(wanted["flat.num_batches_tracked"]) > 10
    assert same_bits(model.state_dict(), before), "the caller's module stays as it is"


METHODS = {
    "FedAvg": ud.FedAvg(),
    "Scaffold": ud.Scaffold(),
    "FedDyn + FedNLR": ud.FedDyn(0.1) + ud.FedNLR(),
    "FedCurv": ud.FedCurv(0.1),
    "CCVR": ud.CCVR(samples_per_class=10, epochs=1),
    "ServerTraining": ud.FedAvg() + ud.ServerTraining(0.05, batch_size=8),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_lanes_agree_with_plain(method):
    data, settings = make_clients(SIZES), {"rounds": 2, "local": LOCAL, "seed": 2, "device": "cpu"}
    plain = ud.train(Pictures(dropout=0.3), data, method, engine="plain", **settings)
    run = ud.train(Pictures(dropout=0.3), data, method, engine="lanes", lanes=3, **settings)
    found, wanted = run.model.state_dict(), plain.model.state_dict()
    assert all(distance({n: found[n]}, {n: w}) < 1e-8 for n, w in wanted.items())


def test_the_rule_takes_lanes():
    run = ud.train(Pictures(), make_clients(SIZES), rounds=1, local=LOCAL, device="cpu")
    assert run.choices["engine"] == "lanes" and run.choices["lanes"] > 1


@dataclass(frozen=True)
class OwnNorms(ud.Part):
    """FedBN: weights, biases and running statistics of norms stay with their client."""

    personal: tuple[str, ...] = ("wide.*", "flat.*")


def test_personal_norms_agree_with_plain():
    data = make_clients(SIZES)
    settings = {"rounds": 3, "local": LOCAL, "participation": 2, "device": "cpu"}
    plain, lanes = (ud.train(Pictures(), data, OwnNorms(), engine=engine, **settings) for engine in ("plain", "lanes"))
    assert distance(lanes.params, plain.params) < 1e-8
    trained = {c for row in lanes.history for c in row["clients"]}
    for c in range(len(data)):
        found, wanted = lanes.own_params(c), plain.own_params(c)
        assert found.keys() == wanted.keys() and "wide.running_var" in found
        assert all(distance({n: found[n]}, {n: w}) < 1e-8 for n, w in wanted.items() if w.any())
        assert bool(found["flat.num_batches_tracked"] > 0) == (c in trained)
    untouched = Pictures().state_dict()
    assert torch.equal(lanes.model.state_dict()["wide.running_mean"], untouched["wide.running_mean"])


def test_tuned_clients_are_evaluated_with_their_own_statistics():
    data = ud.load(make_pair(), ud.IID(), clients=3, client_test_fraction=0.3)
    settings = {"rounds": 2, "local": LOCAL, "personalize_every": 1, "device": "cpu"}
    plain, lanes = (ud.train(Pictures(), data, engine=engine, **settings) for engine in ("plain", "lanes"))
    for a, b in zip(plain.history, lanes.history, strict=True):
        assert a["tuned_loss"] == pytest.approx(b["tuned_loss"], rel=1e-8)
        assert a["client_loss"] == pytest.approx(b["client_loss"], rel=1e-8)


def make_pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator, dtype=torch.float64)
    return x, torch.arange(60) % 4


def test_a_resumed_run_has_the_same_bits(tmp_path):
    data, settings = make_clients(SIZES), {"local": LOCAL, "engine": "lanes", "lanes": 2, "device": "cpu"}
    whole = ud.train(Pictures(None), data, ud.Scaffold(), rounds=4, **settings)
    out = {"out": tmp_path / "run", "checkpoint_every": 1}
    ud.train(Pictures(None), data, ud.Scaffold(), rounds=2, **settings, **out)
    rest = ud.train(Pictures(None), data, ud.Scaffold(), rounds=4, **settings, **out, resume=True)
    assert same_bits(rest.model.state_dict(), whole.model.state_dict())


def test_low_precision_keeps_the_norms_precision():
    """Both engines round activations to the 8 bits of bfloat16, and neither is closer to float32 than the other."""
    data, model = make_clients([16, 21, 38], dtype=torch.float32), Pictures().float()
    settings = {"rounds": 2, "local": ud.Local(epochs=1, batch_size=8, lr=0.05), "device": "cpu"}
    full = ud.train(model, data, engine="plain", **settings).model.state_dict()
    plain, lanes = (ud.train(model, data, engine=e, precision="bfloat16", **settings) for e in ("plain", "lanes"))
    off = [distance(run.model.state_dict(), full) for run in (plain, lanes)]
    assert lanes.model.state_dict()["wide.running_var"].dtype == torch.float32
    assert 1e-5 < min(off) and max(off) < 3 * min(off) < 0.01


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.long)])
def test_captured_steps_agree_with_plain(compile, monkeypatch):
    """Statistics are part of the state that a graph changes in place."""
    data, settings = make_clients(SIZES), {"rounds": 2, "local": LOCAL, "device": "cpu"}
    plain = ud.train(Pictures(None), data, engine="plain", **settings).model.state_dict()
    graphs = cuda_graphs.put_in_place(monkeypatch)
    run = ud.train(Pictures(None), data, engine="lanes", lanes=2, compile=compile, **settings)
    assert sum(graph.replays for graph in graphs) > 10
    assert all(distance({n: run.model.state_dict()[n]}, {n: w}) < 1e-8 for n, w in plain.items())


# ---- call by call --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 2), (7, 3, 2, 4), (7, 3, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("mapped", [False, True])
def test_padding_is_left_out_of_statistics_and_gradients(shape, affine, mapped):
    """Against torch on the real rows, and for the gradient against autograd of the formula, padding included."""
    generator = torch.Generator().manual_seed(3)
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64) + 2 for _ in range(2))
    layer = nn.modules.batchnorm._BatchNorm(shape[1], affine=affine).double()
    layer._check_input_dim = lambda x: None
    if affine:
        nn.init.normal_(layer.weight, generator=generator)
        nn.init.normal_(layer.bias, generator=generator)
    real, mask = 4, (torch.arange(shape[0]) < 4).double()
    statistics = {name: b.clone() for name, b in layer.named_buffers()}

    def loss(x, weights):
        with LaneNorms(statistics, mask) as mode:
            out = torch.func.functional_call(layer, {**weights, **statistics}, (x,))
        return (out * g).sum(), (out, mode.changed)

    def formula(x, weights):
        axes = [0, *range(2, x.dim())]
        wide = mask.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
        count = wide.sum(axes, keepdim=True)
        mean = (wide * x).sum(axes, keepdim=True) / count
        var = (wide * (x - mean) ** 2).sum(axes, keepdim=True) / count
        hat = ((x - mean) / (var + layer.eps).sqrt()).movedim(1, -1)
        return (hat * weights.get("weight", 1.0) + weights.get("bias", 0.0)).movedim(-1, 1).mul(g).sum()

    weights = {name: p.detach() for name, p in layer.named_parameters()}
    found = torch.func.grad(loss, argnums=(0, 1), has_aux=True)
    if mapped:
        two = {name: torch.stack([w, w]) for name, w in weights.items()}
        (dx, dw), (out, changed) = torch.func.vmap(found)(torch.stack([x, x]), two)
        assert all(torch.equal(t[0], t[1]) for t in (dx, out, *dw.values(), *changed.values()))
        dx, out = dx[0], out[0]
        dw, changed = ({name: t[0] for name, t in tree.items()} for tree in (dw, changed))
    else:
        (dx, dw), (out, changed) = found(x, weights)
    wanted = torch.func.grad(formula, argnums=(0, 1))(x, weights)
    torch.testing.assert_close((dx, dw), wanted, rtol=1e-10, atol=1e-10)
    theirs = copy.deepcopy(layer).train()
    torch.testing.assert_close(out[:real], theirs(x[:real]).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(changed, dict(theirs.named_buffers()), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(b, statistics[name]) for name, b in layer.named_buffers()), "nothing is written in place"


def test_a_large_mean_does_not_swallow_the_variance():
    """Σx² − (Σx)²/n would lose all digits of the variance in float32."""
    x = torch.randn(64, 2, 3, generator=torch.Generator().manual_seed(0)) + 3000
    statistics = {"running_mean": torch.zeros(2), "running_var": torch.ones(2)}
    with LaneNorms(statistics, torch.ones(64)) as mode:
        F.batch_norm(x, *statistics.values(), training=True, momentum=1.0)
    wanted = x.double().var((0, 2))
    assert ((mode.changed["running_var"] - wanted).abs() / wanted).max() < 1e-3


def test_second_derivatives_are_refused():
    def value(x):
        with LaneNorms({}, None):
            return F.batch_norm(x, None, None, training=True).pow(3).sum()

    def twice(x):
        return torch.func.grad(value)(x).pow(2).sum()

    with pytest.raises(ud.UndriftError, match="no second derivative"):
        torch.func.grad(twice)(torch.randn(5, 2))


# ---- which models --------------------------------------------------------------------------------------------------

LINEAR, HEAD, NORM = nn.Linear(6, 5), nn.Linear(5, 4), nn.BatchNorm1d(5)


def chain(module, x):
    for layer in module.layers:
        x = layer(x)
    return x


def thirds(module, x):
    """Norm and head on samples of two positions."""
    first, norm, head = module.layers
    return head(norm(first(x.view(len(x), 2, 3))).flatten(1))


def twice(module, x):
    first, norm, head = module.layers
    return head(norm(first(x)) + norm(x[:, :5]))


def functional(module, x):
    first, head = module.layers
    h = first(x)
    return head(F.batch_norm(h, None, None, training=True) if module.training else h)


def by_torch(module, x):
    first, head = module.layers
    h = first(x)
    return head(torch.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, True) if module.training else h)


IN_LANES = {
    "no affine": lambda: Layers(chain, LINEAR, nn.BatchNorm1d(5, affine=False), HEAD),
    "called twice": lambda: Layers(twice, LINEAR, NORM, HEAD),
    "positions": lambda: Layers(thirds, nn.Linear(3, 5), nn.BatchNorm1d(2), nn.Linear(10, 4)),
    "SyncBatchNorm": lambda: Layers(chain, LINEAR, nn.SyncBatchNorm(5), HEAD),
    "instance norm": lambda: Layers(
        thirds, nn.Linear(3, 5), nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(10, 4)
    ),
    "a function": lambda: Layers(functional, LINEAR, HEAD),
    "torch.batch_norm": lambda: Layers(by_torch, LINEAR, HEAD),
    "kept in evaluation": KeptInEvaluation,
}


@pytest.mark.parametrize("make", IN_LANES.values(), ids=IN_LANES)
def test_norms_of_other_kinds_agree_with_plain(make):
    torch.manual_seed(0)
    data, model, settings = make_clients(SIZES), make(), {"rounds": 2, "local": LOCAL, "device": "cpu"}
    plain = ud.train(model, data, engine="plain", **settings).model.state_dict()
    run = ud.train(model, data, **settings)
    assert run.choices["engine"] == "lanes"
    assert all(distance({n: run.model.state_dict()[n]}, {n: w}) < 1e-8 for n, w in plain.items() if w.any())


def test_a_norm_kept_in_evaluation_does_not_move():
    run = ud.train(KeptInEvaluation(), make_clients(SIZES), rounds=1, local=LOCAL, engine="lanes", device="cpu")
    assert torch.equal(run.model.norm.running_mean, torch.full((5,), 0.3).double())
    assert int(run.model.norm.num_batches_tracked) == 0


def folded(module, x):
    first, norm, head = module.layers
    return head(norm(first(x.view(-1, 3))).view(len(x), -1))


def backwards(module, x):
    first, norm, head = module.layers
    return head(norm(first(x).flip(0)).flip(0))


PLAIN = {
    "no running statistics": (
        lambda: Layers(chain, LINEAR, nn.BatchNorm1d(5, track_running_stats=False), HEAD),
        "in evaluation too",
    ),
    "folded into the batch": (lambda: Layers(folded, nn.Linear(3, 5), NORM, nn.Linear(10, 4)), "10 rows for 5 samples"),
    "rows in another order": (lambda: Layers(backwards, LINEAR, NORM, HEAD), "rows"),
    "another buffer": (
        lambda: Layers(chain, nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), NORM, HEAD),
        "training changes its buffer",
    ),
}


@pytest.mark.parametrize(("make", "why"), PLAIN.values(), ids=PLAIN)
def test_what_lanes_cannot_mask_stays_plain(make, why):
    torch.manual_seed(0)
    model = make()
    run = ud.train(model, make_clients(SIZES), rounds=1, local=LOCAL, device="cpu")
    assert run.choices["engine"] == "plain"
    with pytest.raises(ud.UndriftError, match=why):
        ud.train(model, make_clients(SIZES), rounds=1, local=LOCAL, engine="lanes", device="cpu")


# ---- one sample ----------------------------------------------------------------------------------------------------


def train(model, sizes, engine, method="FedAvg()", **local):
    work = ud.Local(**{"epochs": 1, "batch_size": 4, "lr": 0.1} | local)
    return ud.train(model, make_clients(sizes), method, rounds=2, local=work, engine=engine, device="cpu")


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize(
    ("sizes", "local", "sentence"),
    [
        ([8, 9], {}, r"last batch of client 1 .* use Local\(drop_last=True\)"),
        ([8, 9], {"epochs": None, "steps": lambda t: 2 + t}, "last batch of client 1"),
        ([8, 9], {"epochs": None, "steps": [2, 3]}, "last batch of client 1"),
        ([8, 1], {"drop_last": True}, "Client 1 has one sample"),
        ([8, 1], {"epochs": None, "steps": 1}, "Client 1 has one sample"),
        ([8, 1], {"batch_size": None}, "Client 1 has one sample"),
        ([8, 8], {"batch_size": 1}, "larger batch_size"),
    ],
)
def test_a_batch_of_one_sample_is_refused_before_the_first_round(sizes, local, sentence, engine):
    rows, work = [], ud.Local(**{"epochs": 1, "batch_size": 4, "lr": 0.1} | local)
    settings = {"rounds": 2, "local": work, "engine": engine, "device": "cpu", "on_round": rows.append}
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.train(Pictures(), make_clients(sizes), **settings)
    assert not rows


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_one_sample_is_no_problem_where_it_is_not_reached_or_has_positions(engine):
    assert train(Pictures(), [8, 9], engine, epochs=None, steps=2).history
    assert train(Pictures(), [8, 9], engine, drop_last=True).history
    assert train(Pictures(), [8, 10], engine).history


def test_one_sample_with_positions_trains_as_torch_does():
    torch.manual_seed(0)
    model = Layers(thirds, nn.Linear(3, 5), nn.BatchNorm1d(2), nn.Linear(10, 4))
    plain, lanes = (train(model, [9, 5, 1], engine).model.state_dict() for engine in ("plain", "lanes"))
    assert all(distance({n: lanes[n]}, {n: w}) < 1e-8 for n, w in plain.items())


@dataclass(frozen=True)
class Longer(ud.Part):
    """A plan that takes every client to its last batch in the second round."""

    def plan(self, plan, state, server):
        return replace(plan, steps=np.full_like(plan.steps, 2 + plan.round)), state


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_a_plan_that_reaches_one_sample_is_refused_in_its_round(engine):
    with pytest.raises(ud.UndriftError, match="A client's batch has one sample"):
        train(Pictures(), [8, 9], engine, Longer(), epochs=None, steps=2)
