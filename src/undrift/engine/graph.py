"""A local step on a GPU: captured once as a CUDA graph, then replayed.

Everything that the step reads is in buffers with fixed addresses: the training state, which replays change in place,
the lanes' own entries, and the batches of several steps, from which a counter on the device selects the current one. So
a segment of steps is one replay per step, and none of them waits for the host.

The graph is captured when it is built, before the buffers contain anything, and never again: a segment longer than the
buffers goes through them in pieces. So a warm-up never runs on the state of a client in the middle of training.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from undrift.engine.compiler import compiled as through_compiler
from undrift.engine.compiler import distance, trusted
from undrift.tree import Tree, tree_leaves, tree_structure, tree_unflatten

Program = Callable[..., list[Tensor]]

PIECE_STEPS = 64
"""The largest number of steps whose batches the buffers hold. Filling them takes far less time than the steps."""
PIECE_BYTES = 16 * 2**20
"""The memory that these batches may take. If one step's batch is larger, the buffers hold a single step."""

CAPTURING = threading.RLock()
"""Held while a graph is captured, when no other thread may allocate memory or wait for events."""


def piece_steps(step_bytes: int, most: int | None = None) -> int:
    """Return how many steps' batches the buffers hold, given the size of one, within a limit in bytes."""
    return max(1, min(PIECE_STEPS, (most or PIECE_BYTES) // max(1, step_bytes)))


def captures(device: torch.device) -> bool:
    """Return whether steps on this device are captured as graphs."""
    return device.type == "cuda"


class StepGraph:
    """One local step of every lane, for one set of shapes."""

    def __init__(
        self, program: Program, state: Tree, rest: Tree, batch: tuple[Tensor, ...], compiled: torch.dtype | None = None
    ) -> None:
        """`state`, `rest` and `batch` only provide shapes. For `compiled`, see `Traced`."""
        self.state_tree = tree_structure(state)
        self.state = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tree_leaves(state)]
        self.rest = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in tree_leaves(rest)]
        step_bytes = sum(t[0].numel() * t.element_size() for t in batch)
        self.batches = [t.new_zeros(piece_steps(step_bytes), *t.shape[1:]) for t in batch]
        self.turn = torch.zeros(1, dtype=torch.int64, device=batch[0].device)
        casts = _cast_ahead(program, len(self.state)) if compiled and isinstance(program, GraphModule) else []
        self.casts = [(i, torch.zeros_like(self.state[i], dtype=dtype)) for i, dtype in casts]
        self.program, self.untried = program, compiled
        self.step = _mutating(program, len(self.state) + len(casts), compiled is not None)
        self.graph = self._capture()

    def run(self, state: Tree, rest: Tree, batches: tuple[Tensor, ...]) -> Tree:
        """Take the steps that `batches` holds along its first axis. Returns the state, which is in the buffers."""
        leaves, others = tree_leaves(state), tree_leaves(rest)
        if self.untried:
            self._try(leaves, others, [t[0] for t in batches], self.untried)
            self.untried = None
        for buffers, values in ((self.state, leaves), (self.rest, others)):
            for buffer, value in zip(buffers, values, strict=True):
                if buffer is not value:
                    buffer.copy_(value, non_blocking=True)
        for i, cast in self.casts:
            cast.copy_(leaves[i], non_blocking=True)
        piece = len(self.batches[0])
        for begin in range(0, len(batches[0]), piece):
            steps = min(piece, len(batches[0]) - begin)
            for buffer, value in zip(self.batches, batches, strict=True):
                buffer[:steps].copy_(value[begin : begin + steps], non_blocking=True)
            self.turn.zero_()
            for _ in range(steps):
                self.graph.replay()
        return tree_unflatten(self.state, self.state_tree)

    def _try(self, state: list[Tensor], rest: list[Tensor], batch: list[Tensor], compute: torch.dtype) -> None:
        """Take the first step on copies, compiled and uncompiled, and keep the uncompiled step if they differ.

        No buffer holds live state yet, so another graph may still be captured.
        """
        casts = [state[i].to(cast.dtype) for i, cast in self.casts]
        leaves = [t.clone(memory_format=torch.contiguous_format) for t in (*state, *casts, *rest, *batch)]
        wanted, count = self.program(*leaves), len(state)
        self.step(*leaves)
        all_of_it = [list(t[:count]) for t in (leaves, wanted, state)]
        params = [tree_leaves(tree_unflatten(t, self.state_tree)["params"]) for t in all_of_it]
        if not (trusted(distance(*params), compute) and trusted(distance(*all_of_it), compute)):
            self.step = _mutating(self.program, count + len(casts), False)
            self.graph = self._capture()

    def _capture(self) -> torch.cuda.CUDAGraph:
        # A first call creates handles and workspaces and compiles code, none of which may happen while capturing.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.turn.zero_()  # the buffers may hold a single step
                self._once()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: NCCL's polls its events.
        with CAPTURING, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._once()
        return graph

    def _once(self) -> None:
        batch = [t.index_select(0, self.turn)[0] for t in self.batches]
        self.step(*self.state, *(cast for _, cast in self.casts), *self.rest, *batch)
        self.turn.add_(1)


def _mutating(program: Program, count: int, compiled: bool) -> Callable[..., Any]:
    """Return the program with its first `count` arguments, the state, changed in place rather than returned."""
    moved = _moved(program, count) if compiled and isinstance(program, GraphModule) else {}

    def step(*leaves: Tensor) -> None:
        for i, (old, new) in enumerate(zip(leaves[:count], program(*leaves), strict=True)):
            if old is not new and i not in moved:
                old.copy_(new)

    if compiled:
        return _moving(through_compiler(_of_its_own(step), fullgraph=True), moved)
    if isinstance(program, GraphModule):
        _update_in_place(program, count)
    return step


def _moved(program: GraphModule, count: int) -> dict[int, int]:
    """Return which tensors of the new state are copies of which of the old, since a carry passes them on."""
    nodes = list(program.graph.nodes)
    inputs, (outputs,) = [n for n in nodes if n.op == "placeholder"], nodes[-1].args
    found = {}
    for i, new in enumerate(outputs[:count]):
        source = new
        while source.target is torch.ops.aten.clone.default:
            source = source.args[0]
        if source in inputs[:count]:
            found[i] = inputs.index(source)
    return found


def _moving(step: Callable[..., Any], moved: dict[int, int]) -> Callable[..., Any]:
    """Return a compiled step that copies the state `moved` by hand.

    Torch's compiler (2.11, 2.13) drops the copy of an argument and reads it after overwriting it.
    """

    def whole(*leaves: Tensor) -> None:
        before = [leaves[source].clone() for source in moved.values()]
        step(*leaves)
        for i, value in zip(moved, before, strict=True):
            leaves[i].copy_(value)

    return whole if moved else step


def _cast_ahead(program: GraphModule, count: int) -> list[tuple[int, torch.dtype]]:
    """Fuse the cast of the weights to low precision into the update that writes them, a step earlier.

    The casts become arguments and results of the program, after the `count` tensors of the state. Returns which of
    these are cast, and to what.
    """
    graph, found, extra = program.graph, [], []
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    last = next(n for n in graph.nodes if n.op == "output")
    for i, state in enumerate(inputs[:count]):
        casts = [n for n in state.users if n.target is torch.ops.aten._to_copy.default and set(n.kwargs) == {"dtype"}]
        kinds = {n.kwargs["dtype"] for n in casts}
        if len(kinds) != 1:
            continue
        with graph.inserting_before(inputs[count]):
            cast = graph.placeholder(f"cast_{i}")
        for old in casts:
            old.replace_all_uses_with(cast)
            graph.erase_node(old)
        dtype = kinds.pop()
        with graph.inserting_before(last):
            new = last.args[0][i]
            extra.append(graph.call_function(torch.ops.aten._to_copy.default, (new,), {"dtype": dtype}))
        found.append((i, dtype))
    last.args = ([*last.args[0], *extra],)
    program.recompile()
    return found


_made = itertools.count()


def _of_its_own(function: Any) -> Any:
    """Return a copy of the function with its own code object: torch compiles each for at most eight sets of shapes."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_made)}")
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


UPDATES = {torch.ops.aten.addcmul.default: torch.ops.aten.addcmul_.default}


def _update_in_place(program: GraphModule, count: int) -> None:
    """Make the last operation on a weight an in-place one, where nothing reads the old value afterwards."""
    nodes = list(program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    inputs, (outputs,) = [n for n in nodes if n.op == "placeholder"], nodes[-1].args
    for old, new in zip(inputs[:count], outputs, strict=True):
        fits = isinstance(new, Node) and new.target in UPDATES and new.args[0] is old
        if fits and outputs.count(new) == 1 and max(place[u] for u in _readers(old)) == place[new]:
            new.target = UPDATES[new.target]
    program.recompile()


def _readers(node: Node) -> set[Node]:
    """Return the nodes that read a tensor or a view of it."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                schema = getattr(user.target, "_schema", None)
                if schema is None or any(r.alias_info for r in schema.returns):
                    waiting.append(user)
    return found
