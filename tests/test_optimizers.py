"""Local optimizers against torch's, step schedules, parameter groups, and how all of them are written in files."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

import undrift as ud
from tests.experiments import GOOD, toml, undrift
from tests.problems import make_clients, net
from undrift.method.groups import group_factors
from undrift.method.numbers import bind, numbers_at
from undrift.method.optimizers import clip_by_norm
from undrift.method.parse import parse_local, parse_optimizer, parse_step_schedule
from undrift.tools import config
from undrift.tools.experiment import arguments
from undrift.training.build import prepare
from undrift.training.config_writer import config_toml, repeats, toml_literal
from undrift.training.identity import identity
from undrift.training.settings import Settings
from undrift.tree import tree_leaves, tree_map, tree_structure

STEPS = 20
CLIENT = SimpleNamespace(decay={})
SHAPES = {"weight": (4, 3), "bias": (4,), "scale": ()}
AGAINST_TORCH = {
    "sgd": (ud.SGD(), torch.optim.SGD, {}),
    "momentum": (ud.SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "decay": (ud.SGD(weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum and decay": (ud.SGD(0.8, weight_decay=0.1), torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.1}),
    "nesterov": (
        ud.SGD(0.9, nesterov=True, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (ud.Adam(), torch.optim.Adam, {}),
    "adam with decay": (
        ud.Adam(0.8, 0.95, 1e-3, weight_decay=0.1),
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adamw": (ud.AdamW(), torch.optim.AdamW, {}),
    "adamw without decay": (ud.AdamW(weight_decay=0.0), torch.optim.AdamW, {"weight_decay": 0.0}),
    "adamw with much": (
        ud.AdamW(0.8, 0.95, 1e-3, weight_decay=0.3),
        torch.optim.AdamW,
        {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    ),
}
CASES = pytest.mark.parametrize("case", AGAINST_TORCH)


def normal(seed: int, dtype: torch.dtype = torch.float64, lanes: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn((*lanes, *s), generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def bound(optimizer: ud.Optimizer, t: int = 0) -> ud.Optimizer:
    """With its numbers as the engine gives them: tensors of that round's values."""
    return bind(optimizer, tree_map(lambda x: torch.tensor(x, dtype=torch.float64), numbers_at(optimizer, t)))


def rates(changing: bool) -> list[float]:
    return [0.1 * 0.9**k if changing else 0.1 for k in range(STEPS)]


def ours(optimizer, w, gradients, lrs, client=CLIENT):
    """The weights after each step."""
    carry, found = optimizer.carry(w, client), []
    for g, lr in zip(gradients, lrs, strict=True):
        direction, carry = optimizer.step(g, carry, w, client)
        w = {n: w[n] - lr * direction[n] for n in w}
        found.append(w)
    return found


def theirs(kind, options, w, gradients, lrs, groups=None):
    """Those of torch's optimizer. `groups` has options of single parameters."""
    weights = {n: torch.nn.Parameter(x.clone()) for n, x in w.items()}
    reference = kind([{"params": [p], **(groups or {}).get(n, {})} for n, p in weights.items()], lr=0.1, **options)
    found = []
    for g, lr in zip(gradients, lrs, strict=True):
        for group in reference.param_groups:
            group["lr"] = lr
        for n, p in weights.items():
            p.grad = g[n].clone()
        reference.step()
        found.append({n: p.detach().clone() for n, p in weights.items()})
    return found


def assert_close(found, wanted):
    assert len(found) == len(wanted) == STEPS
    for step, (a, b) in enumerate(zip(found, wanted, strict=True)):
        for n in a:
            torch.testing.assert_close(a[n], b[n], rtol=1e-12, atol=1e-12, msg=lambda m, at=(step, n): f"{at}: {m}")


@CASES
@pytest.mark.parametrize("changing", [False, True], ids=["constant rate", "changing rate"])
@pytest.mark.parametrize("as_tensors", [False, True], ids=["floats", "tensors"])
def test_every_step_is_that_of_torch(case, changing, as_tensors):
    optimizer, kind, options = AGAINST_TORCH[case]
    w, gradients, lrs = normal(0), [normal(1 + k) for k in range(STEPS)], rates(changing)
    found = ours(bound(optimizer) if as_tensors else optimizer, w, gradients, lrs)
    assert_close(found, theirs(kind, options, w, gradients, lrs))


@CASES
def test_lanes_take_the_steps_that_each_would_take_alone(case):
    lanes = 3
    optimizer, kind, options = AGAINST_TORCH[case]
    optimizer = bound(optimizer)
    w, gradients = normal(0, lanes=(lanes,)), [normal(1 + k, lanes=(lanes,)) for k in range(STEPS)]
    carry = torch.func.vmap(lambda w: optimizer.carry(w, CLIENT))(w)
    step = torch.func.vmap(lambda g, carry, w: optimizer.step(g, carry, w, CLIENT))
    at, found = w, []
    for g in gradients:
        direction, carry = step(g, carry, at)
        at = {n: at[n] - 0.1 * direction[n] for n in at}
        found.append(at)
    for lane in range(lanes):
        alone = [tree_map(lambda x, lane=lane: x[lane], tree) for tree in (w, gradients, found)]
        assert_close(alone[2], theirs(kind, options, alone[0], alone[1], rates(False)))


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lanes", [(), (2,)], ids=["alone", "in lanes"])
def test_directions_have_the_types_of_the_weights_and_the_carry_stays_what_it_is(case, dtype, lanes):
    optimizer, w = bound(AGAINST_TORCH[case][0]), normal(0, dtype, lanes)

    def mapped(function):
        return torch.func.vmap(function) if lanes else function

    carry = mapped(lambda w: optimizer.carry(w, CLIENT))(w)
    before = tree_structure(carry), [(x.shape, x.dtype) for x in tree_leaves(carry)]
    for k in range(3):
        g = normal(1 + k, dtype, lanes)
        direction, carry = mapped(lambda *given: optimizer.step(*given, CLIENT))(g, carry, w)
        assert list(direction) == list(w)
        assert all(direction[n].dtype is dtype and direction[n].shape == w[n].shape for n in w)
        assert (tree_structure(carry), [(x.shape, x.dtype) for x in tree_leaves(carry)]) == before


def test_sgd_without_momentum_and_decay_costs_nothing():
    g, w = normal(1), normal(0)
    for optimizer in (ud.SGD(), bound(ud.SGD()), bound(ud.SGD(np.float64(0), weight_decay=0))):
        assert optimizer.carry(w, CLIENT) == () and not optimizer.stateful
        assert optimizer.step(g, (), w, CLIENT)[0] is g
    scheduled = bound(ud.SGD(momentum=lambda t: 0.9 * t))  # 0 in the first round only
    assert scheduled.stateful and list(scheduled.carry(w, CLIENT)) == list(w)
    assert bound(ud.SGD(weight_decay=0.1)).carry(w, CLIENT) == ()
    assert ud.SGD(torch.tensor(0.0)).stateful, "whether it has state must not depend on the value of a tensor"


def test_numbers_may_be_schedules_of_the_round():
    optimizer = ud.Adam(beta1=ud.decay(0.9, 0.5), weight_decay=lambda t: 0.1 * t)
    w, gradients = normal(0), [normal(1 + k) for k in range(STEPS)]
    for t in (0, 2):
        options = {"betas": (0.9 * 0.5**t, 0.999), "weight_decay": 0.1 * t}
        found = ours(bound(optimizer, t), w, gradients, rates(False))
        assert_close(found, theirs(torch.optim.Adam, options, w, gradients, rates(False)))


def test_adams_step_count_is_in_the_carry_so_that_it_can_be_kept_and_averaged():
    """As powers of the betas: averaged, they correct the bias of averaged moments."""
    optimizer, w = bound(ud.Adam()), normal(0)
    carry = optimizer.carry(w, CLIENT)
    assert carry["beta1_power"].dtype is torch.float64 and carry["beta1_power"] == 1
    g = normal(1)
    for _ in range(3):
        _, carry = optimizer.step(g, carry, w, CLIENT)
    assert float(carry["beta1_power"]) == pytest.approx(0.9**3) and float(carry["beta2_power"]) == pytest.approx(
        0.999**3
    )
    _, one = optimizer.step(g, optimizer.carry(w, CLIENT), w, CLIENT)
    mean = tree_map(lambda a, b: (a + b) / 2, carry, one)
    direction, _ = optimizer.step(g, mean, w, CLIENT)
    unbiased = {n: x / (x.abs() + 1e-8) for n, x in g.items()}  # of a constant gradient, √v is |g| and m is g
    assert all(torch.allclose(direction[n], unbiased[n], rtol=1e-12, atol=0) for n in g)


@pytest.mark.parametrize("case", ["momentum and decay", "nesterov", "adam with decay", "adamw with much"])
def test_weight_decay_has_the_factor_of_a_parameters_group(case):
    optimizer, kind, options = AGAINST_TORCH[case]
    client = SimpleNamespace(decay={"bias": 0.0, "scale": 0.5})
    groups = {"bias": {"weight_decay": 0.0}, "scale": {"weight_decay": 0.5 * options["weight_decay"]}}
    w, gradients, lrs = normal(0), [normal(1 + k) for k in range(STEPS)], rates(False)
    assert_close(ours(bound(optimizer), w, gradients, lrs, client), theirs(kind, options, w, gradients, lrs, groups))


def test_a_decay_of_0_adds_no_operation():
    """Neither its value nor its weights are looked at: nothing of them is NaN afterwards."""
    client, g = SimpleNamespace(decay=dict.fromkeys(SHAPES, 0.0)), normal(1)
    infinite = tree_map(lambda x: torch.full_like(x, torch.inf), g)
    direction, _ = bound(ud.SGD(weight_decay=0.1)).step(g, (), infinite, client)
    assert all(direction[n] is g[n] for n in g)


@pytest.mark.parametrize("norm", [0.1, 1.0, 100.0, math.inf])
def test_clipping_is_that_of_torch(norm):
    g = normal(3)
    weights = [torch.nn.Parameter(torch.zeros_like(x)) for x in g.values()]
    for p, x in zip(weights, g.values(), strict=True):
        p.grad = x.clone()
    torch.nn.utils.clip_grad_norm_(weights, norm)
    found = clip_by_norm(g, torch.tensor(norm, dtype=torch.float64))
    in_lanes = torch.func.vmap(clip_by_norm, (0, None))(tree_map(lambda x: torch.stack([x, 3 * x]), g), norm)
    for (n, x), p in zip(found.items(), weights, strict=True):
        torch.testing.assert_close(x, p.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(in_lanes[n][0], p.grad, rtol=1e-12, atol=1e-12)
    clipped = clip_by_norm(normal(3, torch.float32), torch.tensor(0.1, dtype=torch.float64))
    assert all(x.dtype is torch.float32 for x in clipped.values())


# ---- step schedules -------------------------------------------------------------------------------------------------


def test_warmup_and_cosine_by_their_equations():
    for k in range(8):
        assert ud.warmup(5)(k, 8) == min(1, (k + 1) / 5)
        assert ud.warmup(5, start=0.2)(k, 8) == pytest.approx(0.2 + 0.8 * min(1, (k + 1) / 5), abs=1e-15)
        assert ud.cosine()(k, 8) == pytest.approx((1 + math.cos(math.pi * k / 8)) / 2, abs=1e-15)
        assert ud.cosine(0.1)(k, 8) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2, abs=1e-15)
    assert ud.cosine(0.1)(0, 8) == 1 and ud.cosine(0.1)(8, 8) == pytest.approx(0.1)


def test_step_schedules_of_tensors_are_those_of_numbers():
    both = ud.warmup(3, 0.1) * ud.cosine(0.2)
    k, steps = torch.arange(6, dtype=torch.float64), torch.tensor([6, 6, 9, 9, 4, 7], dtype=torch.float64)
    for schedule in (ud.warmup(3), ud.cosine(0.2), both):
        wanted = [schedule(float(a), float(b)) for a, b in zip(k, steps, strict=True)]
        assert torch.func.vmap(schedule)(k, steps).tolist() == pytest.approx(wanted, abs=1e-15)


def test_step_schedules_multiply_among_themselves_and_with_functions():
    def half(k, steps):
        return 0.5

    one, other = ud.warmup(3), ud.cosine()
    assert (one * other)(1, 4) == one(1, 4) * other(1, 4)
    assert (one * half)(1, 4) == (half * one)(1, 4) == 0.5 * one(1, 4)
    assert (one * other) * one == one * (other * one)
    assert repr(one * other * one).count(" * ") == 2
    with pytest.raises(TypeError):
        one * 0.5


def test_cosine_in_place_of_a_number_of_the_round_is_refused(uneven):
    with pytest.raises(ud.UndriftError, match=r"Local\(lr\) must be a number or a function of the round"):
        ud.Local(steps=1, lr=ud.cosine()).check(uneven, 1)


# ---- groups ---------------------------------------------------------------------------------------------------------

NAMES = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def test_the_first_pattern_that_matches_decides_and_factors_of_1_are_left_out():
    groups = {"head.bias": ud.Group(), "*.bias": ud.Group(weight_decay=0), "head.*": ud.Group(10, weight_decay=0.5)}
    assert group_factors(groups, NAMES) == ({"head.weight": 10.0}, {"body.0.bias": 0.0, "head.weight": 0.5})
    assert group_factors(None, NAMES) == group_factors({}, NAMES) == ({}, {})
    assert group_factors({"*": ud.Group(rate=0.5)}, iter(NAMES)) == (dict.fromkeys(NAMES, 0.5), {})


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"haed.*": ud.Group(2)}, r"no parameter matches 'haed.\*'; the model's parameters are body.0.weight"),
        ({"HEAD.*": ud.Group(2)}, "no parameter matches"),
        ({"*": ud.Group(2), "head.*": ud.Group(3)}, r"all parameters that 'head.\*' matches.*put it before them"),
    ],
)
def test_a_pattern_without_effect_is_refused(groups, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        group_factors(groups, NAMES)


# ---- what is refused ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnSign(ud.Optimizer):
    """The sign of a running mean."""

    beta: ud.Number = 0.9
    ranges: ClassVar[dict[str, str]] = {"beta": "[0, 1)"}

    def carry(self, params, client):
        return tree_map(torch.zeros_like, params)

    def step(self, g, carry, params, client):
        mean = {n: (self.beta * carry[n] + (1 - self.beta) * g[n]).to(g[n].dtype) for n in g}
        return tree_map(torch.sign, mean), mean


@dataclass(frozen=True)
class WithoutStep(ud.Optimizer):
    rate: ud.Number = 0.9


class Undeclared(ud.Optimizer):
    def step(self, g, carry, params, client):
        return g, carry


@dataclass(frozen=True)
class Stateless(ud.Optimizer):
    def step(self, g, carry, params, client):
        return g, carry


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"optimizer": ud.Adam(), "momentum": 0.9}, r"short form of SGD\(momentum\).*beside optimizer=Adam.*leave it"),
        ({"optimizer": ud.SGD(), "momentum": 0.9}, r"write optimizer=SGD\(momentum=0.9\)"),
        ({"optimizer": ud.AdamW(), "weight_decay": 0.1}, r"write optimizer=AdamW\(weight_decay=0.1\)"),
        ({"optimizer": ud.AdamW(), "weight_decay": ud.decay(1, 0.5)}, r"AdamW\(weight_decay=decay\("),
        ({"optimizer": ud.Adam}, r"Local\(optimizer\) is a class; write Adam\(\)"),
        ({"optimizer": "Adam()"}, r"must be an optimizer such as ud.Adam\(\), not 'Adam\(\)'"),
        ({"optimizer": torch.optim.SGD}, "must be an optimizer such as ud.Adam"),
        ({"optimizer": ud.Adam(beta1=1)}, r"Adam\(beta1\) is 1; it must be in \[0, 1\)"),
        ({"optimizer": ud.AdamW(beta2=-1)}, r"AdamW\(beta2\) is -1; it must be in \[0, 1\)"),
        ({"optimizer": ud.SGD(momentum=lambda t: t / 2)}, r"SGD\(momentum\) is 1 in round 2"),
        ({"optimizer": ud.SGD(weight_decay="a")}, r"SGD\(weight_decay\) must be a number"),
        ({"optimizer": OwnSign(2)}, r"OwnSign\(beta\) is 2"),
        ({"optimizer": WithoutStep()}, r"WithoutStep must define step\("),
        ({"optimizer": Undeclared()}, "Undeclared must be a dataclass"),
        ({"optimizer_state": "keep"}, r'"keep"\) needs an optimizer; for momentum, write optimizer=ud.SGD\('),
        ({"optimizer_state": "keep", "momentum": 0.9}, "needs an optimizer"),
        ({"optimizer_state": "average", "optimizer": ud.SGD()}, r'"average"\): this SGD has no state'),
        ({"optimizer_state": "keep", "optimizer": Stateless()}, "this Stateless has no state"),
        ({"optimizer_state": "forget"}, 'must be one of "reset", "keep", "average", not .forget.'),
        ({"clip_norm": 0}, r"Local\(clip_norm\) is 0; it must be in \(0, inf\]"),
        ({"clip_norm": -1.0}, r"Local\(clip_norm\) is -1"),
        ({"clip_norm": lambda t: 2 - t}, r"Local\(clip_norm\) is 0 in round 2"),
        ({"clip_norm": "much"}, r"Local\(clip_norm\) must be a number"),
        ({"step_schedule": 0.5}, r"must be a function of \(k, steps\), such as ud.cosine\(\), not 0.5"),
        ({"step_schedule": ud.decay(0.1, 0.9)}, r"a function of the round; write lr=decay\(initial=0.1, rate=0.9\)"),
        ({"step_schedule": lambda k, steps: 1.0 if k < 3 else 0.5}, "use tensor operations.*no if on k"),
        ({"step_schedule": lambda k: k}, "fails as a function of the tensors k and steps"),
        ({"step_schedule": lambda k, steps: 4 - k}, r"Local\(step_schedule\) is -1 in step 5 of 10"),
        ({"step_schedule": lambda k, steps: 1 / k}, "is inf in step 0 of 10"),
        ({"step_schedule": lambda k, steps: k.expand(2)}, r"must return one number, not a tensor of shape \(2,\)"),
        ({"groups": ["*.bias"]}, r"Local\(groups\) must be a dict from name patterns"),
        ({"groups": {"*.bias": 0.0}}, r"Local\(groups\['\*.bias'\]\) must be a ud.Group, not 0.0"),
        ({"groups": {3: ud.Group()}}, r"Local\(groups\) has the key 3"),
    ],
)
def test_refusals_of_local(uneven, given, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        ud.Local(steps=1, lr=0.1, **given).check(uneven, 3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ud.SGD(nesterov=True), r"SGD\(nesterov=True\) needs momentum"),
        (lambda: ud.SGD(0.9, nesterov=1), r"SGD\(nesterov\) must be True or False, not 1"),
        (lambda: ud.Group(rate=-1), r"Group\(rate\) must be a number from 0, not -1"),
        (lambda: ud.Group(weight_decay=ud.decay(1, 1)), r"Group\(weight_decay\) must be a number from 0"),
        (lambda: ud.Group(math.inf), r"Group\(rate\)"),
        (lambda: ud.Group(True), r"Group\(rate\)"),
        (lambda: ud.warmup(0), r"warmup\(steps\) must be a whole number from 1, not 0"),
        (lambda: ud.warmup(2.5), r"warmup\(steps\)"),
        (lambda: ud.warmup(2, -1), r"warmup\(start\) must be a number from 0"),
        (lambda: ud.cosine(-0.1), r"cosine\(floor\) must be a number from 0"),
        (lambda: ud.cosine(math.nan), r"cosine\(floor\)"),
    ],
)
def test_refusals_of_the_rest(make, sentence):
    with pytest.raises(ud.UndriftError, match=sentence):
        make()


def test_what_is_fine_passes(uneven):
    groups = {"*.bias": ud.Group(weight_decay=0)}
    given = {"clip_norm": math.inf, "step_schedule": lambda k, steps: 1.0, "groups": groups}
    for optimizer in (ud.SGD(0.9, nesterov=True), ud.Adam(ud.decay(0.9, 0.9)), OwnSign()):
        for state in ("reset", "keep", "average"):
            local = ud.Local(steps=1, lr=0.1, momentum=0, optimizer=optimizer, optimizer_state=state, **given)
            local.check(uneven, 3)
    groups["head.*"] = ud.Group()
    assert list(local.groups) == ["*.bias"], "a copy: what is done to the caller's dict later changes nothing"
    ud.Local(steps=1, lr=0.1, optimizer=Stateless(), step_schedule=ud.warmup(3) * ud.cosine()).check(uneven, 3)


# ---- files ----------------------------------------------------------------------------------------------------------

LOCALS = [
    ud.Local(steps=1, lr=0.1),
    ud.Local(
        steps=1,
        lr=ud.decay(0.1, 0.9),
        optimizer=ud.Adam(beta2=np.float32(0.5), eps=ud.inverse(0.1, 3)),
        optimizer_state="keep",
        clip_norm=ud.decay(1.0, 0.9),
        step_schedule=ud.warmup(5) * ud.cosine(0.1),
        groups={"*.bias": ud.Group(weight_decay=0.0), "0.*": ud.Group(rate=np.float64(2))},
    ),
    ud.Local(epochs=1, batch_size=2, lr=0.1, optimizer=ud.SGD(0.9, True, 0.1), optimizer_state="average"),
    ud.Local(steps=1, lr=0.1, optimizer=OwnSign(beta=0.5), clip_norm=math.inf, step_schedule=ud.cosine()),
]


def prepared(local: ud.Local, **more):
    given = Settings(model=net(), data=make_clients([4, 6]), rounds=2, local=local, device="cpu", **more)
    return prepare(given), given


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: type(local.optimizer).__name__)
def test_the_file_of_a_run_says_its_local_work(local):
    section = tomllib.loads(config_toml(*prepared(local)))["local"]
    experiment = config.checked({**GOOD, "local": section}, "e")
    found = arguments(experiment)["local"]
    assert found == local and "np." not in repr(found)
    assert found.groups is None or list(found.groups) == list(local.groups), "in their order"


def test_patterns_are_quoted_in_files():
    groups = {'a"b.*': ud.Group(2.0), "plain": ud.Group(), "ä\\": ud.Group()}
    found = tomllib.loads(f"groups = {toml_literal(groups)}")["groups"]
    assert parse_local("groups", found) == groups and list(found) == list(groups)


def test_what_a_file_cannot_say_is_a_comment_there():
    for more in ({"optimizer": ud.Adam(lambda t: 0.5)}, {"step_schedule": ud.cosine() * (lambda k, steps: 0.5)}):
        text = config_toml(*prepared(ud.Local(steps=1, lr=0.1, **more)))
        assert not repeats(text) and f"# {next(iter(more))}: " in text


def test_strings_of_local():
    assert parse_optimizer("SGD(0.9, nesterov=True)") == ud.SGD(0.9, nesterov=True)
    assert parse_optimizer("Adam(beta2=decay(0.99, 0.9))") == ud.Adam(beta2=ud.decay(0.99, 0.9))
    assert parse_optimizer("OwnSign(beta=0.1)") == OwnSign(0.1)
    assert parse_step_schedule("warmup(5) * cosine() * warmup(2)") == ud.warmup(5) * ud.cosine() * ud.warmup(2)
    assert parse_local("lr", "decay(0.1, 0.9)") == ud.decay(0.1, 0.9) and parse_local("groups", None) is None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimizer": "Adm()"}, "local.optimizer: There is no optimizer called 'Adm'. Did you mean 'Adam'?"),
        ({"optimizer": "Adam(lr=0.1)"}, "Adam has no argument 'lr'"),
        ({"optimizer": "Adam() + SGD()"}, "local.optimizer: Cannot read"),
        ({"optimizer": "Optimizer()"}, "There is no optimizer called 'Optimizer'"),
        ({"optimizer": "__import__('os').abort()"}, "local.optimizer: Cannot read"),
        ({"optimizer": 3}, "The key 'local.optimizer' must be a string in quotes, not 3."),
        ({"optimizer_state": "keep"}, "local: Local(optimizer_state"),
        ({"step_schedule": "cosine() + warmup(3)"}, "local.step_schedule: Cannot read"),
        ({"step_schedule": "decay(1, 0.9)"}, "There is no step schedule called 'decay'. Known: cosine, warmup."),
        ({"clip_norm": "cosine()"}, "local.clip_norm: There is no schedule called 'cosine'"),
        ({"groups": 3}, "The key 'local.groups' must be a table such as"),
        ({"groups": {"0.*": 3}}, "The key 'local.groups.\"0.*\"' must be a section, not 3."),
        ({"groups": {"0.*": {"lr": 3}}}, "There is no key 'local.groups.\"0.*\".lr'. Known: rate, weight_decay."),
        ({"groups": {"0.*": {"rat": 3}}}, "Did you mean 'rate'?"),
        ({"groups": {"0.*": {"rate": "a"}}}, "The key 'local.groups.\"0.*\".rate' must be"),
        ({"groups": {"0.*": {"rate": -1}}}, "local.groups: Group(rate) must be a number from 0, not -1."),
    ],
)
def test_a_wrong_section_is_refused_by_its_key(tmp_path, settings, sentence):
    file = tmp_path / "e.toml"
    file.write_text(toml({**GOOD, "local": {**GOOD["local"], **settings}}))
    with pytest.raises(ud.UndriftError) as refused:
        arguments(config.checked(config.read(file), "e"))
    assert sentence in str(refused.value)


OWN = """
from dataclasses import dataclass
import torch
import undrift as ud

@dataclass(frozen=True)
class OfAFile(ud.Optimizer):
    beta: ud.Number = 0.5

    def step(self, g, carry, params, client):
        return ud.tree_map(torch.sign, g), carry
"""


def test_a_run_from_a_file_with_an_optimizer_of_ones_own_repeats_and_another_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_optimizer.py").write_text(OWN)
    groups = {"*bias": {"rate": 0.5}}
    local = {**GOOD["local"], "optimizer": "OfAFile(beta=decay(0.5, 0.9))", "groups": groups}
    (tmp_path / "e.toml").write_text(toml({**GOOD, "imports": ["own_optimizer"], "local": local}))
    undrift("run", "e.toml", "--out", "a")
    undrift("run", "a", "--out", "b", "--trust")
    first, again = (tomllib.loads((tmp_path / name / "config.toml").read_text()) for name in "ab")
    assert first == again and first["local"]["optimizer"] == "OfAFile(beta=decay(initial=0.5, rate=0.9))"
    assert first["local"]["groups"] == {"*bias": {"rate": 0.5, "weight_decay": 1.0}}
    file = tmp_path / "a" / "config.toml"
    file.write_text(file.read_text().replace("OfAFile(beta=", "Adam(beta1="))
    with pytest.raises(ud.UndriftError, match=r"local.optimizer was 'OfAFile.* is 'Adam"):
        undrift("resume", "a", "--trust")


def test_all_of_it_belongs_to_a_runs_identity(tmp_path):
    base = replace(LOCALS[1], groups={"*.bias": ud.Group(2.0), "*": ud.Group(3.0)})
    changes = [
        {"optimizer": ud.AdamW()},
        {"optimizer": ud.Adam(beta2=0.6, eps=ud.inverse(0.1, 3))},
        {"optimizer": OwnSign()},
        {"optimizer_state": "average"},
        {"clip_norm": 1.0},
        {"step_schedule": ud.warmup(5)},
        {"step_schedule": lambda k, steps: 0.5},
        {"step_schedule": lambda k, steps: 0.6},
        {"groups": {**base.groups, "*": ud.Group(3.0, 0.5)}},
    ]
    found = [identity(*prepared(local))["local"] for local in (base, *(replace(base, **c) for c in changes))]
    assert len(set(found)) == len(found)
    assert identity(*prepared(replace(base)))["local"] == found[0]
    assert identity(*prepared(ud.Local(steps=1, lr=0.1)))["local"] == (
        "Local(steps=1, epochs=None, batch_size=None, lr=0.1, momentum=0.0, weight_decay=0.0)"
    ), "that of a run of before, which can be resumed"

    data = make_clients([4, 6])
    first = ud.Local(steps=1, lr=0.1, optimizer=ud.Adam())
    ud.train(net(), data, rounds=1, local=first, out=tmp_path / "run", device="cpu")
    other = replace(first, optimizer=ud.AdamW())
    with pytest.raises(ud.UndriftError, match="was started with local"):
        ud.train(net(), data, rounds=1, local=other, out=tmp_path / "run", resume=True, device="cpu")
