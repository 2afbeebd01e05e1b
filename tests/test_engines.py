"""The lanes engine against the plain one: the same semantics, every hook included."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch

import undrift as ud
from tests.carries import CARRIES
from tests.parts import METHOD, Branching, Everything, Finish, Normed, Recurrent
from tests.problems import copies_of_a_million, distance, make_clients, net, same_bits
from undrift.engine.trace import Traced
from undrift.training.build import prepare
from undrift.training.settings import Settings
from undrift.tree import tree_stack

LOCAL = ud.Local(epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=0.01)


def both(model, data, method=None, rounds=10, local=LOCAL, participation=4, **options):
    runs = [
        ud.train(
            model,
            data,
            method or ud.FedAvg(),
            rounds=rounds,
            local=local,
            participation=participation,
            engine=e,
            **options,
        )
        for e in ("lanes", "plain")
    ]
    assert [r.choices["engine"] for r in runs] == ["lanes", "plain"]
    return runs


def test_agreement_in_float64(uneven):
    """Uneven clients with short last batches, dropout, momentum and weight decay, 10 rounds: 1e-10 relative."""
    lanes, plain = both(net(dropout=0.4), uneven, lanes=2)
    assert distance(lanes.params, plain.params) < 1e-10
    assert lanes.params["0.weight"].dtype == torch.float64
    assert distance(lanes.params, dict(net().named_parameters())) > 0.1  # they went somewhere
    drop = {"seconds", "loss", "accuracy", "class_accuracy"}
    for a, b in zip(lanes.history, plain.history, strict=True):
        assert {k: v for k, v in a.items() if k not in drop} == {k: v for k, v in b.items() if k not in drop}
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)


def test_agreement_in_float32():
    data = make_clients([23, 5, 0, 41, 10, 17, 1], torch.float32)
    lanes, plain = both(net(torch.float32, dropout=0.4), data, lanes=3)
    assert lanes.params["0.weight"].dtype == torch.float32
    assert distance(lanes.params, plain.params) < 1e-4


def test_how_many_lanes_changes_no_batch_and_no_mask(uneven):
    """With sums that are added up in another order, the weights differ by rounding alone."""
    settings = {"rounds": 3, "local": LOCAL, "engine": "lanes"}
    runs = {n: ud.train(net(dropout=0.4), uneven, lanes=n, **settings) for n in (1, 2, 3, 6)}
    assert all(distance(run.params, runs[2].params) < 1e-13 for run in runs.values())
    assert all(run.choices["lanes"] == n for n, run in runs.items())


def test_a_client_sees_the_same_batches_and_masks_in_any_cohort(uneven):
    """Alone, or padded beside larger ones: a client's own update is the same."""
    recorded = {}
    for cohort in (1, 2, 6):
        run = ud.train(net(dropout=0.4), uneven, Record(), rounds=12, local=LOCAL, participation=cohort, engine="lanes")
        for row in run.history:
            for client, norm in zip(row["clients"], row["norms"], strict=True):
                recorded.setdefault((row["round"], client), []).append(norm)
    again = [norms for norms in recorded.values() if len(norms) > 1]
    assert len(again) > 12
    assert all(norm == pytest.approx(norms[0], rel=1e-10) for norms in again for norm in norms)


@dataclass(frozen=True)
class Record(ud.Part):
    """Uploads each client's norm in a place of its own, and holds the weights still: all cohorts see the same."""

    def start(self, params):
        return torch.zeros(7, dtype=torch.float64)

    def upload(self, delta, client):
        norm = sum(d.square().sum() for d in delta.values()).sqrt()
        return torch.where(torch.arange(7, device=norm.device) == client.id, norm, 0.0), client.kept

    def transform(self, update, state, server):
        return ud.tree_map(torch.zeros_like, update), server.totals.sums

    def history(self, state):
        return {"norms": state[state > 0].tolist()}


def test_every_hook_agrees(uneven):
    lanes, plain = both(net(dropout=0.2), uneven, METHOD, rounds=4, lanes=2)
    assert distance(lanes.params, plain.params) < 1e-10
    assert [r["total"] for r in lanes.history] == pytest.approx([r["total"] for r in plain.history], rel=1e-9)


HOOKS = """plan broadcast measure logits gradient rate project update upload transform refine
finish""".split()  # noqa: SIM905


@pytest.mark.parametrize("engine", ["plain", pytest.param("lanes", marks=pytest.mark.long)])
@pytest.mark.parametrize("skip", HOOKS)
def test_every_hook_has_its_effect(engine, skip):
    """What each does to the plain engine's result; lanes, which must agree with that result, pass over none either."""
    assert distance(with_everything("plain", ""), with_everything("lanes", "")) < 1e-10
    assert distance(with_everything(engine, ""), with_everything(engine, skip)) > 1e-5


@functools.cache
def with_everything(engine, skip):
    data = make_clients([23, 5, 0, 41, 10, 17, 1])
    method = Everything(scale=0.5, skip=skip) + Finish(skip=skip)
    return ud.train(net(), data, method, rounds=2, local=LOCAL, participation=4, engine=engine).params


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("method", CARRIES, ids=lambda part: type(part).__name__)
def test_carries_that_hand_on_tensors(uneven, method, lanes):
    """The weights of the step before, one gradient twice, what the client has of its own: each lane keeps its own."""
    in_lanes, plain = both(net(), uneven, method, rounds=2, lanes=lanes)
    assert distance(in_lanes.params, plain.params) < 1e-12


@dataclass(frozen=True)
class TreeRate(ud.Part):
    """A rate of its own for every parameter, beside one by step: `rate_sum` and `work` are trees then."""

    measures = "before"

    def measure(self, params, batch, client):
        return batch.mask.sum() * 1.0

    def prepare(self, client):
        return {n: torch.ones_like(w) * (1 + 0.1 * i) for i, (n, w) in enumerate(client.start.items())}

    def rate(self, k, client):
        return client.prepared

    def upload(self, delta, client):
        return ud.tree_map(lambda d, r: d / r, delta, client.rate_sum), client.kept

    def update(self, delta, client):
        return ud.tree_map(lambda d, a: d / a, delta, client.work)

    def transform(self, update, state, server):
        return ud.tree_map(lambda u, s: u + 0.01 * s, update, server.totals.sums), state


@dataclass(frozen=True)
class StepRate(ud.Part):
    def rate(self, k, client):
        return 0.5**k


@pytest.mark.parametrize("method", [TreeRate() + StepRate(), StepRate() + TreeRate()])
def test_rates_by_parameter_and_by_step_multiply(uneven, method):
    lanes, plain = both(net(), uneven, method, rounds=3, lanes=2)
    assert distance(lanes.params, plain.params) < 1e-12
    other = ud.train(net(), uneven, TreeRate(), rounds=3, local=LOCAL, participation=4)
    assert distance(other.params, lanes.params) > 1e-4


def prepared(engine, data, method, **settings):
    """A run that is ready to start, for tests that call its engine themselves."""
    return prepare(
        Settings(model=net(), data=data, method=method, rounds=1, local=LOCAL, device="cpu", engine=engine, **settings)
    )


def test_the_step_is_traced_once(uneven):
    run = prepared("lanes", uneven, ud.FedAvg(), lanes=2)
    with torch.no_grad():
        for t in range(3):
            run.engine.run(run.inputs(run.plan(t), run.start(), [()] * len(run.composed.parts)))
    assert len(run.engine.engine.stepper.step.programs) == 1


@pytest.mark.parametrize("settings", [{"engine": "plain"}, {"engine": "lanes", "lanes": 3}], ids=str)
def test_what_clients_share_may_as_well_be_their_own(uneven, settings):
    """Starting weights, rates, numbers and what was broadcast, different for each client: as each would train alone."""
    method = ud.FedProx(0.3, target=ud.TemporalEnsemble(0.5)) + ud.GradientNoise(0.1)
    run = prepared(data=uneven, method=method, **settings)
    state = run.start()
    method = run.bound(0)
    received = method.broadcast(state.params, state.parts, run.server(0, state))
    inputs = run.inputs(run.plan(0), state, received)
    cohort = len(inputs.plan.clients)
    own = ("start", "received", "lr", "numbers", "weight_decay", "momentum", "round")

    def vary(t, c):
        return t * (1 + 0.1 * c) if t.is_floating_point() else t

    shared = [ud.tree_map(lambda t, c=c: vary(t, c), {n: inputs.shared[n] for n in own}) for c in range(cohort)]
    mixed = replace(
        inputs,
        shared={name: tree for name, tree in inputs.shared.items() if name not in own},
        clients=inputs.clients | tree_stack(shared),
    )
    together, alone = {}, {}
    with torch.no_grad():
        run.engine.run(mixed, visit=lambda w, ids: together.update(unstacked(w, ids)))
        for c in range(cohort):  # all train; only this one is looked at
            one = replace(inputs, shared=inputs.shared | shared[c])
            found = {}
            run.engine.run(one, visit=lambda w, ids, found=found: found.update(unstacked(w, ids)))
            alone[int(inputs.plan.clients[c])] = found[int(inputs.plan.clients[c])]
    assert together.keys() == alone.keys() and len(together) == cohort > 3
    assert all(distance(together[c], alone[c]) < 1e-12 for c in together)
    ids = list(together)
    assert distance(together[ids[0]], together[ids[1]]) > 1e-3


def unstacked(weights, ids):
    return {int(c): {n: w[i].clone() for n, w in weights.items()} for i, c in enumerate(ids)}


@pytest.mark.parametrize(("module", "why"), [(Branching, "vmap"), (Recurrent, "nn.GRU has no vmap rule")])
def test_models_that_do_not_vmap_run_on_the_plain_engine(module, why):
    data = make_clients([12, 8, 20])
    run = ud.train(module(), data, rounds=2, local=ud.Local(epochs=1, batch_size=8, lr=0.1))
    assert run.choices["engine"] == "plain" and why in run.choices["why"]
    if module is not Branching:
        with pytest.raises(ud.UndriftError, match="Use engine="):
            ud.train(module(), data, rounds=1, local=LOCAL, engine="lanes")


def test_recurrent_layers_of_torch_run_as_lanes():
    data, model = make_clients([12, 8, 20]), Recurrent(both_ways=False)
    lanes, plain = (ud.train(model, data, rounds=3, local=LOCAL, engine=e) for e in ("auto", "plain"))
    assert lanes.choices["engine"] == "lanes" and plain.choices["engine"] == "plain"
    assert distance(lanes.params, plain.params) < 1e-10
    assert type(lanes.model.cell) is type(model.cell) is torch.nn.GRU


def test_running_statistics_are_averaged_with_the_weights_weights():
    """One round by hand: each client's statistics after its own batches, weighted by its samples."""
    data, local = make_clients([12, 8, 20]), ud.Local(steps=3, batch_size=4, lr=0.05)
    start = Normed()
    run = ud.train(start, data, rounds=1, local=local)
    import copy

    means = []
    for i in range(3):
        model = copy.deepcopy(start).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for rows in ud.batches(data, local, client=i, round=0, seed=0):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data[i][0][rows]), data[i][1][rows]).backward()
            optimizer.step()
        means.append(copy.deepcopy(model.state_dict()))
    for name, found in run.model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert found == 3 and found.dtype == torch.int64
        else:
            expected = sum(n / 40 * m[name] for n, m in zip((12, 8, 20), means, strict=True))
            assert torch.allclose(found, expected, rtol=1e-10), name
    assert not torch.equal(start.layers[1].running_mean, run.model.layers[1].running_mean)


def test_frozen_parameters_are_shared_and_never_move(uneven):
    model = net()
    model[0].weight.requires_grad_(False)
    lanes, plain = both(model, uneven, rounds=3)
    assert "0.weight" not in lanes.params and distance(lanes.params, plain.params) < 1e-12
    assert lanes.model[0].weight.data_ptr() == model[0].weight.data_ptr()  # not even copied
    assert not torch.equal(lanes.model[3].weight, model[3].weight)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ud.UndriftError, match="no trainable parameters"):
        ud.train(model, uneven, rounds=1, local=LOCAL)


class Drawing(torch.nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = torch.nn.Linear(6, 4).double(), draw

    def forward(self, x):
        return self.layer(self.draw(x, self.training))


F = torch.nn.functional
DRAWS = {
    "dropout": lambda x, training: F.dropout(x, 0.5, training),
    "torch.dropout": lambda x, training: torch.dropout(x, 0.5, training),
    "dropout1d": lambda x, training: F.dropout1d(x[:, :, None].expand(-1, -1, 2), 0.5, training).mean(2),
    "alpha_dropout": lambda x, training: F.alpha_dropout(x, 0.5, training),
    "rand_like": lambda x, training: x * torch.rand_like(x) if training else x,
    "randn": lambda x, training: x + torch.randn(x.shape, dtype=x.dtype) if training else x,
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_inside_a_model_come_from_the_clients_key(uneven, name):
    torch.manual_seed(0)
    model = Drawing(DRAWS[name])
    before = torch.get_rng_state()
    lanes, plain = both(model, uneven, rounds=2)
    again = ud.train(model, uneven, rounds=2, local=LOCAL, participation=4, engine="plain")
    assert torch.equal(torch.get_rng_state(), before)
    assert distance(lanes.params, plain.params) < 1e-12 and same_bits(plain.params, again.params)
    assert distance(lanes.params, without_draws()) > 1e-4


@functools.cache
def without_draws():
    torch.manual_seed(0)
    data = make_clients([23, 5, 0, 41, 10, 17, 1])
    return ud.train(Drawing(lambda x, training: x), data, rounds=2, local=LOCAL, participation=4, engine="plain").params


@pytest.mark.long
def test_a_million_parameters_and_many_clients_are_not_as_many_copies():
    """A few hundred clients here; `make soak` has a thousand."""
    copies, lanes = copies_of_a_million(300)
    assert lanes <= 20 and copies < 100


def test_a_tensor_that_stands_in_two_places_is_traced_as_two():
    traced = Traced(lambda a, b: a - b)
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert traced(one, one).tolist() == [0, 0] and traced(two, one).tolist() == [1, 1]
    assert len(traced.programs) == 1


@dataclass(frozen=True)
class Reordered(ud.Part):
    """FedAvg in disguise: every tree comes back in another order, as a dict built from elsewhere would."""

    def back(self, tree):
        return {n: tree[n] for n in reversed(tree)}

    def gradient(self, g, params, client):
        return self.back(g)

    def rate(self, k, client):
        return self.back({n: torch.ones_like(w) for n, w in client.start.items()})

    def project(self, params, client):
        return self.back(params)

    def update(self, delta, client):
        return self.back(delta)

    def transform(self, update, state, server):
        return self.back(update), state


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_the_order_of_a_hooks_dict_does_not_matter(uneven, engine):
    plain, disguised = (
        ud.train(net(), uneven, m, rounds=3, local=LOCAL, engine=engine).params for m in (ud.FedAvg(), Reordered())
    )
    assert list(disguised) == list(plain) and distance(disguised, plain) < 1e-14


@dataclass(frozen=True)
class Missing(ud.Part):
    def gradient(self, g, params, client):
        return {"0.weight": g["0.weight"]}


def test_a_hook_that_loses_parameters_is_told(uneven):
    with pytest.raises(
        ud.UndriftError, match=r"Missing.gradient must return a dict with the parameters' own names \(0.weight"
    ):
        ud.train(net(), uneven, Missing(), rounds=1, local=LOCAL)


class Scaled(torch.nn.Module):
    """A parameter without axes."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(6, 4), torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.layer(x) * self.scale


def test_a_scalar_parameter_keeps_its_precision():
    data = make_clients([23, 5, 41], torch.float32)
    lanes, plain = both(Scaled(), data, ud.FedProx(mu=0.1) + ud.FedNova(), rounds=3, participation=3)
    assert {w.dtype for w in (*lanes.params.values(), *plain.params.values())} == {torch.float32}
    assert distance(lanes.params, plain.params) < 1e-5 and lanes.params["scale"].shape == ()


@dataclass(frozen=True)
class Votes(ud.Part):
    """Uploads a bool, a byte and a Python number, which must add up like numbers."""

    def start(self, params):
        return {"yes": 0, "bytes": 0, "ones": 0}

    def upload(self, delta, client):
        return {"yes": client.n > 0, "bytes": torch.full((), 100, dtype=torch.int8), "ones": 1}, client.kept

    def transform(self, update, state, server):
        return update, server.totals.sums

    def history(self, state):
        return {name: int(v) for name, v in state.items()}


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_votes_and_counts_add_up(uneven, engine):
    row = ud.train(net(), uneven, Votes(), rounds=1, local=LOCAL, engine=engine).history[0]
    assert (row["yes"], row["bytes"], row["ones"]) == (6, 600, 6)


def test_what_stands_beside_a_part_does_not_change_its_draws(uneven):
    alone = ud.train(net(), uneven, ud.GradientNoise(std=0.1), rounds=2, local=LOCAL)
    beside = ud.train(net(), uneven, ud.FedAvg() + ud.FedProx(mu=0) + ud.GradientNoise(std=0.1), rounds=2, local=LOCAL)
    assert same_bits(alone.params, beside.params)


class Counting(torch.nn.Module):
    """Training changes a buffer that belongs to no norm."""

    def __init__(self, replaces=False):
        super().__init__()
        self.layer, self.replaces = torch.nn.Linear(6, 4).double(), replaces
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        if self.training and self.replaces:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        elif self.training:
            self.mean.mul_(0.5).add_(0.5 * x.mean(0).detach())
        return self.layer(x - self.mean)


def test_buffers_that_training_changes_are_averaged_wherever_they_are(uneven):
    run = ud.train(Counting(), uneven, rounds=1, local=ud.Local(steps=1, lr=0.1))
    assert run.choices["engine"] == "plain" and "buffer 'mean'" in run.choices["why"]
    means = torch.stack([0.5 * uneven[int(i)][0].mean(0) for i in uneven.nonempty])
    shares = torch.tensor(uneven.sizes[uneven.nonempty] / uneven.sizes.sum())
    assert torch.allclose(run.model.mean, shares @ means, rtol=1e-12)
    replaced = ud.train(Counting(replaces=True), uneven, rounds=1, local=ud.Local(steps=1, lr=0.1))
    assert torch.allclose(replaced.model.mean, run.model.mean, rtol=1e-12)


@dataclass(frozen=True)
class Branch(ud.Part):
    mu: ud.Number

    def gradient(self, g, params, client):
        return g if client.n > 3 else ud.tree_map(lambda g: self.mu * g, g)


def test_an_if_on_a_tensor_is_explained(uneven):
    with pytest.raises(ud.UndriftError, match=r'Branch.gradient failed \(.*:\d+\).*vmap.*engine="plain" runs the hook'):
        ud.train(net(), uneven, Branch(mu=1), rounds=1, local=LOCAL, engine="lanes")
    plain, auto = (ud.train(net(), uneven, Branch(mu=1), rounds=1, local=LOCAL, engine=e) for e in ("plain", "auto"))
    assert auto.choices["engine"] == "plain" and "Branch.gradient" in auto.choices["why"]
    assert all(torch.equal(w, plain.params[n]) for n, w in auto.params.items())


def test_padding_far_beyond_the_data_is_avoided():
    data = make_clients([400, *[2] * 60])
    run = ud.train(net(), data, rounds=1, local=ud.Local(steps=1, batch_size=None, lr=0.1))
    assert run.choices["engine"] == "plain" and "padding" in run.choices["why"]


def test_batch_norm_on_a_single_sample_is_explained():
    with pytest.raises(ud.UndriftError, match="a batch_size that leaves no client a last batch of one"):
        ud.train(Normed(), make_clients([9, 8]), rounds=1, local=ud.Local(epochs=1, batch_size=8, lr=0.1))


def test_half_precision_sums_do_not_overflow():
    x, y = torch.randn(30_000, 6).half(), torch.zeros(30_000).long()
    model = torch.nn.Linear(6, 4).half()
    run = ud.train(
        model, ud.FederatedDataset.from_clients([(x, y)]), rounds=1, local=ud.Local(steps=2, batch_size=64, lr=1.0)
    )
    assert all(torch.isfinite(w).all() and w.dtype == torch.float16 for w in run.params.values())
