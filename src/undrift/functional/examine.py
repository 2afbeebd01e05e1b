"""Examine a model by a few passes on samples, without changing it: which buffers it changes, whether it vmaps."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from undrift.errors import UndriftError, first_sentence
from undrift.functional.arguments import arguments, batch_size, floats_to
from undrift.functional.copying import deep_copy
from undrift.functional.draws import Trial, fixed_key
from undrift.functional.generators import seeded
from undrift.functional.layouts import equal, overwrite
from undrift.functional.norm_trials import find_norm_obstacle
from undrift.functional.recurrent.layers import THEIRS
from undrift.functional.writes import FrozenWriteError, RefuseWrites
from undrift.tree import Tree, tree_expand, tree_leaves, tree_map

if TYPE_CHECKING:
    from undrift.functional.model import Model, Params


class Findings(NamedTuple):
    """What passes of a model show about it."""

    output: Tree
    """In evaluation mode."""
    changed: list[str]
    """The names of the buffers and frozen parameters that training changes."""
    unkeyed: str
    """A message about draws that no key controls; empty if there are none."""
    draws_in_evaluation: bool
    rebinds: str
    """The name of a weight whose `.data` the forward pass sets; empty if it sets none."""


MANY = 1000
"""The number of further calls after which a module that counts them is tried."""


class BufferShapeError(Exception):
    """A training pass gives a buffer another shape, as observers of quantization do in their first."""


def examine(model: Model, x: Tree) -> Findings:
    """Run a copy of the model on `x` in each mode.

    Raises `UndriftError` for a model whose outputs differ for the same samples and the same draws, `FrozenWriteError`
    before it would change the caller's own weights, and `BufferShapeError`.
    """
    twin = copy.copy(model)
    frozen = {n: p for n, p in model.module.named_parameters() if n not in model.start}
    twin.module = deep_copy(model.module, {} if model.owns_frozen else {id(p): p for p in frozen.values()})
    before = {n: t for n, t in named_tensors(twin.module).items() if n not in model.start and n not in model.scratch}
    values = {n: t.detach().clone() for n, t in before.items() if model.owns_frozen or n not in frozen}
    versions = {n: before[n]._version for n in values}
    data = {n: p.data for n, p in twin.module.named_parameters()}
    trial = Trial(tree_leaves(x)[0].device)

    def once(generators: bool = False) -> Tree:
        """Run a training pass on a copy of the samples, which it may write to."""
        args, kwargs = arguments(twin.module, tree_map(torch.clone, floats_to(x, model.input_dtype)))
        with trial.draws(generators=generators):
            output = twin.module(*args, **kwargs)
        return [t.clone() for t in tree_leaves(output) if isinstance(t, Tensor)]  # it may be a view of a weight

    guard = contextlib.nullcontext() if model.owns_frozen else RefuseWrites(frozen.values())
    with torch.no_grad(), guard:
        with trial.draws() as draws_in_evaluation:
            output = twin(twin.trial(), tree_map(torch.clone, x))
        _changed(twin.module, before, values, versions)  # observers also record in evaluation mode
        twin.set_mode(True)
        first = once()
        rebinds = _rebound(twin.module, data, model)
        changed = _changed(twin.module, before, values, versions)
        weights = {n: p for n, p in twin.module.named_parameters() if n in model.start}
        for name, p in weights.items():  # which the forward pass may have written to
            p.copy_(model.start[name])
        counts = _numbers(twin.module)
        second = once()
        later = second
        # What a count of calls has no influence on yet, it may influence later: a warm-up, an annealed temperature.
        if changed_numbers := _numbers(twin.module).items() - counts.items():
            for (layer, name), value in changed_numbers:
                vars(layer)[name] = value + MANY * (value - counts.get((layer, name), 0))
            with contextlib.suppress(Exception):  # the module may not accept numbers like these
                later = once()
            for (layer, name), value in changed_numbers:
                vars(layer)[name] = value
        # A generator that the forward pass makes and seeds is to give the same numbers every time, unlike the key.
        if trial.named and _alike(once(generators=True), once(generators=True)):
            trial.unkeyed = trial.unkeyed or "its forward pass draws from a generator that it seeds itself"
        # An average of the weights that begins with the weights themselves changes when these have.
        for p in weights.values():
            p.mul_(1.0625).add_(0.01)
        data = {n: p.data for n, p in twin.module.named_parameters()}
        with contextlib.suppress(Exception):  # the model may not accept weights like these
            once()
        rebinds = rebinds or _rebound(twin.module, data, model)
        changed = sorted({*changed, *_changed(twin.module, before, values, versions)})
    for name in changed:
        if before[name].is_complex() or before[name].layout is not torch.strided:
            kind = "complex" if before[name].is_complex() else "sparse"
            raise UndriftError(
                f"Training changes the model's buffer {name!r}, which is {kind}; undrift averages real, dense buffers "
                "over clients. Keep real numbers in the buffer (torch.view_as_real, Tensor.values()), and make the "
                f"{kind} tensor from them in forward."
            )
    if not (_alike(first, second) and _alike(second, later)):
        raise UndriftError(
            "The model gives different outputs for the same samples and the same draws, so runs would not repeat: "
            "its forward pass draws from a generator of its own, or counts its calls. Use torch.rand or torch.randn, "
            "which undrift draws from the client's key, and buffers for what must change."
        )
    return Findings(output, changed, trial.unkeyed, draws_in_evaluation[0], rebinds)


def shaped_by_batch(model: Model, x: Tree) -> list[str]:
    """Return the names of the buffers whose shape is that of the last batch, as spiking neurons keep potentials."""
    twin = deep_copy(model.module, {}).train()
    shapes: list[dict[str, torch.Size]] = []
    with torch.no_grad(), contextlib.suppress(Exception), seeded(fixed_key(tree_leaves(x)[0].device)):
        for rows in (2, 3):
            few = tree_map(lambda t, n=rows: _rows(t, n), floats_to(x, model.input_dtype))
            args, kwargs = arguments(twin, few)
            twin(*args, **kwargs)
            shapes.append({name: b.shape for name, b in twin.named_buffers()})
    return [name for name, shape in shapes[0].items() if len(shapes) == 2 and shapes[1][name] != shape]


def _rows(t: Tensor, n: int) -> Tensor:
    return t[:1].expand(n, *t.shape[1:]).clone()


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters and buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _numbers(module: nn.Module) -> dict[tuple[nn.Module, str], float]:
    """Return the numbers among the attributes of a module's layers, by layer and name."""
    return {
        (layer, name): x
        for layer in module.modules()
        for name, x in vars(layer).items()
        if isinstance(x, int | float) and not isinstance(x, bool)
    }


def _changed(
    module: nn.Module, before: dict[str, Tensor], values: dict[str, Tensor], versions: dict[str, int]
) -> list[str]:
    """Return the names of the tensors that a forward pass has replaced or written to, after restoring them.

    A running maximum, for example, may be written to without being changed. `versions` is updated.
    """
    found, now = [], named_tensors(module)
    for name, value in values.items():
        old = before[name]
        if now[name].shape != value.shape:
            raise BufferShapeError
        if now[name] is not old:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._buffers[attribute] = old
        if now[name] is not old or old._version != versions[name] or not equal(value, old):
            found.append(name)
            overwrite(old, value)
            versions[name] = old._version
    return found


def _rebound(module: nn.Module, data: dict[str, Tensor], model: Model) -> str:
    """Return the name of a weight whose `.data` a forward pass has set; empty if there is none."""
    new = {
        name: p
        for name, p in module.named_parameters()
        if p.data_ptr() != data[name].data_ptr() and not torch.equal(p, data[name])  # cuDNN only moves its weights
    }
    if not model.owns_frozen:
        for name, p in new.items():
            p.data = data[name]  # it may be the caller's
        if new.keys() - model.start.keys():
            raise FrozenWriteError
    return next((name for name in new if name in model.start), "")


def find_obstacle(model: Model) -> str | None:
    """Return why a model cannot run under vmap: by its layers, or by trying. None if it can."""
    for layer in model.module.modules():
        name = type(layer).__name__
        if isinstance(layer, nn.RNNBase) and type(layer) not in THEIRS:
            return f"nn.{name} has no vmap rule, unless it is a GRU or LSTM with biases and one direction"
    if model.rebinds:
        return f"its forward pass sets the .data of {model.rebinds!r}"
    return model.unkeyed or find_norm_obstacle(model) or _vmap_failure(model)


def _vmap_failure(model: Model) -> str | None:
    """Return why vmap refuses the model, from a tiny step of two lanes, or None."""
    assert model.sample is not None
    # A copy, since a module may keep what it computes, and such a tensor is invalid outside of vmap.
    model = model._with(module=deep_copy(model.module, {id(t): t for t in named_tensors(model.module).values()}))
    key, x = fixed_key(tree_leaves(model.sample)[0].device), tree_expand(model.sample, 2)

    mask = torch.ones(batch_size(model.sample), device=key.words.device)

    def output(params: Params, x: Tree) -> Tensor:
        found = tree_leaves(model.train(params, x, key, mask=mask))
        return torch.stack([t.sum() for t in found if isinstance(t, Tensor) and t.is_floating_point()]).sum()

    try:
        torch.func.vmap(torch.func.grad(output))(tree_expand(model.trial(), 2), x)
    except UndriftError:
        raise
    except Exception as error:  # a user's forward pass may raise anything under vmap
        return f"the model does not run under vmap ({first_sentence(error)})"
    return None


def _alike(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two outputs are equal up to rounding; a GPU may sum in another order."""
    return len(a) == len(b) and all(_same(one, other) for one, other in zip(a, b, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    gap, size = (a - b).nan_to_num().double().norm(), a.nan_to_num().double().norm()
    return bool(gap <= 100 * torch.finfo(a.dtype).eps * size)
