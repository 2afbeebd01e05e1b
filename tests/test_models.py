"""Models by name: sizes, first weights, refusals; recurrent layers that equal torch's own and run as lanes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import undrift as ud
from tests.problems import distance, same_bits
from undrift import models
from undrift.functional.model import Model
from undrift.functional.recurrent.layers import GRU, LSTM, adopt, gru
from undrift.random import Key


def conv(kernel, before, after):
    return kernel * kernel * before * after + after


def linear(before, after):
    return before * after + after


def recurrent(gates, before, width):
    return gates * width * (before + width + 2)


MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
BLOCK = 5  # scalars of a residual block: four biases and a multiplier
VGG = conv(3, 3, 32) + conv(3, 32, 64) + conv(3, 64, 128) + conv(3, 128, 128) + conv(3, 128, 256) + conv(3, 256, 256)
RESNET = 9 * (3 * 16 + 3 * 2 * 16 * 16 + (16 * 32 + 32 * 32) + 2 * 2 * 32 * 32 + (32 * 64 + 64 * 64) + 2 * 2 * 64 * 64)
COUNTS = [
    ("mlp", 10, MNIST, {}, linear(784, 64) + linear(64, 10)),
    ("mlp", 10, MNIST, {"hidden": 25}, linear(784, 25) + linear(25, 10)),
    ("logistic", 500, (10_000,), {}, 10_000 * 500 + 500),
    ("svm", 2, MNIST, {}, 784 * 2 + 2),
    ("cnn", 10, (1, 8, 8), {}, conv(3, 1, 16) + conv(3, 16, 32) + linear(32 * 2 * 2, 64) + linear(64, 10)),
    ("lenet5", 10, MNIST, {}, 61_706),
    ("lenet5", 10, (1, 32, 32), {}, 61_706),  # 28×28 is padded to this
    ("lenet5", 10, CIFAR, {}, 61_706 + 2 * 25 * 6),
    ("lenet5", 10, (1, 16, 20), {}, conv(5, 1, 6) + conv(5, 6, 16) + linear(32, 120) + linear(120, 84) + 85 * 10),
    ("cnn_fedavg", 10, MNIST, {}, 1_663_370),  # the number that McMahan et al. give
    ("cnn_fedavg", 62, MNIST, {}, 1_663_370 + 52 * 513),
    ("cnn_femnist", 62, MNIST, {}, conv(3, 1, 32) + conv(3, 32, 64) + linear(64 * 5 * 5, 512) + linear(512, 62)),
    ("cnn_temporal", 10, MNIST, {}, conv(5, 1, 16) + conv(5, 16, 32) + linear(32 * 4 * 4, 512) + linear(512, 10)),
    ("cnn_temporal", 10, CIFAR, {}, conv(5, 3, 16) + conv(5, 16, 32) + linear(32 * 5 * 5, 512) + linear(512, 10)),
    ("vgg9", 10, CIFAR, {}, VGG + linear(256 * 4 * 4, 512) + linear(512, 512) + linear(512, 10)),
    ("vgg9", 100, CIFAR, {"dropout": False}, VGG + linear(256 * 4 * 4, 512) + linear(512, 512) + linear(512, 100)),
    ("resnet20", 10, CIFAR, {}, RESNET + 9 * BLOCK + 2 + linear(64, 10)),
    ("gru", 90, (80,), {}, 90 * 8 + recurrent(3, 8, 256) + recurrent(3, 256, 256) + linear(256, 90)),
    ("gru", 10, (80,), {"vocabulary": 50}, 50 * 8 + recurrent(3, 8, 256) + recurrent(3, 256, 256) + linear(256, 10)),
    ("gru", 10, (1, 40, 64), {"layers": 1}, recurrent(3, 40, 256) + linear(256, 10)),
    ("lstm", 4, (30,), {"vocabulary": 1000}, 1000 * 64 + recurrent(4, 64, 128) + linear(128, 4)),
    ("lstm", 10, (1, 40, 64), {}, recurrent(4, 40, 128) + linear(128, 10)),
    ("lstm", 10, (64, 40), {"hidden": 32}, recurrent(4, 40, 32) + linear(32, 10)),
]


@pytest.mark.parametrize(("name", "classes", "shape", "options", "count"), COUNTS)
def test_parameters_are_as_many_as_counted_by_hand(name, classes, shape, options, count):
    model = models.get(name, classes=classes, shape=shape, **options)
    assert sum(p.numel() for p in model.parameters()) == count


def test_every_model_is_counted():
    assert {name for name, *_ in COUNTS} == set(models.MODELS)


SMALL = [
    ("mlp", (1, 4, 4), {}),
    ("logistic", (7,), {}),
    ("svm", (7,), {}),
    ("cnn", (1, 5, 6), {}),
    ("lenet5", (1, 28, 28), {}),
    ("lenet5", (2, 16, 18), {}),
    ("cnn_fedavg", (1, 4, 4), {}),
    ("cnn_femnist", (1, 10, 12), {}),
    ("cnn_temporal", (1, 16, 16), {}),
    ("vgg9", (3, 8, 9), {}),
    ("resnet20", (3, 7, 8), {}),
    ("gru", (5,), {"hidden": 6}),
    ("gru", (5, 3), {"hidden": 6}),
    ("lstm", (5,), {"hidden": 6, "vocabulary": 3, "layers": 2}),
    ("lstm", (1, 3, 5), {"hidden": 6}),
]


def noise(*shape):
    torch.manual_seed(3)
    return torch.randn(shape, dtype=torch.float64)


def samples(name, shape, n):
    torch.manual_seed(3)
    return torch.randint(3, (n, *shape)) if name in ("gru", "lstm") and len(shape) == 1 else noise(n, *shape)


def disturbed(model, seed):
    """Weights near the model's own: ResNet-20 starts with a classifier of zeros, which would hide all errors."""
    torch.manual_seed(seed)
    return {name: w.detach() + 0.1 * torch.randn_like(w) for name, w in model.named_parameters()}


@pytest.mark.parametrize(("name", "shape", "options"), SMALL)
def test_every_model_runs_under_vmap_as_it_does_alone(name, shape, options):
    model = models.get(name, classes=3, shape=shape, **options).double().eval()
    adopt(model)
    x = samples(name, shape, 4).view(2, 2, *shape)
    lanes = [disturbed(model, seed) for seed in (1, 2)]
    stacked = {n: torch.stack([lane[n] for lane in lanes]) for n in lanes[0]}
    together = vmap(lambda params, x: functional_call(model, params, (x,)))(stacked, x)
    alone = torch.stack([functional_call(model, lane, (rows,)) for lane, rows in zip(lanes, x, strict=True)])
    assert together.shape == (2, 2, 3) and alone.std() > 1e-3
    assert torch.allclose(together, alone, rtol=1e-10, atol=1e-12)


@pytest.fixture(params=[(GRU, nn.GRU), (LSTM, nn.LSTM)], ids=["gru", "lstm"])
def pair(request):
    """Our layer and torch's, two deep, with the same weights."""
    ours, theirs = request.param
    torch.manual_seed(0)
    mine, reference = (kind(5, 7, 2, batch_first=True).double() for kind in (ours, theirs))
    mine.load_state_dict(reference.state_dict())
    return mine, reference


def score(layer, x, state=None):
    """A number that every output counts in."""
    out, end = layer(x, state)
    ends = end if isinstance(end, tuple) else (end,)
    return out.sin().sum() + sum((i + 1) * e.square().sum() for i, e in enumerate(ends))


def gradients(layer, params, x):
    return grad(lambda params: score(lambda x, _: functional_call(layer, params, (x,)), x))(params)


def test_outputs_and_all_gradients_are_those_of_torch(pair):
    mine, reference = pair
    x, start = torch.randn(4, 6, 5, dtype=torch.float64), torch.randn(2, 2, 4, 7, dtype=torch.float64)
    found = []
    for layer in (mine, reference):
        leaves = [x.clone().requires_grad_(), start[0].clone().requires_grad_(), start[1].clone().requires_grad_()]
        state = (leaves[1], leaves[2]) if isinstance(mine, LSTM) else leaves[1] + leaves[2]
        value = score(layer, leaves[0], state)
        found.append([value, *layer(x)[0], *torch.autograd.grad(value, [*leaves, *layer.parameters()])])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-10


def test_gradients_of_lanes_are_those_of_a_loop(pair):
    mine, _ = pair
    lanes = [disturbed(mine, seed) for seed in range(3)]
    x = noise(3, 4, 6, 5)
    together = vmap(lambda params, x: gradients(mine, params, x))(
        {n: torch.stack([p[n] for p in lanes]) for n in lanes[0]}, x
    )
    for i, params in enumerate(lanes):
        alone = gradients(mine, params, x[i])
        assert distance({n: g[i] for n, g in together.items()}, alone) < 1e-12


def test_gradients_by_sample_inside_lanes_are_those_of_a_loop(pair):
    mine, _ = pair
    lanes, x = [disturbed(mine, seed) for seed in range(2)], noise(2, 3, 6, 5)
    stacked = {n: torch.stack([p[n] for p in lanes]) for n in lanes[0]}
    by_sample = vmap(lambda params, x: vmap(lambda row: gradients(mine, params, row[None]))(x))(stacked, x)
    for i, params in enumerate(lanes):
        for j in range(3):
            alone = gradients(mine, params, x[i, j : j + 1])
            assert distance({n: g[i, j] for n, g in by_sample.items()}, alone) < 1e-12


def test_no_second_derivative_is_promised(pair):
    mine, _ = pair
    params, x = disturbed(mine, 0), noise(2, 6, 5)
    with pytest.raises(ud.UndriftError, match="have no second derivative"):
        grad(lambda params: gradients(mine, params, x)["weight_hh_l0"].sum())(params)


def test_recurrent_layers_take_bfloat16(pair):
    mine, _ = pair
    x, params = noise(4, 6, 5), disturbed(mine, 0)
    half = {n: w.bfloat16() for n, w in params.items()}
    together = vmap(lambda params, x: gradients(mine, params, x))(
        {n: w[None] for n, w in half.items()}, x[None].bfloat16()
    )
    assert all(g.dtype == torch.bfloat16 for g in together.values())
    assert distance({n: g[0] for n, g in together.items()}, gradients(mine, params, x)) < 0.05


@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.parametrize("shape", [(6,), (6, 5), (1, 5, 6)])
def test_neurons_of_our_layers_are_found_as_those_of_torch(name, shape):
    x = samples(name, shape, 4)
    modules = [models.get(name, classes=3, shape=shape, hidden=7, layers=2, vocabulary=3).double() for _ in range(2)]
    modules[0].load_state_dict(modules[1].state_dict())
    adopt(modules[0])
    ours, theirs = (Model(module, x.device).examined(x)[0] for module in modules)
    assert ours.layers == theirs.layers
    assert [layer.name for layer in ours.layers] == ["rnn[0]", "rnn[1]", "head"]
    gates = {"gru": 3, "lstm": 4}[name]
    own = {f"rnn.{n}_l1": (0, gates) for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    assert ours.layers[1].params == own
    found, expected = (model.activations(model.start, x) for model in (ours, theirs))
    assert distance(found, expected) < 1e-12
    assert torch.allclose(ours.features(ours.start, x), theirs.features(theirs.start, x))
    words = torch.tensor([1, 2])
    assert torch.equal(ours.train(ours.start, x, Key(words, words[0])), ours(ours.start, x))  # a key changes nothing


def test_samples_are_read_along_time():
    """A spectrogram is the same reading as the sequence of its columns, and the last step is the one that counts."""
    spectrogram = noise(2, 1, 3, 5)
    sequence = spectrogram[:, 0].transpose(1, 2)
    one, two = (models.get("lstm", classes=3, shape=s, hidden=6).double() for s in ((1, 3, 5), (5, 3)))
    assert torch.equal(one(spectrogram), two(sequence))
    assert torch.equal(two(sequence), two.head(two.rnn(sequence)[1][0][-1]))


def test_an_lstm_may_read_the_mean_of_its_states_and_start_without_forgetting():
    def made(**options: object) -> nn.Module:
        return models.get("lstm", classes=3, shape=(5, 3), hidden=6, layers=2, **options).double()

    last, mean, steady = made(), made(pool="mean"), made(forget_bias=1)
    x = noise(2, 5, 3)
    assert torch.equal(mean(x), mean.head(mean.rnn(x)[0].mean(1))) and not torch.allclose(mean(x), last(x))
    for layer in range(2):
        biases = [getattr(m.rnn, f"bias_ih_l{layer}") + getattr(m.rnn, f"bias_hh_l{layer}") for m in (last, steady)]
        assert (biases[1][6:12] == 1).all()
        for kept in (slice(0, 6), slice(12, 24)):
            assert torch.equal(biases[0][kept], biases[1][kept])


@pytest.mark.parametrize("method", [ud.FedAvg(), ud.FedNLR()])
def test_a_gru_trains_the_same_on_both_engines(method):
    torch.manual_seed(0)
    texts = [torch.randint(0, 6, (n, 5)) for n in (7, 4, 9)]
    data = ud.FederatedDataset.from_clients([(x, (x[:, 0] + i) % 6) for i, x in enumerate(texts)])
    module = models.get("gru", classes=6, shape=(5,), hidden=8).double()
    settings = {"rounds": 2, "local": ud.Local(epochs=1, batch_size=4, lr=0.5)}
    lanes, plain = (ud.train(module, data, method, engine=e, **settings) for e in ("lanes", "plain"))
    assert lanes.choices["lanes"] > 1
    assert distance(lanes.params, plain.params) < 1e-12
    moved = {n: w.cpu() - module.state_dict()[n] for n, w in lanes.params.items()}
    assert all(change.norm() > 1e-4 for change in moved.values())
    assert ud.train(module, data, method, precision="bfloat16", **settings).choices["engine"] == "lanes"


@torch.no_grad()
def test_vgg9_starts_as_the_paper_says():
    model = models.get("vgg9", classes=10, shape=CIFAR)
    convolutions = [m for m in model if isinstance(m, nn.Conv2d)]
    layers = [m for m in model if isinstance(m, nn.Linear)]
    assert len(convolutions) == 6 and len(layers) == 3
    assert not any(m.bias.any() for m in convolutions + layers)
    for m in convolutions:
        bound = math.sqrt(6 / (9 * m.in_channels))
        assert 0.98 * bound < m.weight.abs().max() <= bound
        assert m.weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    for m in layers:
        assert m.weight.std() == pytest.approx(math.sqrt(2 / (m.in_features + m.out_features)), rel=0.05)
        assert m.weight.abs().max() > 3 * m.weight.std()  # a uniform draw ends at √3 of them


def test_vgg9_drops_where_niid_bench_does():
    drops, plain = (models.get("vgg9", classes=10, shape=CIFAR, dropout=d) for d in (True, False))
    kinds = " ".join(type(m).__name__ for m in drops if not isinstance(m, nn.ReLU))
    assert kinds == (
        "Conv2d Conv2d MaxPool2d Conv2d Conv2d MaxPool2d Dropout2d Conv2d Conv2d MaxPool2d Flatten "
        "Dropout Linear Linear Dropout Linear"
    )
    assert [m.p for m in drops if "Dropout" in type(m).__name__] == [0.05, 0.1, 0.1]
    assert not any("Dropout" in type(m).__name__ for m in plain)
    assert same_bits(drops.state_dict(), plain.state_dict())


@torch.no_grad()
def test_resnet20_starts_by_fixup():
    model = models.get("resnet20", classes=10, shape=CIFAR)
    assert math.sqrt(sum(float(p.square().sum()) for p in model.parameters())) == pytest.approx(8.85, abs=0.15)
    x = torch.randn(2, *CIFAR)
    assert not model(x).any()
    # With zeros for every block's last convolution the first stage is the identity.
    stem = F.relu(model.conv1(x))
    assert torch.equal(model.blocks[:3](stem), stem)
    half = model.blocks[:4](stem)
    assert torch.equal(half[:, :16], stem[:, :, ::2, ::2]) and not half[:, 16:].any()
    for block in model.blocks:
        he = math.sqrt(2 / (9 * block.conv1.out_channels))
        assert block.conv1.weight.std() == pytest.approx(he / 3, rel=0.05)
        assert (block.scale.tolist(), block.bias1a.tolist()) == ([1.0], [0.0])
    assert model.blocks(stem).shape == (2, 64, 8, 8)


def test_the_seed_decides_the_weights_and_nothing_else_is_drawn():
    for name, shape, options in SMALL:
        before = torch.get_rng_state()
        one, same, other = (models.get(name, classes=3, shape=shape, seed=s, **options).state_dict() for s in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), before)
        assert same_bits(one, same) and not same_bits(one, other)


@pytest.mark.parametrize(
    ("name", "shape", "options", "sentence"),
    [
        ("lenet", MNIST, {}, "There is no model called 'lenet'. Did you mean 'lenet5'?"),
        (
            "cnn",
            (1, 3, 8),
            {},
            'The model "cnn" needs images of channels × height × width, at least 4×4, not samples',
        ),
        ("lenet5", (1, 8, 8), {}, 'The model "lenet5" needs images of channels × height × width, at least 16×16'),
        ("cnn_fedavg", (784,), {}, 'The model "cnn_fedavg" needs images .* at least 4×4, not samples of shape'),
        ("cnn_femnist", (1, 9, 28), {}, 'The model "cnn_femnist" needs images .* at least 10×10'),
        ("cnn_temporal", (1, 15, 28), {}, 'The model "cnn_temporal" needs images .* at least 16×16'),
        ("vgg9", (3, 7, 7), {}, 'The model "vgg9" needs images .* at least 8×8, not samples of shape'),
        ("resnet20", (32, 32), {}, 'The model "resnet20" needs images of channels × height × width'),
        ("gru", (3, 32, 32), {}, 'The model "gru" needs tokens of shape .time,., sequences .* or spectrograms'),
        ("lstm", (30,), {}, 'The model "lstm" reads samples of shape .* pass vocabulary to models.get.'),
        ("lstm", (30,), {"vocabulary": 9, "pool": "max"}, 'lstm.pool. must be "last" or "mean", not \'max\'.'),
        (
            "lstm",
            (30,),
            {"vocabulary": 9, "forget_bias": "1"},
            "lstm.forget_bias. must be a finite number, or None, not '1'.",
        ),
        ("lstm", (30,), {"vocabulary": 0}, "vocabulary must be a whole number from 1, not 0."),
        (
            "vgg9",
            CIFAR,
            {"drop": 0.1},
            r"The model \"vgg9\" has no option 'drop' \(did you mean 'dropout'\?\); its options are dropout.",
        ),
        ("vgg9", CIFAR, {"dropout": 0.1}, 'The option dropout of the model "vgg9" must be True or False, not 0.1.'),
        ("cnn", MNIST, {"hidden": 3}, "The model \"cnn\" has no option 'hidden'; it has none."),
        ("gru", (9,), {"depth": 3}, "its options are embedding, hidden, layers."),
        ("gru", (9,), {"hidden": 0}, 'The option hidden of the model "gru" must be a whole number from 1, not 0.'),
    ],
)
def test_what_a_model_cannot_take_is_said(name, shape, options, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        models.get(name, classes=10, shape=shape, **options)


def test_what_reads_no_tokens_ignores_the_vocabulary():
    one, two = (models.get("mlp", classes=3, shape=(4,), vocabulary=v).state_dict() for v in (None, 9))
    assert same_bits(one, two)


def test_what_recurrent_layers_do_not_do_is_said():
    model = models.get("gru", classes=3, shape=(4,), hidden=5)
    with pytest.raises(ud.UndriftError, match="reads tokens: x must hold whole numbers"):
        model(torch.rand(2, 4))
    layer, x = model.rnn, torch.rand(2, 4, 8)
    weights, start = list(layer.parameters()), torch.zeros(2, 2, 5)
    assert torch.allclose(gru(x, start, weights, True, 2, 0.5, False, False, True)[0], layer(x)[0], atol=1e-6)
    for odd in [(False, 2, 0.0, False, False), (True, 2, 0.0, False, True)]:
        with pytest.raises(ud.UndriftError, match="have biases and one direction"):
            gru(x, start, weights, *odd, True)
