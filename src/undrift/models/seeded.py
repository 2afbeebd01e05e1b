"""Initialize weights from a separate generator: torch's global one is neither read nor changed, in any thread."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.errors import UndriftError


class Seeded(TorchDispatchMode):
    """A context in which torch's CPU draws, in this thread only, come from a generator seeded with `seed`.

    Layers get the same weights as after `torch.manual_seed(seed)`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **kwargs | {"generator": self.generator})
        packet = func.overloadpacket  # torch.rand(…) and torch.rand(…, generator=…) are two overloads of one operation
        seeded = {"": "generator", "default": "generator"}.get(func._overloadname, f"{func._overloadname}_generator")
        if seeded not in packet.overloads():
            raise UndriftError(
                f"The model's initialization draws with {packet}, which takes no generator, so its weights would not "
                "follow the seed; initialize with torch.nn.init, torch.rand or torch.randn."
            )
        return getattr(packet, seeded)(*args, **kwargs | {"generator": self.generator})
