"""A cohort's convolutions, both ways, against torch's own rule under vmap; they need no GPU to be right."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vjp, vmap

import undrift as ud
from undrift.functional.convolution import lanes
from undrift.functional.convolution.geometry import channels_first, channels_last
from undrift.functional.convolution.lanes import ChannelsLast, LaneConvolutions
from undrift.functional.convolution.operations import conv2d_input_grad

SHAPES = [  # inputs, outputs, size, kernel, stride, padding
    (3, 8, 9, 3, 1, 0),
    (2, 3, 9, 5, 1, 2),
    (2, 3, 8, 3, 2, 1),
    (1, 2, 7, 1, 2, 0),
    (4, 4, 8, 3, 1, 1),
    (4, 2, 9, 3, 2, 1),
    (5, 3, 6, (1, 3), (2, 1), (0, 1)),
]


def loss(params, x, own, stride, padding):
    with LaneConvolutions() if own else nullcontext():
        h = torch.tanh(F.conv2d(x, params["w"], params["b"], stride, padding))
        return (F.conv2d(h, params["v"], padding=1).square()).sum()


def problem(inputs, outputs, size, kernel):
    torch.manual_seed(0)
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    shapes = {"w": (3, outputs, inputs, *kernel), "b": (3, outputs), "v": (3, outputs, outputs, 3, 3)}
    return {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}, torch.randn(
        3, 4, inputs, size, size
    ).double()


@pytest.mark.parametrize(("inputs", "outputs", "size", "kernel", "stride", "padding"), SHAPES)
def test_gradients_are_those_of_torchs_own_rule(inputs, outputs, size, kernel, stride, padding):
    params, x = problem(inputs, outputs, size, kernel)
    found, wanted = (
        vmap(grad(lambda p, x, own=own: loss(p, x, own, stride, padding)))(params, x) for own in (True, False)
    )
    for name in wanted:
        assert torch.allclose(found[name], wanted[name], rtol=1e-10, atol=1e-10), name


NARROW = [(2, 3, 9, (2, 5), (1, 1), (1, 3)), (1, 3, 7, (3, 4), (1, 1), (0, 0)), (6, 4, 8, (5, 5), (1, 1), (2, 2))]
"""Few inputs and a wide kernel, whose columns become outputs."""


@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "kernel", "stride", "padding"),
    [*NARROW, (4, 4, 8, (3, 3), (1, 1), (1, 1)), (40, 2, 8, (5, 5), (1, 1), (1, 2)), (2, 3, 9, (5, 5), (2, 1), (2, 0))],
)
def test_the_gradient_of_the_input(inputs, outputs, size, kernel, stride, padding):
    torch.manual_seed(0)
    x = torch.randn(3, 2, inputs, size, size + 1, dtype=torch.float64)
    weight = torch.randn(3, outputs, inputs, *kernel, dtype=torch.float64)

    def wanted(x, weight):
        return F.conv2d(x, weight, None, stride, padding)

    g = torch.randn_like(vmap(wanted)(x, weight))
    found = conv2d_input_grad(channels_last(g), channels_last(weight), x.shape[3:], stride, padding)
    (exact,) = vmap(lambda x, weight, g: vjp(lambda x: wanted(x, weight), x)[1](g))(x, weight, g)
    assert torch.allclose(channels_first(found), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("inputs", "outputs", "size", "kernel", "stride", "padding"), SHAPES)
def test_sample_by_sample_inside_the_lanes(inputs, outputs, size, kernel, stride, padding):
    """What FedCurv's Fisher does: a vmap over samples inside the vmap over lanes."""
    params, x = problem(inputs, outputs, size, kernel)

    def each(own):
        one = grad(lambda p, sample: loss(p, sample[None], own, stride, padding))
        return vmap(vmap(one, (None, 0)))(params, x)

    found, wanted = each(True), each(False)
    assert all(torch.allclose(found[n], wanted[n], rtol=1e-10, atol=1e-10) for n in wanted)


def test_what_is_no_plain_convolution_stays_torchs():
    x, w = torch.randn(2, 4, 8, 8), torch.randn(6, 2, 3, 3)
    for options in ({"groups": 2}, {"groups": 2, "dilation": 2}, {"groups": 2, "padding": "same"}):
        with LaneConvolutions():
            found = F.conv2d(x, w, **options)
        assert torch.equal(found, F.conv2d(x, w, **options))
    with LaneConvolutions():
        assert F.conv2d(x[0], torch.randn(3, 4, 3, 3)).shape == (3, 6, 6)


@pytest.mark.parametrize("channels", [1, 3])
def test_on_a_cpu_one_models_channels_come_last_and_change_nothing(channels):
    torch.manual_seed(0)
    x, weight = torch.randn(4, channels, 9, 9).double(), torch.randn(5, channels, 3, 3).double()

    def loss(w, last):
        with ChannelsLast() if last else nullcontext():
            out = F.conv2d(x, w, padding=1, stride=2)
        assert last == (out.is_contiguous(memory_format=torch.channels_last) and not out.is_contiguous())
        return out.square().sum()

    found, wanted = (grad(lambda w, last=last: loss(w, last))(weight) for last in (True, False))
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


class Views(nn.Module):
    """A model whose author takes for granted how a convolution's output lies in memory."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.conv, self.last, self.view = nn.Conv2d(2, 4, 3), nn.Linear(36, 3), view

    def forward(self, x):
        x = F.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.last(x.view(-1, 36) if self.view else x.flatten(1))


@pytest.mark.parametrize(
    "engine", [{"engine": "plain"}, {"lanes": 1}, {"lanes": 2}, {"lanes": 2, "ours": True}], ids=str
)
def test_a_view_of_what_a_convolution_puts_out(engine, monkeypatch):
    ours, settings = engine.get("ours"), {k: v for k, v in engine.items() if k != "ours"}
    if ours:
        monkeypatch.setattr(lanes, "available", lambda device, dtype: True)
    torch.manual_seed(0)
    data = ud.FederatedDataset.from_clients([(torch.rand(6, 2, 8, 8), torch.arange(6) % 3) for _ in range(2)])
    module = Views(True)
    twin = copy.deepcopy(module)
    twin.view = False
    settings |= {"rounds": 2, "local": ud.Local(epochs=1, batch_size=3, lr=0.1)}
    viewed, flat = (ud.train(m, data, **settings).params for m in (module, twin))
    assert all(torch.equal(viewed[name], w) for name, w in flat.items())
