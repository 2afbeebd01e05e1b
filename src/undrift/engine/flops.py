"""The floating-point operations of a forward pass, by kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """Counts floating-point operations, by the name of torch's function.

    Unlike torch's `FlopCounterMode`, it has no hooks, with which a forward pass could not use `torch.func.jacrev`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func._overloadpacket
        if packet not in flop_registry:
            with self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        if packet in flop_registry:
            self.counts[str(packet)] += flop_registry[packet](*args, **kwargs, out_val=output)
        return output
