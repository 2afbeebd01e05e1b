"""Which engine, and how many lanes: by rules on the model, the data and the device, never by timing.

So the choice, and with it the bits, repeat. The constants come from `python -m benchmarks.rounds`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from undrift.engine.client import Program
from undrift.engine.cohort import Orders, Resident
from undrift.engine.lanes import LanesEngine
from undrift.engine.plain import PlainEngine
from undrift.errors import UndriftError
from undrift.models.functional import NORMS, Model
from undrift.tree import tree_leaves, tree_map

CPU_CONVOLUTION_FLOPS = 2.5e7
"""Convolution work of one lane's forward pass above which a CPU is as fast one client at a time."""
CPU_LANE_BYTES = 256 * 2**20
"""What all lanes' weights together may take on a CPU; more lanes than that no longer help."""
GPU_LANE_SHARE = 0.25
"""The share of a GPU's memory that all lanes' weights may take; the rest is for activations and data."""
COPIES = 5
"""Copies of the weights that a lane needs at once: weights, new weights, gradient, velocity, one in passing."""


@dataclass(frozen=True)
class Choice:
    engine: str
    lanes: int
    why: str


def obstacle(module: nn.Module) -> str | None:
    """Why a model cannot run as lanes, by its layers."""
    for layer in module.modules():
        name = type(layer).__name__
        if isinstance(layer, nn.RNNBase):
            return f"nn.{name} has no vmap rule"
        if isinstance(layer, NORMS) and (
            isinstance(layer, nn.modules.batchnorm._BatchNorm) or layer.track_running_stats
        ):
            return f"{name} in training mode looks across the rows of a batch and changes its statistics"
    return None


def choose(
    engine: str,
    lanes: int | None,
    program: Program,
    data: Resident,
    orders: Orders,
    sizes: np.ndarray,
    steps: np.ndarray,
    width: int,
) -> Choice:
    """The engine for a run whose rounds look like `orders`; `sizes` and `steps` are all non-empty clients'."""
    model, device = program.model, data.device
    blocked = obstacle(model.module)
    if engine == "lanes" and blocked:
        raise UndriftError(f'engine="lanes" cannot train this model: {blocked}. Use engine="plain" or "auto".')
    if engine == "plain":
        return Choice("plain", 1, "asked for")
    if engine == "auto" and blocked:
        return Choice("plain", 1, blocked)
    cohort = len(orders.plan.clients)
    count = min(lanes or _lanes(model, device, cohort, steps), cohort)
    if engine == "lanes":
        return Choice("lanes", count, "asked for")
    if device.type == "cpu":
        flops = convolution_flops(model, data, width)
        if flops > CPU_CONVOLUTION_FLOPS:
            return Choice("plain", 1, "on a CPU convolutions of this size run as fast one client at a time")
    if failure := _vmap_failure(program, data, orders):
        return Choice("plain", 1, f"the model does not run under vmap ({failure})")
    return Choice("lanes", count, "the model runs under vmap")


def build(choice: Choice, program: Program, data: Resident) -> LanesEngine | PlainEngine:
    return LanesEngine(program, data, choice.lanes) if choice.engine == "lanes" else PlainEngine(program, data)


def _lanes(model: Model, device: torch.device, cohort: int, steps: np.ndarray) -> int:
    """As many lanes as keep busy while the longest client trains, and as memory holds."""
    busy = int(np.ceil(cohort * steps.mean() / steps.max()))
    weights = COPIES * sum(w.numel() * w.element_size() for w in tree_leaves(model.start))
    memory = (
        CPU_LANE_BYTES
        if device.type == "cpu"
        else GPU_LANE_SHARE * torch.cuda.get_device_properties(device).total_memory
    )
    return max(1, min(cohort, busy, int(memory // weights)))


def convolution_flops(model: Model, data: Resident, width: int) -> float:
    """Operations that the convolutions of one lane's forward pass take, counted on one sample."""
    row = torch.zeros(1, dtype=torch.int64, device=data.device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(model.start, data.batch(row, row).x)
    counts = counter.get_flop_counts().get("Global", {})
    return float(sum(flops for op, flops in counts.items() if "convolution" in str(op))) * width


def _vmap_failure(program: Program, data: Resident, orders: Orders) -> str | None:
    """The first line of what vmap says to a tiny step of two lanes, or None."""
    two = tree_map(lambda t: t[[0, 0]], orders.lanes)
    two |= {"measured": [() for _ in program.method.parts], "prepared": [() for _ in program.method.parts]}
    rows = torch.zeros(2, 2, dtype=torch.int64, device=data.device)
    batch = data.batch(rows, torch.ones_like(rows, dtype=torch.bool))
    zeros = torch.zeros(2, dtype=torch.int64, device=data.device)
    params = tree_map(lambda w: w.expand(2, *w.shape), program.model.start)

    def output(params: object, x: torch.Tensor, lane: dict[str, torch.Tensor], k: torch.Tensor) -> torch.Tensor:
        from undrift.random import Key

        return program.model.train(params, x, Key(lane["key"], k)).sum()  # type: ignore[arg-type]

    try:
        torch.func.vmap(torch.func.grad(output))(params, batch.x, two, zeros)
    except UndriftError:
        raise
    except Exception as error:  # whatever a user's forward pass may raise under vmap
        return (str(error).splitlines() or [type(error).__name__])[0][:200]
    return None
