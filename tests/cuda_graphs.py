"""A stand-in for CUDA graphs, so that all of `engine/graph.py` runs on a CPU.

It keeps the three properties that the engine must respect. Warming up really runs the step. Capturing runs nothing: it
notes operations together with the very tensors that they read and write, and memory that a kernel would have filled
holds garbage (NaN). Replaying runs the operations on those tensors, so a buffer that was replaced since is not seen.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from undrift.engine import choose, graph
from undrift.training import build

DEVICES = [torch.device("cuda:0")]
"""The current device last, and below it those to go back to."""


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.devices = {DEVICES[-1]}
        """Those that were current while it was captured or replayed."""
        self.replays = 0
        graphs.append(self)

    def replay(self) -> None:
        assert self.calls, "a graph is replayed that was never captured"
        self.replays += 1
        self.devices.add(DEVICES[-1])
        for function, args, kwargs, outputs in self.calls:
            new = function(*args, **kwargs)
            if outputs is not None:
                for buffer, value in zip(outputs, tensors(new), strict=True):
                    buffer.copy_(value)


graphs: list[Graph] = []
"""Those made so far."""


class Capture(TorchDispatchMode):
    """Stands for `torch.cuda.graph`: a context in which operations go into a graph."""

    def __init__(self, graph: Graph, capture_error_mode: str = "global") -> None:
        super().__init__()
        self.graph = graph

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # or torch.compile would refuse to run inside it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        schema = function._schema
        if schema.is_mutable:
            (written,) = [
                arg
                for arg, described in zip(args, schema.arguments, strict=False)
                if described.alias_info and described.alias_info.is_write
            ]
            self.graph.calls.append((function, args, kwargs, None))
            return written
        if any(r.alias_info for r in schema.returns):  # a view has no memory of its own
            return function(*args, **kwargs)
        outputs = tree_map_only(torch.Tensor, garbage, function(*on_meta(args), **on_meta(kwargs)))
        self.graph.calls.append((function, args, kwargs, tensors(outputs)))
        return outputs


def on_meta(tree):
    """Arguments that have shapes but no data, and that ask for results of that kind."""

    def leaf(x):
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    return tree_map(leaf, tree)


def garbage(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made.fill_(torch.nan if made.is_floating_point() else 123)


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


@contextmanager
def current_device(device):
    DEVICES.append(torch.device(device))
    try:
        yield
    finally:
        DEVICES.pop()


def put_in_place(monkeypatch, compiler: str = "eager") -> list[Graph]:
    """Let steps on the CPU be captured; gives the graphs that are made from here on. torch.compile uses `compiler`."""
    compile = torch.compile
    torch.set_num_threads(1)  # with more, a CPU trains clients side by side, as no GPU does
    for module in (build, choose, graph):
        monkeypatch.setattr(module, "captures", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda f, options, **rest: compile(f, backend=compiler, **rest))
    for name, value in {
        "CUDAGraph": Graph,
        "graph": Capture,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "device": current_device,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graphs.clear()
    return graphs
