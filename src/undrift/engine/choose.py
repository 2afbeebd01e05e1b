"""Which engine, and how many lanes: by rules on the model, the data and the device, never by timing.

So the choice, and with it the bits, repeat. The constants come from `python -m benchmarks.cpu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from undrift.engine.client import Program
from undrift.engine.cohort import Orders, Resident
from undrift.engine.graph import captures
from undrift.engine.lanes import LanesEngine
from undrift.engine.plain import PlainEngine
from undrift.errors import UndriftError
from undrift.functional.model import NORMS, Model, Params
from undrift.functional.recurrent.layers import THEIRS, adopt, release
from undrift.random import Key
from undrift.tree import tree_expand

CPU_CONVOLUTION_FLOPS = 4e7
"""Convolution work of one lane's forward pass above which a CPU is fastest with one lane."""
CPU_LANE_BYTES = 16 * 2**20
"""What all lanes' weights and batches may take on a CPU: beyond its cache, more lanes cost more than they save."""
CPU_PADDING = 4
"""How many times the mean batch the widest may be before padding all to it costs a CPU more than lanes save."""
CPU_THREAD_BYTES = 4 * 2**20
"""What a layer may put out for clients to have a thread each; of more, they crowd each other out of the cache."""
GPU_LANE_SHARE = 0.05
"""The share of a GPU's memory for all lanes' weights and batches; gradients, activations and data take the rest."""


@dataclass(frozen=True)
class Choice:
    engine: str
    lanes: int
    why: str
    compile: bool = False


def obstacle(model: Model) -> str | None:
    """Why a model cannot run as lanes, by its layers."""
    for layer in model.module.modules():
        name = type(layer).__name__
        if isinstance(layer, nn.RNNBase) and type(layer) not in THEIRS:
            return f"nn.{name} has no vmap rule, unless it is a GRU or LSTM with biases, one direction and no dropout"
        if isinstance(layer, NORMS) and (
            isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats
        ):
            return f"{name} in training mode looks across the rows of a batch and changes its statistics"
    return f"training changes its buffer {next(iter(model.tracked))!r}" if model.tracked else None


def choose(
    engine: str, lanes: int | None, program: Program, data: Resident, orders: Orders, steps: np.ndarray, width: int
) -> Choice:
    """The engine for a run whose rounds look like `orders`; `steps` are all non-empty clients', `width` a batch's."""
    if engine != "plain":
        adopt(program.model.module)
    choice = _choose(engine, lanes, program, data, orders, steps, width)
    if choice.engine == "plain":
        release(program.model.module)
    return choice


def _choose(
    engine: str, lanes: int | None, program: Program, data: Resident, orders: Orders, steps: np.ndarray, width: int
) -> Choice:
    blocked = obstacle(program.model) or _vmap_failure(program, data, orders)
    program.model.vmaps = blocked is None
    if engine == "lanes" and blocked:
        raise UndriftError(f'engine="lanes" cannot train this model: {blocked}. Use engine="plain" or "auto".')
    if engine == "plain":
        return Choice("plain", 1, "asked for")
    if blocked:
        return Choice("plain", 1, blocked)
    cohort = len(orders.plan.clients)
    if lanes is not None:
        return Choice("lanes", min(lanes, cohort), "asked for")
    batches = np.minimum(data.data.sizes[data.data.nonempty], width)
    if engine == "auto" and data.device.type == "cpu" and width > CPU_PADDING * batches.mean():
        return Choice("plain", 1, "clients' batches differ so much in size that padding costs more than lanes save")
    return Choice("lanes", *_lanes(program.model, data, cohort, steps, width))


COMPILE_STEPS = 3000
"""How many local steps of all lanes a run must have for compiling them to pay; it takes about a minute."""


def compiles(asked: bool | None, choice: Choice, device: torch.device, rounds: int, steps: float) -> bool:
    """Whether to compile a step, given how many `steps` a round's clients take together."""
    able = captures(device) and choice.engine == "lanes"
    if asked and not able:
        raise UndriftError("compile=True is for lanes on a GPU; leave it out.")
    return able and (bool(asked) if asked is not None else rounds * steps / choice.lanes >= COMPILE_STEPS)


def build(choice: Choice, program: Program, data: Resident, width: int) -> LanesEngine | PlainEngine:
    if choice.engine == "plain":
        return PlainEngine(program, data)
    one_by_one = data.device.type == "cpu" and choice.lanes == 1
    threads = torch.get_num_threads() if one_by_one and _largest(program.model, width) <= CPU_THREAD_BYTES else 1
    return LanesEngine(program, data, choice.lanes, choice.compile, threads)


def _largest(model: Model, width: int) -> float:
    """Bytes of the largest output that a layer gives for a batch."""
    with torch.no_grad():
        outputs = [call.output for call in model.watch(model.start, model.sample[:1]).calls]  # type: ignore[index]
    return width * max((out.numel() * out.element_size() for out in outputs), default=0)


def _lanes(model: Model, data: Resident, cohort: int, steps: np.ndarray, width: int) -> tuple[int, str]:
    """How many lanes, and why: as many as keep busy while the longest client trains, and as memory holds."""
    device = data.device
    if device.type == "cpu" and convolution_flops(model, data, width) > CPU_CONVOLUTION_FLOPS:
        return 1, "on a CPU convolutions of this size are fastest one client at a time"
    busy = min(cohort, math.ceil(cohort * steps.mean() / steps.max()))
    x = data.data.take(data.store, torch.zeros(1, dtype=torch.int64, device=device))[0]
    batch = 2 * width * x.numel() * x.element_size()  # and at least as much again for what the layers make of it
    lane = batch + sum(w.numel() * w.element_size() for w in model.start.values())
    on_gpu = device.type == "cuda"
    memory = GPU_LANE_SHARE * torch.cuda.get_device_properties(device).total_memory if on_gpu else CPU_LANE_BYTES
    room = max(1, int(memory // lane))
    if room >= busy:
        return busy, "as many as keep busy while the longest client trains"
    return math.ceil(busy / math.ceil(busy / room)), "as many as memory serves well"


def convolution_flops(model: Model, data: Resident, width: int) -> float:
    """Operations that the convolutions of one lane's forward pass take, counted on one sample."""
    row = torch.zeros(1, dtype=torch.int64, device=data.device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(model.start, data.batch(row, row).x)
    counts = counter.get_flop_counts().get("Global", {})
    return float(sum(flops for op, flops in counts.items() if "convolution" in str(op))) * width


def _vmap_failure(program: Program, data: Resident, orders: Orders) -> str | None:
    """Why vmap refuses the model, from a tiny step of two lanes, or None."""
    rows = torch.zeros(2, 2, dtype=torch.int64, device=data.device)
    keys = orders.lanes["key"][[0, 0]]

    def output(params: Params, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return program.model.train(params, x, Key(words, torch.zeros_like(words[0]))).sum()

    try:
        torch.func.vmap(torch.func.grad(output))(tree_expand(program.model.start, 2), data.batch(rows, rows).x, keys)
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's forward pass may raise under vmap
        return f"the model does not run under vmap ({(str(error).splitlines() or [type(error).__name__])[0][:200]})"
    return None
