"""Clients that begin together, and clients that end together.

Lanes take their next clients at different times, but what a client does before its first step and after its last does
not depend on when. So the next clients to train begin as a group, and wait there for lanes; clients that have finished
wait until they are a group, and end together. This takes a fraction of the operations.

A group has as many clients as there are lanes. So this takes the memory of the lanes' entries and state once more for
those that wait to end, and at most once more for those that wait for a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from undrift.tree import Tree, to_device, tree_copy_, tree_leaves, tree_map

Pairs = list[tuple[int, int]]
"""Lanes, and the positions of their clients in the cohort."""


def sizes(count: int, width: int, vary: bool) -> list[int]:
    """Return the sizes of the groups for this many clients: the number of lanes, then the rest.

    A program is traced for each size. If cohorts `vary`, the rest is cut into powers of two, so that there are few.
    """
    rest = count % width
    powers = [2**i for i in reversed(range(rest.bit_length())) if rest >> i & 1]
    return [width] * (count // width) + (powers if vary or not rest else [rest])


class Beginning:
    """The clients of a round in the order in which lanes take them.

    Args:
        order: Their positions in the cohort.
        sizes: The sizes of the groups.
        begin: Returns trees for a group of clients, along a first axis.
    """

    def __init__(self, order: list[int], sizes: list[int], begin: Callable[[list[int]], Tree]) -> None:
        self.order, self.sizes, self.begin = order, sizes, begin
        self.group: Tree = None
        self.waiting = 0
        """How many clients of the group wait for a lane."""

    def fill(self, lanes: Tree, where: Sequence[int]) -> Tree:
        """Return the lanes' trees, with those of the next clients in the lanes at `where`."""
        while where:
            if not self.waiting:
                self.waiting = self.sizes.pop(0)
                members, self.order = self.order[: self.waiting], self.order[self.waiting :]
                self.group = self.begin(members)
            count, size = min(len(where), self.waiting), _length(self.group)
            if lanes is None or count == _length(lanes):
                lanes = self.group  # all of them, of which no copy is needed
            else:
                copy(lanes, where[:count], self.group, range(size - self.waiting, size - self.waiting + count))
            self.waiting -= count
            where = where[count:]
        if not self.waiting:
            self.group = None
        return lanes


class Ending:
    """The clients of a round that have finished, and have not ended yet.

    Args:
        sizes: The sizes of the groups.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.clients = sizes, []  # type: list[int], list[int]
        self.group: Tree = None

    def add(self, pairs: Pairs, lanes: Tree) -> Iterator[tuple[Tree, list[int]]]:
        """Keep copies of the trees of lanes whose clients have finished. Yields the groups that are complete."""
        while pairs:
            size, begin = self.sizes[0], len(self.clients)
            some, pairs = pairs[: size - begin], pairs[size - begin :]
            self.clients += [client for _, client in some]
            if len(some) == _length(lanes):
                self.group = lanes  # all of them, of which no copy is needed
            else:
                if self.group is None:
                    self.group = tree_map(lambda t, size=size: t.new_empty(size, *t.shape[1:]), lanes)
                copy(self.group, range(begin, begin + len(some)), lanes, [lane for lane, _ in some])
            if len(self.clients) == size:
                done, self.group, self.clients = (self.group, self.clients), None, []
                self.sizes.pop(0)
                yield done


def copy(tree: Tree, where: Sequence[int], source: Tree, rows: Sequence[int]) -> None:
    """Copy the entries at `rows` along the first axis of the source's tensors to `where` in the tree's."""
    ours, theirs = tree_leaves(tree), take(tree_leaves(source), rows)
    if _adjacent(where):
        tree_copy_(take(ours, where), theirs)
    else:
        index = _index(where, ours)
        for t, new in zip(ours, theirs, strict=True):
            t.index_copy_(0, index, new)


def take(tree: Tree, where: Sequence[int]) -> Tree:
    """Return the entries at `where` along the trees' first axis; adjacent ones as views."""
    if not _adjacent(where):
        return copied(tree, where)
    begin, end = where[0], where[-1] + 1
    return tree_map(lambda t: t[begin:end], tree)


def copied(tree: Tree, where: Sequence[int]) -> Tree:
    """Return copies of the entries at `where` along the trees' first axis."""
    index = _index(where, tree)
    return tree_map(lambda t: t.index_select(0, index), tree)


def _adjacent(where: Sequence[int]) -> bool:
    return list(where) == list(range(where[0], where[0] + len(where)))


def _index(where: Sequence[int], tree: Tree) -> torch.Tensor:
    return to_device(torch.tensor(where), tree_leaves(tree)[0].device)


def _length(tree: Tree) -> int:
    return len(tree_leaves(tree)[0])
