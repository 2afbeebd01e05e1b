"""Hooks that would be wrong without a word are refused before training, and correct ones are not."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import undrift as ud
from tests import field as methods
from tests.field_reference import METHODS
from tests.parts import METHOD, After, Normed
from tests.problems import distance, make_clients, net, quadratic, same_bits, split
from undrift.method import calls
from undrift.training import build
from undrift.training.side_by_side import side_by_side

LOCAL = ud.Local(epochs=2, batch_size=4, lr=0.1)
PLAIN, LANES = {"engine": "plain"}, {"engine": "lanes", "lanes": 2}
ON_BOTH = pytest.mark.parametrize("engine", [PLAIN, LANES], ids=["plain", "lanes"])
SIZES = [7, 1, 13, 5, 0, 10]
ZERO = torch.zeros((), dtype=torch.float64)


def part(name: str = "Mine", /, **hooks: Any) -> ud.Part:
    """A part of this name with these hooks and class attributes."""
    return make_dataclass(name, [], bases=(ud.Part,), frozen=True, namespace=hooks)()


def train(method: Any, model: Any = None, data: Any = None, **settings: Any) -> ud.Result:
    given = {"rounds": 2, "local": LOCAL, "device": "cpu", **settings}
    return ud.train(model or net(), make_clients(SIZES) if data is None else data, method, **given)


def refusal(method: Any, *given: Any, **settings: Any) -> str:
    with pytest.raises(ud.UndriftError) as refused:
        train(method, *given, **settings)
    return str(refused.value)


@pytest.fixture
def said(caplog):
    """What the rehearsal notes in the log."""
    caplog.set_level(logging.INFO, logger="undrift")
    return lambda: [record.getMessage() for record in caplog.records if "rehearsal" in record.getMessage()]


# ---- the mask -------------------------------------------------------------------------------------------------------


def loss(params, batch, client):
    return client.loss(client.model(params, batch.x), batch.y)


def measuring(when: str, measure: Callable[..., Any], **hooks: Any) -> ud.Part:
    return part("Mine", measures=when, measure=measure, **hooks)


def scaled(self, g, params, client):
    return ud.tree_map(lambda d: d * client.measured / client.n, g)


def sent(self, delta, client):
    return client.measured, client.kept


def contrast(z):
    return (torch.softmax(z @ z.T, 1) ** 2).sum(1)


UNMASKED = {
    "a mean over the batch": part(
        "Mine", objective=lambda self, losses, z, b, w, c: losses + (z - z.mean(0)).square().mean()
    ),
    "the length of the batch": part("Mine", objective=lambda self, losses, z, b, w, c: losses * len(b.y) / 4),
    "a maximum": part("Mine", objective=lambda self, losses, z, b, w, c: losses / losses.detach().max()),
    "a sum": part("Mine", objective=lambda self, losses, z, b, w, c: losses.sum().expand_as(losses) / 4),
    "pairs of samples": part("Mine", objective=lambda self, losses, z, b, w, c: losses + 0.1 * contrast(z)),
    "a loop": part(
        "Mine", objective=lambda self, losses, z, b, w, c: losses + sum(z[i].square().sum() for i in range(len(b.y)))
    ),
    "gradients per sample": part(
        "Mine",
        replaces_gradient=True,
        gradient=lambda self, g, w, c: ud.tree_map(lambda d: d.mean(0), c.gradients(w)),
    ),
    "measured before": measuring("before", lambda self, w, b, c: loss(w, b, c).sum(), gradient=scaled),
    "a count": measuring("before", lambda self, w, b, c: torch.ones_like(b.mask).sum(), gradient=scaled),
    "a mean that is summed": measuring("before", lambda self, w, b, c: loss(w, b, c).mean(), gradient=scaled),
    "measured at what is sent": measuring("sent", lambda self, w, b, c: loss(w, b, c).sum(), gradient=scaled),
    "measured after": measuring("after", lambda self, w, b, c: loss(w, b, c).sum(), upload=sent),
    "measured in training": measuring("training", lambda self, w, b, c: b.losses.sum(), upload=sent),
    "measured over the cohort": measuring(
        "cohort", lambda self, w, b, c: loss(w, b, c).sum(), broadcast=lambda self, w, s, server: server.totals.sums
    ),
    "measured in the end": measuring(
        "finish", lambda self, w, b, c: loss(w, b, c).sum(), finish=lambda self, w, s, server: w
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("mistake", UNMASKED)
def test_hooks_that_forget_the_mask_are_refused_where_batches_are_padded(mistake, dtype):
    made = UNMASKED[mistake]
    model, data = net(dtype), make_clients(SIZES, dtype)
    found = refusal(made, model, data, **LANES)
    hook = next(hook for hook in ("measure", "objective", "gradient") if hook in vars(type(made)))
    assert f"Mine.{hook} depends on the samples that pad a short batch" in found
    assert "batch.mask" in found
    assert len(train(made, model, data, rounds=1, **PLAIN).history) == 1, "nothing is padded there"


def test_without_padding_the_mask_may_be_forgotten():
    """Even clients: no batch is short."""
    even = ud.Local(epochs=1, batch_size=4, lr=0.1)
    lanes, plain = (
        train(UNMASKED["a sum"], data=make_clients([8, 4, 16]), local=even, **engine) for engine in (LANES, PLAIN)
    )
    assert distance(lanes.params, plain.params) < 1e-12


# ---- losses and gradients that are lost -----------------------------------------------------------------------------


def no_grad(self, losses, z, batch, params, client):
    with torch.no_grad():
        return losses + z.square().sum(1)


LOST = {
    "without gradients": (no_grad, "objective returns losses that do not depend on the weights"),
    "detached": (
        lambda self, losses, z, b, w, c: (losses + z.square().sum(1)).detach(),
        "objective returns losses that do not depend on the weights",
    ),
    "half detached": (
        lambda self, losses, z, b, w, c: losses.detach() + z.square().sum(1),
        "objective ignores the losses that it is given, or detaches them",
    ),
    "replaced": (
        lambda self, losses, z, b, w, c: F.cross_entropy(z, b.y, reduction="none", label_smoothing=0.1),
        "objective ignores the losses that it is given",
    ),
}


@ON_BOTH
@pytest.mark.parametrize("mistake", LOST)
def test_objectives_that_lose_the_losses_are_refused(mistake, engine):
    function, sentence = LOST[mistake]
    assert f"Mine.{sentence}" in refusal(ud.BalancedLoss() + part("Mine", objective=function), **engine)


@ON_BOTH
def test_a_part_may_replace_the_losses_if_it_says_so_and_comes_first(engine):
    smooth = part("Smooth", objective=LOST["replaced"][0], replaces_losses=True)
    after = train(smooth, **engine)
    longer = part("Longer", objective=lambda self, losses, z, b, w, c: losses + z.square().sum(1))
    assert distance(train(smooth + longer, **engine).params, after.params) > 1e-3
    with pytest.raises(ud.UndriftError, match="Smooth replaces the losses, so what Longer does to them would be lost"):
        longer + smooth


@ON_BOTH
def test_hooks_that_ignore_the_gradient_are_refused(engine):
    for hooks in (
        {"gradient": lambda self, g, w, c: c.gradient(ud.tree_map(torch.clone, w))},
        {"gradient": lambda self, g, w, c: ud.tree_map(torch.zeros_like, w)},
        {"carry": lambda self, w, c: w, "step": lambda self, g, v, w, c: (c.gradient(v), v)},
    ):
        hook = "step" if "step" in hooks else "gradient"
        found = refusal(part("Mine", **hooks), **engine)
        assert f"Mine.{hook} ignores the gradient that it is given" in found and "replaces_gradient" in found
        assert train(part("Mine", replaces_gradient=True, **hooks), **engine).history


USING = {
    "its sign": lambda g: ud.tree_map(torch.sign, g),
    "its size": lambda g: ud.tree_map(lambda d: torch.where(d.abs() > 0.01, 1.0, 0.0).to(d.dtype), g),
    "its direction": lambda g: ud.tree_map(lambda d: d / d.norm(), g),
}


@ON_BOTH
@pytest.mark.parametrize("without", [False, True], ids=["with gradients", "without gradients"])
@pytest.mark.parametrize("what", USING)
def test_hooks_that_use_the_gradient_in_a_way_of_their_own_are_fine(what, without, engine, said):
    def gradient(self, g, params, client):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not without):
            return USING[what](g)

    assert train(part("Mine", gradient=gradient), **engine).history and not said()


@ON_BOTH
@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["as long", "of length 1"])
def test_a_gradient_elsewhere_loses_what_other_parts_have_added(scale, engine):
    """Sharpness-aware minimization that takes its direction from the gradient, and returns another one."""

    def there(client, params, g):
        length = torch.sqrt(sum(d.square().sum() for d in g.values())) ** (1 - scale)
        return client.gradient(ud.tree_map(lambda w, d: w + 0.3 * d / length, params, g))

    naive = part("Naive", gradient=lambda self, g, params, client: there(client, params, g))
    assert "Naive.gradient ignores the gradient that it is given" in refusal(ud.FedProx(1.0) + naive, **engine)

    def difference(self, g, params, client):
        here = client.gradient(params)
        return ud.tree_map(lambda g, a, b: g + a - b, g, there(client, params, here), here)

    assert train(ud.FedProx(1.0) + part("Right", gradient=difference), **engine).history


# ---- chance ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stateful(ud.Part):
    generator: Any = field(default_factory=lambda: np.random.default_rng(0), compare=False)

    def gradient(self, g, params, client):
        return ud.tree_map(lambda d: d + self.generator.normal(), g)


GLOBAL = {
    "numpy": lambda d: d + torch.from_numpy(np.asarray(np.random.randn(*d.shape))),
    "python": lambda d: d + random.random(),
}


@ON_BOTH
@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("which", GLOBAL)
def test_global_generators_of_numpy_and_python_are_refused(which, rehearse, engine):
    def function(self, tree, *rest):
        return ud.tree_map(GLOBAL[which], tree)

    def pair(self, tree, state, server):
        return function(self, tree), state

    for hook in ("gradient", "update", "transform"):
        made = part("Mine", **{hook: pair if hook == "transform" else function})
        found = refusal(made, **engine, rehearse=rehearse)
        assert f"Mine.{hook} draws from a global generator of numpy or Python's random" in found
        assert "ud.random.normal(client.key, shape)" in found


@ON_BOTH
def test_other_generators_of_the_hosts_are_noticed_since_they_do_not_repeat(engine):
    unseeded = part(
        "Mine", gradient=lambda self, g, w, c: ud.tree_map(lambda d: d + np.random.default_rng().normal(), g)
    )
    assert "Mine.gradient does not return the same for the same arguments" in refusal(unseeded, **engine)
    assert "Stateful.gradient does not return the same for the same arguments" in refusal(Stateful(), **engine)


def test_draws_of_another_thread_are_not_blamed_on_a_hook():
    """One that come between, that is: the hook is called again to see."""
    made, again = part("Mine", gradient=lambda self, g, w, c: g), []
    watched = calls.HostDraws(made, "gradient")
    random.random()
    assert not watched.found(lambda: again.append(1)) and again == [1]
    assert watched.found(random.random)
    assert not calls.HostDraws(made, "gradient").found(random.random), "nothing was drawn"


@ON_BOTH
def test_draws_in_start_and_keep_point_to_the_keys_that_they_have(engine):
    for hook, signature in (("start", "def start(self, params, server)"), ("keep", "def keep(self, params, client)")):
        for generator in (None, torch.Generator().manual_seed(0)):
            made = part("Mine", **{hook: lambda self, w, *rest, g=generator: torch.randn(3, generator=g)})
            found = refusal(made, **engine)
            assert f"Mine.{hook} draws" in found and signature in found
            assert ("whose state is not part of a run" in found) == (generator is not None)


# ---- what hooks are given, changed in place -------------------------------------------------------------------------


def writes(tree):
    for t in tree.values():
        t.add_(0.01)
    return tree


def multiplies(tree):
    for name in tree:
        tree[name] *= 0.5
    return tree


def removes(tree):
    tree["3.bias"] = 0 * tree["3.bias"]
    return tree


def row(tree):
    tree["0.weight"][0].zero_()  # a view of the tensor, not the tensor itself
    return tree


IN_PLACE: dict[str, dict[str, Any]] = {
    "the gradient": {"gradient": lambda self, g, w, c: writes(g)},
    "the gradient, times": {"gradient": lambda self, g, w, c: multiplies(g)},
    "the weights": {"gradient": lambda self, g, w, c: writes(w) and g},
    "an entry": {"project": lambda self, w, c: removes(w)},
    "client.start": {"gradient": lambda self, g, w, c: removes(c.start) and g},
    "the update": {"update": lambda self, d, c: writes(d)},
    "server.params": {"transform": lambda self, u, s, server: (u, s) if writes(server.params) else None},
    "the state": {
        "start": lambda self, w: ud.tree_map(torch.zeros_like, w),
        "transform": lambda self, u, s, server: (writes(s), s),
    },
    "updates": {"aggregate": lambda self, u, s, server: (ud.tree_map(lambda t: t.mean(0), writes(u)), s)},
}


@ON_BOTH
@pytest.mark.parametrize("rehearse", [True, False])
@pytest.mark.parametrize("what", IN_PLACE)
def test_what_hooks_are_given_must_not_be_changed_in_place(what, rehearse, engine):
    hook = list(IN_PLACE[what])[-1]
    found = refusal(part("Mine", **IN_PLACE[what]), **engine, rehearse=rehearse)
    assert f"Mine.{hook} changes in place what it was given" in found and "ud.tree_map" in found


@ON_BOTH
def test_a_row_of_a_tensor_changed_in_place_is_noticed_in_the_rehearsal(engine):
    found = refusal(part("Mine", gradient=lambda self, g, w, c: row(w) and g), **engine)
    assert "Mine.gradient changes in place what it was given" in found


@ON_BOTH
def test_tensors_of_a_hooks_own_may_be_changed_in_place(engine):
    made = part("Mine", gradient=lambda self, g, w, c: writes(ud.tree_map(torch.clone, g)))
    assert train(made, **engine).history


# ---- how a part is written ------------------------------------------------------------------------------------------


def test_swapped_arguments_are_refused():
    for hook, function in {
        "gradient": lambda self, params, g, client: g,
        "transform": lambda self, state, update, server: (update, state),
        "objective": lambda self, z, losses, batch, params, client: losses,
    }.items():
        found = refusal(part("Mine", **{hook: function}))
        assert f"Mine.{hook} has its argument" in found and "in another place than undrift passes it" in found


def test_a_part_that_is_not_frozen_is_refused():
    @dataclass
    class Momentum(ud.Part):
        m: Any = None

        def transform(self, update, state, server):
            self.m = update
            return self.m, state

    assert "Momentum must be a frozen dataclass" in refusal(Momentum())


@ON_BOTH
def test_fields_that_are_not_known_yet_are_none(engine):
    seen = []

    def prepare(self, client):
        seen.extend([client.received, client.measured, client.prepared, client.carry, client.step, client.final])
        return {}

    measure = {"measures": "after", "measure": lambda self, w, b, c: b.mask.sum()}
    train(part("Mine", prepare=prepare, upload=sent, **measure), rounds=1, **engine)
    assert seen and set(seen) == {None}


@ON_BOTH
def test_one_hot_works_in_every_hook(engine):
    def objective(self, losses, z, batch, params, client):
        return losses + (F.one_hot(batch.y, 4) * z).sum(1)

    def by_comparing(self, losses, z, batch, params, client):
        return losses + ((batch.y[:, None] == torch.arange(4)) * z).sum(1)

    one, other = (train(part("Mine", objective=f), **engine) for f in (objective, by_comparing))
    assert one.choices["engine"] == engine["engine"] and distance(one.params, other.params) < 1e-14


# ---- values of Python -----------------------------------------------------------------------------------------------

SEEN = {"factor": 1.0}


def slowed(self, k, client):
    return torch.ones_like(k) * SEEN["factor"]


@pytest.fixture
def seen():
    SEEN["factor"] = 1.0
    yield SEEN
    SEEN["factor"] = 1.0


def halves(self, plan, state, server):
    SEEN["factor"] = 0.5**server.round
    return plan, state


def test_a_variable_that_changes_is_refused_in_lanes_and_right_on_the_plain_engine(seen):
    made, schedule = part("Mine", plan=halves, rate=slowed), replace(LOCAL, lr=ud.decay(0.1, 0.5))
    plain = train(made, rounds=4, **PLAIN)
    wanted = train(ud.FedAvg(), rounds=4, local=schedule, **PLAIN)
    assert distance(plain.params, wanted.params) < 1e-13
    found = refusal(made, rounds=4, **LANES)
    assert "Mine.rate depends on a value of Python that has changed during the run" in found
    assert train(made, rounds=4, **LANES, rehearse=False).history, "that it is wrong is what the rehearsal is for"


@pytest.mark.parametrize(("when", "found_before"), [(1, 9), (8, 9), (31, 32), (33, 36)])
def test_a_variable_that_changes_late_is_found_at_the_latest_in_the_end(when, found_before, seen):
    rounds = []

    def slow(row):
        rounds.append(row["round"])
        if row["round"] == when:
            SEEN["factor"] = 0.5

    found = refusal(part("Mine", rate=slowed), rounds=9 if when < 9 else 36, on_round=slow, **LANES)
    assert "Mine.rate depends on a value of Python" in found and max(rounds) == found_before - 1


def test_lists_that_a_hook_fills_and_does_not_read_are_fine(seen):
    kept = []

    def plan(self, plan, state, server):
        kept.append(server.round)
        return plan, state

    def rate(self, k, client):
        kept.append(k)
        return 1.0

    train(part("Mine", plan=plan, rate=rate), rounds=3, **LANES)
    assert 2 in [k for k in kept if isinstance(k, int)]


# ---- rates ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turns(ud.Part):
    """FedRep, without its `gradient`."""

    personal: tuple[str, ...] = ("3.*",)

    def rate(self, k, client):
        head = torch.where(k < 2, 1.0, 0.0)
        return {n: head if n in client.personal else 1 - head for n in client.start}


@ON_BOTH
def test_rates_that_let_the_momentum_run_on_are_refused(engine):
    for local in (
        replace(LOCAL, momentum=0.9),
        replace(LOCAL, optimizer=ud.Adam()),
        replace(LOCAL, optimizer=ud.SGD(momentum=0.9)),
    ):
        found = refusal(Turns(), local=local, **engine)
        assert "Turns.rate is 0 for '0.bias' in the first step and not in the last" in found
    assert train(Turns(), **engine).history, "without momentum, nothing runs on"
    assert train(METHODS["FedRep"][0], local=replace(LOCAL, momentum=0.9), **engine).history
    warm = replace(LOCAL, momentum=0.9, step_schedule=ud.warmup(2))
    assert train(ud.FedProx(0.1) + part("Mine", rate=lambda self, k, c: 0.5), local=warm, **engine).history


@dataclass(frozen=True)
class Bare(ud.Part):
    """A second model with `client.lr`, or with `client.rates`."""

    rates: bool = False
    reads_rates: ClassVar[bool] = False

    def keep(self, params):
        return params

    def carry(self, params, client):
        return client.kept

    def step(self, g, carry, params, client):
        d = client.gradient(carry)
        rates = client.rates if self.rates else dict.fromkeys(d, client.lr)
        return g, ud.tree_map(lambda v, d, rate: v - rate * d, carry, d, rates)

    def upload(self, delta, client):
        return (), client.carry


@ON_BOTH
def test_a_second_model_that_forgets_the_rates_is_refused(engine):
    slow = part("Slow", rate=lambda self, k, client: 0.5)
    for method, local in (
        (Bare(), replace(LOCAL, step_schedule=lambda k, n: 0.0 * k)),
        (Bare(), replace(LOCAL, step_schedule=lambda k, n: 1 - 0.9 * k / n)),
        (Bare(), replace(LOCAL, groups={"3.*": ud.Group(0.1, 1.0)})),
        (Bare() + slow, LOCAL),
    ):
        assert "Bare.step takes client.lr for the rate of its own weights" in refusal(method, local=local, **engine)
    assert train(Bare(), local=replace(LOCAL, lr=ud.decay(0.1, 0.9)), **engine).history
    assert train(Bare(rates=True) + slow, local=replace(LOCAL, step_schedule=ud.warmup(2)), **engine).history


# ---- updates, own weights, and who takes part -----------------------------------------------------------------------


@dataclass(frozen=True)
class Feedback(ud.Part):
    """Keeps what it has not sent, and takes that from another update than it has sent."""

    handed: bool = False
    reads_rates: ClassVar[bool] = False

    def keep(self, params):
        return ud.tree_map(torch.zeros_like, params)

    def update(self, delta, client):
        whole = ud.tree_map(torch.add, delta, client.kept)
        sent = ud.tree_map(lambda d: torch.where(d.abs() > 0.01, d, 0.0), whole)
        return (sent, ud.tree_map(torch.sub, whole, sent)) if self.handed else sent

    def upload(self, delta, client):
        if self.handed:
            return (), client.from_update
        whole = ud.tree_map(torch.add, delta, client.kept)
        return (), ud.tree_map(lambda d: torch.where(d.abs() > 0.01, 0.0, d), whole)


@ON_BOTH
def test_error_feedback_beside_another_update_hook(engine):
    nothing = part("Nothing", reads_rates=False, update=lambda self, d, c: ud.tree_map(torch.zeros_like, d))
    found = refusal(nothing + Feedback(), **engine)
    assert "Feedback.upload uses its `delta`" in found and "Nothing.update" in found and "client.from_update" in found
    assert train(Feedback(), **engine).history and train(Feedback() + nothing, **engine).history
    stands = train(nothing + Feedback(handed=True), **engine)
    assert same_bits(stands.params, {n: w.detach() for n, w in net().named_parameters()})


@ON_BOTH
def test_own_weights_come_with_their_running_statistics(engine):
    class Mine(Bare):
        def own(self, params, client):
            return client.kept

    found = refusal(Mine(), Normed().double(), split(), local=replace(LOCAL, drop_last=True), **engine)
    assert "Mine.own returns weights without the running statistics that they are used with" in found
    assert "client.gradient_and_buffers" in found
    assert train(Mine(), net(), split(), **engine).history, "this model has none"


@ON_BOTH
def test_samplers_that_override_each_other_are_refused(engine):
    def first(count):
        def plan(self, plan, state, server):
            clients = server.clients[:count]
            return replace(plan, clients=clients, steps=server.steps(clients)), state

        return plan

    def last(self, plan, state, server):
        clients = server.clients[-2:]
        return replace(plan, clients=clients, steps=server.steps(clients)), state

    found = refusal(part("Mine", plan=first(4)), participation=2, **engine)
    assert "Mine.plan chooses 4 clients of its own, so `participation`, which samples 2" in found
    found = refusal(part("Mine", plan=last) + part("Other", plan=first(2)), **engine)
    assert "Mine and Other both choose the round's clients" in found
    assert train(part("Mine", plan=first(2)), participation=2, **engine).history, "it takes the number from there"

    def fewer(self, plan, state, server):
        return replace(plan, clients=plan.clients[:1], steps=plan.steps[:1]), state

    fewer = part("Fewer", plan=fewer)
    assert train(fewer, participation=3, **engine).history, "one may always leave out some"


@ON_BOTH
def test_an_empty_cohort_is_named_where_the_server_divides_by_it(engine):
    def nobody(self, plan, state, server):
        return replace(plan, clients=plan.clients[:0], steps=plan.steps[:0]), state

    def divides(self, update, state, server):
        return ud.tree_map(lambda d: d / server.totals.size, update), state

    run = train(part("Mine", plan=nobody, transform=divides), **engine)
    assert run.stopped.startswith("Round 1: the cohort is empty") and "look at Mine.transform" in run.stopped
    assert "learning rate" not in run.stopped and "server.totals.size.clamp(min=1)" in run.stopped


@ON_BOTH
@pytest.mark.parametrize("asks", [False, True])
def test_parameters_that_stay_frozen_where_they_are_tuned_are_told(asks, engine, caplog):
    def rate(self, k, client):
        head = torch.where(client.tuning, 1.0, 0.0) if asks else torch.zeros_like(k)
        return {n: head if n.startswith("3.") else torch.ones_like(head) for n in client.start}

    train(part("Mine", rate=rate), data=split(), **engine)
    warned = [r.getMessage() for r in caplog.records if "tuned_* columns" in r.getMessage()]
    assert len(warned) == (not asks)
    assert asks or "Mine.rate is 0 for 3.bias, 3.weight" in warned[0]


# ---- no false alarms ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingLoss(ud.Part):
    measures: ClassVar[str] = "training"

    def start(self, params, server):
        return ZERO

    def measure(self, params, batch, client):
        return {"loss": (batch.losses * batch.mask).sum(), "n": batch.mask.sum()}

    def upload(self, delta, client):
        return client.measured, client.kept

    def observe(self, params, state, server):
        return server.totals.sums["loss"] / server.totals.sums["n"].clamp(min=1)


@dataclass(frozen=True)
class Contrast(ud.Part):
    """A term of pairs of samples, masked."""

    def objective(self, losses, z, batch, params, client):
        pairs = (z @ z.T).masked_fill(batch.mask[None] == 0, torch.finfo(z.dtype).min)
        return losses + 0.1 * (torch.softmax(pairs, 1) ** 2).sum(1)


CORRECT: dict[str, Any] = {
    **{name: method for name, (method, _) in METHODS.items() if name not in ("FedPer", "FedRep")},
    "Everything": METHOD.parts[0] + After(),
    "TrainingLoss": TrainingLoss(),
    "Contrast": Contrast(),
    "all at once": Contrast() + TrainingLoss() + methods.FedDecorr(0.5) + methods.Ditto(0.3),
}


class Wide(torch.nn.Module):
    """Convolutions with biases before batch norm, whose gradient is nothing but rounding."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv1d(1, 4, 3, padding=1), torch.nn.BatchNorm1d(4) if norm else torch.nn.Identity(),
            torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Flatten(), torch.nn.Linear(24, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.body(x[:, None])


def made(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    return {"dropout": lambda: net(dtype, dropout=0.4), "norm": lambda: Wide().to(dtype)}[kind]()


@ON_BOTH
@pytest.mark.parametrize("name", CORRECT)
def test_correct_methods_are_not_refused(name, engine, said):
    assert train(CORRECT[name], rounds=1, **engine).history and not said()
    small = make_clients(SIZES, torch.float32)
    if name != "Everything":  # which is written for these six features, and for float64
        assert train(CORRECT[name], made("dropout", torch.float32), small, rounds=1, **engine).history and not said()


GENERAL = ("FedSAM", "MOON", "Mime", "PerFedAvg", "TrainingLoss", "Contrast")


@ON_BOTH
@pytest.mark.parametrize("name", GENERAL)
def test_correct_methods_are_not_refused_with_norms_in_low_precision_and_on_few_samples(name, engine, said):
    data = make_clients([7, 13, 6, 10], torch.float32)
    local = ud.Local(epochs=1, batch_size=4, lr=0.1, momentum=0.9, drop_last=True)
    for kind, precision in (("norm", "auto"), ("dropout", "bfloat16")):
        model = made(kind, torch.float32)
        assert train(CORRECT[name], model, data, local=local, rounds=1, precision=precision, **engine).history
    tiny = {"local": ud.Local(epochs=1, batch_size=2, lr=0.1), "rounds": 1}
    assert train(CORRECT[name], data=make_clients([1, 1]), **tiny, **engine).history, "one sample"
    assert train(CORRECT[name], data=make_clients([2, 3]), **tiny, **engine).history, "two"
    assert not said()


def test_gradients_of_nothing_but_rounding_are_no_mistake(said):
    """Of a bias before batch norm: 0, were it not for rounding, which padding changes altogether."""
    same = part("Mine", gradient=lambda self, g, params, client: g)
    for seed in (0, 3, 7, 51):
        torch.manual_seed(seed)
        layers = [torch.nn.Conv2d(1, 3, 3, padding=1), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(108, 4))
        pairs = [(torch.randn(n, 1, 6, 6), torch.randint(0, 4, (n,))) for n in (7, 13, 5, 10)]
        data = ud.FederatedDataset.from_clients(pairs)
        assert train(same, model, data, rounds=1, **LANES).history and not said()


@ON_BOTH
def test_methods_without_classes_are_rehearsed_too(engine, said):
    """Empty `label_counts`."""
    pairs = [(torch.randn(n, 6, dtype=torch.float64), torch.rand(n, 2, dtype=torch.float64)) for n in (5, 3, 8)]
    data = ud.FederatedDataset.from_clients(pairs, task=ud.Task(loss=quadratic))

    def gradient(self, g, params, client):
        assert client.label_counts.numel() == 0
        return g

    method = part("Mine", gradient=gradient) + TrainingLoss()
    assert train(method, torch.nn.Linear(6, 1).double(), data, **engine).history and not said()


@ON_BOTH
@pytest.mark.parametrize("personal", ["FedPer", "FedRep"])
def test_methods_with_personal_parameters_are_rehearsed_too(personal, engine, said):
    assert train(METHODS[personal][0] + methods.FedSAM(0.1), data=split(), **engine).history and not said()


def test_hooks_that_need_whole_batches_are_tried_on_them(said):
    """The largest five losses of a batch: three samples do not have them, and the mask is right."""

    def objective(self, losses, z, batch, params, client):
        return losses + torch.where(batch.mask > 0, losses, 0.0).topk(5).values.sum() / 5

    def unmasked(self, losses, z, batch, params, client):
        return losses + (z - z.mean(0)).square().mean() + 0 * losses.topk(5).values.sum()

    data, local = make_clients([17, 25, 9]), ud.Local(epochs=1, batch_size=8, lr=0.1)
    assert train(part("Mine", objective=objective), data=data, local=local, **LANES).history and not said()
    found = refusal(part("Mine", objective=unmasked), data=data, local=local, **LANES)
    assert "Mine.objective depends on the samples that pad a short batch" in found


def test_a_rehearsal_that_cannot_be_held_is_given_up(said):
    """The hook counts on the length that lanes pad batches to; whether training gets there, training will tell."""

    def objective(self, losses, z, batch, params, client):
        assert len(losses) == 4
        return losses

    data, local = make_clients([5, 5]), ud.Local(epochs=1, batch_size=4, lr=0.1)
    assert train(part("Mine", objective=objective), data=data, local=local, **LANES).history
    assert "was given up: Mine.objective failed" in said()[0]
    assert "could not be compared with ordinary PyTorch, which failed: Mine.objective failed" in said()[1]


BESIDE = {"drift": {"drift": True}, "faults": {"faults": ud.Faults(dropout=0.2)}, "rules": {"max_norm_ratio": 3.0}}


@pytest.mark.parametrize("more", BESIDE.values(), ids=BESIDE)
def test_the_rehearsal_beside_what_else_a_run_may_have(more, said):
    method = Contrast() + TrainingLoss() + ud.FedProx(0.1)
    for engine in (PLAIN, LANES):
        assert train(method, participation=4, **more, **engine).history and not said()
    bad = UNMASKED["measured in training"]
    assert "Mine.measure depends on the samples that pad" in refusal(bad, participation=4, **more, **LANES)


def test_runs_side_by_side_are_rehearsed_one_by_one():
    data = make_clients(SIZES)

    def task(method, seed):
        return lambda: train(method, data=data, seed=seed)

    right, wrong = Contrast() + TrainingLoss(), UNMASKED["a sum"]
    found = side_by_side([task(right, 0), task(wrong, 1), task(right, 2)])
    alone = train(right, data=data, seed=2)
    assert distance(found[2].params, alone.params) < 1e-12 and found[0].choices["beside"] == ["run 2"]
    assert "Mine.objective depends on the samples that pad" in str(found[1])


def test_only_methods_with_parts_of_ones_own_are_rehearsed(monkeypatch):
    held = []
    monkeypatch.setattr(build, "rehearse_hooks", lambda *given: held.append(1))
    train(ud.FedProx(0.1) + ud.Scaffold())
    assert not held
    train(Contrast(), rehearse=False)
    assert not held
    train(Contrast())
    assert held
