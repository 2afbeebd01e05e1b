"""The caller's own module, borrowed for a while: whatever passes of it change is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from undrift.functional.layouts import is_expanded


@contextmanager
def borrowed(module: nn.Module, device: torch.device, frozen: bool) -> Iterator[nn.Module]:
    """A context with the module on `device`, in evaluation mode and without gradients.

    Afterwards it is as it was: its weights, buffers, gradients and modes, and the attributes of its layers, with what
    is in lists, dicts and sets among them. `frozen` says whether its forward pass may change frozen parameters, which
    are saved only then, since a frozen backbone may be large.
    """
    layers = list(module.modules())
    modes = [layer.training for layer in layers]
    attributes = [dict(vars(layer)) for layer in layers]
    containers = [_contents(x) for own in attributes for x in own.values() if isinstance(x, list | dict | set)]
    tensors = {id(t): t for own in attributes for t in own.values() if isinstance(t, Tensor)}
    tensors |= {id(t): t for t in (*module.parameters(), *module.buffers())}
    grads = [(p, p.grad) for p in module.parameters()]
    saved: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for t in tensors.values():
            if t.device != device and t.device.type != "meta":
                saved.append((t, t.data, t.data))
                t.data = t.data.to(device)
            elif not isinstance(t, nn.Parameter) or t.requires_grad or frozen:
                saved.append((t, t.data, t.data.clone()))
        for p, _ in grads:
            p.grad = None
        module.eval()
        yield module
    finally:
        for t, data, value in saved:
            t.data = data
            if value is not data and not is_expanded(data):  # a forward pass cannot write into that either
                data.copy_(value)
        for p, grad in grads:
            p.grad = grad
        for layer, own in zip(layers, attributes, strict=True):
            vars(layer).clear()
            vars(layer).update(own)
        for layer, mode in zip(layers, modes, strict=True):
            if layer.training != mode:  # scripted modules do not keep it among their attributes
                layer.training = mode
        for container, contents in containers:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)


def _contents(container: Any) -> tuple[Any, Any]:
    return container, container.copy()
