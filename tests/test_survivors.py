"""Behaviour that mutants of the code change (`make mutants`).

Some of it was changed by a mutant that survived, the rest was foreseen from a list of mutants. docs/testing.md says
which tests were seen to fail with their mutant.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pkgutil
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import undrift as ud
from tests.parts import Branching
from tests.problems import Point, make_clients, net, quadratics
from undrift import random
from undrift.engine import choose, compiler
from undrift.engine import threads as threaded
from undrift.engine.gradients import AUGMENT
from undrift.engine.graph import captures
from undrift.engine.threads import at_once
from undrift.functional.convolution import lanes as convolution
from undrift.functional.convolution.lanes import LaneConvolutions
from undrift.method.context import Server
from undrift.method.parse import as_method
from undrift.method.part import AGGREGATE, BROADCAST, FINISH, OBSERVE, PLAN, REFINE, TRANSFORM, part_stream
from undrift.methods import curvature
from undrift.random import MASK, Key, bits, derive, philox, uniform
from undrift.schedule import CHECKED, sampled_rounds
from undrift.training import nonfinite
from undrift.training.threads import use_threads
from undrift.training.torch_flags import use_flags

KEY = Key(torch.tensor([1, 2]), torch.tensor(0))


# ---- the contract --------------------------------------------------------------------------------------------------
def dataclasses_of(*packages: str) -> list[type]:
    found = set()
    for package in packages:
        module = importlib.import_module(package)
        names = [package, *(f"{package}.{m.name}" for m in pkgutil.iter_modules(getattr(module, "__path__", [])))]
        for name in names:
            for item in vars(importlib.import_module(name)).values():
                if isinstance(item, type) and dataclasses.is_dataclass(item) and item.__module__ == name:
                    found.add(item)
    return sorted(found, key=lambda cls: cls.__qualname__)


@pytest.mark.parametrize(
    "cls",
    dataclasses_of("undrift.engine", "undrift.methods", "undrift.method", "undrift.random", "undrift.schedule"),
    ids=lambda cls: cls.__name__,
)
def test_what_hooks_and_engines_are_given_is_immutable(cls):
    assert cls.__dataclass_params__.frozen


DEFAULTS = [
    (ud.FedAvg(), "FedAvg(weighting=None)"),
    (ud.ServerSGD(), "ServerSGD(lr=1.0, momentum=0.0)"),
    (ud.FedAvgM(), "FedAvgM(lr=1.0, momentum=0.9)"),
    (ud.FedAdam(0.1), "FedAdam(lr=0.1, beta1=0.9, beta2=0.99, tau=0.001, initial_v=None)"),
    (ud.FedYogi(0.1), "FedYogi(lr=0.1, beta1=0.9, beta2=0.99, tau=0.001, initial_v=None)"),
    (ud.FedAdagrad(0.1), "FedAdagrad(lr=0.1, beta1=0.0, tau=0.001, initial_v=None)"),
    (ud.SCAFFOLD(), "Scaffold(correction='gradient', variates='mean')"),
    (ud.ServerAdam(0.1), "ServerAdam(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-08)"),
    (ud.ServerYogi(0.1), "ServerYogi(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-08)"),
    (ud.ServerAdagrad(0.1), "ServerAdagrad(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-08)"),
    (
        ud.ServerTraining(0.1),
        "ServerTraining(lr=0.1, epochs=1, batch_size=64, weight_decay=0.0, clip_norm=None, momentum=0.0)",
    ),
    (ud.CCVR(), "CCVR(samples_per_class=200, lr=0.01, epochs=10, batch_size=64)"),
    (ud.FedNLR(), "FedNLR(base=1.0, depth=1.0, width=1.0, ratio=None)"),
    (ud.TwoDLRD(3), "TwoDLRD(window=3, C=0.2)"),
    (ud.AllDecreasing(3), "AllDecreasing(window=3, factor=0.8)"),
    (ud.AdditiveTuning(3), "AdditiveTuning(window=3, C=0.2)"),
]


@pytest.mark.parametrize(("part", "text"), DEFAULTS, ids=[text.partition("(")[0] for _, text in DEFAULTS])
def test_defaults_are_the_documented_ones(part, text):
    assert repr(part) == text


def test_no_two_hooks_and_no_two_parts_share_their_draws():
    """Local steps count from 0, so hooks outside of them have steps far above; all are words of 32 bits."""
    steps = [BROADCAST, REFINE, FINISH, PLAN, TRANSFORM, AGGREGATE, OBSERVE]
    assert len(set(steps)) == 7 and all(2**31 <= step < 2**32 for step in steps)
    assert AUGMENT < 2**16, "the model's own streams"
    for name in ud.METHODS:
        part = getattr(ud, name)
        first = part_stream(part.__new__(part))
        assert (
            first % 2**16 == 0 and 2**16 <= first <= 2**32 - 2**16
        )  # 2¹⁶ streams of its own, none of them the model's


# ---- local work ----------------------------------------------------------------------------------------------------
def test_batches_look_at_schedules_up_to_the_round_asked_for(uneven):
    local = ud.Local(steps=1, lr=lambda t: 2.0 - t)  # negative from round 3 on
    assert len(ud.batches(uneven, local, client=0, round=2, seed=0)) == 1
    with pytest.raises(ud.UndriftError, match=r"Local\(lr\) is -1 in round 3"):
        ud.batches(uneven, local, client=0, round=3, seed=0)
    with pytest.raises(ud.UndriftError, match="no client 0, round -1"):
        ud.batches(uneven, local, client=0, round=-1, seed=0)


# ---- draws ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 2**31, 2**32 + 5, 2**63 - 1])
def test_a_seed_is_two_words_of_philox(seed):
    purpose = 0xE8B7BE43  # crc32 of "a"
    assert derive(seed, "a") == philox((purpose, 0, 0, 0), (seed & MASK, seed >> 32))[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_draws_are_never_0_nor_1(dtype, monkeypatch):
    monkeypatch.setattr(random, "bits", lambda key, count: torch.tensor([0, MASK]))
    low, high = uniform(KEY, (2,), dtype)
    bits = 32 if dtype == torch.float64 else 23
    assert (low, high) == (0.5 * 2.0**-bits, 1 - 0.5 * 2.0**-bits)


def test_draws_are_philox_of_a_counter():
    """Of (block, stream, step, 0), four words a block: what another system would have to do to draw the same."""
    key = Key(torch.tensor([7, 9]), torch.tensor(3), stream=5)
    wanted = [word for block in range(3) for word in philox((block, 5, 3, 0), (7, 9))]
    assert bits(key, 10).tolist() == wanted[:10]


def test_long_schedules_are_looked_at_in_the_middle_too():
    found = list(sampled_rounds(10 * CHECKED))
    middle = [t for t in found if CHECKED <= t < 9 * CHECKED]
    assert found == sorted(set(found)) and {*range(CHECKED), *range(9 * CHECKED, 10 * CHECKED)} <= {*found}
    assert 700 <= len(middle) <= 1000 and max(b - a for a, b in itertools.pairwise(middle)) <= 10


# ---- methods -------------------------------------------------------------------------------------------------------
def test_a_ratio_of_exactly_one_is_allowed(uneven):
    as_method(ud.FedNLR(base=1, depth=0, width=0)).check(None, uneven, rounds=1)
    run = ud.train(net(), uneven, ud.FedNLR(base=1, depth=0, width=0), rounds=1, local=ud.Local(steps=1, lr=0.1))
    assert run.history[0]["ratio"] == {"0": 1.0, "3": 1.0}


@pytest.mark.parametrize(("total", "decays"), [(-1e-3, 1), (0.0, 0), (1e-3, 0)])
def test_any_negative_diagnostic_is_a_stall(total, decays):
    """S < 0 counts a decay, however small it is, and S = 0 does not."""
    part = ud.AllDecreasing(window=torch.tensor(0.0))
    w = {"w": torch.tensor([1.0], dtype=torch.float64)}
    state = part.start(w, None) | {"S": torch.tensor(total, dtype=torch.float64)}
    after = part.observe(w, state, Server(None, None, None, 0, KEY, w, 1, 1.0))  # no update, so S stays
    assert int(after["decays"]) == decays and float(after["S"]) == (0.0 if decays else total)


def test_rates_in_the_history_are_of_steps_that_were_taken():
    data = quadratics([(1.0, 1.0), (1.0, 3.0)])
    run = ud.train(Point(), data, ud.AllDecreasing(window=3), rounds=1, local=ud.Local(steps=2, lr=0.5))
    assert run.history[0]["rates"] == [0.5, 0.5, 0.0, 0.0]


def test_additive_tuning_never_steps_backwards():
    """`γ·max(1 − C·d, 0)` with C·d = 1.2."""
    part = ud.AdditiveTuning(window=1, C=torch.tensor(0.2, dtype=torch.float64))
    mine = dataclasses.replace(_client(), received=torch.tensor(6))
    assert [float(part.rate(torch.tensor(k), mine)) for k in (0, 1)] == [1.0, 0.0]


def _client():
    from undrift.method.context import Client

    fields = {f.name: None for f in dataclasses.fields(Client)}
    return Client(**fields)


def test_a_layer_whose_neurons_are_alike_has_temperature_0():
    """FedNLR leaves its rates alone, and says so in the history."""
    model = net()
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.zero_()
    run = ud.train(model, make_clients([5]), ud.FedNLR(), rounds=1, local=ud.Local(steps=1, lr=0.1))
    assert run.history[0]["temperature"]["3"] == 0.0 < run.history[0]["temperature"]["0"]


@pytest.mark.parametrize("engine", ["lanes", "plain"])
def test_ccvr_sums_over_each_class_of_all_clients(engine, uneven):
    """Counts, sums and outer products of the features at the last weights, class by class."""
    seen = {}

    @dataclasses.dataclass(frozen=True)
    class Spy(ud.CCVR):
        def finish(self, params, state, server):
            seen.update(params=params, sums=server.totals.sums)
            return params

    ud.train(net(), uneven, Spy(), rounds=1, local=ud.Local(steps=2, batch_size=4, lr=0.1), engine=engine)
    x, y = (torch.cat(parts) for parts in zip(*(uneven[i] for i in range(len(uneven))), strict=True))
    hidden = torch.tanh(F.linear(x, seen["params"]["0.weight"], seen["params"]["0.bias"]))
    for c in range(4):
        own = hidden[y == c]
        assert seen["sums"]["n"][c] == len(own)
        assert torch.allclose(seen["sums"]["sum"][c], own.sum(0)) and torch.allclose(
            seen["sums"]["outer"][c], own.T @ own
        )


def test_a_class_of_one_sample_has_no_spread(uneven):
    """CCVR's virtual features of it are the sample itself."""
    features = torch.tensor([[1.0, 2.0], [3.0, 5.0], [4.0, 1.0]], dtype=torch.float64)
    member = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    outer = torch.einsum("bc,bd,be->cde", member, features, features)
    sums = {"n": member.sum(0), "sum": member.T @ features, "outer": outer}

    class Double:
        dtype = torch.float64

    drawn, classes = ud.CCVR(samples_per_class=3).virtual(sums, Server(Double(), None, None, 0, KEY, {}, 1, 1.0))
    assert torch.allclose(drawn[classes == 0], features[0].expand(3, 2)) and drawn.isfinite().all()


# ---- engines -------------------------------------------------------------------------------------------------------
def test_plain_is_one_lane(uneven):
    run = ud.train(net(), uneven, rounds=1, local=ud.Local(steps=1, lr=0.1), engine="plain")
    assert run.choices["engine"] == "plain" and run.choices["lanes"] == 1


def test_graphs_are_for_gpus():
    assert captures(torch.device("cuda:0")) and not captures(torch.device("cpu"))


def test_compiling_pays_from_so_many_steps_on():
    lanes, gpu = choose.Choice("lanes", 10, ""), torch.device("cuda")
    steps = choose.COMPILE_STEPS
    assert choose.compiles(None, lanes, gpu, rounds=steps, steps=10.0)
    assert not choose.compiles(None, lanes, gpu, rounds=steps - 1, steps=10.0)
    assert not choose.compiles(False, lanes, gpu, rounds=steps, steps=10.0)
    assert choose.compiles(True, lanes, gpu, rounds=1, steps=1.0)


def test_the_compiler_chooses_by_rule_and_for_static_shapes(monkeypatch):
    seen = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: seen.update(options) or function)
    compiler.compiled(torch.sin, fullgraph=True)
    assert seen["dynamic"] is False and seen["fullgraph"] is True
    assert seen["options"] is None or seen["options"]["deterministic"] is True


def test_more_items_than_threads():
    with use_threads(1):
        assert at_once(lambda item: (item, torch.get_num_threads()), [1, 2, 3]) == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), ((2, 1), 0)])
def test_our_convolutions_without_lanes(stride, padding):
    """One lane on a GPU is not mapped: the functions' own forward and backward passes, not their rules for vmap."""
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 3, 7, 7).double(), torch.randn(4, 3, 3, 3).double(), torch.randn(4).double()

    def loss(x, w, b):
        return F.conv2d(x, w, b, stride, padding).tanh().sum()

    def ours(x, w, b):
        with LaneConvolutions():
            return loss(x, w, b)

    found, wanted = (grad(function, (0, 1, 2))(x, w, b) for function in (ours, loss))
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), ((2, 1), 0), ((2, 3), (1, 0))])
@pytest.mark.parametrize("sides", [(7, 7), (8, 9)])
def test_our_convolutions_gradient_of_the_input_in_lanes(stride, padding, sides):
    """Zeros between the outputs' gradients, and beyond the last where the stride leaves rows or columns over."""
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 5, 3, *sides).double(), torch.randn(2, 4, 3, 3, 3).double(), torch.randn(2, 4).double()

    def loss(x, w, b):
        return F.conv2d(x, w, b, stride, padding).tanh().sum()

    def ours(x, w, b):
        with LaneConvolutions():
            return loss(x, w, b)

    found, wanted = (vmap(grad(function, (0, 1, 2)))(x, w, b) for function in (ours, loss))
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-10) for one, other in zip(found, wanted, strict=True))


def test_as_many_lanes_as_keep_busy_while_the_longest_client_trains():
    """Of ten clients one has 100 steps and nine have 10: two lanes, of which the second is busy for 90 of 100 steps."""
    data, local = make_clients([100] + [10] * 9), ud.Local(epochs=1, batch_size=1, lr=0.0)
    assert ud.train(net(), data, rounds=1, local=local).choices["lanes"] == 2
    assert ud.train(net(), make_clients([10] * 10), rounds=1, local=local).choices["lanes"] == 10


def test_fewer_lanes_than_would_keep_busy_where_memory_is_short(monkeypatch):
    """Ten clients of equal length and room for four lanes: three turns of four, not two of four and one of two."""
    data, local = make_clients([10] * 10), ud.Local(epochs=1, batch_size=1, lr=0.0)
    weights = 8 * sum(w.numel() for w in net().parameters()) + 2 * 8 * 6  # and twice a batch of one sample
    monkeypatch.setattr(choose, "CPU_LANE_BYTES", 4.5 * weights)
    found = ud.train(net(), data, rounds=1, local=local).choices
    assert found["lanes"] == 4 and found["why"] == "as many as fit into the memory set aside for lanes"


def watched_threads(monkeypatch) -> list[int]:
    """Gets the number of threads whenever clients are trained on them."""
    seen: list[int] = []

    def watched(function, queues):
        seen.append(len(queues))
        return at_once(function, queues)

    monkeypatch.setattr(threaded, "at_once", watched)
    return seen


@pytest.mark.parametrize("clients_at_once", [True, False])
def test_clients_have_a_thread_each_where_no_layer_puts_out_much(monkeypatch, clients_at_once):
    """What the widest layer puts out for a batch of 5 samples in float64, against the limit."""
    widest = 8 * max(layer.out_features for layer in net() if isinstance(layer, torch.nn.Linear)) * 5
    monkeypatch.setattr(choose, "CPU_THREAD_BYTES", widest if clients_at_once else widest - 1)
    seen = watched_threads(monkeypatch)
    local = ud.Local(epochs=1, batch_size=5, lr=0.1)
    ud.train(net(), make_clients([5] * 4), rounds=1, local=local, lanes=1, threads=2, rehearse=False)
    assert seen == ([2] if clients_at_once else [])


@pytest.mark.parametrize(("sizes", "clients_at_once"), [([9, 10], True), ([1, 10], False)])
def test_threads_that_would_be_idle_are_not_used(monkeypatch, sizes, clients_at_once):
    """Two threads of which one is busy for 9 of 10 steps are 95% busy; with 1 of 10 steps, 55%."""
    seen = watched_threads(monkeypatch)
    local = ud.Local(epochs=1, batch_size=1, lr=0.1)
    ud.train(net(), make_clients(sizes), rounds=1, local=local, lanes=1, threads=2, rehearse=False)
    assert seen == ([2] if clients_at_once else [])


@pytest.mark.parametrize(("dtype", "tf32", "bound"), [("float32", False, 9.8e-4), ("float32", True, 0.089)])
def test_what_a_compiled_program_may_be_off_by(dtype, tf32, bound):
    compute = getattr(torch, dtype)
    with use_flags("tf32" if tf32 else "auto", False, torch.device("cpu")):
        assert compiler.trusted(0.98 * bound, compute) and not compiler.trusted(1.05 * bound, compute)


def test_the_largest_batch():
    ud.Local(steps=1, lr=0.1, batch_size=2**31 - 1)
    with pytest.raises(ud.UndriftError, match=r"batch_size.*2147483648"):
        ud.Local(steps=1, lr=0.1, batch_size=2**31)


def test_normal_draws_of_float32_come_from_uniform_ones_of_float32():
    """So that float32 and bfloat16 see the same draws, and a GPU takes no logarithms in float64."""
    u, v = random.uniform(KEY, (3, 2), torch.float32).unbind(1)
    radius, angle = torch.sqrt(-2 * torch.log(u)), 2 * torch.pi * v
    wanted = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], 1).flatten()
    assert torch.equal(random.normal(KEY, (6,), torch.float32), wanted)
    assert torch.equal(random.normal(KEY, (6,), torch.bfloat16), wanted.bfloat16())


def test_clients_in_messages():
    assert nonfinite.name_clients([3]) == "client 3" and nonfinite.name_clients([3, 7]) == "clients 3 and 7"


def test_no_part_has_the_models_streams():
    """crc32 modulo 2¹⁶ − 2, plus one: 1 to 2¹⁶ − 2, so that part numbers fill 16 bits and none is 0 or the last."""
    part = ud.FedProx(0.1)
    assert part_stream(part) == (1 + zlib.crc32(b"FedProx") % (2**16 - 2)) * 2**16


def test_our_convolutions_stay_out_of_passes_on_a_cpu(monkeypatch, uneven):
    """Torch's own are faster there; ours are entered in no pass, before training or after."""
    entered = []

    class Spy(LaneConvolutions):
        def __enter__(self):
            entered.append(1)
            return super().__enter__()

    monkeypatch.setattr(convolution, "LaneConvolutions", Spy)
    ud.train(net(), uneven, ud.FedCurv(0.1) + ud.FedNLR(), rounds=2, local=ud.Local(steps=1, lr=0.1), lanes=2)
    assert not entered


def test_the_most_steps_of_a_client_that_can_be_counted(uneven):
    with pytest.raises(ud.UndriftError, match="one whole number from 1 for each of the 7 clients"):
        ud.Local(steps=[1] * 6 + [2**63], lr=0.1).check(uneven, rounds=1)


def test_a_client_that_does_no_work_sends_no_update(uneven):
    """FedNova divides by the work that was done; where every rate is 0 there is none."""

    @dataclasses.dataclass(frozen=True)
    class Idle(ud.Part):
        def rate(self, k, client):
            return 0.0 * super().rate(k, client)

    run = ud.train(net(), uneven, ud.FedNova() + Idle(), rounds=1, local=ud.Local(steps=2, lr=0.1))
    assert run.stopped is None and len(run.history) == 1
    assert all(torch.equal(w, old) for w, old in zip(run.params.values(), net().parameters(), strict=True))
    assert ud.Part().rate(torch.tensor(0), None) == 1.0


def test_many_clients_in_messages():
    assert nonfinite.name_clients([1, 2, 3, 4, 5, 6, 7]) == "clients 1, 2, 3, 4, 5 and 2 more"


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_ccvr_refuses_what_is_no_count(count):
    with pytest.raises(ud.UndriftError, match=r"CCVR\(epochs\) must be a whole number from 1"):
        ud.CCVR(epochs=count)


def test_a_small_cohort_is_drawn_by_64_bit_words_without_duplicates():
    """The first of (high·2³² + low) mod 2⁶³ mod N that differ."""
    key, population = (3, 4), 1000
    high, low, _, _ = random.philox((np.arange(10), 1, 0, 0), key)
    drawn = [((int(h) << 32 | int(word)) % 2**63) % population for h, word in zip(high, low, strict=True)]
    assert random.choose(key, population, 5).tolist() == sorted(list(dict.fromkeys(drawn))[:5])


def test_how_far_a_compiled_program_is_off():
    assert compiler.distance([torch.tensor([0.0, 3.0])], [torch.tensor([0.0, 2.0])]) == 0.5
    assert compiler.distance([torch.tensor([3.0])], [torch.tensor([2.0])], [torch.tensor([1.0])]) == 1.0


@pytest.mark.parametrize(("model", "way"), [(net(), "_one_pass"), (None, "_vmapped"), (Branching(), "_one_by_one")])
def test_squared_gradients_go_row_by_row_only_where_a_model_does_not_vmap(model, way, monkeypatch):
    used = []
    for name in ("_one_pass", "_vmapped", "_one_by_one"):
        function = getattr(curvature, name)
        monkeypatch.setattr(curvature, name, lambda *a, f=function, n=name: used.append(n) or f(*a))
    if model is None:  # the squares of a norm's scale need every sample's gradient
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)).double()
    ud.train(model, make_clients([6, 6]), ud.FedCurv(0.1), rounds=1, local=ud.Local(steps=1, lr=0.1))
    assert set(used) == {way}
