"""Which engine, and how many lanes: by rules on the model, the data and the device, never by timing.

So the choice is reproducible, and so are the results. The constants come from `python -m benchmarks.cpu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from undrift.engine.base import Engine
from undrift.engine.client import Program
from undrift.engine.device_data import DeviceData
from undrift.engine.flops import Flops
from undrift.engine.graph import captures
from undrift.engine.lanes import LanesEngine
from undrift.engine.plain import PlainEngine
from undrift.engine.stacked import StackedEngine
from undrift.engine.steps import EagerSteps, GraphSteps
from undrift.engine.threads import ThreadedEngine
from undrift.engine.vectorized import Vectorized
from undrift.errors import LanesError, UndriftError
from undrift.functional.arguments import batch_size
from undrift.functional.model import Model
from undrift.method.local import Spread
from undrift.tree import tree_bytes

L = TypeVar("L", bound=LanesEngine)

CPU_CONVOLUTION_FLOPS = 4e7
"""The operations of the convolutions in a forward pass above which a CPU is fastest with one lane."""
CPU_LANE_BYTES = 16 * 2**20
"""The largest size of all lanes' weights and batches on a CPU. Beyond its cache, more lanes do not help."""
CPU_PADDING = 4
"""The largest ratio of the largest batch to the mean. Beyond it, padding costs a CPU more than lanes save."""
CPU_THREAD_BYTES = 4 * 2**20
"""The largest output of a layer for which clients get a thread each; beyond it, they evict each other's cache."""
GPU_LANE_SHARE = 0.05
"""The share of a GPU's memory for all lanes' weights and batches; gradients, activations and data take the rest."""


@dataclass(frozen=True)
class Choice:
    engine: str
    lanes: int
    why: str
    compile: bool = False


def choose(
    engine: str,
    lanes: int | None,
    model: Model,
    data: DeviceData,
    cohort: int,
    steps: Spread,
    width: int,
    obstacle: str | None = None,
) -> Choice:
    """Return the engine for a run.

    Args:
        engine: The engine that the user asked for.
        lanes: The number of lanes that the user asked for.
        model: The model as it would run in lanes.
        obstacle: Why the data or the loss cannot be used in lanes, if they cannot.
        data: The clients' data.
        cohort: The number of clients per round.
        steps: The numbers of local steps of the clients with data.
        width: The size of the largest batch.
    """
    if engine == "plain":
        return Choice("plain", 1, "asked for")
    obstacle = model.obstacle or obstacle
    if engine == "lanes" and obstacle:
        message = f'engine="lanes" cannot train this model: {obstacle}. Use engine="plain" or "auto".'
        raise LanesError(message, obstacle)
    if obstacle:
        return Choice("plain", 1, obstacle)
    if lanes is not None:
        return Choice("lanes", min(lanes, cohort), "asked for")
    sizes, clients = data.data.size_counts
    batch = float((np.minimum(sizes, width) * clients).sum() / clients.sum())
    if engine == "auto" and data.device.type == "cpu" and width > CPU_PADDING * batch:
        return Choice("plain", 1, "clients' batches differ so much in size that padding costs more than lanes save")
    return Choice("lanes", *_lanes(model, data, cohort, steps, width))


COMPILE_STEPS = 3000
"""The number of local steps of all lanes from which compiling, which takes about a minute, is worthwhile."""


def compiles(asked: bool | None, choice: Choice, device: torch.device, rounds: int, steps: float) -> bool:
    """Return whether to compile a step, given how many `steps` a round's clients take together."""
    able = captures(device) and choice.engine == "lanes"
    if asked and not able:
        raise UndriftError("compile=True is for lanes on a GPU; leave it out.")
    return able and (bool(asked) if asked is not None else rounds * steps / choice.lanes >= COMPILE_STEPS)


def build(choice: Choice, program: Program, data: DeviceData, width: int) -> Engine:
    """Return the engine that was chosen."""
    if choice.engine == "plain":
        return PlainEngine(program, data)
    functions = Vectorized(program, data)
    if captures(data.device):
        return _graphs(LanesEngine, choice, functions)
    alone = data.device.type == "cpu" and choice.lanes == 1
    threads = torch.get_num_threads() if alone and _largest(program.model, width) <= CPU_THREAD_BYTES else 1
    engine = LanesEngine(functions, EagerSteps(functions.step), choice.lanes, trace_passes=threads > 1)
    return ThreadedEngine(engine, threads) if threads > 1 else engine


def build_stacked(choice: Choice, program: Program, data: DeviceData) -> StackedEngine:
    """Return the engine for several runs."""
    functions = Vectorized(program, data, apart=True)
    if captures(data.device):
        return _graphs(StackedEngine, choice, functions)
    return StackedEngine(functions, EagerSteps(functions.step), choice.lanes)


def _graphs(kind: type[L], choice: Choice, functions: Vectorized) -> L:
    """Return a lanes engine whose steps are captured as CUDA graphs."""
    compiled = functions.program.model.compute_dtype if choice.compile else None
    return kind(functions, GraphSteps(functions.step, compiled), choice.lanes, trace_passes=True, compiled=compiled)


def _largest(model: Model, width: int) -> float:
    """Return the size in bytes of the largest output of a layer for a batch."""
    with torch.no_grad():
        outputs = [call.output for call in model.watch(model.trial(), model.sample).calls]
    most = max((out.numel() * out.element_size() for out in outputs), default=0)
    return width * most / batch_size(model.sample)


def _lanes(model: Model, data: DeviceData, cohort: int, steps: Spread, width: int) -> tuple[int, str]:
    """Return the number of lanes, and why: as many as stay busy while the longest client trains, within memory."""
    device = data.device
    if device.type == "cpu" and convolution_flops(model, data, width) > CPU_CONVOLUTION_FLOPS:
        return 1, "on a CPU convolutions of this size are fastest one client at a time"
    busy = min(cohort, math.ceil(cohort * steps.mean / steps.largest))
    batch = 2 * width * tree_bytes(data.sample)  # and at least as much again for activations
    lane = batch + sum(w.numel() * w.element_size() for w in model.start.values())
    on_gpu = device.type == "cuda"
    memory = GPU_LANE_SHARE * torch.cuda.get_device_properties(device).total_memory if on_gpu else CPU_LANE_BYTES
    room = max(1, int(memory // lane))
    if room >= busy:
        return busy, "with more lanes, some would be idle until the client with the most steps is done"
    return math.ceil(busy / math.ceil(busy / room)), "as many as fit into the memory set aside for lanes"


def convolution_flops(model: Model, data: DeviceData, width: int) -> float:
    """Return the operations of the convolutions in one lane's forward pass, counted on the model's two samples."""
    with Flops() as counter, torch.no_grad():
        model(model.trial(), model.sample)
    flops = sum(count for name, count in counter.counts.items() if "convolution" in name)
    return float(flops) * width / batch_size(model.sample)
