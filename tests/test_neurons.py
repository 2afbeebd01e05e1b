"""Layers found by watching the forward pass; FedNLR's scales, the paper's example, bound neurons; CCVR's features."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import undrift as ud
from tests.problems import distance, make_clients, net
from undrift.methods.fednlr import neuron_scales
from undrift.models.functional import Model
from undrift.random import Key
from undrift.roles import Server


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40), st.floats(1.01, 20))
def test_scales_have_mean_one_and_the_ratio_asked_for(averages, mu):
    h = torch.tensor(averages, dtype=torch.float64)
    s, temperature = neuron_scales(h, mu)
    m = len(h)
    if h.max() - h.min() < 1e-300:
        assert s.tolist() == [1.0] * m
    else:
        assert s.mean().item() == pytest.approx(1)
        assert (s.max() / s.min()).item() == pytest.approx(mu, rel=1e-9)
        assert m / (mu * (m - 1) + 1) * (1 - 1e-9) <= s.min() and s.max() <= mu * m / (mu + m - 1) * (1 + 1e-9)
        assert temperature == (h.max() - h.min()) / math.log(mu)


def test_scales_are_exactly_one_when_there_is_nothing_to_tell():
    assert neuron_scales(torch.tensor([3.0, 3.0, 3.0]), 2.0)[0].tolist() == [1.0] * 3
    assert neuron_scales(torch.tensor([1.0, 2.0, 3.0]), 1.0)[0].tolist() == [1.0] * 3


class Functional(nn.Module):
    """Functional activations, a residual addition, norms, pooling, a module used twice, one that nothing follows."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.group = nn.GroupNorm(2, 4)
        self.shrink = nn.Conv2d(1, 4, 1)
        self.hidden = nn.Linear(16, 5)
        self.layernorm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        z = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        z = torch.relu(self.group(self.second(z)) + F.max_pool2d(self.shrink(x), 2))
        z = F.gelu(self.layernorm(self.hidden(F.avg_pool2d(z, 2).flatten(1))))
        return F.log_softmax(self.head(z) * self.scale, -1)


def examined(module, x):
    model = Model(module, x.device)
    model.examine(x)
    return model


def test_layers_are_found_with_the_parameters_their_neurons_own():
    torch.manual_seed(0)
    module, x = Functional().eval(), torch.randn(6, 1, 8, 8)
    model = examined(module, x)
    assert [(layer.name, layer.width) for layer in model.layers] == [
        ("first", 4), ("second", 4), ("shrink", 4), ("hidden", 5), ("head", 3),
    ]  # fmt: skip
    owned = {layer.name: [name for name, _, _ in layer.params] for layer in model.layers}
    assert owned["first"] == ["first.weight", "first.bias", "norm.weight", "norm.bias"]
    assert owned["second"] == ["second.weight", "group.weight", "group.bias"]
    assert owned["hidden"] == ["hidden.weight", "hidden.bias"]  # a layer norm's pair has scale 1
    found = model.activations(model.start, x)
    first = F.relu(module.norm(module.first(x)))
    both = torch.relu(module.group(module.second(F.max_pool2d(first, 2))) + F.max_pool2d(module.shrink(x), 2))
    hidden = F.gelu(module.layernorm(module.hidden(F.avg_pool2d(both, 2).flatten(1))))
    assert torch.allclose(found["first"], first.mean((2, 3)))  # after the non-linearity, before pooling
    assert torch.allclose(found["second"], both.mean((2, 3)))  # after the addition
    assert torch.allclose(found["shrink"], both.mean((2, 3)))
    assert torch.allclose(found["hidden"], hidden)
    assert torch.allclose(found["head"], module.head(hidden))  # raw logits


@pytest.mark.parametrize(("kind", "gates"), [(nn.GRU, 3), (nn.LSTM, 4), (nn.RNN, 1)])
def test_recurrent_units_own_a_row_in_every_gate(kind, gates):
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = kind(2, 5, num_layers=2, batch_first=True), nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.cell(x.view(-1, 3, 2))[0][:, -1])

    module, x = Reader(), torch.randn(7, 6)
    model = examined(module, x)
    assert [layer.name for layer in model.layers] == ["cell[0]", "cell[1]", "head"]
    assert model.layers[1].params == tuple(
        (f"cell.{n}_l1", 0, gates) for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    alone = kind(2, 5, batch_first=True)
    alone.load_state_dict(
        {n: getattr(module.cell, n) for n in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")}
    )
    found = model.activations(model.start, x)
    with torch.no_grad():
        assert torch.allclose(found["cell[0]"], alone(x.view(-1, 3, 2))[0].abs().mean(1))
        assert torch.allclose(found["cell[1]"], module.cell(x.view(-1, 3, 2))[0].abs().mean(1))
    data = make_clients([12, 8, 20], torch.float32)
    run = ud.train(module, data, ud.FedNLR(), rounds=2, local=ud.Local(epochs=1, batch_size=8, lr=0.1))
    assert run.choices["engine"] == "plain" and set(run.history[0]["ratio"]) == {"cell[0]", "cell[1]", "head"}


def test_fednlr_on_convolutions_and_norms_agrees_between_engines_and_moves():
    data = ud.load("digits", ud.Dirichlet(0.5), clients=4)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16, 10)
    ).double()
    settings = {"rounds": 2, "local": ud.Local(steps=3, batch_size=16, lr=0.1)}
    lanes, plain = (ud.train(module, data, ud.FedNLR(), engine=e, **settings) for e in ("lanes", "plain"))
    assert distance(lanes.params, plain.params) < 1e-12
    assert distance(lanes.params, ud.train(module, data, **settings).params) > 1e-4
    row = lanes.history[0]
    assert row["ratio"] == pytest.approx({"0": 1 + 0.5 + math.log10(4), "5": 1 + 1 + 1})
    assert all(t > 0 for t in row["temperature"].values())


def two_by_two():
    """The paper's Example 1."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1, 1 / 3], [1 / 3, 1]]))
        model[2].weight.copy_(torch.tensor([[10 / 9, 2 / 3], [2 / 3, 10 / 9]]))
    return model


def test_example_1_of_the_paper():
    x = torch.tensor([[1, 1 / 3], [1 / 3, 1]], dtype=torch.float64)
    data = ud.FederatedDataset.from_clients([(x[:1], torch.tensor([0]))])
    local = ud.Local(steps=1, lr=0.5)

    def second(model):
        with torch.no_grad():
            hidden = torch.relu(model[0](x[1]))
            return [round(float(h), 3) for h in hidden], round(float(torch.softmax(model[2](hidden), 0)[1]), 3)

    assert second(two_by_two()) == ([0.667, 1.111], 0.549)
    assert second(ud.train(two_by_two(), data, rounds=1, local=local).model) == ([0.733, 1.044], 0.367)
    hidden, chance = second(ud.train(two_by_two(), data, ud.FedNLR(), rounds=1, local=local).model)
    assert hidden[1] == 1.063 and chance == 0.364


def test_bound_neurons():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        model[0].bias.zero_()
    x = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.3, 2.0]])
    bound = ud.bound_neurons(model, x, torch.tensor([0, 0, 1, 1]))
    assert bound["0"] == {0: 0, 1: 1}  # the third fires for both


def test_ccvr_draws_each_class_from_its_own_gaussian(uneven):
    """Means and covariances of the virtual features are those of the clients' features, pooled."""
    model = examined(net(), uneven[0][0])
    x, y = torch.cat([uneven[i][0] for i in range(7)]), torch.cat([uneven[i][1] for i in range(7)])
    with torch.no_grad():
        features = model.features(model.start, x)
        assert torch.allclose(features, torch.tanh(net()[0](x)))
        member = F.one_hot(y, 4).double()
        sums = {
            "n": member.sum(0),
            "sum": member.T @ features,
            "outer": torch.einsum("bc,bd,be->cde", member, features, features),
        }
        server = Server(model, F.cross_entropy, None, 0, Key(torch.tensor([1, 2]), torch.tensor(0)))
        drawn, classes = ud.CCVR(samples_per_class=20_000).virtual(sums, server)
    for c in range(4):
        own, virtual = features[y == c], drawn[classes == c]
        assert torch.allclose(virtual.mean(0), own.mean(0), atol=0.02)
        assert torch.allclose(torch.cov(virtual.T), torch.cov(own.T), atol=0.02)


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_ccvr_retrains_the_classifier_alone(uneven, engine):
    settings = {"rounds": 3, "local": ud.Local(epochs=1, batch_size=8, lr=0.1), "engine": engine}
    plain, ccvr = (ud.train(net(), uneven, m, **settings) for m in (ud.FedAvg(), ud.CCVR(lr=0.1)))
    assert torch.equal(plain.params["0.weight"], ccvr.params["0.weight"])
    assert distance({"w": ccvr.params["3.weight"]}, {"w": plain.params["3.weight"]}) > 1e-2
    assert ccvr.history[0]["loss"] == plain.history[0]["loss"] and ccvr.history[-1]["loss"] != plain.history[-1]["loss"]


def test_ccvr_is_the_same_on_both_engines_and_helps_a_biased_classifier(uneven):
    lanes, plain = (
        ud.train(net(), uneven, ud.CCVR(), rounds=2, local=ud.Local(epochs=1, batch_size=8, lr=0.1), engine=e)
        for e in ("lanes", "plain")
    )
    assert distance(lanes.params, plain.params) < 1e-9
    digits = ud.load("digits", ud.Shards(1), clients=10, seed=0)
    settings = {"rounds": 15, "local": ud.Local(epochs=5, batch_size=32, lr=0.1), "participation": 3}
    before, after = (
        ud.train("mlp", digits, m, **settings).history[-1]["accuracy"] for m in (ud.FedAvg(), ud.CCVR(lr=0.1))
    )
    assert after > before + 0.1


def test_ccvr_refuses_what_has_no_classifier():
    model = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 4, 1), nn.Flatten()).double()
    with pytest.raises(ud.UndriftError, match="last linear layer"):
        ud.train(model, make_clients([5]), ud.CCVR(), rounds=1, local=ud.Local(steps=1, lr=0.1))
