"""Forward passes that write to frozen parameters, which may be the caller's own: noticed before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.tree import tree_leaves


class FrozenWriteError(Exception):
    """The forward pass is about to change a frozen parameter, as that of an averaged teacher does."""


class RefuseWrites(TorchDispatchMode):
    """Inside it, an operation that would change one of these tensors, or a view of one, raises `FrozenWriteError`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {t.untyped_storage().data_ptr() for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.storages and func._schema.is_mutable:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            changed = [named.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
            for t in tree_leaves(changed):
                if isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self.storages:
                    raise FrozenWriteError
        return func(*args, **kwargs)
