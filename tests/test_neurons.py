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
from undrift.functional.model import Model
from undrift.method.context import Server
from undrift.methods.fednlr import neuron_scales
from undrift.random import Key


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40), st.floats(1.01, 20))
def test_scales_have_mean_one_and_the_ratio_asked_for(averages, mu):
    h = torch.tensor(averages, dtype=torch.float64)
    s, temperature = neuron_scales(h, mu)
    m = len(h)
    if h.max() == h.min():
        assert s.tolist() == [1.0] * m
    elif h.max() - h.min() > 1e-290:  # below, float64 itself has few digits left
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
    return Model(module, x.device).examined(x)[0]


def test_layers_are_found_with_the_parameters_their_neurons_own():
    torch.manual_seed(0)
    module, x = Functional().eval(), torch.randn(6, 1, 8, 8)
    model = examined(module, x)
    assert [(layer.name, layer.width) for layer in model.layers] == [
        ("first", 4), ("second", 4), ("shrink", 4), ("hidden", 5), ("head", 3),
    ]  # fmt: skip
    owned = {layer.name: list(layer.params) for layer in model.layers}
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
    assert torch.allclose(found["hidden"], hidden, atol=1e-6)  # channels may lie in another order, and sums with them
    assert torch.allclose(found["head"], module.head(hidden), atol=1e-6)  # raw logits


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
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    assert model.layers[1].params == {f"cell.{n}_l1": (0, gates) for n in names}
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
    assert run.choices["engine"] == ("plain" if kind is nn.RNN else "lanes")
    assert set(run.history[0]["ratio"]) == {"cell[0]", "cell[1]", "head"}


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
        server = Server(model, F.cross_entropy, None, 0, Key(torch.tensor([1, 2]), torch.tensor(0)), {}, 1, 1.0)
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
    with pytest.raises(ud.UndriftError, match="must end with a trainable linear layer"):
        ud.train(model, make_clients([5]), ud.CCVR(), rounds=1, local=ud.Local(steps=1, lr=0.1))


class Odd(nn.Module):
    """A forward pass given as a function of the module, over two layers `a` and `b` and a head."""

    def __init__(self, forward, a, b=None, head=None):
        super().__init__()
        self.a, self.b, self.head, self.run = a, b, head or nn.Identity(), forward

    def forward(self, x):
        return self.head(self.run(self, x))


def activations(forward, a, b=None, head=None, x=None):
    torch.manual_seed(1)
    module = Odd(forward, a, b, head).eval()
    x = torch.randn(5, 6) if x is None else x
    model = examined(module, x)
    assert model.layers  # found from the sample, before anything is read
    return module, x, model, model.activations(model.start, x)


def test_neurons_of_sequences_lie_along_the_last_axis_whatever_the_lengths():
    for after in (lambda m, x: F.relu(m.a(x)).mean(1), lambda m, x: F.relu(m.a(x).flatten(1)).view(5, 4, 4).mean(1)):
        module, x, _, found = activations(after, nn.Linear(3, 4), head=nn.Linear(4, 2), x=torch.randn(5, 4, 3))
        assert torch.allclose(found["a"], F.relu(module.a(x)).mean(1))  # four steps of four neurons


def test_moved_or_joined_channels_are_read_before_they_move():
    def forward(m, x):
        return F.relu(torch.cat([m.a(x), m.b(x)], 1)).mean(1, keepdim=True)

    module, x, _, found = activations(forward, nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(1, 2))
    assert torch.allclose(found["a"], module.a(x)) and torch.allclose(found["b"], module.b(x))


def test_clamp_is_a_rectifier_and_the_last_layer_is_always_raw():
    module, x, _, found = activations(
        lambda m, x: torch.sigmoid(m.b(m.a(x).clamp(min=0))), nn.Linear(6, 3), nn.Linear(3, 2)
    )
    assert torch.allclose(found["a"], module.a(x).clamp(min=0))
    assert torch.allclose(found["b"], module.b(module.a(x).clamp(min=0)))


def test_a_norm_after_the_non_linearity_and_one_called_twice_take_the_scale_once():
    _, _, model, _ = activations(lambda m, x: m.b(F.relu(m.a(x))), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert list(model.layers[0].params) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    twice = lambda m, x: F.relu(m.b(m.a(F.relu(m.b(m.a(x))))))  # noqa: E731
    _, _, model, _ = activations(twice, nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.Linear(6, 2))
    assert list(model.layers[0].params) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_two_weights_of_one_module_are_two_layers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return F.linear(F.relu(F.linear(x, self.w1)), self.w2)

    assert [layer.name for layer in examined(Two(), torch.randn(5, 6)).layers] == ["w1", "w2"]


def test_what_fednlr_cannot_see_is_said(caplog):
    data, local = make_clients([8, 8], torch.float32), ud.Local(steps=1, lr=0.1)

    class Bare(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.w, self.linear = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 4) if linear else nn.Identity()

        def forward(self, x):
            return self.linear(x @ self.w)

    with pytest.raises(ud.UndriftError, match="found no linear, convolution or recurrent layer"):
        ud.train(Bare(False), data, ud.FedNLR(), rounds=1, local=local)
    ud.train(Bare(True), data, ud.FedNLR(), rounds=1, local=local)
    assert "FedNLR does not scale w" in caplog.text
    first = Odd(lambda m, x: m.a(x.view(-1, 3, 2).transpose(0, 1)).mean(0), nn.Linear(2, 4))
    with pytest.raises(ud.UndriftError, match="the samples along its first axis; put the batch first"):
        ud.train(first, data, ud.FedNLR(), rounds=1, local=local)
    ud.train(first, data, rounds=1, local=local)  # without FedNLR nobody minds


@pytest.mark.parametrize("method", [ud.FedCurv(weight=1.0), ud.FedCL(weight=1.0), ud.ServerTraining(lr=0.1)])
def test_methods_that_differentiate_work_on_models_that_do_not_vmap(method):
    from tests.parts import Branching, Normed, Recurrent

    for module in (Branching, Normed, Recurrent):
        data, local = make_clients([12, 8, 20]), ud.Local(epochs=1, batch_size=8, lr=0.1)
        run = ud.train(module(), data, method, rounds=3, local=local)
        assert run.choices["engine"] == ("lanes" if module is Normed else "plain")
        assert distance(run.params, ud.train(module(), data, rounds=3, local=local).params) > 1e-6


def test_attention_without_dropout_trains():
    layer = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True)
    model = Odd(lambda m, x: m.a(x.view(-1, 3, 2)).mean(1), layer, head=nn.Linear(2, 4))
    assert ud.train(model, make_clients([8, 8], torch.float32), rounds=1, local=ud.Local(steps=1, lr=0.1)).history


def test_ccvr_takes_a_frozen_bias_and_refuses_a_norm_after_the_head():
    data, local = make_clients([12, 9, 15], torch.float32), ud.Local(steps=1, lr=0.1)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    model[2].bias.requires_grad_(False)
    run = ud.train(model, data, ud.CCVR(), rounds=1, local=local)
    assert torch.equal(run.model[2].bias, model[2].bias) and not torch.equal(run.model[2].weight, model[2].weight)
    with pytest.raises(ud.UndriftError, match="must end with a trainable linear layer"):
        ud.train(nn.Sequential(*model, nn.LayerNorm(4)), data, ud.CCVR(), rounds=1, local=local)


def test_ccvr_covariances_keep_their_digits_in_float32():
    x = (100 + 0.01 * torch.randn(500, 4)).float()
    data = ud.FederatedDataset.from_clients([(x, torch.zeros(500).long())])
    seen = {}

    class Spy(ud.CCVR):
        def virtual(self, sums, server):
            seen["x"] = super().virtual(sums, server)[0]
            return super().virtual(sums, server)

    from dataclasses import dataclass

    ud.train(
        nn.Linear(4, 2),
        data,
        dataclass(frozen=True)(Spy)(samples_per_class=5000),
        rounds=1,
        local=ud.Local(steps=1, lr=0.0),
    )
    assert torch.allclose(seen["x"].double().std(0), x.double().std(0), rtol=0.05)
