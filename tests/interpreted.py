"""Kernels by Triton's interpreter, which needs no GPU:  TRITON_INTERPRET=1 python -m tests.interpreted

A program of its own, for Triton must be told before it is imported. It shows that a kernel computes what is meant; what
a GPU's compiler makes of it, `test_kernels.py` shows on one.
"""

from __future__ import annotations

from itertools import product

import torch

from undrift.functional.convolution import kernels as convolution
from undrift.functional.convolution import operations as meant
from undrift.functional.convolution import row_kernels as rows
from undrift.functional.convolution.geometry import output_size
from undrift.functional.recurrent import kernels as recurrent
from undrift.functional.recurrent import operations as loops
from undrift.random import kernels as drawing
from undrift.random import philox_words

SHAPES = [  # lanes, batch, size, channels, outputs, kernel, stride, padding
    (2, 3, (8, 8), 16, 20, (3, 3), (1, 1), (1, 1)),
    (2, 2, (9, 7), 3, 5, (5, 3), (1, 2), (0, 2)),
    (1, 2, (6, 6), 32, 130, (3, 3), (2, 2), (1, 1)),
    (3, 9, (6, 6), 1, 4, (1, 1), (1, 1), (0, 0)),
]


def compare(found: object, wanted: object) -> None:
    pairs = zip(*((one,) if isinstance(one, torch.Tensor) else one for one in (found, wanted)), strict=True)
    for one, other in pairs:
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max())), (one - other).abs().max()


def main() -> None:
    torch.manual_seed(0)
    convolution.shared_memory = recurrent.shared_memory = lambda device: 227  # as on Hopper, where tf32 transposes g
    for (lanes, batch, size, channels, outputs, kernel, stride, padding), tf32 in product(SHAPES, (False, True)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        x, weight = torch.randn(lanes, batch, *size, channels), torch.randn(lanes, outputs, *kernel, channels)
        bias = torch.randn(lanes, outputs)
        wanted = meant.conv2d_forward(x, weight, bias, stride, padding)
        compare(convolution.conv2d_forward(x, weight, bias, stride, padding), wanted)
        g = torch.randn_like(wanted)
        for name in ("conv2d_weight_grad", "conv2d_squared_weight_grad"):
            found, wanted = (getattr(module, name)(g, x, kernel, stride, padding) for module in (convolution, meant))
            compare(found, wanted)
        for relu in (False, True):
            arguments = (x, weight, bias - 3 * relu, stride, padding, relu)
            (found, which), (wanted, chosen) = (module.conv2d_pool(*arguments) for module in (convolution, meant))
            compare(found, wanted)
            assert torch.equal(which, chosen) and chosen.unique().numel() == 4 + relu
            g = torch.randn_like(wanted)
            height, width = output_size(size, kernel, stride, padding)
            compare(*(module.pool_grad(g, chosen, height, width) for module in (rows, meant)))
    for columns, padding in [(5, 0), (5, 2), (4, 3), (1, 0)]:
        x = torch.randn(2, 3, 4, 9, 3 * columns)
        compare(*(module.add_columns(x, columns, padding) for module in (rows, meant)))
    for lanes, time, batch, width in [(2, 3, 3, 16), (1, 2, 70, 24)]:
        steps, state = (lanes, time, batch), torch.randn(lanes, batch, width)
        for gates, loop in ((3, "gru"), (4, "lstm")):
            weight = torch.randn(lanes, gates * width, width) / width**0.5
            base, narrow = torch.randn(*steps, gates * width), [torch.rand(*steps, width) for _ in range(3)]
            factors, end = torch.rand(*steps, gates, width), torch.randn(lanes, batch, width)
            forward = (weight, base, narrow[0], state) if loop == "gru" else (weight, base, state, end)
            backward = (weight, narrow[0], factors, narrow[1])
            if loop == "lstm":
                backward = (weight, narrow[0], end, factors, *narrow[1:])
            for name, tensors in ((f"{loop}_forward", forward), (f"{loop}_backward", backward)):
                compare(*(getattr(module, name)(*tensors) for module in (recurrent, loops)))
    for lanes, stream, count in [(3, 0, 0), (2, 1, 1), (3, 65536, 1023), (1, 2**31 + 5, 4097)]:
        keys, steps = torch.randint(0, 2**32, (lanes, 2)), torch.randint(0, 2**20, (lanes,))
        words = drawing.philox_words(keys, steps, stream, count)
        assert torch.equal(words, philox_words(keys, steps, stream, count))


if __name__ == "__main__":
    main()
