"""Models train as ordinary PyTorch trains the caller's own module, or are refused; the rehearsal finds which."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import undrift as ud
from tests.handloop import everything, own_loop, put
from tests.problems import distance, make_clients, same_bits
from undrift.functional import gradient
from undrift.functional.batch_norm import LaneNorms
from undrift.functional.borrowed import borrowed
from undrift.functional.gradient import Held
from undrift.functional.model import Model
from undrift.training import model_rehearsal

LOCAL, ROUNDS = ud.Local(epochs=2, batch_size=4, lr=0.1), 2
UNEVEN = [10, 7, 4, 1]  # short last batches, one full batch, one sample


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def hidden(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        return self.last(self.hidden(x))


def made(kind: Callable[[], Any]) -> Any:
    """A module with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def trained(module, data=None, **options):
    return ud.train(module, data or make_clients(UNEVEN), **{"rounds": ROUNDS, "local": LOCAL, **options})


def refusal(*args, **options) -> str:
    with pytest.raises(ud.UndriftError) as refused:
        trained(*args, **options)
    return str(refused.value)


# ---- weights that are reached in another way than by their names ---------------------------------------------------


class Partial(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = functools.partial(F.linear, weight=self.last.weight)

    def forward(self, x):
        return self.head(self.hidden(x))


class Closure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heads = {"head": lambda h: F.linear(h, self.last.weight)}

    def forward(self, x):
        return self.heads["head"](self.hidden(x))


class InAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heads = [self.last.weight]

    def forward(self, x):
        return F.linear(self.hidden(x), self.heads[0])


class Penalized(Net):
    """The weights' norm is a part of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.all = list(self.parameters())

    def forward(self, x):
        return super().forward(x) * (1 + 0.01 * sum(w.square().sum() for w in self.all))


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Parameter(torch.randn(16, 6).double() / 3), nn.Linear(8, 4).double()
        self.query = self.both[:8]

    def forward(self, x):
        return self.last(torch.tanh(x @ self.query.T + x @ self.both[8:].T))


class ByItsType(Net):
    def forward(self, x):
        return super().forward(x) * (2 if isinstance(self.last.weight, nn.Parameter) else 1)


def patched() -> nn.Module:
    """The `forward` of a module that closes over the one that it replaces, and that of a layer that closes over it."""
    module = Net()
    old, last = module.forward, module.last
    module.forward = lambda x: 2 * old(x)
    module.last.forward = lambda h: F.linear(h, last.weight, 3 * last.bias)
    return module


def bound() -> nn.Module:
    module = Net()
    module.forward = types.MethodType(lambda self, x: self.last(torch.relu(self.first(x))), module)
    return module


# ---- modules under several names -----------------------------------------------------------------------------------


def repeated() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 4)).double()


class Alias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.first = self.backbone[0]

    def forward(self, x):
        return self.backbone(x) + self.first(x)[:, :4]


class Helper:
    def __init__(self, net) -> None:
        self.net = net

    def offset(self):
        return self.net.last.bias.sum()


class Helped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self)

    def forward(self, x):
        return super().forward(x) * (1 + self.helper.offset())


# ---- hooks ---------------------------------------------------------------------------------------------------------


def hooked() -> nn.Module:
    module = Net()
    module.last.weight.register_hook(lambda g: 3 * g)
    return module


class Cast(Net):
    """In lower precision, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [self.last.weight]

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (self.hidden(x.float()) @ self.heads[0].T).float()


def scaled_in_place(p) -> None:
    p.grad.mul_(3)


def hooked_afterwards() -> nn.Module:
    module = Net()
    module.last.weight.register_post_accumulate_grad_hook(scaled_in_place)
    return module


def hooked_forward() -> nn.Module:
    module = Net()
    module.first.register_forward_hook(lambda layer, args, output: 2 * output)
    return module


def hooked_backward() -> nn.Module:
    module = Net()
    module.last.register_full_backward_hook(lambda layer, before, after: (2 * before[0],))
    return module


# ---- state in Python, and generators -------------------------------------------------------------------------------


class ByBatch(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if len(x) >= 4 else 0.5)


class Remembering(Net):
    """A cache by shape, and counts and lists that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        if len(x) not in self.cache:
            self.cache[len(x)] = 0.01 * torch.arange(len(x), dtype=x.dtype)[:, None]
        return super().forward(x) + self.cache[len(x)]


class Supervised(Net):
    """What deep supervision and spiking neurons keep: features, with their history, in a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.states = [torch.zeros(1)], {"h": None}

    def hidden(self, x):
        self.features[0] = self.states["h"] = super().hidden(x)
        return self.features[0]


class Potentials(Net):
    """A buffer of the shape of the batch, which is not a part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("potential", torch.zeros(0).double(), persistent=False)

    def hidden(self, x):
        self.potential = torch.zeros(len(x), 8).double()
        for _ in range(2):
            self.potential = 0.5 * self.potential + self.first(x)
        return torch.tanh(self.potential)


class Caching(Net):
    """A product of weights, without a gradient, serves in evaluation mode until the next step."""

    kept = None

    def forward(self, x):
        if self.training:
            self.kept = None
            return super().forward(x)
        if self.kept is None:
            self.kept = self.last.weight.detach() @ self.first.weight.detach()
        return x @ self.kept.T


class Merging(Caching):
    """Or until the mode changes."""

    def train(self, mode=True):
        self.kept = None
        return super().train(mode)


class Checkpointed(Net):
    """Counts, as batch norm does, in a pass that is computed again for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()).double())

    def counted(self, x):
        if self.training:
            self.calls += 1
        return super().hidden(x)

    def hidden(self, x):
        return checkpoint(self.counted, x, use_reentrant=False)


def checkpointed_and_hooked() -> nn.Module:
    module = Checkpointed()
    module.last.weight.register_hook(lambda g: 3 * g)
    return module


class Recording(Net):
    """Counts its calls in a buffer, in evaluation mode too, as observers for quantization record."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()).double())

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class AlwaysTraining(Net):
    """`eval` is overridden, as some libraries do to keep a layer in training mode."""

    def eval(self):
        return self

    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


class BackwardInside(Net):
    """An energy's gradient, as in reversible blocks."""

    def forward(self, x):
        h = self.first(x)
        with torch.enable_grad():
            own = h.detach().requires_grad_()
            torch.tanh(own).square().sum().backward()
        return self.last(torch.tanh(h) + 0.1 * own.grad)


class FixedFeatures(Net):
    """Random features that are to be the same in every call."""

    def features(self):
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) + x @ self.features()))


class SeededFeatures(FixedFeatures):
    def features(self):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return torch.randn(6, 8, dtype=torch.float64)


# ---- gradients and evaluation in ways of their own -----------------------------------------------------------------


class ByFrequency(nn.Module):
    """An embedding whose gradient depends on how often a token is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8, scale_grad_by_freq=True)
        self.last = nn.Linear(8, 4)
        self.double()

    def forward(self, x):
        return self.last(self.embedding((2 * x[:, :3].abs()).long().clamp(max=4)).mean(1))


class Encoder(nn.Module):
    """Whose evaluation takes another path than its training, by nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(6, 4)
        self.double()

    def forward(self, x):
        mask = torch.zeros(len(x), 3, dtype=torch.bool)
        mask[:, 2] = x[:, 0] > 0
        return self.last(self.encoder(torch.stack([x, 2 * x, x / 2], 1), src_key_padding_mask=mask).mean(1))


RIGHT: dict[Callable[[], Any], str] = {
    Net: "lanes",
    Partial: "in place",
    Closure: "lanes",
    InAList: "in place",
    Penalized: "in place",
    Sliced: "in place",
    ByItsType: "in place",
    patched: "lanes",
    bound: "lanes",
    repeated: "lanes",
    Alias: "lanes",
    Helped: "lanes",
    hooked: "its parameters have hooks",
    hooked_afterwards: "its parameters have hooks",
    hooked_forward: "lanes",
    hooked_backward: "vmap",
    ByBatch: "interact",
    Remembering: "lanes",
    Supervised: "lanes",
    Potentials: "lanes",
    Caching: "in lanes the output in evaluation mode is off by",
    Merging: "lanes",
    Checkpointed: "training changes its buffer 'calls'",
    checkpointed_and_hooked: "its parameters have hooks",
    Recording: "training changes its buffer 'calls'",
    AlwaysTraining: "lanes",
    BackwardInside: "vmap",
    FixedFeatures: "a generator that it seeds itself",
    SeededFeatures: "seeds torch's generators",
    ByFrequency: "in lanes 'embedding.weight' is off by",
    Encoder: "vmap",
}
"""The engine that trains it, or words of the reason for which the plain engine does."""


NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch warns once per process


@NESTED
@pytest.mark.parametrize("tested", [True, False], ids=["tested", "untested"])
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_the_weights_are_those_of_ordinary_pytorch(kind, tested):
    data = make_clients(UNEVEN)
    test = data.test
    if not tested:
        data = ud.FederatedDataset(data.store, data.index, data.offsets)
    module = made(kind)
    before = copy.deepcopy(everything(module))
    found = trained(module, data)
    assert same_bits(everything(module), before), "the caller's module has changed"
    assert distance(everything(found.model), own_loop(made(kind), data, LOCAL, ROUNDS)) < 1e-12
    assert (found.choices["engine"] if RIGHT[kind] == "lanes" else found.choices["why"]).find(RIGHT[kind]) >= 0
    # The result is a module like the caller's: it can be trained further, and evaluated as the history has it.
    mine, theirs = (dict(one.named_parameters()) for one in (found.model, module))
    assert mine.keys() == theirs.keys() and all(isinstance(p, nn.Parameter) and p.is_leaf for p in mine.values())
    with torch.no_grad():
        output = found.model(test[0])
    if tested:
        assert found.history[-1]["loss"] == pytest.approx(float(F.cross_entropy(output, test[1])), rel=1e-12)
    F.cross_entropy(found.model.train()(test[0]), test[1]).backward()
    assert sum(p.grad is not None and bool(p.grad.any()) for p in mine.values()) >= 3


# ---- what is refused -----------------------------------------------------------------------------------------------


class Weak(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = weakref.ref(self.last)

    def forward(self, x):
        return self.head()(self.hidden(x))


class Global(Net):
    def __init__(self) -> None:
        super().__init__()
        KNOWN.append(self)

    def forward(self, x):
        return KNOWN[-1].last(self.hidden(x))


KNOWN: list[nn.Module] = []


class TiedByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.last = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 4)
        self.double()
        self.decoder.weight.data = self.encoder.weight.data.T

    def forward(self, x):
        return self.last(self.decoder(torch.tanh(self.encoder(x))))


class Counting(Net):
    calls = 0

    def factor(self):
        return 1 + 0.1 * self.calls

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * self.factor()


class WarmingUp(Counting):
    """For the first calls, nothing changes."""

    def factor(self):
        return 1 if self.calls < 40 else 2


class CountingEvaluations(Net):
    calls = 0

    def forward(self, x):
        type(self).calls += not self.training
        return super().forward(x) * (1 if self.training else self.calls)


class Keeping(Net):
    """Keeps features with their history, which the next call uses, if only in principle."""

    kept = 0.0

    def hidden(self, x):
        self.kept = super().hidden(x).mean() + 0 * self.kept
        return super().hidden(x) + self.kept


FACTORY = "model=lambda: Net(…)"
REFUSED: dict[Callable[[], Any], tuple[str, ...]] = {
    Weak: ("'last.weight' is off by", "'head' is a weak reference", FACTORY),
    Global: ("is off by", "The forward of Global uses your module by a global name"),
    TiedByData: ("two parameters in the same memory", "decoder.weight = encoder.weight"),
    Counting: ("counts its calls",),
    WarmingUp: ("counts its calls",),
    Keeping: ("PyTorch cannot take two steps with this model", "a gradient through the first", "Reset it in forward"),
    CountingEvaluations: ("output in evaluation mode is off by", "keeps something in Python from one call to the next"),
}


@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_would_be_wrong_is_refused_with_its_cause(kind, engine):
    module = made(kind)
    before = copy.deepcopy(everything(module))
    found = refusal(module, engine=engine)
    assert all(words in found for words in REFUSED[kind]), found
    assert same_bits(everything(module), before)


@dataclass(frozen=True)
class BodyLater(ud.Part):
    """The head takes the first local steps, which are all that is rehearsed."""

    def rate(self, k, client):
        return {name: (k >= 2) == name.startswith("first") for name in client.start}


HIDING: dict[str, dict[str, Any]] = {
    "a warm-up that begins at 0": {"local": ud.Local(epochs=2, batch_size=4, lr=lambda t: 0.05 * t)},
    "a tiny rate": {"local": ud.Local(epochs=2, batch_size=4, lr=1e-9)},
    "a tiny rate of Adam": {"local": ud.Local(epochs=2, batch_size=4, lr=1e-9, optimizer=ud.AdamW())},
    "a group with rate 0": {"local": ud.Local(epochs=2, batch_size=4, lr=0.1, groups={"last.*": ud.Group(rate=0)})},
    "a method": {"method": BodyLater()},
}


class WeakBody(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = weakref.ref(self.first)

    def hidden(self, x):
        return torch.tanh(self.body()(x))


@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize("setting", HIDING)
def test_steps_that_hardly_move_the_weights_hide_nothing(setting, engine):
    kind = WeakBody if setting == "a method" else Weak
    assert "is a weak reference" in refusal(made(kind), engine=engine, **HIDING[setting])
    assert trained(made(Net), engine=engine, **HIDING[setting]).choices["engine"] in ("lanes", "plain")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_half_precision_hides_nothing(dtype, engine):
    data = make_clients(UNEVEN, torch.float32)
    assert "is a weak reference" in refusal(made(Weak).to(dtype), data, engine=engine)
    assert "rehearsal" not in trained(made(Net).to(dtype), data, engine=engine).choices


class Annealing:
    """A loss that counts its calls."""

    calls = 0

    def __call__(self, z, y):
        self.calls += 1
        return min(1.0, self.calls / 100) * F.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_losses_that_keep_something_are_refused(engine):
    """What changes from call to call also changes when the weights differ in their last digits."""
    assert "Two trials with PyTorch alone differ as well" in refusal(made(Net), loss=Annealing(), engine=engine)


def test_a_comparison_that_fails_is_said(caplog, monkeypatch):
    monkeypatch.setattr(model_rehearsal.Comparison, "verdict", lambda self: 1 / 0)
    found = trained(made(Net))
    assert "could not be compared with ordinary PyTorch: division by zero" in found.choices["rehearsal"]
    assert found.choices["rehearsal"] in caplog.text


def test_a_function_that_makes_the_model_is_a_way_out():
    found = trained(Weak)
    assert found.choices["engine"] == "lanes"
    start = trained(Weak, rounds=1, local=ud.Local(steps=1, lr=0.0)).model
    assert distance(everything(found.model), own_loop(start, make_clients(UNEVEN), LOCAL, ROUNDS)) < 1e-12


def test_a_function_is_no_way_out_for_a_global_name():
    """It is that of the latest module that the function has made, in all others as well."""
    for engine in ("auto", "plain"):
        assert "The forward of Global uses your module by a global name" in refusal(Global, engine=engine)


class Auxiliary(Net):
    def forward(self, x):
        h = self.hidden(x)
        self.size = h.square().mean()
        return self.last(h)


def test_losses_that_read_the_model_are_refused():
    module = made(Auxiliary)

    def loss(z, y):
        return F.cross_entropy(z, y, reduction="none") + module.size

    assert "A loss must not read the model itself" in refusal(module, loss=loss), "nothing has been stored there yet"
    module(torch.randn(3, 6).double())
    for engine in ("auto", "plain"):
        found = refusal(module, loss=loss, engine=engine)
        assert "is off by" in found and "A loss must not read the model itself" in found


def test_losses_that_read_the_weights_are_refused():
    module = made(Net)
    found = refusal(
        module, loss=lambda z, y: F.cross_entropy(z, y, reduction="none") + module.last.weight.square().sum()
    )
    assert "'last.weight' is off by" in found and "A loss must not read the model itself" in found


def test_lanes_that_were_asked_for_are_refused_where_they_would_be_wrong():
    found = refusal(made(ByFrequency), engine="lanes")
    assert "'embedding.weight' is off by" in found and found.endswith('Use "auto".')


def test_it_can_be_switched_off(caplog):
    caplog.set_level(logging.INFO, logger="undrift")
    found = trained(made(Partial), rehearse=False)
    assert found.choices["engine"] == "lanes" and "rehearsal" not in caplog.text
    assert distance(everything(found.model), own_loop(made(Partial), make_clients(UNEVEN), LOCAL, ROUNDS)) > 0.01


# ---- mutants of how a module is called as a function ---------------------------------------------------------------


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()

    def hidden(self, x):
        return torch.tanh(self.norm(self.first(x)))


EVEN = make_clients([8, 4, 12])


def leaves_one_out(patch, monkeypatch) -> None:
    """A parameter is not replaced."""
    right = gradient.replaced
    monkeypatch.setattr(gradient, "replaced", lambda slots, own: right(slots, {n: own[n] for n in own if n != patch}))


def swaps(monkeypatch) -> None:
    """Two parameters of one shape are replaced by each other."""
    right, other = gradient.replaced, {"first.bias": "norm.bias", "norm.bias": "first.bias"}
    monkeypatch.setattr(gradient, "replaced", lambda slots, own: right(slots, {n: own[other.get(n, n)] for n in own}))


def forgets_hooks(monkeypatch) -> None:
    """A copy without the hooks of its layers."""
    from undrift.functional import model

    right = model.copy_of

    def copied(*args, **options):
        found = right(*args, **options)
        for layer in found.modules():
            layer._forward_hooks.clear()
        return found

    monkeypatch.setattr(model, "copy_of", copied)


def keeps_statistics(monkeypatch) -> None:
    """Buffers are stale: what training makes of them is lost."""
    call, leave = Held.call, LaneNorms.__exit__

    def stale(self, module, tensors, buffers, *args):
        return call(self, module, tensors, {name: t.clone() for name, t in buffers.items()}, *args)

    def forgetting(self, *args):
        self.changed = {}
        return leave(self, *args)

    monkeypatch.setattr(Held, "call", stale)
    monkeypatch.setattr(LaneNorms, "__exit__", forgetting)


def loses_a_gradient(monkeypatch) -> None:
    """A parameter's gradient ends on the way."""
    right = Held.call

    def call(self, module, tensors, *args):
        return right(self, module, {**tensors, "first.weight": tensors["first.weight"].detach()}, *args)

    monkeypatch.setattr(Held, "call", call)


MUTANTS: dict[str, Callable[[Any], None]] = {
    "a weight is not replaced": functools.partial(leaves_one_out, "last.weight"),
    "a bias is not replaced": functools.partial(leaves_one_out, "last.bias"),
    "a norm's weight is not replaced": functools.partial(leaves_one_out, "norm.weight"),
    "two are swapped": swaps,
    "hooks are forgotten": forgets_hooks,
    "a buffer is not replaced": functools.partial(leaves_one_out, "norm.running_mean"),
    "buffers are stale": keeps_statistics,
    "a gradient is lost": loses_a_gradient,
}


def with_everything() -> nn.Module:
    """A norm, a hook, and weights that are not special."""
    module = Normed()
    module.first.register_forward_hook(lambda layer, args, output: 2 * output)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape).double() / 3)
    return module


@pytest.mark.parametrize("engine", ["lanes", "plain"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_functional_call_are_noticed(mutant, engine, monkeypatch):
    options = {"data": EVEN, "engine": engine, "rounds": 1}
    right = trained(made(with_everything), **options)
    MUTANTS[mutant](monkeypatch)
    with contextlib.suppress(ud.UndriftError):  # or nobody would notice
        wrong = trained(made(with_everything), rehearse=False, **options)
        assert distance(everything(wrong.model), everything(right.model)) > 1e-3
    try:
        found = trained(made(with_everything), **options)
    except ud.UndriftError:
        pass
    else:  # trained in place
        assert "in place" in found.choices["why"]
        assert distance(everything(found.model), everything(right.model)) < 1e-12


# ---- no false alarms -----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.last(self.gru(x.unflatten(1, (3, 2)))[0][:, -1])


def pictures() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 4))


SOUND: dict[str, Callable[[], nn.Module]] = {
    "norm and hook": lambda: with_everything().float(),
    "pictures": pictures,
    "recurrent": Recurrent,
    "attention": lambda: Encoder().float(),
    "a head of zeros": lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), zeros(nn.Linear(8, 4))),
}


def zeros(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@NESTED
@pytest.mark.parametrize("precision", ["auto", "bfloat16"])
@pytest.mark.parametrize("method", [ud.FedAvg(), ud.Scaffold() + ud.FedProx(0.1), ud.FedNLR()], ids=str)
@pytest.mark.parametrize("kind", SOUND)
def test_models_that_are_right_train_as_without_a_rehearsal(kind, method, precision, caplog):
    caplog.set_level(logging.INFO, logger="undrift")
    data = make_clients([9, 5, 12, 8], torch.float32)
    local = ud.Local(epochs=1, batch_size=4, lr=0.1, weight_decay=0.01, drop_last=True)
    options = {"data": data, "method": method, "local": local, "precision": precision, "rounds": 1}
    without = trained(made(SOUND[kind]), rehearse=False, **options)
    found = trained(made(SOUND[kind]), **options)
    assert found.choices == without.choices
    assert same_bits(everything(found.model), everything(without.model)), "the rehearsal has changed the run"
    assert not any(words in caplog.text for words in ("the rehearsal of the model", "compared with", "result.model"))


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_outputs_may_be_views_of_weights(engine):
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return self.weight.expand(len(x), 4)

    found = trained(Constant(), make_clients([9, 5, 12, 8], torch.float32), engine=engine)
    assert found.choices["engine"] == engine and found.model.weight.any()


# ---- the caller's own module ---------------------------------------------------------------------------------------


def test_casts_of_earlier_weights_do_not_serve_again():
    data, local = make_clients(UNEVEN, torch.float32), ud.Local(epochs=2, batch_size=4, lr=2.0)
    found = trained(made(Cast).float(), data, local=local)
    assert "in place" in found.choices["why"]
    assert distance(everything(found.model), own_loop(made(Cast).float(), data, local, ROUNDS)) < 1e-5


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_the_mode_of_a_scripted_layer_is_as_it_was():
    module = nn.Sequential(torch.jit.script(nn.Linear(6, 4))).double()
    found = trained(module)
    assert all(layer.training for layer in module.modules())
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in found.model.parameters())


def test_the_callers_module_is_as_it_was():
    class Messy(Normed):
        def forward(self, x):
            self.seen.append(len(x))
            self.latest = x
            self.table["n"] = len(x)
            return super().forward(x)

    module = made(Messy)
    module.seen, module.table, module.latest = [7], {"n": 3}, None
    module.first.weight.grad = torch.ones(8, 6).double()
    module.last.eval()
    before, grad = copy.deepcopy(module.state_dict()), module.first.weight.grad
    trained(module, EVEN)
    assert same_bits(module.state_dict(), before)
    assert module.seen == [7] and module.table == {"n": 3} and module.latest is None
    assert module.first.weight.grad is grad and torch.equal(grad, torch.ones(8, 6)) and module.last.weight.grad is None
    assert module.training and not module.last.training

    def fails() -> None:
        with borrowed(module, torch.device("cpu"), frozen=True) as lent, torch.no_grad():
            lent.last.weight.zero_()
            lent.seen.append(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert same_bits(module.state_dict(), before) and module.seen == [7]


class LowRank(nn.Linear):
    """Merges its update into the frozen weight when it goes into evaluation mode, as loralib's layers do."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.randn(sizes[1], 2))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (1 - 2 * mode) * (self.up @ self.down)
            self.merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) + (0 if self.merged else x @ self.down.T @ self.up.T)


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_weights_are_merged_for_evaluation_with_the_weights_of_that_call(engine):
    def kind():
        return nn.Sequential(LowRank(6, 8), nn.Tanh(), LowRank(8, 4)).double()

    data, module = make_clients(UNEVEN), made(kind)
    before = copy.deepcopy(everything(module))
    found = trained(module, data, engine=engine)
    assert same_bits(everything(module), before) and not module[0].merged
    wanted = made(kind)
    put(wanted, own_loop(made(kind), data, LOCAL, ROUNDS))
    with torch.no_grad():
        loss = F.cross_entropy(wanted.eval()(data.test[0]), data.test[1])
    assert found.history[-1]["loss"] == pytest.approx(float(loss), rel=1e-12)
    assert distance(everything(found.model), everything(wanted)) < 1e-12
    assert distance(everything(found.model.train()), everything(wanted.train())) < 1e-12


# ---- after training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["weight", "running_mean"])
def test_a_result_that_evaluates_otherwise_is_noticed(lost, caplog, monkeypatch):
    trained(made(Normed), EVEN)
    assert "result.model" not in caplog.text
    right = Model.load

    def load(self, params):
        before = {n: t.clone() for n, t in everything(self.module).items()}
        found = right(self, params)
        with torch.no_grad():
            everything(found)[f"norm.{lost}"].copy_(before[f"norm.{lost}"])
        return found

    monkeypatch.setattr(Model, "load", load)
    trained(made(Normed), EVEN)
    assert "result.model's outputs in evaluation mode differ" in caplog.text
