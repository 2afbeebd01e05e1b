"""What hooks of the contract can do beside the first model: each against a loop of its own or a formula, to 1e-12.

Second models with rates and running statistics, `update` that hands on to `upload`, the order of parts that encode and
decode, keys in `start` and `keep`, tuning, sums from local steps, and a pass over the data that chooses the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import undrift as ud
from tests.parts import Normed
from tests.problems import distance, make_clients, net, same_bits, split
from undrift.engine.client import KEEP
from undrift.method.part import START, TRANSFORM, part_stream
from undrift.random import Key, derive, normal, normal_like
from undrift.training.build import prepare
from undrift.training.rounds import federated_round
from undrift.training.settings import Settings

LOCAL = ud.Local(epochs=2, batch_size=4, lr=0.1)
PLAIN, LANES, ONE_LANE = {"engine": "plain"}, {"engine": "lanes", "lanes": 2}, {"engine": "lanes", "lanes": 1}
ON_BOTH = pytest.mark.parametrize("engine", [PLAIN, LANES, ONE_LANE], ids=["plain", "lanes", "one lane"])
SIZES = [7, 1, 13, 5, 0, 10]
Tree = dict[str, Any]
BOUND = 1e-12


def start() -> Tree:
    return {n: w.detach().clone() for n, w in net().named_parameters()}


def nothing(z: Tensor) -> float:
    return 0.0


def gradient(model: torch.nn.Module, w: Tree, x: Tensor, y: Tensor, extra: Callable[[Tensor], Any] = nothing) -> Tree:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in w.items()}
    z = torch.func.functional_call(model, leaves, (x,))
    loss = (F.cross_entropy(z, y, reduction="none") + extra(z)).mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def batches(data: Any, local: Any, client: int, t: int) -> list[tuple[Tensor, Tensor]]:
    x, y = data[client]
    return [(x[rows], y[rows]) for rows in ud.batches(data, local, client=client, round=t, seed=0)]


def mean(trees: list[Tree], weights: list[int]) -> Tree:
    return {n: sum(k / sum(weights) * tree[n] for k, tree in zip(weights, trees, strict=True)) for n in trees[0]}


def add(a: Tree, b: Tree, scale: float = 1.0) -> Tree:
    return {n: a[n] + scale * b[n] for n in a}


def descended(data: Any, w: Tree, client: int, t: int, local: Any = LOCAL) -> Tree:
    """A client's weights after its local steps."""
    for x, y in batches(data, local, client, t):
        w = add(w, gradient(net(), w, x, y), -local.lr)
    return w


# ---- rates of second models -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ditto(ud.Part):
    lam: ud.Number = 0.5

    reads_rates: ClassVar[bool] = False
    harmless_sums: ClassVar[bool] = True

    def keep(self, params, client):
        return {"v": params, "buffers": client.buffers}

    def carry(self, params, client):
        return client.kept

    def step(self, g, carry, params, client):
        d, buffers = client.gradient_and_buffers(carry["v"], carry["buffers"])
        v, w, rates = carry["v"], client.start, client.rates
        return g, {"v": {n: v[n] - rates[n] * (d[n] + self.lam * (v[n] - w[n])) for n in v}, "buffers": buffers}

    def upload(self, delta, client):
        return (), client.carry

    def own(self, params, client):
        return {**client.kept["v"], **client.kept["buffers"]}


@dataclass(frozen=True)
class Slow(ud.Part):
    def rate(self, k, client):
        return {n: 0.9**k * (0.5 if n == "3.bias" else 1.0) for n in client.start}


def slow(k: int, n: str) -> float:
    return 0.9**k * (0.5 if n == "3.bias" else 1.0)


RATES: dict[str, tuple[Any, Any, Callable[[int, int, str], float]]] = {
    "schedule": (Ditto(), replace(LOCAL, step_schedule=lambda k, n: 1 - 0.5 * k / n), lambda k, n, _: 1 - 0.5 * k / n),
    "nothing": (Ditto(), replace(LOCAL, step_schedule=lambda k, n: 0.0 * k), lambda k, n, _: 0.0),
    "groups": (
        Ditto(),
        replace(LOCAL, groups={"0.*": ud.Group(rate=0.3)}),
        lambda k, n, name: 0.3 if name.startswith("0.") else 1.0,
    ),
    "a part": (Ditto() + Slow(), LOCAL, lambda k, n, name: slow(k, name)),
    "a part before": (Slow() + Ditto(), LOCAL, lambda k, n, name: slow(k, name)),
}


@ON_BOTH
@pytest.mark.parametrize("which", RATES)
def test_second_models_have_the_rates_of_the_first(which, engine):
    method, local, factor = RATES[which]
    data, w, own = make_clients(SIZES), start(), {}
    run = ud.train(net(), data, method, rounds=3, local=local, device="cpu", **engine)
    for t in range(3):
        ends, counts = [], []
        for i in np.flatnonzero(SIZES).tolist():
            v, mine, steps = w, own.get(i, w), batches(data, local, i, t)
            for k, (x, y) in enumerate(steps):
                rate = {n: 0.1 * factor(k, len(steps), n) for n in w}
                g, d = gradient(net(), v, x, y), gradient(net(), mine, x, y)
                mine = {n: mine[n] - rate[n] * (d[n] + 0.5 * (mine[n] - w[n])) for n in w}
                v = {n: v[n] - rate[n] * g[n] for n in w}
            own[i] = mine
            ends.append(v)
            counts.append(SIZES[i])
        w = mean(ends, counts)
    assert distance(run.params, w) < BOUND
    for i, mine in own.items():
        assert distance(run.own_params(i), mine) < BOUND
    assert (distance(own[2], start()) == 0) == (which == "nothing")


@ON_BOTH
def test_rates_in_gradient_step_and_project_are_the_same(engine):
    @dataclass(frozen=True)
    class Same(ud.Part):
        def keep(self, params):
            return {"seen": torch.zeros(3, dtype=torch.float64)}

        def carry(self, params, client):
            return torch.zeros(2, dtype=torch.float64)

        def step(self, g, carry, params, client):
            return g, torch.stack([client.rates["0.bias"], client.rates["3.bias"]])

        def project(self, params, client):
            off = (client.rates["3.bias"] - client.carry[1]).abs() + (client.rates["0.bias"] - client.carry[0]).abs()
            return {n: w + off for n, w in params.items()}

    @dataclass(frozen=True)
    class InGradient(ud.Part):
        def gradient(self, g, params, client):
            return {n: d * client.rates[n] / client.lr for n, d in g.items()}

    settings = {"rounds": 2, "local": LOCAL, "device": "cpu", **engine}
    same = ud.train(net(), make_clients(SIZES), Same() + Slow(), **settings)
    alone = ud.train(net(), make_clients(SIZES), Slow(), **settings)
    assert distance(same.params, alone.params) < BOUND
    again = ud.train(net(), make_clients(SIZES), InGradient() + Slow(), **settings)
    assert distance(again.params, alone.params) > 1e-3


# ---- running statistics of second models ----------------------------------------------------------------------------


def normed() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Normed()


def loaded(state: Tree) -> torch.nn.Module:
    model = normed()
    model.load_state_dict(state)
    return model


@ON_BOTH
def test_second_models_have_running_statistics_of_their_own(engine):
    """Ditto with batch norm, with torch's own modules: weights, statistics, and the evaluation with both."""
    data, lam = split((12, 7, 0, 20, 9), (5, 3, 4, 0, 11)), 0.5
    local = replace(LOCAL, drop_last=True)
    w, own = copy.deepcopy(normed().state_dict()), {}
    for t in range(4):
        ends, counts = [], []
        for i in np.flatnonzero(data.sizes).tolist():
            first, second = loaded(w).train(), loaded(own.get(i, w)).train()
            for x, y in batches(data, local, i, t):
                for model, pull in ((first, 0.0), (second, lam)):
                    model.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    with torch.no_grad():
                        for n, p in model.named_parameters():
                            p.sub_(0.1 * (p.grad + pull * (p - w[n])))
            own[i] = copy.deepcopy(second.state_dict())
            ends.append(copy.deepcopy(first.state_dict()))
            counts.append(int(data.sizes[i]))
        w = mean(ends, counts)
        w = {n: t.round().long() if n.endswith("tracked") else t for n, t in w.items()}
    run = ud.train(normed(), data, Ditto(lam), rounds=4, local=local, device="cpu", **engine)
    assert distance(run.params, {n: w[n] for n in run.params}) < BOUND
    losses = []
    for i, mine in own.items():
        found = run.own_params(i)
        assert found.keys() == mine.keys() and distance(found, mine) < BOUND
        held = data.client_test[i]
        if len(held[1]):
            losses.append(F.cross_entropy(loaded(mine).eval()(held[0]), held[1]).item())
    assert run.history[-1]["client_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-11)


@ON_BOTH
def test_kept_models_bring_their_running_statistics_along(engine):
    """As MOON's last model: `client.model({**weights, **buffers}, x)`."""

    @dataclass(frozen=True)
    class Last(ud.Part):
        reads_rates: ClassVar[bool] = False

        def keep(self, params, client):
            return {**params, **client.buffers}

        def objective(self, losses, z, batch, params, client):
            return losses + 0.3 * (z - client.model(client.kept, batch.x)).square().sum(1)

        def upload(self, delta, client):
            return (), {**client.final, **client.buffers}

    data, local = make_clients([8, 12]), replace(LOCAL, drop_last=True)
    run = ud.train(normed(), data, Last(), rounds=3, local=local, device="cpu", **engine)
    w, kept = copy.deepcopy(normed().state_dict()), {}
    for t in range(3):
        ends = []
        for i in (0, 1):
            model, last = loaded(w).train(), loaded(kept.get(i, w)).eval()
            for x, y in batches(data, local, i, t):
                model.zero_grad()
                z = model(x)
                (F.cross_entropy(z, y, reduction="none") + 0.3 * (z - last(x)).square().sum(1)).mean().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.1 * p.grad)
            kept[i] = copy.deepcopy(model.state_dict())
            ends.append(kept[i])
        w = mean(ends, [8, 12])
        w = {n: t.round().long() if n.endswith("tracked") else t for n, t in w.items()}
    assert distance(run.params, {n: w[n] for n in run.params}) < BOUND


@ON_BOTH
def test_buffers_are_those_before_the_step(engine):
    """Checked with a second model that is the first: it must stay the same, statistics included."""

    @dataclass(frozen=True)
    class Twin(ud.Part):
        def carry(self, params, client):
            return {"v": params, "buffers": client.buffers}

        def step(self, g, carry, params, client):
            same = torch.stack([(carry["buffers"][n] - t).abs().max() for n, t in client.buffers.items()]).max()
            d, buffers = client.gradient_and_buffers(carry["v"], carry["buffers"])
            v = {n: w - client.rates[n] * d[n] for n, w in carry["v"].items()}
            return {n: t + same for n, t in g.items()}, {"v": v, "buffers": buffers}

        def update(self, delta, client):
            off = [(client.buffers[n] - t).abs().max() for n, t in client.carry["buffers"].items()]
            off += [(client.final[n] - t).abs().max() for n, t in client.carry["v"].items()]
            return {n: d + torch.stack(off).max() for n, d in delta.items()}

    settings = {"rounds": 2, "local": replace(LOCAL, drop_last=True), "device": "cpu", **engine}
    data = make_clients([8, 12, 5])
    twin, alone = (ud.train(normed(), data, method, **settings) for method in (Twin(), ud.FedAvg()))
    assert distance(twin.params, alone.params) < BOUND


# ---- update, upload and the order of parts --------------------------------------------------------------------------


@dataclass(frozen=True)
class Coarse(ud.Part):
    """Rounds to multiples of `unit`, with error feedback."""

    unit: ud.Number = 0.05

    stage: ClassVar[str] = "compression"
    reads_rates: ClassVar[bool] = False

    def keep(self, params, client):
        return ud.tree_map(torch.zeros_like, params)

    def update(self, delta, client):
        whole = ud.tree_map(torch.add, delta, client.kept)
        sent = ud.tree_map(lambda d: self.unit * torch.round(d / self.unit), whole)
        return sent, ud.tree_map(torch.sub, whole, sent)

    def upload(self, delta, client):
        return (), client.from_update


@dataclass(frozen=True)
class Private(ud.Part):
    clip: ud.Number = 0.3
    noise: ud.Number = 0.02

    stage: ClassVar[str] = "privacy"
    implies_weighting: ClassVar[str] = "uniform"
    reads_rates: ClassVar[bool] = False

    def update(self, delta, client):
        length = torch.sqrt(sum(d.square().sum() for d in delta.values()))
        return ud.tree_map(lambda d: d * torch.clamp(self.clip / length, max=1.0), delta)

    def transform(self, update, state, server):
        drawn = normal_like(server.key, update)
        return ud.tree_map(lambda d, z: d + self.noise * z, update, drawn), state


@dataclass(frozen=True)
class Double(ud.Part):
    """A method's own `update`, which comes first, and a `transform`, which sees the noise."""

    def start(self, params):
        return ud.tree_map(torch.zeros_like, params)

    def update(self, delta, client):
        return ud.tree_map(lambda d: 2 * d, delta)

    def observe(self, params, state, server):
        return server.totals.update


def drawn(part: ud.Part, t: int, tree: Tree) -> Tree:
    key = Key(torch.tensor(derive(0, "server", t)), torch.tensor(TRANSFORM), part_stream(part))
    return normal_like(key, tree)


ORDERS = {
    "as written": lambda: Double() + Coarse() + Private() + ud.ServerSGD(momentum=0.5),
    "backwards": lambda: ud.ServerSGD(momentum=0.5) + Private() + Coarse() + Double(),
    "mixed": lambda: Private() + Double() + ud.ServerSGD(momentum=0.5) + Coarse(),
}


@ON_BOTH
@pytest.mark.parametrize("order", ORDERS)
def test_parts_that_encode_and_decode_nest_whatever_the_order(order, engine):
    """Twice the update, rounded with feedback, clipped; then noise, then momentum at the server."""
    data, w, kept = make_clients(SIZES), start(), {}
    velocity = {n: torch.zeros_like(t) for n, t in w.items()}
    run = ud.train(net(), data, ORDERS[order](), rounds=3, local=LOCAL, device="cpu", **engine)
    for t in range(3):
        total = {n: torch.zeros_like(t) for n, t in w.items()}
        for i in np.flatnonzero(SIZES).tolist():
            delta = {n: 2 * (v - w[n]) for n, v in descended(data, w, i, t).items()}
            whole = add(delta, kept[i]) if i in kept else delta
            sent = {n: 0.05 * torch.round(d / 0.05) for n, d in whole.items()}
            kept[i] = {n: whole[n] - sent[n] for n in whole}
            length = torch.cat([d.flatten() for d in sent.values()]).norm()
            total = add(total, sent, float(torch.clamp(0.3 / length, max=1.0)) / 5)
        noised = add(total, drawn(Private(), t, w), 0.02)
        velocity = {n: 0.5 * velocity[n] + noised[n] for n in w}
        w = add(w, velocity)
    assert distance(run.params, w) < BOUND


def test_other_parts_see_the_update_with_its_noise():
    """`server.totals.update`, which would reveal what the noise is to hide."""
    method = Double() + Private()
    run = prepare(Settings(model=net(), data=make_clients(SIZES), method=method, rounds=2, local=LOCAL, device="cpu"))
    with torch.no_grad():
        after, _ = federated_round(run, run.start(), False)
    moved = {n: after.params[n] - w for n, w in start().items()}
    assert distance(after.parts[0], moved) < BOUND


def test_the_size_of_an_update_is_found_in_the_same_order():
    @dataclass(frozen=True)
    class Half(Coarse):
        def update_bytes(self, size, params):
            return size // 2

    @dataclass(frozen=True)
    class Tag(ud.Part):
        def update_bytes(self, size, params):
            return size + 1000

    whole = sum(w.numel() * 8 for w in start().values())
    for method in (Half() + Tag(), Tag() + Half()):
        row = ud.train(net(), make_clients([4]), method, rounds=1, local=LOCAL, engine="plain").history[0]
        assert row["bytes_up"] == (whole + 1000) // 2 + 8


def test_parts_without_a_stage_do_not_come_after_server_optimizers():
    class Method(Private):
        stage: ClassVar[str] = "method"

    with pytest.raises(ud.UndriftError, match="Method changes updates at the client and again at the server, and Serv"):
        ud.ServerSGD(momentum=0.5) + Method()
    assert Method() + ud.ServerSGD(momentum=0.5) and ud.ServerSGD(momentum=0.5) + Private()

    class Late(Private):
        stage: ClassVar[str] = "late"

    with pytest.raises(ud.UndriftError, match=r'Late.stage must be one of "method", "compression", "privacy", not'):
        ud.FedAvg() + Late()


@ON_BOTH
def test_from_update_is_none_unless_update_hands_something_on(engine):
    seen = []

    @dataclass(frozen=True)
    class Looks(ud.Part):
        hands: bool
        reads_rates: ClassVar[bool] = False

        def update(self, delta, client):
            seen.append(client.from_update)
            return (delta, client.n) if self.hands else delta

        def upload(self, delta, client):
            seen.append(client.from_update)
            return (client.from_update if self.hands else ()), client.kept

        def observe(self, params, state, server):
            assert not self.hands or float(server.totals.sums) == sum(SIZES)
            return state

    settings = {"rounds": 1, "local": LOCAL, "device": "cpu", **engine}
    ud.train(net(), make_clients(SIZES), Looks(False), **settings)
    assert seen and all(found is None for found in seen)
    ud.train(net(), make_clients(SIZES), Looks(True), **settings)

    class Three(Looks):
        def update(self, delta, client):
            return delta, 1, 2

    with pytest.raises(ud.UndriftError, match=r"Three\.update must return a pair"):
        ud.train(net(), make_clients(SIZES), Three(True), **settings)


@ON_BOTH
def test_personal_entries_are_zero_in_what_update_and_upload_are_given(engine):
    """The norm of what a client sends after clipping, and a sum of squared norms."""

    @dataclass(frozen=True)
    class Head(ud.Part):
        personal: tuple[str, ...] = ("3.*",)

        def upload(self, delta, client):
            return sum(d.square().sum() for d in delta.values()), client.kept

        def observe(self, params, state, server):
            return server.totals.sums

        def start(self, params):
            return 0.0

        def history(self, state):
            return {"squares": float(state)}

    data = make_clients([9])
    run = ud.train(net(), data, Head() + Private(clip=0.01, noise=0.0), rounds=1, local=LOCAL, device="cpu", **engine)
    moved = torch.cat([(run.params[n] - w).flatten() for n, w in start().items()])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-12)
    ends = descended(data, start(), 0, 0)
    body = sum(float((ends[n] - start()[n]).square().sum()) for n in ends if n.startswith("0."))
    assert run.history[0]["squares"] == pytest.approx(body, rel=1e-12)


# ---- keys and clients in start and keep -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Random(ud.Part):
    reads_rates: ClassVar[bool] = False
    harmless_sums: ClassVar[bool] = True

    def start(self, params, server):
        return normal_like(server.key, params)

    def broadcast(self, params, state, server):
        return state

    def keep(self, params, client):
        return {"drawn": normal(client.key, (3,), torch.float64), "id": client.id, "n": client.n, "w": params["0.bias"]}

    def gradient(self, g, params, client):
        pull = client.kept["drawn"].sum() + 0.1 * client.kept["n"]
        return ud.tree_map(lambda d, s: d + 0.01 * pull * s, g, client.received)

    def upload(self, delta, client):
        off = (client.kept["id"] - client.id).abs() + (client.kept["n"] - client.n).abs()
        return off, client.kept

    def observe(self, params, state, server):
        assert float(server.totals.sums) == 0
        return state


@ON_BOTH
def test_start_and_keep_draw_from_keys(engine):
    """A client's draws are its own, whenever and beside whomever it takes part for the first time."""
    data, w = make_clients(SIZES), start()
    run = ud.train(net(), data, Random(), rounds=4, local=LOCAL, participation=2, device="cpu", **engine)
    server = Key(torch.tensor(derive(0, "server", 0)), torch.tensor(START), part_stream(Random()))
    direction, kept = normal_like(server, w), {}
    assert {tuple(row["clients"]) for row in run.history} > {tuple(run.history[0]["clients"])}
    for t, row in enumerate(run.history):
        ends, counts = [], []
        for i in row["clients"]:
            if i not in kept:
                words = torch.tensor(np.stack(derive(0, "client", t, np.array([i])), 1))[0]
                kept[i] = normal(Key(words, torch.tensor(KEEP), part_stream(Random())), (3,), torch.float64)
            v, pull = w, kept[i].sum() + 0.1 * SIZES[i]
            for x, y in batches(data, LOCAL, i, t):
                v = add(v, add(gradient(net(), v, x, y), direction, 0.01 * pull), -0.1)
            ends.append(v)
            counts.append(SIZES[i])
        w = mean(ends, counts)
    assert distance(run.params, w) < BOUND
    assert len({tuple(one.tolist()) for one in kept.values()}) == len(kept)


@ON_BOTH
def test_signatures_of_before_keep_working(engine):
    @dataclass(frozen=True)
    class New(ud.Part):
        def start(self, params, server):
            return ud.tree_map(torch.zeros_like, params)

        def keep(self, params, client):
            return ud.tree_map(torch.zeros_like, params)

        def gradient(self, g, params, client):
            return ud.tree_map(torch.add, g, client.kept)

        def upload(self, delta, client):
            return (), ud.tree_map(lambda d: 0.1 * d, delta)

    class Old(New):
        def start(self, params):
            return ud.tree_map(torch.zeros_like, params)

        def keep(self, params):
            return ud.tree_map(torch.zeros_like, params)

    class Named(New):
        def keep(self, params, *rest):
            return ud.tree_map(torch.zeros_like, params)

    settings = {"rounds": 3, "local": LOCAL, "participation": 3, "device": "cpu", **engine}
    runs = [ud.train(net(), make_clients(SIZES), method, **settings).params for method in (New(), Old(), Named())]
    assert same_bits(runs[0], runs[1]) and same_bits(runs[0], runs[2])


# ---- tuning ---------------------------------------------------------------------------------------------------------


@ON_BOTH
def test_a_part_can_tell_tuning_from_training(engine):
    """FedBABU: the head is frozen in training, and tuned with all the rest."""

    @dataclass(frozen=True)
    class FedBABU(ud.Part):
        def rate(self, k, client):
            head = torch.where(client.tuning, 1.0, 0.0)
            return {n: head if n.startswith("3.") else torch.ones_like(head) for n in client.start}

    data = split()
    run = ud.train(net(), data, FedBABU(), rounds=3, local=LOCAL, device="cpu", **engine)
    w = start()
    assert all(torch.equal(run.params[n], w[n]) for n in w if n.startswith("3."))
    assert distance(run.params, w) > 1e-3
    losses = []
    for i in np.flatnonzero(data.sizes).tolist():
        held = data.client_test[i]
        if len(held[1]):
            tuned = descended(data, run.params, i, 2, replace(LOCAL, epochs=1))
            losses.append(float(F.cross_entropy(torch.func.functional_call(net(), tuned, (held[0],)), held[1])))
    assert run.history[-1]["tuned_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)


# ---- sums from local steps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingLoss(ud.Part):
    measures: ClassVar[str] = "training"
    reads_rates: ClassVar[bool] = False

    def start(self, params):
        return 0.0

    def measure(self, params, batch, client):
        assert batch.output.shape == (len(batch.mask), 4) and batch.features.shape == (len(batch.mask), 8)
        squares = (batch.output.square().sum(1) + batch.features.sum(1)) * batch.mask
        return {"loss": (batch.losses * batch.mask).sum(), "squares": squares.sum(), "n": batch.mask.sum()}

    def upload(self, delta, client):
        return {name: client.weight * total for name, total in client.measured.items()}, client.kept

    def observe(self, params, state, server):
        sums = server.totals.sums
        return torch.stack([sums["loss"], sums["squares"], sums["n"]])

    def history(self, state):
        return {"sums": state.tolist()}


@dataclass(frozen=True)
class Small(ud.Part):
    def objective(self, losses, z, batch, params, client):
        return losses + 0.1 * z.square().sum(1)


@ON_BOTH
@pytest.mark.parametrize("drift", [False, True])
def test_sums_of_local_steps_are_those_of_their_forward_passes(drift, engine):
    """Weighted sums of losses after `objective`, of outputs and of features, over all steps, at their weights."""
    data, w = make_clients(SIZES), start()
    method = Small() + TrainingLoss()
    run = ud.train(net(), data, method, rounds=2, local=LOCAL, device="cpu", drift=drift, **engine)
    without = ud.train(net(), data, Small(), rounds=2, local=LOCAL, device="cpu", **engine)
    assert distance(run.params, without.params) < BOUND, "they change nothing"
    for t in range(2):
        wanted, ends, counts = torch.zeros(3, dtype=torch.float64), [], []
        for i in np.flatnonzero(SIZES).tolist():
            v = w
            for x, y in batches(data, LOCAL, i, t):
                h = torch.tanh(x @ v["0.weight"].T + v["0.bias"])
                z = h @ v["3.weight"].T + v["3.bias"]
                losses = F.cross_entropy(z, y, reduction="none") + 0.1 * z.square().sum(1)
                found = [losses.sum(), z.square().sum() + h.sum(), torch.tensor(float(len(y)))]
                wanted += SIZES[i] * torch.stack([one.double() for one in found])
                v = add(v, gradient(net(), v, x, y, lambda z: 0.1 * z.square().sum(1)), -0.1)
            ends.append(v)
            counts.append(SIZES[i])
        assert run.history[t]["sums"] == pytest.approx(wanted.tolist(), rel=1e-12)
        w = mean(ends, counts)


@ON_BOTH
def test_sums_of_local_steps_see_dropout_and_batch_norm_as_the_step_does(engine):
    """The loss that drift=True finds in another way."""

    class Loss(TrainingLoss):
        def measure(self, params, batch, client):
            last = torch.where(client.step == client.steps - 1, 1.0, 0.0)
            loss = (batch.losses * batch.mask).sum() / batch.mask.sum()
            return {"loss": last * loss, "squares": 0.0, "n": 1}

    local = replace(LOCAL, drop_last=True)
    for model in (net(dropout=0.4), normed()):
        settings = {"rounds": 2, "local": local, "device": "cpu", "drift": True, **engine}
        run = ud.train(model, make_clients([8, 12, 5]), Loss(), **settings)
        for row in run.history:
            assert row["sums"][0] / 25 == pytest.approx(row["train_loss"], rel=1e-10)


@ON_BOTH
def test_sums_of_local_steps_must_not_have_the_shape_of_the_batch(engine):
    made = TrainingLoss()

    class Vector(TrainingLoss):
        def measure(self, params, batch, client):
            return {"loss": batch.losses, "squares": 0.0, "n": 1}

    with pytest.raises(ud.UndriftError, match=r"Vector\.measure must return sums over the batch"):
        ud.train(net(), make_clients([5, 7]), Vector(), rounds=1, local=LOCAL, device="cpu", **engine)
    assert ud.train(net(), make_clients([5, 7]), made, rounds=1, local=LOCAL, device="cpu", **engine).history


# ---- weights that the data choose -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class IFCA(ud.Part):
    clusters: int = 3

    measures: ClassVar[str] = "sent"
    reads_rates: ClassVar[bool] = False

    def start(self, params, server):
        each = [normal_like(server.key.stream_at(j), params) for j in range(self.clusters)]
        return ud.tree_map(lambda w, *z: torch.stack([w + 0.5 * d for d in z]), params, *each)

    def broadcast(self, params, state, server):
        return state

    def measure(self, params, batch, client):
        def loss(j):
            model = ud.tree_map(lambda w: w[j], client.received)
            return (client.loss(client.model(model, batch.x), batch.y) * batch.mask).sum()

        return torch.stack([loss(j) for j in range(self.clusters)])

    def _model(self, client, cluster):
        chosen = F.one_hot(cluster, self.clusters)
        return ud.tree_map(lambda w: torch.einsum("k,k...->...", chosen.to(w.dtype), w), client.received)

    def keep(self, params, client):
        return 0

    def begin(self, params, client):
        return self._model(client, client.measured.argmin())

    def upload(self, delta, client):
        weight = client.weight * F.one_hot(client.measured.argmin(), self.clusters)
        moved = ud.tree_map(lambda d: torch.einsum("k,...->k...", weight.to(d.dtype), d), delta)
        return {"moved": moved, "weight": weight}, client.measured.argmin()

    def observe(self, params, state, server):
        weight = server.totals.sums["weight"].clamp(min=1e-9)
        moved = server.totals.sums["moved"]
        return ud.tree_map(lambda w, d: w + d / weight.view(-1, *[1] * (d.dim() - 1)), state, moved)

    def own(self, params, client):
        return self._model(client, client.kept)


@ON_BOTH
@pytest.mark.parametrize("local", [LOCAL, replace(LOCAL, momentum=0.9)], ids=["sgd", "momentum"])
def test_a_client_may_begin_with_the_model_that_fits_its_data(local, engine):
    data, w = make_clients(SIZES), start()
    run = ud.train(net(), data, IFCA(), rounds=4, local=local, participation=4, device="cpu", **engine)
    key = Key(torch.tensor(derive(0, "server", 0)), torch.tensor(START), part_stream(IFCA()))
    models = [add(w, normal_like(key.stream_at(j), w), 0.5) for j in range(3)]
    chosen: dict[int, int] = {}
    for t, row in enumerate(run.history):
        ends: dict[int, list[Tree]] = {}
        for i in row["clients"]:
            x, y = data[i]
            losses = [float(F.cross_entropy(torch.func.functional_call(net(), m, (x,)), y)) for m in models]
            chosen[i] = int(np.argmin(losses))
            v = models[chosen[i]]
            velocity = {n: torch.zeros_like(t) for n, t in v.items()}
            for x, y in batches(data, local, i, t):
                velocity = add(gradient(net(), v, x, y), velocity, local.momentum)
                v = add(v, velocity, -0.1)
            ends.setdefault(chosen[i], []).append((v, SIZES[i]))
        models = [mean(*map(list, zip(*ends[j], strict=True))) if j in ends else m for j, m in enumerate(models)]
    assert len(set(chosen.values())) > 1
    for i, j in chosen.items():
        assert distance(run.own_params(i), models[j]) < BOUND


def test_a_pass_at_the_weights_sent_is_over_when_begin_is_called():
    """And one "before" still comes after it, at the weights that training begins with."""
    seen = {}

    @dataclass(frozen=True)
    class Sent(ud.Part):
        measures: ClassVar[str] = "sent"

        def measure(self, params, batch, client):
            return {"w": params["3.bias"] * batch.mask.sum(), "n": batch.mask.sum()}

        def begin(self, params, client):
            seen["sent"] = client.measured["w"] / client.measured["n"]
            return ud.tree_map(lambda w: w + 1, params)

    @dataclass(frozen=True)
    class Before(ud.Part):
        measures: ClassVar[str] = "before"

        def measure(self, params, batch, client):
            return {"w": params["3.bias"] * batch.mask.sum(), "n": batch.mask.sum()}

        def prepare(self, client):
            seen["before"] = client.measured["w"] / client.measured["n"]
            return ()

    ud.train(net(), make_clients([5]), Sent() + Before(), rounds=1, local=LOCAL, engine="plain")
    assert torch.allclose(seen["sent"], start()["3.bias"]) and torch.allclose(seen["before"], start()["3.bias"] + 1)
