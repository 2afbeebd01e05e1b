"""Random functions of torch as functions of a key: each against its distribution, attention against its formula."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from undrift.functional.draws import KeyedDraws
from undrift.functional.dropouts import _attention
from undrift.random import Key, keep_mask

N = 200_000
EULER = 0.5772156649015329


def key(number=0, step=0):
    return Key(torch.tensor([number, 7]), torch.tensor(step))


def empty(dtype=torch.float32):
    return torch.empty(N, dtype=dtype)


def gumbel(dtype=torch.float64):
    """The difference of two Gumbel variables, from the logarithm of the odds of a relaxed sample."""
    p = F.gumbel_softmax(torch.zeros(N, 2, dtype=dtype), tau=1.0)
    return p[:, 0].log() - p[:, 1].log()


D = torch.distributions
# Name: a draw of N numbers, its mean and its variance.
KINDS = {
    "rand": (lambda: torch.rand(N), 0.5, 1 / 12),
    "rand of a size": (lambda: torch.rand((N,)), 0.5, 1 / 12),
    "rand_like": (lambda: torch.rand_like(empty()), 0.5, 1 / 12),
    "randn": (lambda: torch.randn(size=(N,)), 0, 1),
    "randn out": (lambda: torch.randn(N, out=empty()), 0, 1),
    "randint": (lambda: torch.randint(6, (N,)), 2.5, 35 / 12),
    "randint low": (lambda: torch.randint(-2, 4, (N,)), 0.5, 35 / 12),
    "randint named": (lambda: torch.randint(low=1, high=7, size=(N,)), 3.5, 35 / 12),
    "randint huge": (lambda: torch.randint(2**40, (N,)).double() / 2**40, 0.5, 1 / 12),
    "randint_like": (lambda: torch.randint_like(empty(), 1, 7), 3.5, 35 / 12),
    "randperm": (lambda: torch.randperm(N).double() / N, 0.5, 1 / 12),
    "normal": (lambda: torch.normal(2.0, 3.0, (N,)), 2, 9),
    "normal of tensors": (lambda: torch.normal(torch.full((N,), 2.0), torch.tensor(3.0)), 2, 9),
    "normal of a mean": (lambda: torch.normal(torch.full((N,), 2.0)), 2, 1),
    "normal of a std": (lambda: torch.normal(2.0, torch.full((N,), 3.0)), 2, 9),
    "normal_": (lambda: empty().normal_(2, 3), 2, 9),
    "uniform_": (lambda: empty().uniform_(-1, 3), 1, 16 / 12),
    "uniform_ named": (lambda: empty().uniform_(**{"from": -1, "to": 3}), 1, 16 / 12),
    "exponential_": (lambda: empty().exponential_(2.0), 0.5, 0.25),
    "log_normal_": (lambda: empty().log_normal_(0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
    "geometric_": (lambda: empty().geometric_(0.25), 4, 12),
    "cauchy_": (lambda: empty().cauchy_(1, 2).sub(1).div(2).atan(), 0, math.pi**2 / 12),
    "random_": (lambda: empty().random_() / 2**24, 0.5, 1 / 12),
    "random_ to": (lambda: torch.empty(N, dtype=torch.int64).random_(6), 2.5, 35 / 12),
    "random_ from to": (lambda: torch.empty(N, dtype=torch.int64).random_(1, 7), 3.5, 35 / 12),
    "random_ of bytes": (lambda: torch.empty(N, dtype=torch.uint8).random_(), 127.5, (256**2 - 1) / 12),
    "random_ of int64": (lambda: torch.empty(N, dtype=torch.int64).random_().double() / 2**63, 0.5, 1 / 12),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), 0.3, 0.21),
    "bernoulli p": (lambda: torch.bernoulli(torch.zeros(N), 0.3), 0.3, 0.21),
    "Tensor.bernoulli": (lambda: torch.full((N,), 0.3).bernoulli(), 0.3, 0.21),
    "bernoulli_": (lambda: empty().bernoulli_(0.3), 0.3, 0.21),
    "bernoulli_ of a tensor": (lambda: empty().bernoulli_(torch.full((N,), 0.3)), 0.3, 0.21),
    "bernoulli_ of one": (lambda: empty().bernoulli_(1.0) + empty().bernoulli_(0.0), 1, 0),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 0, 3, 4]).expand(N, 4), 1), 2.25, 0.9375),
    "multinomial repeated": (lambda: torch.tensor([1.0, 0, 3, 4]).multinomial(N, True), 2.25, 0.9375),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2), 1, 0.25),
    "dropout in place": (lambda: torch.dropout_(torch.ones(N), 0.2, True), 1, 0.25),
    "dropout1d": (lambda: F.dropout1d(torch.ones(N, 2, 3), 0.2)[:, 1, 2], 1, 0.25),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.randn(N), 0.3, training=True), 0, 1),
    "feature_alpha_dropout": (lambda: nn.FeatureAlphaDropout(0.3)(torch.randn(N, 1, 2))[:, :, 1], 0, 1),
    "rrelu": (lambda: F.rrelu(torch.full((N,), -1.0), 0.2, 0.8, training=True), -0.5, 0.36 / 12),
    "gumbel_softmax": (gumbel, 0, math.pi**2 / 3),
    "Normal.rsample": (lambda: D.Normal(torch.full((N,), 2.0), 3.0).rsample(), 2, 9),
    "Normal.sample": (lambda: D.Normal(torch.full((N,), 2.0), 3.0).sample(), 2, 9),
    "Uniform": (lambda: D.Uniform(torch.zeros(N), 2.0).rsample(), 1, 1 / 3),
    "Gumbel": (lambda: D.Gumbel(torch.zeros(N), 1.0).rsample(), EULER, math.pi**2 / 6),
    "Laplace": (lambda: D.Laplace(torch.zeros(N), 1.0).rsample(), 0, 2),
    "Exponential": (lambda: D.Exponential(torch.full((N,), 2.0)).rsample(), 0.5, 0.25),
    "Bernoulli": (lambda: D.Bernoulli(torch.full((N,), 0.3)).sample(), 0.3, 0.21),
    "Categorical": (lambda: D.Categorical(torch.tensor([1.0, 0, 3, 4])).sample((N,)), 2.25, 0.9375),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_draw_has_its_mean_and_its_variance(name):
    """Within six standard errors, the variance's by the fourth moment of the draw itself."""
    draw, mean, variance = KINDS[name]
    before = torch.get_rng_state()
    with KeyedDraws(key()):
        found = draw()
    with KeyedDraws(key()):
        again = draw()
    with KeyedDraws(key(1)):
        other = draw()
    assert torch.equal(torch.get_rng_state(), before), "the global generator must not be touched"
    assert torch.equal(found, again) and (variance == 0 or not torch.equal(found, other))
    found = found.double().flatten()
    assert len(found) == N
    deviation = (found - mean).square()
    assert abs(found.mean() - mean) <= 6 * math.sqrt(variance / N)
    assert abs(deviation.mean() - variance) <= 6 * deviation.std() / math.sqrt(N)


def test_types_and_shapes_are_those_of_torch():
    calls = [
        lambda: torch.randint(5, (2, 3)), lambda: torch.randint(5, (2,), dtype=torch.int32), lambda: torch.randperm(4),
        lambda: torch.rand([]), lambda: torch.rand(2, 3).double(), lambda: torch.randn((), dtype=torch.half),
        lambda: torch.multinomial(torch.ones(3, 4), 2), lambda: torch.multinomial(torch.ones(4), 2, True),
        lambda: torch.normal(torch.ones(3, 1), torch.ones(2)), lambda: torch.bernoulli(torch.ones(2).half()),
        lambda: torch.randint_like(torch.ones(3, dtype=torch.uint8), 4), lambda: torch.empty(2).bfloat16().normal_(),
        lambda: F.fractional_max_pool2d(torch.rand(2, 3, 8, 8), 2, output_size=4),
        lambda: F.fractional_max_pool3d(torch.rand(2, 3, 8, 8, 8), 2, output_ratio=0.5),
        lambda: torch.randn(3, requires_grad=True) * 1, lambda: nn.RReLU()(torch.ones(2).double()),
    ]  # fmt: skip
    for call in calls:
        with KeyedDraws(key()):
            mine = call()
        theirs = call()
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def test_draws_without_replacement_are_distinct_and_in_the_order_of_chance():
    p = torch.tensor([1.0, 2, 3, 0])
    with KeyedDraws(key()):
        found = torch.multinomial(p.expand(N, 4), 3)
    assert (found.sort(1).values == torch.arange(3)).all(), "0 has no chance, the others come once"
    first = torch.bincount(found[:, 0], minlength=3) / N
    assert torch.allclose(first, p[:3] / 6, atol=6 * 0.5 / math.sqrt(N))
    second = torch.bincount(found[found[:, 0] == 2, 1], minlength=2).double()
    assert torch.allclose(second / second.sum(), torch.tensor([1 / 3, 2 / 3]).double(), atol=6 * 0.5 / math.sqrt(N / 2))


def test_permutations_are_all_there_and_equally_likely():
    seen = {}
    for i in range(1200):
        with KeyedDraws(key(i)):
            order = tuple(torch.randperm(3).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6 and all(abs(count - 200) < 6 * math.sqrt(200 * 5 / 6) for count in seen.values())


def test_in_place_dropout_writes_where_torch_writes():
    """`x + nn.Dropout(inplace=True)(x)` has the dropped values twice."""
    x = torch.ones(1000)
    with KeyedDraws(key()):
        y = nn.Dropout(0.5, inplace=True)(x)
    assert y is x and set(x.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    "draw", [lambda x: F.dropout(x, 0.5), torch.rand_like, lambda x: x.new_empty(x.shape).normal_()]
)
def test_padding_changes_no_samples_draws(draw):
    with KeyedDraws(key()):
        short = draw(torch.ones(3, 5))
    with KeyedDraws(key()):
        padded = draw(torch.ones(8, 5))
    assert torch.equal(short, padded[:3])


# ---- attention -----------------------------------------------------------------------------------------------------


def heads(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for _ in range(3)]


def nothing_dropped(draw, shape, p):
    return torch.ones(tuple(shape), dtype=torch.bool)


ALLOWED = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.6
ALLOWED[0, 0, 2] = False  # a query that may see no key
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": ALLOWED},
    "causal and bool": {"attn_mask": ALLOWED, "is_causal": True},
    "float": {"attn_mask": torch.linspace(-3, 3, 25, dtype=torch.float64).view(5, 5)},
    "infinite": {"attn_mask": torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(~ALLOWED, -math.inf)},
    "scale": {"scale": 0.3},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_without_a_dropped_weight_is_torch_s(name):
    """Values and gradients, with p so small that nothing is scaled either."""
    q, k, v = heads(2, 4, 5, 3)
    if name == "grouped":
        k, v = k[:, :2], v[:, :2]
    results = []
    for attend in (
        lambda *a, **o: _attention(nothing_dropped, *a, dropout_p=1e-15, **o),
        F.scaled_dot_product_attention,
    ):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attend(*leaves, **MASKS[name])
        results.append([out, *torch.autograd.grad(out.cos().sum(), leaves)])
    for mine, theirs in zip(*results, strict=True):
        assert mine.isfinite().all() and (mine - theirs).abs().max() < 1e-12


def test_attention_with_dropout_is_its_formula():
    """From the equation, with the mask of the key's first stream."""
    q, k, v = heads(2, 4, 5, 3)
    with KeyedDraws(key()):
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    weights = torch.softmax(torch.einsum("bhle,bhse->bhls", q, k) / math.sqrt(3), -1)
    dropped = weights * keep_mask(key(), (2, 4, 5, 5), 0.3) / 0.7
    assert (found - torch.einsum("bhls,bhse->bhle", dropped, v)).abs().max() < 1e-12


def test_the_expectation_of_attention_with_dropout_is_attention_without():
    q, k, v = (t.expand(40_000, 2, 3, 4) for t in heads(1, 2, 3, 4))
    with KeyedDraws(key()):
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
    exact = F.scaled_dot_product_attention(q[:1], k[:1], v[:1])
    assert ((found.mean(0) - exact[0]).abs() < 6 * found.std(0) / math.sqrt(40_000)).all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_draws_from_the_key(need_weights):
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    runs = []
    for number in (0, 0, 1):
        with KeyedDraws(key(number)) as keyed:
            runs.append(layer(x, x, x, need_weights=need_weights)[0])
        assert keyed.calls == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0], runs[1]) and not torch.allclose(runs[0], runs[2])
    layer.eval()
    with KeyedDraws(key()) as keyed:
        assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0]) and keyed.calls == 0


# ---- recurrent layers ----------------------------------------------------------------------------------------------

LAYERS = {
    "gru": lambda **o: nn.GRU(3, 4, 3, **o),
    "lstm": lambda **o: nn.LSTM(3, 4, 3, **o),
    "rnn": lambda **o: nn.RNN(3, 4, 3, **o),
    "both directions": lambda **o: nn.LSTM(3, 4, 3, bidirectional=True, **o),
    "projected": lambda **o: nn.LSTM(3, 4, 3, proj_size=2, **o),
    "batch first": lambda **o: nn.GRU(3, 4, 3, batch_first=True, **o),
    "no biases": lambda **o: nn.LSTM(3, 4, 3, bias=False, **o),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_one_by_one_are_the_whole_recurrence(name, packed):
    """With a dropout so small that it drops nothing, keyed dropout is no dropout; with a large one, it is some."""
    torch.manual_seed(0)
    x = torch.randn(5, 5, 3, dtype=torch.float64)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 4, 4, 2, 1], batch_first=name == "batch first")
    runs = []
    for dropout in (0.0, 1e-13, 0.5):
        torch.manual_seed(1)
        layer = LAYERS[name](dropout=dropout).double()
        with KeyedDraws(key()) as keyed:
            out, states = layer(x)
        assert keyed.calls == (2 if dropout else 0)
        out = out.data if packed else out
        runs.append(torch.cat([t.flatten() for t in (out, *(states if isinstance(states, tuple) else (states,)))]))
    assert (runs[0] - runs[1]).abs().max() < 1e-10 and (runs[0] - runs[2]).abs().max() > 1e-3
