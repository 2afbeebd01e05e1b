"""Buffers whose values are not simply one block of memory: sparse and expanded tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.errors import UndriftError

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def components(t: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold a tensor's values: itself, or the indices and the values of a sparse one."""
    if t.layout is torch.strided:
        return [t]
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in COMPRESSED:
        return [*(getattr(t, name)() for name in COMPRESSED[t.layout]), t.values()]
    raise UndriftError(f"The model has a tensor of the layout {t.layout}, which undrift does not support.")


def is_expanded(t: Tensor) -> bool:
    """Return whether several elements of a tensor are one in memory, as `expand` leaves them."""
    return t.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)
    )


def equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, which does not know sparse tensors."""
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    return all(map(torch.equal, components(a), components(b)))


def overwrite(t: Tensor, value: Tensor) -> None:
    """Write a value into a tensor, such that autograd does not notice. An expanded one gets memory of its own."""
    if is_expanded(t):
        t.data = value.detach().clone()
    else:
        t.data.copy_(value)
