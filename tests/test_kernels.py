"""Kernels against what they mean: by Triton's interpreter everywhere, and where torch sees a GPU, on it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.problems import distance
from undrift.functional.convolution.geometry import NO_ENTRY, output_size
from undrift.functional.convolution.operations import (
    add_columns,
    conv2d_forward,
    conv2d_pool,
    conv2d_squared_weight_grad,
    conv2d_weight_grad,
    pool_grad,
)
from undrift.functional.recurrent import operations as recurrent

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CLOSE = {"bfloat16": 1e-2, "tf32": 5e-3, "float32": 1e-5}
SHAPES = [  # lanes, batch, size, channels, outputs, kernel, stride, padding
    (2, 64, (32, 32), 3, 32, (3, 3), (1, 1), (1, 1)),
    (2, 64, (32, 32), 4, 32, (3, 3), (1, 1), (1, 1)),
    (5, 10, (30, 30), 32, 64, (3, 3), (1, 1), (0, 0)),
    (2, 8, (8, 8), 128, 256, (3, 3), (1, 1), (1, 1)),
    (2, 9, (16, 16), 64, 128, (3, 3), (1, 1), (1, 1)),
    (3, 7, (14, 14), 6, 16, (5, 5), (1, 1), (2, 2)),
    (3, 7, (14, 14), 20, 64, (3, 3), (1, 1), (1, 1)),
    (3, 7, (14, 14), 6, 32, (3, 3), (1, 1), (1, 1)),
    (3, 7, (14, 14), 64, 62, (3, 3), (1, 1), (1, 1)),
    (2, 16, (32, 32), 16, 32, (3, 3), (2, 2), (1, 1)),
    (3, 5, (7, 9), 1, 5, (1, 3), (1, 2), (0, 1)),
    (1, 1, (6, 6), 48, 200, (1, 1), (2, 1), (0, 0)),
]


def test_kernels_compute_what_is_meant():
    pytest.importorskip("triton")
    child = [sys.executable, "-m", "tests.interpreted"]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(child, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=list(CLOSE))
def precision(request):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == "tf32"
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def compare(operation, precision, tensors, *rest):
    """The operation on the GPU beside that on the CPU, of the same numbers."""
    kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
    rounded = [t.to(kind) if t.is_floating_point() else t for t in tensors]
    found = operation(*[t.cuda() for t in rounded], *rest)
    wanted = operation(*[t.double() if t.is_floating_point() else t for t in rounded], *rest)
    for one, other in zip(*((out,) if isinstance(out, torch.Tensor) else out for out in (found, wanted)), strict=True):
        assert one.shape == other.shape and one.is_cuda
        error = (one.cpu().double() - other).abs().max() / other.abs().max()
        assert error < CLOSE[precision], error


@on_a_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions_and_their_gradients(shape, precision):
    lanes, batch, size, channels, outputs, kernel, stride, padding = shape
    torch.manual_seed(0)
    x, weight = torch.randn(lanes, batch, *size, channels), torch.randn(lanes, outputs, *kernel, channels)
    compare(conv2d_forward, precision, (x, weight, torch.randn(lanes, outputs)), stride, padding)
    g = torch.randn_like(conv2d_forward(x, weight, torch.zeros(lanes, outputs), stride, padding))
    compare(conv2d_weight_grad, precision, (g, x), kernel, stride, padding)
    compare(conv2d_squared_weight_grad, precision, (g, x), kernel, stride, padding)


@on_a_gpu
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions_with_pooling(shape, relu, precision):
    """Of two entries that are equal up to rounding, either may be chosen."""
    lanes, batch, size, channels, outputs, kernel, stride, padding = shape
    torch.manual_seed(0)
    kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x, weight = torch.randn(lanes, batch, *size, channels), torch.randn(lanes, outputs, *kernel, channels)
    tensors = [t.to(kind) for t in (x, weight, torch.randn(lanes, outputs) - int(relu))]
    found, which = (t.cpu() for t in conv2d_pool(*[t.cuda() for t in tensors], stride, padding, relu))
    exact = [t.double() for t in tensors]
    wanted, chosen = conv2d_pool(*exact, stride, padding, relu)
    windows = conv2d_forward(*exact, stride, padding).unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    windows = torch.cat([windows, torch.zeros_like(windows[..., :1])], -1)  # where ReLU has made all zero
    taken = windows.gather(-1, which[..., None].long())[..., 0]
    assert found.shape == wanted.shape and (relu or int(which.max()) < NO_ENTRY)
    for one in (found.double(), taken):
        assert (one - wanted).abs().max() < CLOSE[precision] * wanted.abs().max()
    g = torch.randn_like(wanted)
    compare(pool_grad, precision, (g, chosen), *output_size(size, kernel, stride, padding))


@on_a_gpu
@pytest.mark.parametrize(("columns", "padding"), [(5, 0), (5, 2), (4, 3)])
def test_columns_of_a_kernel_are_added_up(columns, padding, precision):
    torch.manual_seed(0)
    compare(add_columns, precision, (torch.randn(2, 3, 4, 9, 16 * columns),), columns, padding)


@on_a_gpu
@pytest.mark.parametrize(("lanes", "time", "batch", "width"), [(3, 6, 32, 256), (2, 5, 3, 20), (1, 1, 70, 48)])
def test_recurrent_loops_forward_and_backward(lanes, time, batch, width, precision):
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(lanes, *shape)

    def part(*shape):
        return torch.rand(lanes, time, batch, *shape)

    sequence, state = draw(time, batch, width), draw(batch, width)
    weight = draw(3 * width, width) / width**0.5
    compare(recurrent.gru_forward, precision, (weight, draw(time, batch, 3 * width), sequence, state))
    compare(recurrent.gru_backward, precision, (weight, sequence, part(3, width), part(width)))
    weight = draw(4 * width, width) / width**0.5
    compare(recurrent.lstm_forward, precision, (weight, draw(time, batch, 4 * width), state, draw(batch, width)))
    known = (part(4, width), part(width), part(width))
    compare(recurrent.lstm_backward, precision, (weight, sequence, state, *known))


@on_a_gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_recurrent_models_train_as_on_the_cpu(name):
    import undrift as ud

    generator = torch.Generator().manual_seed(0)
    data = ud.FederatedDataset.from_clients(
        [
            (torch.randint(0, 9, (n, 7), generator=generator), torch.randint(0, 9, (n,), generator=generator))
            for n in (23, 5, 41, 10)
        ]
    )
    settings = {"rounds": 3, "local": ud.Local(epochs=2, batch_size=8, lr=0.1), "engine": "lanes", "lanes": 2}
    model = ud.models.get(name, classes=9, shape=(7,), vocabulary=9, hidden=24)
    cpu = ud.train(model, data, device="cpu", **settings)
    for compile in (False, True):
        gpu = ud.train(model, data, device="cuda", compile=compile, **settings)
        assert distance({n: w.cpu() for n, w in gpu.params.items()}, cpu.params) < 1e-4
