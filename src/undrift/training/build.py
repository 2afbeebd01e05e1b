"""Build a run from the settings of `ud.train`: check what determines the training, and choose what was left open."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift import models
from undrift.columns import directions
from undrift.data.dataset import FederatedDataset, Rows
from undrift.data.samples import sample_shape
from undrift.engine.base import Engine
from undrift.engine.choose import Choice, build, choose, compiles
from undrift.engine.client import Program
from undrift.engine.device_data import DeviceData
from undrift.engine.fallback import Fallback
from undrift.engine.graph import captures
from undrift.engine.placement import Placement
from undrift.engine.plain import PlainEngine
from undrift.engine.ranked import RankedEngine
from undrift.engine.ranks import ALONE, Ranks
from undrift.engine.slots import SlotFiles
from undrift.errors import require
from undrift.functional.arguments import WHOLE
from undrift.functional.copying import Factory, has_hooks, unwrapped, without_factory
from undrift.functional.in_place import HOOKS
from undrift.functional.model import Model
from undrift.loss_modules import of_batches
from undrift.losses import LOSSES, Loss, for_labels, get_loss, model_loss, name_of
from undrift.method.calls import call, ours
from undrift.method.groups import group_factors
from undrift.method.local import Local
from undrift.method.parse import as_method
from undrift.method.part import Method
from undrift.method.work import with_local_work
from undrift.metrics import get_metrics
from undrift.models import parse_model
from undrift.random import derive, torch_seed
from undrift.training import drift
from undrift.training.argument_checks import check_types, cohort_size_of, find_device, warn_of_one_client
from undrift.training.batch_checks import check_single_samples, warn_of_short_batches, why_plain
from undrift.training.client_failures import Conditions
from undrift.training.hook_rehearsal import find_sums, rehearse_hooks
from undrift.training.model_checks import (
    check_augment,
    check_gradient,
    check_split,
    warn_of_labels,
    warn_of_pixels,
    warn_of_rounding,
    warn_of_trained_test,
    with_shapes,
)
from undrift.training.model_loss_data import with_label_inputs
from undrift.training.model_rehearsal import OwnModule
from undrift.training.run import Run
from undrift.training.run_folder import CHECKPOINT
from undrift.training.settings import Settings
from undrift.training.state import State
from undrift.training.threads import thread_count, use_threads
from undrift.training.torch_flags import full_precision
from undrift.tree import tree_bytes, tree_map

log = logging.getLogger("undrift")


def prepare(given: Settings, ranks: Ranks = ALONE, cohort: int | None = None) -> Run:
    """Check what determines the training, and choose what was left open. Raises `UndriftError`.

    `ranks` are the processes of the run. There is no communication here: if one of them rejects something, or does not
    find something on its machine, the others learn about it afterwards. `cohort` is the number of clients sampled per
    round, if the data are those of some of the clients only.
    """
    check_types(given)
    data, local, rounds, seed = given.data, given.local, given.rounds, given.seed
    method = as_method(given.method)
    where = find_device(given.device)
    cohort_size = cohort or cohort_size_of(given.participation, data.population)
    conditions = Conditions(given.faults, given.max_norm_ratio, given.min_clients)
    conditions.check(rounds, cohort_size)
    local.check(data, rounds)
    method.check(local, data, rounds)
    derive(seed, "check")  # a seed that is not an integer is rejected here

    chosen_loss = for_labels(get_loss(given.loss if given.loss is not None else data.task.loss), data.unlabelled)
    chosen_metrics = get_metrics(given.metrics if given.metrics is not None else data.task.metrics, chosen_loss)
    drift.check(given.drift, chosen_metrics)
    own_loss = chosen_loss is model_loss
    data = with_label_inputs(data) if own_loss else data
    module = with_shapes(module_of(given.model, data, seed), data, seed)
    function = Model(module, where, given.precision, output_of(given, method, own_loss))
    examined, chosen_loss = check_data(function, data, where, chosen_loss, chosen_metrics)
    refuse_batch_losses(method, chosen_loss)
    if cohort is None and ranks.leads:  # otherwise, the data are not those of all clients
        warn_of_one_client(given.participation, data.population)
        warn_of_labels(data, chosen_loss, given.loss is None and data.task.loss is None)
        warn_of_trained_test(data)
    if any(has_hooks(p) for p in examined.module.parameters()):
        examined = examined.in_place(HOOKS)
    for part in method.parts:
        call(part, "check_model", examined, rounds)
    placement = Placement(where, given.data_on)
    place, why_there = placement.reason(data.store)
    device_data = DeviceData(data, where, examined.accum_dtype, placement.stays)
    with current_device(where), full_precision():
        in_lanes = examined.in_lanes()
        choice = choose_engine(given, in_lanes, device_data, -(-cohort_size // ranks.size), method, chosen_loss)
    function = in_lanes if choice.engine == "lanes" else examined
    check_single_samples(function, local, data, rounds, method.batches, given.personalize_every is not None)
    warn_of_short_batches(local, data, rounds, method.batches)
    program = drift.observe_program(build_program(function, method, local, data, chosen_loss), given.drift, cohort_size)
    program = conditions.program(program, cohort_size)
    count, why_so_many = thread_count(given.threads, function, choice, where, local.widest(data.size_counts[0]))
    with use_threads(count):
        engine, choices = build_engine(choice, program, examined, device_data, given, ranks)
    choices |= {"threads": count, "threads_why": why_so_many, "data": place, "data_why": why_there}
    if said := directions(chosen_metrics):  # for whoever reads the run's folder without the metrics themselves
        choices["lower_is_better"] = said
    run = Run(
        method=method,
        composed=program.method,
        model=function,
        data=data,
        device_data=device_data,
        local=local,
        loss=chosen_loss,
        metrics=chosen_metrics,
        test=device_data.place(data.test_rows) if data.test_rows else None,
        validation=device_data.place(data.validation_rows) if data.validation_rows else None,
        server_data=tree_map(lambda t: t.to(where), data.server) if data.server else None,
        rounds=rounds,
        cohort_size=cohort_size,
        seed=seed,
        conditions=conditions,
        engine=engine,
        choices=choices,
        drift=given.drift,
        ranks=ranks,
    )
    find_sums(run, program)
    if given.rehearse and not (models.is_ours(given.model) and name_of(chosen_loss) in LOSSES.own):
        padded = choice.engine == "lanes" and may_pad(local, data, method)
        run = replace(run, own_module=OwnModule(unwrapped(module), examined, program, padded))
    if given.rehearse and not all(ours(part) for part in method.parts):
        alone = replace(build_program(function, method, local, data, chosen_loss), sums=program.sums)
        lanes = choice.engine == "lanes"
        run = replace(run, rehearsal=rehearse_hooks(run, alone, lanes, lanes and may_pad(local, data, method)))
    return choose_client_storage(run, given.out)


def may_pad(local: Local, data: FederatedDataset, method: Method) -> bool:
    """Return whether lanes pad batches: short ones, and those of passes without training."""
    return local.may_be_short(data.size_counts[0]) or any(part.measures for part in method.parts)


def build_engine(
    choice: Choice, program: Program, model: Model, data: DeviceData, given: Settings, ranks: Ranks
) -> tuple[Engine, dict[str, Any]]:
    """Return the engine that was chosen, and `Run.choices`. `model` is for the plain engine, in case lanes fail."""
    choices = {
        "engine": choice.engine,
        "lanes": choice.lanes,
        "compile": choice.compile,
        "device": str(data.device),
        "precision": str(model.dtype).removeprefix("torch.") if given.precision == "auto" else given.precision,
        "dtype": str(model.dtype),
        "why": choice.why,
        **({"processes": ranks.size} if ranks.several else {}),
    }

    def joined(engine: Engine) -> Engine:
        return engine if ranks.group is None else RankedEngine(engine, ranks)

    width = given.local.widest(data.data.size_counts[0])
    if choice.engine == "plain":
        return joined(build(choice, program, data, width)), choices

    def lanes(count: int) -> Engine:
        return joined(build(replace(choice, lanes=count), program, data, width))

    def plain() -> Engine:
        return joined(PlainEngine(replace(program, model=model), data))

    spare = plain if given.engine == "auto" else None
    return Fallback(
        lanes, choice.lanes, spare, partial(note_narrowing, choices), partial(note_switch, choices)
    ), choices


def note_narrowing(choices: dict[str, Any], t: int, lanes: int) -> None:
    """Record in a run's choices that it trains with fewer lanes from round `t` on, counted from 0."""
    choices |= {"lanes": lanes, "why": "memory ran out with more lanes", "narrowed": t + 1}


def note_switch(choices: dict[str, Any], t: int, why: str) -> None:
    """Record in a run's choices that it trains on the plain engine from round `t` on, counted from 0."""
    choices |= {"engine": "plain", "lanes": 1, "compile": False, "why": why, "switched": t + 1}


def build_program(model: Model, method: Method, local: Local, data: FederatedDataset, loss: Loss) -> Program:
    """Return what one client does, with the method and local training as one chain of parts."""
    personal = method.personal([*model.start, *model.tracked])
    rates, decays = group_factors(local.groups, list(model.start)) if local.groups else ({}, {})
    return Program(
        model=model,
        method=with_local_work(method, local, rates, model.tracked, personal),
        loss=loss,
        weight_decay=callable(local.weight_decay) or bool(local.weight_decay),
        augment=data.augment,
        personal=personal,
        decay=decays,
    )


def output_of(given: Settings, method: Method, own_loss: bool) -> str | None:
    """Return which of the model's outputs the loss gets. Raises if a part needs logits and they are not known."""
    output = given.output or (WHOLE if own_loss else None)
    changing = method.overriding("logits") if output == WHOLE else []
    names = " and ".join(type(part).__name__ for _, part in changing)
    require(
        not names,
        f'{names} changes logits, so it cannot be combined with loss="model" or output="all", which have none.',
    )
    return output


def refuse_batch_losses(method: Method, loss: Loss) -> None:
    """Reject parts that need the losses of single samples if the loss has none."""
    names = [type(part).__name__ for part in method.parts if part.needs_losses] if of_batches(loss) else []
    require(
        not names,
        f"{' and '.join(names)} needs a loss for every sample, but the loss returns one number for a batch.",
    )


def module_of(model: Any, data: FederatedDataset, seed: int) -> nn.Module:
    """Return the user's module, or a new one of the name, or from the function, that was given."""
    if isinstance(model, nn.Module):
        return without_factory(model)
    if isinstance(model, str):
        name, options = parse_model(model)
        x = data.take(data.store, data.index[:1])[0]
        several = (
            f"The model {name!r} takes one input, but samples have several, of shape {sample_shape(x)}; give a module."
        )
        require(isinstance(x, Tensor), several)
        needs: dict[str, Any] = {"classes": data.outputs, "shape": x.shape[1:], "vocabulary": data.task.vocabulary}
        model = models.get(name, seed=seed, **needs, **options)
    elif callable(model):
        made = Factory(model).made(torch_seed(seed, "model"))
        kind = type(made).__name__
        require(isinstance(made, nn.Module), f"The function given as model must return an nn.Module, not {kind}.")
        model = made
    kind = type(model).__name__
    require(
        isinstance(model, nn.Module),
        f"model must be an nn.Module, a function that makes one, or the name of a model, not {kind}.",
    )
    module: nn.Module = model
    return module


def check_data(
    model: Model, data: FederatedDataset, device: torch.device, loss: Loss, metrics: dict[str, Any]
) -> tuple[Model, Loss]:
    """Try the model, the loss, the metrics and the augmentation on samples of every split.

    Returns the model with what the clients' samples show about it, and the loss, as one of whole batches if it is.
    """
    own = Rows(data.store, data.index, data.take)
    splits = {"clients'": own}
    for name in ("test", "validation", "server"):
        rows = getattr(data, f"{name}_rows")
        splits |= {f"{name} data's": rows} if rows else {}
    if (tests := data.client_test) is not None and tests.store is not data.store and len(tests.index):
        splits["clients' own tests'"] = Rows(tests.store, tests.index, tests.take)
    examinations = {whose: check_split(model, whose, rows, device, loss, metrics) for whose, rows in splits.items()}
    examined, loss = examinations["clients'"]
    checked = check_gradient(examined, own, device, loss)
    warn_of_rounding(checked, own, device)
    warn_of_pixels(checked, own, device)
    if data.augment:
        check_augment(data.augment, own, device)
    return checked, loss


def choose_engine(given: Settings, model: Model, data: DeviceData, cohort: int, method: Method, loss: Loss) -> Choice:
    """Return the engine that was asked for, or that suits the model, the data and the device."""
    local, sizes = given.local, data.data.size_counts[0]
    width, steps = local.widest(sizes), local.spread(0, data.data, method.batches)
    padded = may_pad(local, data.data, method)
    obstacle = None if given.engine == "plain" or model.obstacle else why_plain(model, loss, data, padded)
    choice = choose(given.engine, given.lanes, model, data, cohort, steps, width, obstacle)
    work = cohort * steps.mean
    choice = replace(choice, compile=compiles(given.compile, choice, data.device, given.rounds, work))
    log.info("engine %s, %d lanes, on %s: %s", choice.engine, choice.lanes, data.device, choice.why)
    return choice


def current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which `device` is the current GPU, which CUDA graphs and Triton's kernels always use."""
    return torch.cuda.device(device) if captures(device) else contextlib.nullcontext()


# ---- where what clients keep is stored -----------------------------------------------------------------------------

HOST_SHARE = 0.25
"""The share of host memory that clients' states may take. If they might take more, they go to files."""
LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file with the memory limit of a container, on Linux."""


def choose_client_storage(run: Run, out: Any) -> Run:
    """Return the run, with files for what clients keep if the clients of all rounds might keep too much for memory.

    That is known before the first round: by how much a newcomer's state takes, and how many clients can take part.
    """
    parts = run.composed.overriding("keep")
    if not parts or not hasattr(os, "pwrite") or run.ranks.several:  # each process has only its own clients' states
        return run
    one = run.data.holders(np.zeros(1, np.int64))
    plan = replace(run.plan(0), clients=one, steps=np.ones(1, np.int64))
    with torch.no_grad():
        state = State(run.model.start, [], run.model.tracked, run.no_states())
        fresh = run.inputs(plan, state, None, state.clients).kept([0])
    most = tree_bytes(fresh) * min(run.population, run.cohort_size * run.rounds)
    if most <= HOST_SHARE * host_memory():
        return run
    folder = Path(out) / CHECKPOINT if out else None
    run.choices["kept"] = f"in {'the run folder' if out else 'temporary files'}: up to {most / 1e9:.3g} GB of states"
    return replace(run, files=SlotFiles(folder))


def host_memory() -> int:
    """Return the memory of the machine, or the part of it that this process may use, in bytes."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(LIMIT.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # there is no limit, or it is not known
        return whole
