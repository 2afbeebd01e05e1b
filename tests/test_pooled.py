"""Convolution, ReLU and pooling as one operation, against torch's own three; none of this needs a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

import undrift as ud
from tests.problems import distance
from undrift.engine import choose
from undrift.engine.lanes import LanesEngine
from undrift.engine.trace import Traced
from undrift.functional.convolution import lanes, pooled
from undrift.functional.convolution.lanes import LaneConvolutions
from undrift.functional.convolution.operations import conv2d_pool

SHAPES = [  # inputs, size, kernel, stride, padding; the convolution's output is even, odd, of one window
    (3, (10, 10), 3, 1, 0),
    (2, (9, 8), (5, 3), 1, (2, 1)),
    (1, (12, 9), 3, 2, 1),
    (2, (4, 5), 3, 1, 0),
]
ORDERS = {
    "ReLU first": lambda h: F.max_pool2d(torch.relu(h), 2),
    "ReLU last": lambda h: F.relu(F.max_pool2d(h, 2)),
    "no ReLU": nn.MaxPool2d(2, 2),
}


def operations(traced: Traced) -> list[str]:
    ((program, _),) = traced.programs.values()
    names = [str(node.target).split(".") for node in program.graph.nodes]
    return [name[1] for name in names if name[0] == "undrift"]


def both_ways(function, params, *rest):
    """Its gradient in lanes, traced: by our operations, and by torch's. Also returns what the first ran."""

    def inside(own):
        def one(params, *rest):
            with LaneConvolutions() if own else nullcontext():
                return function(params, *rest)

        return vmap(grad(one))

    own = Traced(inside(True))
    found, wanted = own(params, *rest), inside(False)(params, *rest)
    for name in wanted:
        assert torch.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-10), name
    return operations(own)


def problem(inputs, size, kernel):
    torch.manual_seed(0)
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    shapes = {"w": (3, 4, inputs, *kernel), "b": (3, 4), "v": (3, 5, 4, 1, 1)}
    params = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return params, torch.randn(3, 6, inputs, *size, dtype=torch.float64)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_torchs(shape, order):
    inputs, size, kernel, stride, padding = shape
    params, x = problem(inputs, size, kernel)

    def first(params, x):
        h = ORDERS[order](F.conv2d(x, params["w"], params["b"], stride, padding))
        return F.conv2d(h, params["v"]).square().sum()

    def second(params, x):
        h = torch.tanh(F.conv2d(x, params["w"], params["b"], stride, padding))
        return ORDERS[order](F.conv2d(h, params["v"])).square().sum()

    for function in (first, second):
        ran = both_ways(function, params, x)
        assert ran.count("conv2d_pool") == ran.count("pool_grad") == 1


def test_sample_by_sample_inside_the_lanes():
    params, x = problem(*SHAPES[1][:3])

    def one(params, x):
        loss = lambda p, sample: ORDERS["ReLU first"](F.conv2d(sample[None], p["w"], p["b"])).square().sum()  # noqa: E731
        each = vmap(grad(loss), (None, 0))(params, x)
        return sum((each[name] * params[name]).square().sum() for name in ("w", "b"))

    def inside(own):
        def lane(params, x):
            with LaneConvolutions() if own else nullcontext():
                return one(params, x)

        return vmap(lane)

    own = Traced(inside(True))
    assert torch.allclose(own(params, x), inside(False)(params, x), rtol=1e-10)
    assert operations(own) == ["conv2d_pool", "pool_grad", "conv2d_weight_grad"]


def hooked(h):
    relu = nn.ReLU()
    relu.register_forward_hook(lambda module, inputs, out: 2 * out)
    return F.max_pool2d(relu(h), 2)


def skipped(h):
    kept = F.relu(h)
    return F.max_pool2d(kept, 2) + kept[..., ::2, ::2]


def hooked_later(h):
    pooled = F.max_pool2d(h, 2)
    h.register_hook(lambda g: 2 * g)
    return pooled


def hooked_later_after_relu(h):
    kept = F.relu(h)
    pooled = F.max_pool2d(kept, 2)
    kept.register_hook(lambda g: 2 * g)
    return pooled


def differentiated(h):
    pooled = F.max_pool2d(h, 2)
    (d,) = torch.autograd.grad(pooled.sum(), h, create_graph=True)
    return pooled * d.sum()


def differentiated_if_used(h):
    pooled = F.max_pool2d(h, 2)
    (d,) = torch.autograd.grad(pooled.sum(), h, allow_unused=True, create_graph=True)
    return pooled if d is None else pooled * d.sum()


def pooled_twice(h):
    return F.max_pool2d(h, 2) + F.max_pool2d(h, 2)


def changed(h):
    h.mul_(-1)
    return F.max_pool2d(h, 2)


@pytest.mark.parametrize(
    "after",
    [
        lambda h: F.max_pool2d(F.relu(h), 3),
        lambda h: F.max_pool2d(F.relu(h), 2, 1),
        lambda h: F.max_pool2d(F.relu(h), 2, padding=1),
        lambda h: F.max_pool2d(F.relu(h), 2, dilation=2),
        lambda h: F.max_pool2d(F.relu(h), 2, ceil_mode=True),
        lambda h: F.max_pool2d(F.relu(h), 2, return_indices=True)[0],
        lambda h: F.max_pool2d(F.relu(h).abs(), 2),
        lambda h: F.max_pool2d(F.relu(h) if h.mean(0).numel() else h, 2),
        lambda h: F.max_pool2d(F.relu(h, inplace=True), 2),
        lambda h: F.max_pool2d(h.relu_(), 2),
        lambda h: F.max_pool2d(torch.relu(h.sigmoid() - 0.5), 2),
        lambda h: F.avg_pool2d(F.relu(h), 2),
        hooked,
        hooked_later,
        hooked_later_after_relu,
        differentiated,
        differentiated_if_used,
        pooled_twice,
        skipped,
        changed,
    ],
)
def test_anything_else_is_left_alone(after):
    params, x = problem(*SHAPES[0][:3])
    ran = both_ways(lambda p, x: after(F.conv2d(x, p["w"], p["b"])).square().sum(), params, x)
    assert ran.count("conv2d_forward") == 1 and "conv2d_pool" not in ran


def test_pooling_of_something_else_after_a_convolution():
    params, x = problem(*SHAPES[0][:3])

    def loss(params, x):
        h = F.conv2d(x, params["w"], params["b"])
        return F.max_pool2d(x * params["v"].sum(), 2).square().sum() + F.conv2d(h, params["v"]).square().sum()

    def of_no_use(params, x):
        scaled = x * params["v"].sum()
        F.conv2d(x, params["w"], params["b"])
        return F.max_pool2d(scaled, 2).square().sum()

    for function in (loss, of_no_use):
        assert "conv2d_pool" not in both_ways(function, params, x)


def test_an_output_that_is_used_outside_of_the_model():
    """The mode does not see that; the program shows that the convolution would be computed twice."""
    params, x = problem(*SHAPES[0][:3])

    def lane(own):
        def loss(params, x):
            with LaneConvolutions() if own else nullcontext():
                h = F.conv2d(x, params["w"], params["b"])
                pooled = F.max_pool2d(h, 2)
            return pooled.square().sum() + h.pow(3).sum()

        return vmap(grad(loss))

    own = Traced(lane(True))
    found, wanted = own(params, x), lane(False)(params, x)
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-10) for name in wanted)
    assert "conv2d_pool" not in operations(own)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("relu_inside", [False, True])
def test_gradients_stop_where_they_are_switched_off(context, relu_inside):
    params, x = problem(*SHAPES[0][:3])

    def loss(params, x):
        with context():
            h = F.conv2d(x, params["w"], params["b"])
            h = F.relu(h) if relu_inside else h
        h = h if relu_inside else F.relu(h)
        return (F.max_pool2d(h, 2) * params["v"].sum()).square().sum()

    both_ways(loss, params, x)


@pytest.mark.parametrize("frozen", ["w", "b", "wb", "no bias"])
def test_frozen_weights_and_no_bias(frozen):
    params, x = problem(*SHAPES[0][:3])
    still = {name: params.pop(name) for name in ("w", "b") if name in frozen}

    def loss(params, x, still):
        both = params | still
        h = F.conv2d(x, both["w"], None if frozen == "no bias" else both["b"])
        return (F.max_pool2d(h, 2) * params["v"].sum()).square().sum()

    assert "conv2d_pool" in both_ways(loss, params, x, still)


def test_many_outputs_have_larger_tiles_without_it():
    params, x = problem(*SHAPES[0][:3])
    params["w"], params["b"] = (params[name].repeat_interleave(17, 1) for name in ("w", "b"))  # 68
    ran = both_ways(lambda p, x: F.max_pool2d(F.conv2d(x, p["w"], p["b"]), 2).square().sum(), params, x)
    assert "conv2d_pool" not in ran


def test_a_window_too_small_is_torchs_error():
    params, x = problem(2, (3, 3), 3)
    with pytest.raises(Exception, match="too small"):
        both_ways(lambda p, x: F.max_pool2d(F.conv2d(x, p["w"], p["b"]), 2).sum(), params, x)


def test_only_a_trace_is_fused(monkeypatch):
    monkeypatch.setattr(pooled.LaneConvPool, "apply", lambda *args: pytest.fail("what follows would be computed twice"))
    params, x = problem(*SHAPES[0][:3])
    with LaneConvolutions():
        vmap(lambda p, x: ORDERS["ReLU first"](F.conv2d(x, p["w"], p["b"])))(params, x)


def test_nan_is_not_lost():
    params, x = problem(*SHAPES[0][:3])
    x[1, 2] = torch.nan

    def lane(params, x):
        with LaneConvolutions():
            return ORDERS["ReLU first"](F.conv2d(x, params["w"], params["b"]))

    out = Traced(vmap(lane))(params, x)
    assert out[1, 2].isnan().all() and out.isnan().sum() == out[1, 2].numel()


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(6, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize(
    "method", [ud.FedAvg(), ud.FedNLR(), ud.FedCurv(0.1), ud.FedProx(0.1) + ud.GradientNoise(0.01)]
)
def test_runs_are_those_of_the_plain_engine(method, monkeypatch):
    """With kernels' operations, and passes without training traced, as on a GPU."""
    fusions = []
    monkeypatch.setattr(lanes, "available", lambda device, dtype: True)
    monkeypatch.setattr(pooled, "conv2d_pool", lambda *args: fusions.append(1) or conv2d_pool(*args))
    monkeypatch.setattr(choose, "LanesEngine", lambda *args, **options: LanesEngine(*args, trace_passes=True))
    draw = lambda n: (torch.randn(n, 1, 8, 8).double(), torch.arange(n) % 3)  # noqa: E731
    data = ud.FederatedDataset.from_clients([draw(n) for n in (7, 1, 12)], test=draw(4))
    settings = {"rounds": 3, "local": ud.Local(epochs=2, batch_size=4, lr=0.1)}
    fused, plain = (ud.train(network(), data, method, engine=engine, **settings) for engine in ("lanes", "plain"))
    assert distance(fused.params, plain.params) < 1e-9 and fusions
