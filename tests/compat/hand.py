"""FedAvg in plain PyTorch, written once for any module. It shares with the package only the batches (`ud.batches`).

In every round each client starts from the global weights and takes its SGD steps; then, over clients with n_i samples,

    w ← Σ n_i w_i / Σ n_i,

and likewise for whatever else training has changed: buffers such as running statistics (counters are rounded), and
frozen parameters that the forward pass writes, such as a teacher's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import undrift as ud
from tests.compat.case import Case, rows_of

ROUNDS = 2

LOSSES = {
    None: F.cross_entropy,
    "cross_entropy": F.cross_entropy,
    "mse": lambda z, y: F.mse_loss(z.reshape(y.shape), y),
    "binary_cross_entropy": lambda z, y: F.binary_cross_entropy_with_logits(z, y.to(z.dtype)),
}


def simulate(case: Case) -> dict[str, Tensor]:
    """The module's parameters and buffers after all rounds."""
    module, clients, local = case.module(), case.clients(), case.work()
    state = tensors(module)
    # Layers that the user has set to evaluation mode, to freeze a norm's statistics say, stay in it.
    still = [layer for layer in module.modules() if not layer.training] if module.training else []
    weights = [float(len(y)) for _, y in clients]
    # Batches depend on how many samples a client has, not on what they are.
    counted = ud.FederatedDataset.from_clients([(torch.zeros(len(y), 1), torch.zeros(len(y))) for _, y in clients])
    for t in range(ROUNDS):
        ends = []
        for i, pair in enumerate(clients):
            put(module, state)
            module.train()
            for layer in still:
                layer.training = False
            train(case, module, pair, ud.batches(counted, local, client=i, round=t, seed=0), local)
            ends.append(tensors(module))
        state = {name: mean(value, [end[name] for end in ends], weights) for name, value in state.items()}
    return state


def train(case: Case, module: nn.Module, pair: tuple[Any, Tensor], batches: list[Tensor], local: ud.Local) -> None:
    """One client's steps."""
    x, y = pair
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, float(local.lr), float(local.momentum), 0.0, float(local.weight_decay))
    for rows in batches:
        optimizer.zero_grad()
        loss_of(case, module, rows_of(x, rows), y[rows]).backward()
        optimizer.step()


def loss_of(case: Case, module: nn.Module, x: Any, y: Tensor) -> Tensor:
    """The loss of a batch, by torch's own losses where the case names one."""
    if case.loss == "model":
        return called(module, x).loss
    output = picked(called(module, x), case.output)
    if case.batch_loss:
        return case.batch_loss(output, y)
    if case.loss is None or isinstance(case.loss, str):
        return LOSSES[case.loss](output, y)
    return case.criterion(module)(output, y).mean()


@torch.no_grad()
def evaluate(case: Case, module: nn.Module) -> float:
    """The loss of the module on the samples that no client has."""
    held = case.held_out()
    assert held
    module.eval()
    return float(loss_of(case, module, *held).double())


def called(module: nn.Module, x: Any) -> Any:
    """What the module returns for a tensor, a tuple of arguments, or a dict: keyword arguments, or one argument."""
    if isinstance(x, dict):
        return module(x) if list(inspect.signature(module.forward).parameters) == ["batch"] else module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def picked(output: Any, name: str | None) -> Any:
    """The output that the loss is about."""
    if isinstance(output, Tensor) or name == "all":
        return output
    if name is not None:
        return output[int(name)] if name.isdigit() else output[name]
    return output.logits if hasattr(output, "logits") else output


def tensors(module: nn.Module, caches: bool = False) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, but for those that the module does not call its state, such as a cache."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    left_out = set() if caches else caches_of(module)
    return {name: dense(t.detach()).clone() for name, t in found.items() if not is_lazy(t) and name not in left_out}


def caches_of(module: nn.Module) -> set[str]:
    """The names of buffers that are not in the module's `state_dict()`."""
    layers = module.named_modules(remove_duplicate=False)
    return {f"{path}.{name}".lstrip(".") for path, layer in layers for name in layer._non_persistent_buffers_set}


def dense(t: Tensor) -> Tensor:
    """A sparse tensor, such as an adjacency matrix, written out."""
    return t if t.layout is torch.strided else t.to_dense()


@torch.no_grad()
def put(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Write the state into the module. An observer's buffers are empty until its first call, so shapes may differ."""
    caches = caches_of(module)
    for name, t in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        if name in caches:
            continue
        if t.shape != state[name].shape:
            t.resize_(state[name].shape)
        if not torch.equal(dense(t), state[name]):  # a sparse or an expanded buffer could not be written to
            t.copy_(state[name])


def mean(before: Tensor, ends: list[Tensor], weights: list[float]) -> Tensor:
    """The clients' mean, or the value before if no client has changed it."""
    if all(torch.equal(before, end) for end in ends):
        return before
    wide = torch.complex128 if before.is_complex() else torch.float64
    total = sum(w / sum(weights) * end.to(wide) for w, end in zip(weights, ends, strict=True))
    assert isinstance(total, Tensor)
    return (total if before.is_floating_point() or before.is_complex() else total.round()).to(before.dtype)
