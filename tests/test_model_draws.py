"""Draws inside a model: keyed ones are the same in every engine, others run plain and repeat just as well."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import undrift as ud
from tests.problems import distance, make_clients, same_bits
from undrift.functional.draws import Trial
from undrift.functional.generators import host_states, seeded, seeded_depth
from undrift.functional.model import Model
from undrift.random import Key, keep_mask

LOCAL = ud.Local(epochs=1, batch_size=4, lr=0.1)
OPTIONS = {"rounds": 2, "local": LOCAL, "participation": 4}
SIZES = [11, 5, 0, 1, 9]
"""Clients of one sample, of none, and with short last batches of 3 and of 1."""


class Drawing(nn.Module):
    """A linear layer on what `draw(x)` makes of 3 tokens of 2 features, in training mode."""

    def __init__(self, draw, always=False):
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.always = draw, always
        self.head = nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.draw(x) if self.training or self.always else x)


class Tokens(nn.Module):
    """A layer on sequences of 3 tokens with 2 features."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer().double()
        with torch.no_grad():
            width = self.sequence(torch.zeros(1, 3, 2, dtype=torch.float64)).shape[-1]
        self.head = nn.Linear(3 * width, 4, dtype=torch.float64)

    def sequence(self, x):
        attends = isinstance(self.layer, nn.MultiheadAttention)
        found = self.layer(x, x, x) if attends else self.layer(x)
        return found[0] if isinstance(found, tuple) else found

    def forward(self, x):
        return self.head(self.sequence(x.view(-1, 3, 2)).flatten(1))


def filled(x):
    """The result of the in-place draw is not used."""
    noise = torch.empty(x.shape, dtype=x.dtype)
    noise[:, :3].normal_()
    noise[:, 3:].uniform_()
    return x * noise


def depth(x):
    """Stochastic depth, as torchvision has it."""
    noise = torch.empty([len(x), 1], dtype=x.dtype, device=x.device).bernoulli_(0.7)
    noise.div_(0.7)
    return x + x.sin() * noise


def path(x):
    """Stochastic depth, as timm has it."""
    keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
    keep.div_(0.7)
    return x + x.sin() * keep


def attended(x):
    x = x.view(-1, 1, 3, 2)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True).flatten(1)


D = torch.distributions
KEYED = {
    "stochastic depth": lambda: Drawing(depth),
    "drop path": lambda: Drawing(path),
    "filled": lambda: Drawing(filled),
    "attention": lambda: Drawing(attended),
    "bernoulli": lambda: Drawing(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "bernoulli of a tensor": lambda: Drawing(lambda x: x * torch.bernoulli(torch.sigmoid(x))),
    "normal": lambda: Drawing(lambda x: torch.normal(x, torch.ones_like(x))),
    "randint": lambda: Drawing(lambda x: x * torch.randint(0, 3, x.shape)),
    "randint_like": lambda: Drawing(lambda x: x + torch.randint_like(x, 3)),
    "randperm": lambda: Drawing(lambda x: x[:, torch.randperm(6)]),
    "multinomial": lambda: Drawing(lambda x: x * torch.multinomial(x.softmax(1), 6)),
    "random_": lambda: Drawing(lambda x: x * torch.empty_like(x).random_(3)),
    "gumbel": lambda: Drawing(lambda x: F.gumbel_softmax(x, tau=0.5)),
    "gumbel hard": lambda: Drawing(lambda x: F.gumbel_softmax(x, tau=0.5, hard=True)),
    "rrelu": lambda: Drawing(lambda x: F.rrelu(x, training=True)),
    "feature alpha": lambda: Drawing(lambda x: F.feature_alpha_dropout(x.view(-1, 3, 2), 0.4, True).flatten(1)),
    "in place": lambda: Drawing(
        lambda x: F.dropout(x * 2, 0.4, inplace=True) + F.rrelu(-x, training=True, inplace=True)
    ),
    "fractional": lambda: Drawing(
        lambda x: F.fractional_max_pool2d(x.view(-1, 1, 2, 3).repeat(1, 1, 2, 2), 1, output_size=(2, 3)).flatten(1)
    ),
    "Normal": lambda: Drawing(lambda x: D.Normal(x, 1 + x.square(), validate_args=False).rsample()),
    "Categorical": lambda: Drawing(lambda x: x + D.Categorical(logits=x, validate_args=False).sample()[:, None]),
    "MultiheadAttention": lambda: Tokens(lambda: nn.MultiheadAttention(2, 2, dropout=0.3, batch_first=True)),
    "TransformerEncoder": lambda: Tokens(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 2, 8, dropout=0.1, batch_first=True), 1)
    ),
    "GRU": lambda: Tokens(lambda: nn.GRU(2, 3, 2, dropout=0.4, batch_first=True)),
    "LSTM": lambda: Tokens(lambda: nn.LSTM(2, 3, 2, dropout=0.4, batch_first=True)),
    "draws in evaluation": lambda: Drawing(lambda x: x + torch.randn_like(x) * torch.rand([]), always=True),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", KEYED)
def test_keyed_draws_are_the_same_in_lanes_and_repeat(name):
    data, model = make_clients(SIZES), KEYED[name]()
    before, hosts = torch.get_rng_state(), host_states()
    lanes = ud.train(model, data, engine="lanes", lanes=3, **OPTIONS)
    again = ud.train(model, data, engine="lanes", lanes=3, **OPTIONS)
    plain = ud.train(model, data, engine="plain", **OPTIONS)
    other = ud.train(model, data, engine="plain", seed=1, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), before) and host_states() == hosts
    assert same_bits(lanes.params, again.params) and lanes.history[-1]["loss"] == again.history[-1]["loss"]
    assert distance(lanes.params, plain.params) < 1e-12 and distance(plain.params, other.params) > 1e-4
    assert abs(lanes.history[-1]["loss"] - plain.history[-1]["loss"]) < 1e-12


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_the_draws_of_stochastic_depth_are_those_of_the_clients_key(engine):
    """By hand, from the equation: one client, one step on all of its samples, and the mask of its key."""
    data, keys = make_clients([5]), []

    @dataclass(frozen=True)
    class Note(ud.Part):
        def gradient(self, g, params, client):
            keys.append(client.key)
            return g

    model = Drawing(depth)
    options = {"rounds": 1, "local": ud.Local(steps=1, batch_size=5, lr=0.5)}
    ud.train(model, data, Note(), engine="plain", **options)
    found = ud.train(model, data, engine=engine, **options).params
    key = Key(keys[0].words, keys[0].step)
    (positions,) = ud.batches(data, options["local"], client=0, round=0, seed=0)
    x, y = (t[positions] for t in data[0])
    x = x + x.sin() * keep_mask(key, (5, 1), 1 - 0.7) / 0.7
    weight, bias = (w.detach().clone().requires_grad_() for w in (model.head.weight, model.head.bias))
    F.cross_entropy(F.linear(x, weight, bias), y).backward()
    by_hand = {"head.weight": weight - 0.5 * weight.grad, "head.bias": bias - 0.5 * bias.grad}
    assert distance(found, {n: t.detach() for n, t in by_hand.items()}) < 1e-12


@pytest.mark.parametrize("name", ["stochastic depth", "filled", "attention", "gumbel"])
def test_per_sample_gradients_have_the_draws_of_their_batch(name):
    @dataclass(frozen=True)
    class Compare(ud.Part):
        def gradient(self, g, params, client):
            each = client.gradients(params)
            real = (each["head.bias"].abs().sum(1) > 0).sum()  # padding has zeros
            return ud.tree_map(lambda e, g: g + 1e6 * (e.sum(0) / real - g), each, g)

    data, model = make_clients([9, 4]), KEYED[name]()
    options = {"rounds": 1, "local": ud.Local(steps=2, batch_size=4, lr=0.1)}
    plain = ud.train(model, data, engine="plain", **options)
    for engine in ("lanes", "plain"):
        compared = ud.train(model, data, Compare(), engine=engine, **options)
        assert distance(compared.params, plain.params) < 1e-6, engine


# ---- draws that no key governs -------------------------------------------------------------------------------------


def python(x):
    return x * random.random()


def numpys(x):
    return x + torch.from_numpy(np.random.rand(*x.shape)).to(x)


def poisson(x):
    return x + torch.poisson(x.abs()) + torch.rand_like(x)


UNKEYED = {
    "python": (python, "Python's random"),
    "numpy": (numpys, "numpy.random"),
    "poisson": (poisson, "aten.poisson"),
    "gamma": (lambda x: x * D.Gamma(x.abs() + 1, 1.0).rsample(), "aten._standard_gamma"),
}


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("name", UNKEYED)
def test_draws_that_no_key_governs_run_plain_and_repeat(name, always):
    draw, reason = UNKEYED[name]
    data, model = make_clients(SIZES), Drawing(draw, always)
    before, hosts = torch.get_rng_state(), host_states()
    runs = [ud.train(model, data, seed=seed, **OPTIONS) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before) and host_states() == hosts
    assert runs[0].choices["engine"] == "plain" and reason in runs[0].choices["why"]
    assert same_bits(runs[0].params, runs[1].params) and distance(runs[0].params, runs[2].params) > 1e-4
    assert [row["loss"] for row in runs[0].history] == [row["loss"] for row in runs[1].history]
    with pytest.raises(ud.UndriftError, match='engine="lanes" cannot train this model: its forward pass draws from'):
        ud.train(model, data, engine="lanes", **OPTIONS)


def test_clients_rounds_and_steps_draw_differently():
    seen = []

    def draw(x):
        seen.append(float(torch.poisson(torch.full((), 1e6))))
        return x * seen[-1] / 1e6

    ud.train(Drawing(draw), make_clients([4, 8]), rounds=2, local=ud.Local(steps=2, batch_size=4, lr=0.1))
    in_steps = seen[-8:]
    assert len(set(in_steps)) == 8


def test_a_model_with_seeded_draws_draws_them_all_from_the_generators():
    """Checkpointing repeats draws from the generators' states, so with `unkeyed` no draw may come from the key."""
    model = Model(Drawing(lambda x: F.dropout(x, 0.5)), torch.device("cpu"))
    model, _ = model.examined(torch.ones(2, 6, dtype=torch.float64))
    assert not model.unkeyed
    marked = model._with(unkeyed="it checkpoints")
    assert marked.obstacle == "it checkpoints" and model.obstacle is None
    key, x = Key(torch.tensor([3, 4]), torch.tensor(5)), torch.ones(4, 6, dtype=torch.float64)
    found = marked.train(marked.start, x, key)
    with seeded(key):
        expected = F.linear(F.dropout(x, 0.5), *marked.start.values())
    assert torch.equal(found, expected)
    assert not torch.allclose(found, model.train(model.start, x, key))


def test_a_checkpoint_sees_the_same_draws_again():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Drawing):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def gradient(kind):
        model = Model(kind(lambda x: F.dropout(x, 0.5)), torch.device("cpu"))._with(unkeyed="it checkpoints")
        key, x = Key(torch.tensor([3, 4]), torch.tensor(5)), torch.ones(4, 6, dtype=torch.float64)
        weights = {n: w.clone().requires_grad_() for n, w in model.start.items()}
        with model.seeding(key):
            return torch.autograd.grad(model.train(weights, x, key).square().sum(), weights["head.weight"])[0]

    dropped = gradient(Drawing)
    mine = gradient(Checkpointed)
    assert (dropped - mine).abs().max() < 1e-12


class NoisyGradient(torch.autograd.Function):
    """The identity; its gradient is drawn from the global generator."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g + torch.randn_like(g)


class Noisy(Drawing):
    def forward(self, x):
        return NoisyGradient.apply(super().forward(x))


@pytest.mark.parametrize("draw", [poisson, lambda x: x])
def test_draws_of_the_backward_pass_repeat_too(draw):
    data, model = make_clients([9, 4]), Noisy(draw)
    before = torch.get_rng_state()
    runs = [ud.train(model, data, seed=seed, rounds=1, local=LOCAL) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before) and "pass draws from" in runs[0].choices["why"]
    assert same_bits(runs[0].params, runs[1].params) and not same_bits(runs[0].params, runs[2].params)


def test_a_trial_without_a_key_counts_every_draw():
    trial = Trial(torch.device("cpu"))
    with trial.draws() as drew:
        torch.rand(3)
    assert drew == [True] and not trial.unkeyed
    with trial.draws(keyed=False) as drew:
        torch.rand(3)
    assert drew == [True] and "draws from aten.rand" in trial.unkeyed


def test_generators_are_put_back_when_forward_fails():
    calls = []

    def fails(x):
        calls.append(random.random() + np.random.rand() + float(torch.rand(())))
        torch.poisson(x.abs())
        if len(calls) > 4:
            raise ValueError("enough")
        return x

    before, hosts = torch.get_rng_state(), host_states()
    with pytest.raises(ud.UndriftError, match="enough"):
        ud.train(Drawing(fails), make_clients([9, 4]), **OPTIONS | {"participation": 2})
    assert torch.equal(torch.get_rng_state(), before) and host_states() == hosts and seeded_depth() == 0


def test_seeds_within_seeds_go_on_where_they_were():
    key, other = (Key(torch.tensor([i, 0]), torch.tensor(0)) for i in (1, 2))
    with seeded(key):
        whole = torch.rand(4)
    with seeded(key):
        parts = [torch.rand(2)]
        with seeded(other):
            torch.rand(7), random.random(), np.random.rand()
        with seeded(key):  # the same key goes on
            parts.append(torch.rand(2))
    assert torch.equal(torch.cat(parts), whole)
    with seeded(key, torch.tensor(0)):
        assert not torch.equal(torch.rand(4), whole)


@pytest.mark.parametrize("hook", ["objective", "gradient"])
def test_hooks_must_not_draw_from_seeded_generators(hook):
    """The model may, inside a hook too."""

    @dataclass(frozen=True)
    class Draws(ud.Part):
        bad: bool

        def objective(self, losses, z, batch, params, client):
            noise = torch.rand_like(losses) if self.bad and hook == "objective" else 0
            return losses + client.model(params, batch.x).square().mean(-1) + noise

        def gradient(self, g, params, client):
            noise = torch.rand(()) if self.bad and hook == "gradient" else 0
            return ud.tree_map(lambda a, b: a + b + noise, g, client.gradient(ud.tree_map(lambda w: w * 1.1, params)))

    data, model = make_clients([9, 4]), Drawing(poisson, always=True)
    assert ud.train(model, data, Draws(bad=False), rounds=1, local=LOCAL).choices["engine"] == "plain"
    with pytest.raises(ud.UndriftError, match=f"Draws.{hook} draws"):
        ud.train(model, data, Draws(bad=True), rounds=1, local=LOCAL)


def test_per_sample_gradients_of_seeded_draws_differ_by_sample():
    seen = []

    @dataclass(frozen=True)
    class Each(ud.Part):
        def gradient(self, g, params, client):
            seen.append(client.gradients(params)["head.weight"])
            return g

    model = Drawing(lambda x: torch.ones_like(x) * torch.poisson(torch.full((), 50.0)))
    data = make_clients([4])
    ud.train(model, data, Each(), rounds=1, local=ud.Local(steps=1, batch_size=4, lr=0.1))
    sizes = seen[-1].flatten(1).norm(dim=1)  # of training: the rehearsal before it takes fewer samples
    assert len({round(float(s), 9) for s in sizes}) == 4


def test_server_training_seeds_its_steps():
    data = make_clients([9, 4])
    method, model = ud.FedAvg() + ud.ServerTraining(lr=0.1, batch_size=8), Noisy(poisson)
    before = torch.get_rng_state()
    runs = [ud.train(model, data, method, seed=s, **OPTIONS | {"participation": 2}) for s in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(runs[0].params, runs[1].params) and not same_bits(runs[0].params, runs[2].params)


# ---- losses --------------------------------------------------------------------------------------------------------


def keyed_loss(output, target):
    return F.cross_entropy(F.dropout(output, 0.3), target, reduction="none") * torch.rand(len(output)).to(output)


def unkeyed_loss(output, target):
    return F.cross_entropy(output, target, reduction="none") * torch.poisson(torch.full_like(output[:, 0], 5))


@pytest.mark.parametrize("model", [None, depth])
@pytest.mark.parametrize("loss", [keyed_loss, unkeyed_loss])
def test_losses_that_draw_repeat(loss, model):
    data, model = make_clients(SIZES), Drawing(model or (lambda x: x))
    before = torch.get_rng_state()
    auto, again, other = (ud.train(model, data, loss=loss, seed=seed, **OPTIONS) for seed in (0, 0, 1))
    plain = ud.train(model, data, loss=loss, engine="plain", **OPTIONS)
    assert torch.equal(torch.get_rng_state(), before)
    assert auto.choices["engine"] == ("lanes" if loss is keyed_loss else "plain")
    assert same_bits(auto.params, again.params) and auto.history[-1]["loss"] == again.history[-1]["loss"]
    assert distance(auto.params, plain.params) < 1e-12 and distance(auto.params, other.params) > 1e-4
    if loss is unkeyed_loss:
        assert "the loss draws from aten.poisson" in auto.choices["why"]


@pytest.mark.parametrize("loss", [keyed_loss, unkeyed_loss])
def test_hooks_that_call_a_loss_that_draws_repeat(loss):
    data, model = make_clients([9, 4]), Drawing(lambda x: x)
    before = torch.get_rng_state()
    runs = [ud.train(model, data, ud.FedCurv(0.1), loss=loss, rounds=2, local=LOCAL) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before) and same_bits(runs[0].params, runs[1].params)
