"""The processes of one run, as torchrun starts them: this process's rank, and their communication.

All communication goes through `torch.distributed`: NCCL if every process has a GPU of its own, else gloo. Every process
does the same things in the same order, so a collective operation of one meets the same operation of the others. Where
something can fail in one of them only, `together` and `first` inform all of them.

A process that was not started by torchrun is alone. All of this is then the identity, and costs nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from undrift.engine.fallback import out_of_memory
from undrift.engine.feed import mark_as_of_data, of_data
from undrift.errors import UndriftError, first_line, known_to_all, machine_trouble, shared_by_all
from undrift.tree import Tree, tree_leaves, tree_structure, tree_unflatten

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long a process waits for one that hangs. One that has ended is noticed at once."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes, to read the bits of other numbers."""
LOST = (
    "Another process of this run has ended or cannot be reached ({0}); its own message, if it left one, says why. "
    "Resume the run from its last checkpoint, with as many processes as you like"
)


class LostError(ConnectionError):
    """Raised if another process of the run is gone."""


class Ranks:
    """The processes of a run, and this one's rank.

    Args:
        rank: This process's number, from 0. The first one leads: it alone writes files and talks to the caller.
        size: The number of processes.
        group: The group for anything in host memory; None for a process that is alone.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.nccl: Any = None
        """The group for tensors on GPUs; without it, they go through host memory."""
        self.busy = self.lost = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.size > 1

    def __enter__(self) -> Ranks:
        if self.lost:
            raise LostError(LOST.format("in an earlier run"))
        if self.busy and self.group is not None:
            raise UndriftError(
                "Under torchrun one run must end before the next begins, for all processes train each of them "
                "together; call ud.train outside of on_round, and not from threads."
            )
        self.busy = True
        return self

    def __exit__(self, *error: object) -> None:
        self.busy = False

    def owns(self, client: int) -> bool:
        """Return whether this process has the state that the client keeps between rounds."""
        return client % self.size == self.rank

    # ---- numbers ---------------------------------------------------------------------------------------------
    def use(self, device: torch.device) -> None:
        """Prepare for tensors on this device. Processes that share a GPU exchange them through the host's memory."""
        if self.group is None or device.type != "cuda":
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        places = self.gathered((socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid)))
        if len(set(places)) == self.size and self.nccl is None and dist.is_nccl_available():
            self.nccl = dist.new_group(backend="nccl", timeout=PATIENCE)
        elif len(set(places)) < self.size:
            self.nccl = None

    def sum(self, tree: Tree) -> Tree:
        """Return the sum of all processes' trees, bitwise equal in all of them. Leaves of one dtype travel together."""
        if self.group is None:
            return tree
        leaves = tree_leaves(tree)
        added = list(leaves)
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves if leaf.numel()):
            places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype and leaf.numel()]
            flat = torch.cat([leaves[i].reshape(-1) for i in places])
            total = self._reduced(flat, dist.ReduceOp.SUM).split([leaves[i].numel() for i in places])
            for i, piece in zip(places, total, strict=True):
                added[i] = piece.view(leaves[i].shape)
        return tree_unflatten(added, tree_structure(tree))

    def every(self, flag: Tensor) -> Tensor:
        """Return whether the condition holds in all processes, as a tensor on its device."""
        if self.group is None:
            return flag
        return self._reduced(flag.reshape(1).long(), dist.ReduceOp.MIN)[0].bool()

    def rows(self, own: Tensor, counts: list[int]) -> Tensor:
        """Return the rows of all processes, one process after another; this one has `counts[rank]` of them."""
        if self.group is None:
            return own
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        group, here = self._way(padded)
        found = [torch.empty_like(here) for _ in counts]
        with self.listening():
            dist.all_gather(found, here.contiguous(), group=group)
        return torch.cat([rows[:count] for rows, count in zip(found, counts, strict=True)]).to(own.device)

    def _reduced(self, flat: Tensor, how: Any) -> Tensor:
        group, here = self._way(flat)
        with self.listening():
            dist.all_reduce(here, op=how, group=group)
        return here.to(flat.device)

    def _way(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """Return the group that exchanges this tensor, and the tensor in the memory that the group uses."""
        if tensor.device.type == "cuda" and self.nccl is not None:
            return self.nccl, tensor
        return self.group, tensor.cpu()

    def same(self, tree: Tree) -> None:
        """Raise if the tree's bits are not the same in all processes."""
        if self.several:
            sums = torch.stack([checksum(leaf) for leaf in tree_leaves(tree)])
            found = self._reduced(torch.cat([sums, -sums]), dist.ReduceOp.MAX)
            if bool((found[: len(sums)] != -found[len(sums) :]).any()):
                raise UndriftError(
                    "The processes of this run no longer have the same weights: something that each of them computes "
                    "for itself, such as a part's hook at the server, does not repeat. Try deterministic=True; and "
                    "hooks must draw from their key alone."
                )

    # ---- anything else ---------------------------------------------------------------------------------------
    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, in their order."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with self.listening():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def handed_in(self, value: T) -> list[T]:
        """Return the same in the first process only; None in the others."""
        if self.group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.leads else None
        with self.listening():
            dist.gather_object(value, found, dst=0, group=self.group)
        return found or []

    def said(self, work: Callable[[], T]) -> T:
        """Return what `work` returns in the first process, which alone calls it. All processes raise its error."""
        return self._first(work, shared=True)

    def first(self, work: Callable[[], T]) -> T | None:
        """Do the same, but return None in the other processes, which wait until it is done."""
        return self._first(work, shared=False)

    def _first(self, work: Callable[[], T], shared: bool) -> Any:
        if self.group is None:
            return work()
        value, error = None, None
        if self.leads:
            try:
                value = work()
            except BaseException as raised:
                error = raised
        found = self._broadcast((described(error), value if shared else None), 0)
        if error is not None:
            raise shared_by_all(error)
        if found[0] is not None:
            raise relayed(found[0], 0)
        return value if self.leads else found[1]

    def together(self, work: Callable[[], T]) -> T:
        """Return what `work` returns here. If it fails in any process, all raise the error of the first of those."""
        if self.group is None:
            return work()
        value, error = None, None
        try:
            value = work()
        except Exception as raised:
            if known_to_all(raised):
                raise
            error = raised
        failed = self._reduced(torch.tensor([self.size if error is None else self.rank]), dist.ReduceOp.MIN)
        who = int(failed)
        if who == self.size:
            return value  # type: ignore[return-value]
        told = self._broadcast(described(error), who)
        raise shared_by_all(error) if error is not None and who == self.rank else relayed(told, who)

    def _broadcast(self, value: Any, source: int) -> Any:
        box = [value]
        with self.listening():
            dist.broadcast_object_list(box, src=source, group=self.group)
        return box[0]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context for collective operations: turns torch's error about a lost process into a clear message."""
        if self.lost:
            raise LostError(LOST.format("as was found before"))
        try:
            yield
        except (RuntimeError, OSError) as error:  # torch.distributed's own errors, or those of gloo's sockets
            self.lost = True
            raise LostError(LOST.format(plainly(error))) from error


def plainly(error: BaseException) -> str:
    """Return torch's message about a broken connection, without the location in its source."""
    return re.sub(r"^\[[^]]*\] *", "", first_line(error)).partition(". ")[0][:120]


ALONE = Ranks()
_known: list[Ranks] = []


def launched() -> Ranks:
    """Return this process's place among those that torchrun has started. The first call connects them."""
    if not dist.is_available():
        return ALONE
    initialized = dist.is_initialized()
    if not initialized and not dist.is_torchelastic_launched():
        return ALONE
    if not _known:
        if initialized:  # by the caller, with whatever backend
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
        else:
            dist.init_process_group("gloo", timeout=PATIENCE)
            atexit.register(_leave)
            group = dist.group.WORLD
        _known.append(Ranks(dist.get_rank(), dist.get_world_size(), group))
        if not _known[0].leads:
            logging.getLogger("undrift").setLevel(logging.ERROR)  # the first process reports it
    return _known[0]


def _leave() -> None:
    """Close the connections, before Python stops the threads that serve them.

    With GPUs, if another process is gone, there is no clean end: waiting for it would take long.
    """
    for ranks in _known:
        stuck = ranks.lost and ranks.nccl is not None
        ranks.group = ranks.nccl = None
        if dist.is_initialized() and not stuck:
            dist.destroy_process_group()
            gc.collect()  # so that nothing references a group: torch aborts if its threads outlive Python


def local_rank() -> int | None:
    """This process's number on its machine; None if torchrun has not started it."""
    return int(os.environ["LOCAL_RANK"]) if dist.is_available() and dist.is_torchelastic_launched() else None


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the tensor's bits, read as integers, which does not depend on the order of addition."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(WORDS.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64)


def described(error: BaseException | None) -> tuple[str, str] | None:
    """Return an error as it is sent to other processes: its type, as far as it matters, and its message."""
    if error is None:
        return None
    kinds = {
        "data": of_data(error),
        "memory": out_of_memory(error),
        "stop": isinstance(error, KeyboardInterrupt),
        "refusal": isinstance(error, UndriftError),
        "trouble": isinstance(error, Exception) and machine_trouble(error) is not None,
    }
    return next((kind for kind, holds in kinds.items() if holds), "other"), str(error) or type(error).__name__


KINDS: dict[str, type[BaseException]] = {
    "data": RuntimeError,
    "memory": torch.OutOfMemoryError,
    "stop": KeyboardInterrupt,
    "refusal": UndriftError,
    "trouble": OSError,
    "other": RuntimeError,
}


def relayed(told: tuple[str, str], source: int) -> BaseException:
    """Return the error that process `source` has reported."""
    error = shared_by_all(KINDS[told[0]](told[1]), relayed=True)
    if told[0] == "data":
        mark_as_of_data(error)
    error.add_note(f"It was raised in process {source}.")
    return error
